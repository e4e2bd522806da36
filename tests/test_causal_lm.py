# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Causal language models of transformers as they are: their likelihood is their own, and they train, save and sample."""

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from d3pm_hf import CausalLMDenoiser, D3PMPipeline, D3PMScheduler, D3PMTextPipeline, evaluate_bound
from d3pm_hf.data import TextCrops
from d3pm_hf.training import D3PMTrainingArguments, train


LETTERS = "abcdefgh"
SIZE = 1 + len(LETTERS)  # the end of a text is token 0, and stands before it too
NUM_TOKENS = 6  # of a text
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
POSITIONS = {"max_position_embeddings": 12}
# The settings that make a tiny network of each architecture.
ARCHITECTURES = {
    "bert": {**SIZES, **POSITIONS, "is_decoder": True},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "falcon": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": None},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 12},
    "gpt_neox": {**SIZES, **POSITIONS},
    "llama": {**SIZES, **POSITIONS, "num_key_value_heads": 1},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "opt": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16, **POSITIONS},
    "qwen2": {**SIZES, **POSITIONS, "num_key_value_heads": 1},
}  # fmt: skip


def tiny_tokenizer():
    """Letters one by one. There is no mask token."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def tiny_model(architecture, **settings):
    torch.manual_seed(0)
    known = {"vocab_size": SIZE, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
    config = AutoConfig.for_model(architecture, **{**known, **ARCHITECTURES[architecture], **settings})
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_pipeline(architecture="gpt2", **settings):
    model = tiny_model(architecture, **settings)
    return quiet(D3PMTextPipeline.from_causal_lm(model, tiny_tokenizer(), sequence_length=NUM_TOKENS))


def quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def texts(count=4):
    return torch.randint(0, SIZE, (count, NUM_TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def own_nats(model, x_0, num_tokens=SIZE):
    """-log p(x_0) of each text `[B]` as transformers computes it: BOS and the text, and logits of the next token."""
    inputs = torch.cat([torch.zeros_like(x_0[:, :1]), x_0], dim=1)
    log_p = model(inputs).logits[:, :-1, :num_tokens].double().log_softmax(-1)
    return -log_p.gather(-1, x_0[..., None]).sum((1, 2))


def bound(pipeline, x_0, **options):
    options = {"is_causal": True, "progress_bar": False, **options}
    return evaluate_bound(pipeline.scheduler, pipeline.denoiser, [x_0], **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture, tmp_path):
    """The likelihood is the model's own; 20 steps of training, saving, loading and sampling."""
    pipeline = tiny_pipeline(architecture)
    model, x_0 = pipeline.text_model, texts()
    nats = bound(pipeline, x_0).nats_per_example
    assert torch.allclose(nats.double(), own_nats(model, x_0), rtol=1e-5, atol=0)
    # Each term by itself, over the tokens that are masked at its timestep, adds up to the same.
    assert torch.allclose(bound(pipeline, x_0, is_causal=False).nats_per_example, nats, rtol=1e-5, atol=0)

    tokens = np.array([1, 2, 3, 4] * 30, np.uint8)
    arguments = D3PMTrainingArguments(
        str(tmp_path), max_train_steps=20, train_batch_size=8, learning_rate=1e-2, lr_warmup_steps=0, num_samples=0
    )
    pipeline = train(arguments, pipeline, TextCrops(tokens, NUM_TOKENS, SIZE))
    before, after = (own_nats(one, torch.tensor([[1, 2, 3, 4, 1, 2]])) for one in (tiny_model(architecture), model))
    assert pipeline.text_model is model and after < 0.8 * before

    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path))
    assert type(loaded.text_model) is type(model) and isinstance(loaded.denoiser, CausalLMDenoiser)
    assert torch.allclose(bound(loaded, x_0).nats_per_example.double(), own_nats(model.eval(), x_0), rtol=1e-5, atol=0)
    output = loaded(batch_size=3, generator=torch.Generator().manual_seed(0))
    assert output.sequences.shape == (3, NUM_TOKENS) and output.sequences.max() < SIZE
    assert all(set(text) <= set(LETTERS) for text in output.texts)


def test_rows_without_a_token():
    """Rows of the output layer beyond the tokenizer are never drawn, and p is the softmax over all others."""
    pipeline = tiny_pipeline(vocab_size=SIZE + 3)
    assert pipeline.scheduler.never_data == tuple(range(SIZE, SIZE + 4))
    x_0 = texts()
    nats = bound(pipeline, x_0).nats_per_example.double()
    assert torch.allclose(nats, own_nats(pipeline.text_model, x_0), rtol=1e-5, atol=0)
    assert (nats < own_nats(pipeline.text_model, x_0, SIZE + 3)).all()
    assert pipeline(batch_size=64, output_type="latent").sequences.max() < SIZE


