# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Causal language models that are made to read both sides: their attention, the mask token, training, files and samples."""

import pytest
import torch
from test_causal_lm import ARCHITECTURES, LETTERS, SIZE, tiny_model, tiny_tokenizer
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from d3pm_hf import CausalLMDenoiser, D3PMPipeline, D3PMTextPipeline, MaskedLMDenoiser
from d3pm_hf.training import D3PMTrainingArguments, train


N = 6
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "head_dim": 8,
    "max_position_embeddings": 12,
}
# Architectures beside those of tests/test_causal_lm.py.
MORE = {
    "gemma": SIZES,
    "gemma2": {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "mistral": {**SIZES, "sliding_window": 4},
    "qwen3": SIZES,
    "mpt": {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 12},
}
NAMES = ("gpt2", "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "gpt_neox", "opt")
EACH = pytest.mark.parametrize("name", NAMES)


def make_model(name, **settings):
    if name in ARCHITECTURES:
        return tiny_model(name, **settings)
    torch.manual_seed(0)
    known = {"vocab_size": SIZE, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**known, **MORE[name], **settings})).eval()


def make_pipeline(name="llama", model=None, **options):
    options = {"process": "absorbing", "num_train_timesteps": 20, "sequence_length": N, **options}
    pipeline = D3PMTextPipeline.from_causal_lm(model or make_model(name), tiny_tokenizer(), **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def changed_by(denoiser, position, length=4):
    """Which positions' logits change with the token at `position`."""
    x = torch.tensor([[1, 2, 3, 4, 5, 6]])[:, :length]
    other = x.clone()
    other[:, position] = 7
    with torch.no_grad():
        return ((denoiser(x, 0) - denoiser(other, 0)).abs().amax((0, 2)) > 0).tolist()


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, kind) for name in NAMES for kind in ("sdpa", "eager") if (name, kind) != ("gemma2", "sdpa")],
)  # SDPA has no cap of the scores, which Gemma 2 has
def test_every_position_sees_both_sides(name, attention):
    """Each token changes the logits of all positions. A causal network does not see what comes later."""
    model = make_model(name, attn_implementation=attention)
    before = changed_by(MaskedLMDenoiser(model), 3)
    assert before == [False] * 3 + [True]
    pipeline = make_pipeline(model=model)
    for position in range(4):
        assert all(changed_by(pipeline.denoiser, position)), position


@EACH
def test_it_is_saved_and_loaded(name, tmp_path):
    pipeline = make_pipeline(name)
    pipeline.save_pretrained(tmp_path)
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    assert isinstance(loaded.denoiser, MaskedLMDenoiser) and loaded.denoiser.shift_logits
    x = torch.tensor([[1, 9, 3, 9, 5, 6]])
    with torch.no_grad():
        assert_close(loaded.denoiser(x, 0), pipeline.denoiser(x, 0))
    assert all(changed_by(loaded.denoiser, 3))


def test_the_output_is_shifted():
    """The logits of a position are the network's at the position before, as they were for the next token."""
    pipeline = make_pipeline("gpt2")
    x = torch.tensor([[1, 9, 3, 9, 5, 6]])
    with torch.no_grad():
        raw = pipeline.text_model(x).logits
        assert_close(pipeline.denoiser(x, 0), torch.cat([raw[:, :1], raw[:, :-1]], dim=1))
        keep = torch.tensor([0, 3, 5])
        assert_close(pipeline.denoiser(x, 0, logits_to_keep=keep), pipeline.denoiser(x, 0)[0, keep])


def test_the_mask_is_a_new_token():
    """The network gets a row for it, and the tokenizer that was passed stays as it was."""
    tokenizer = tiny_tokenizer()
    pipeline = D3PMTextPipeline.from_causal_lm(make_model("llama"), tokenizer, process="absorbing", sequence_length=N)
    assert tokenizer.mask_token is None and pipeline.tokenizer.mask_token == "[MASK]"
    config = pipeline.scheduler.config
    assert (config.transition, config.num_classes, config.mask_token_id) == ("absorbing", SIZE + 1, SIZE)
    assert len(pipeline.scheduler) == 1000 and len(pipeline.text_model.get_input_embeddings().weight) == SIZE + 1