def test_draws_from_the_model():
    """Texts of two tokens after a prompt of one are drawn as often as the model says."""
    torch.manual_seed(0)
    pipeline = quiet(D3PMTextPipeline.from_causal_lm(tiny_model("gpt2"), tiny_tokenizer(), sequence_length=3))
    count = 4000
    output = pipeline("b", batch_size=count, output_type="latent", generator=torch.Generator().manual_seed(0))
    assert (output.sequences[:, 0] == 2).all()
    drawn = torch.bincount(output.sequences[:, 1] * SIZE + output.sequences[:, 2], minlength=SIZE**2) / count
    first, second = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    every = torch.stack([torch.full((SIZE**2,), 2), first.flatten(), second.flatten()], dim=1)
    true = (-own_nats(pipeline.text_model, every)).softmax(0)  # given the first token
    # The chi-square statistic of 80 degrees of freedom exceeds 133 once in 10,000 times.
    assert (count * (drawn - true) ** 2 / true).sum() < 133


def test_prompts():
    """A prompt is continued to the length of the process, and the mask of the process marks gaps in tokens."""
    pipeline = tiny_pipeline()
    output = pipeline(["abc", "h"])
    assert output.sequences.shape == (2, NUM_TOKENS)
    assert output.sequences[0, :3].tolist() == [1, 2, 3] and output.sequences[1, 0] == 8
    again = pipeline(input_ids=torch.tensor([[1, SIZE, 3, SIZE, SIZE, 4]]), output_type="latent").sequences[0]
    assert again[[0, 2, 5]].tolist() == [1, 3, 4] and again.max() < SIZE


@pytest.mark.parametrize("architecture", ["bloom", "gpt2", "llama", "opt"])
def test_padding(architecture):
    """Padding changes no logits of the tokens, on either side."""
    denoiser = CausalLMDenoiser(tiny_model(architecture))
    x_0 = texts(1)
    alone = denoiser(x_0)  # [1, N, K]
    assert alone.shape == (1, NUM_TOKENS, SIZE + 1) and (alone[..., -1] == -torch.inf).all()
    for left, right in ((0, 3), (3, 0)):
        padded = torch.nn.functional.pad(x_0, (left, right), value=5)
        mask = torch.nn.functional.pad(torch.ones_like(x_0), (left, right))
        logits = denoiser(padded, attention_mask=mask)[:, left : left + NUM_TOKENS]
        assert torch.allclose(logits, alone, atol=1e-5)


def test_from_a_folder(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipeline = D3PMTextPipeline.from_causal_lm(tmp_path, dtype=torch.float64)
    assert pipeline.config.sequence_length == len(pipeline.scheduler) == 12  # the positions of the network
    assert pipeline.dtype == torch.float64 and not pipeline.text_model.training
    with pytest.raises(
        ValueError, match="has a configuration that AutoModelForMaskedLM does not know: choose another"
    ):
        D3PMTextPipeline.from_masked_lm(tmp_path)


def test_mask_of_the_tokenizer():
    """A tokenizer may have a mask of its own: a causal network never reads one."""
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "h"
    pipeline = quiet(D3PMTextPipeline.from_causal_lm(tiny_model("gpt2"), tokenizer, sequence_length=NUM_TOKENS))
    tokens = pipeline("ahhbhh", output_type="latent").sequences[0]
    assert tokens[[0, 3]].tolist() == [1, 2]


def test_compiled_network():
    pipeline = tiny_pipeline()
    pipeline.text_model = torch.compile(pipeline.text_model, backend="eager")
    assert isinstance(pipeline.denoiser, CausalLMDenoiser)


def test_wrong_parts():
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    with pytest.raises(ValueError, match="sequence_length is 13: it must be an integer in 1 .. 12"):
        D3PMTextPipeline.from_causal_lm(model, tokenizer, sequence_length=13)
    with pytest.raises(ValueError, match="vocabulary of 9 and the network one of 5: use the tokenizer"):
        D3PMTextPipeline.from_causal_lm(tiny_model("gpt2", vocab_size=5), tokenizer)
    with pytest.raises(
        ValueError, match="BertLMHeadModel change with later tokens, so it is no causal network: set is_d"
    ):
        D3PMTextPipeline.from_causal_lm(tiny_model("bert", is_decoder=False), tokenizer)
    without = tiny_model("gpt2", bos_token_id=None, eos_token_id=None)
    with pytest.raises(ValueError, match="neither a bos_token_id nor an eos_token_id, before which a text begins"):
        D3PMTextPipeline.from_causal_lm(without, tokenizer)
    with pytest.raises(ValueError, match="network is a Linear: it must be a causal language model of transformers"):
        CausalLMDenoiser(torch.nn.Linear(2, 2))
    pipeline = tiny_pipeline()
    with pytest.raises(
        ValueError, match="num_classes is 9, and a network with 9 tokens needs 10, the last of which is"
    ):
        D3PMTextPipeline(model, D3PMScheduler(9, 6, transition="autoregressive"))
    with pytest.raises(ValueError, match="has 4 tokens, and the autoregressive process has 6 timesteps, one for each"):
        pipeline(sequence_length=4)