def test_the_mask_takes_a_row_to_spare():
    """Networks with more rows than tokens, such as Qwen's, are not resized, and rows without a token are never data."""
    model = make_model("qwen2", vocab_size=SIZE + 3)
    weight = model.get_input_embeddings().weight
    pipeline = make_pipeline(model=model)
    assert pipeline.text_model.get_input_embeddings().weight is weight
    assert pipeline.scheduler.mask_token_id == SIZE and pipeline.scheduler.config.suppress_tokens == [
        SIZE + 1,
        SIZE + 2,
    ]


def test_a_tokenizer_with_a_mask_keeps_it():
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "h"
    pipeline = D3PMTextPipeline.from_causal_lm(make_model("llama"), tokenizer, process="absorbing", sequence_length=N)
    assert pipeline.scheduler.mask_token_id == SIZE - 1 and pipeline.scheduler.config.num_classes == SIZE


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3", "gemma"])
def test_it_trains_and_fills_in(name, tmp_path):
    """Trained on one letter again and again, it fills in the first positions from what stands on their right."""
    rows = torch.arange(1, SIZE)[:, None].expand(-1, N)
    arguments = D3PMTrainingArguments(
        output_dir=str(tmp_path),
        max_train_steps=100,
        train_batch_size=16,
        learning_rate=1e-2,
        lr_warmup_steps=1,
        validation_steps=0,
        num_samples=0,
    )
    train(arguments, make_pipeline(model=make_model(name, initializer_range=0.1)), rows.repeat(2, 1))
    pipeline = D3PMPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    text = rows.clone()
    text[:, :3] = pipeline.scheduler.mask_token_id
    filled = pipeline(input_ids=text, num_inference_steps=20, temperature=0.0, output_type="latent").sequences
    assert (filled == rows).float().mean() > 0.95
    texts = pipeline(
        [letter * 2 for letter in LETTERS], max_new_tokens=4, num_inference_steps=20, temperature=0.0
    ).texts
    assert sum(text == letter * N for text, letter in zip(texts, LETTERS)) >= 7


def test_padding_is_not_seen():
    pipeline = make_pipeline("llama")
    options = {"max_new_tokens": 2, "num_inference_steps": 4, "temperature": 0.0, "sampler": "confidence"}
    together = pipeline(["abcd", "e"], **options).texts
    assert together == [pipeline(prompt, **options).texts[0] for prompt in ("abcd", "e")]


@pytest.mark.parametrize(("name", "cause"), [("mamba", ""), ("mpt", r" \('NoneType' object has no attribute 'to'\)")])
def test_architectures_that_cannot(name, cause):
    """They are causal language models as before. MPT of transformers fails without a causal mask."""
    model = make_model(name)
    before, sentence = (
        model.config.to_dict(),
        f"the attention of M.*ForCausalLM cannot be made bidirectional{cause}: choose another",
    )
    with pytest.raises(ValueError, match=sentence):
        make_pipeline(model=model)
    assert {**model.config.to_dict(), "is_causal": None} == {**before, "is_causal": None}
    options = {"process": "autoregressive", "num_train_timesteps": None}
    assert isinstance(make_pipeline(model=model, **options).denoiser, CausalLMDenoiser)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="process is 'uniform': it must be one of autoregressive, absorbing"):
        make_pipeline(process="uniform")
    with pytest.raises(ValueError, match="num_train_timesteps is that of process='absorbing'"):
        make_pipeline(process="autoregressive")
    with pytest.raises(ValueError, match="sequence_length is 13"):
        make_pipeline(sequence_length=13)
    with pytest.raises(ValueError, match="has a vocabulary of 9 and the network one of 5"):
        make_pipeline(model=make_model("gpt2", vocab_size=5))


def test_a_subclass_without_special_tokens():
    """Its `__init__` does not take `add_special_tokens`."""

    class Plain(D3PMTextPipeline):
        def __init__(self, text_model, scheduler, tokenizer=None, sequence_length: int = N):
            super().__init__(text_model, scheduler, tokenizer, sequence_length)

    for process in ("autoregressive", "absorbing"):
        pipeline = Plain.from_causal_lm(make_model("llama"), tiny_tokenizer(), process=process, sequence_length=4)
        assert type(pipeline) is Plain and pipeline.config.sequence_length == 4
