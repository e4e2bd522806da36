# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Masked language models of transformers as they are: from the model to a pipeline, training, files and samples."""

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

from d3pm_hf import D3PMPipeline, D3PMTextPipeline, d3pm_loss
from d3pm_hf.models.text_denoisers import num_positions


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "acdefghiklmnpqrstvwy"
NUM_ROWS = 32  # of the output layer: 25 tokens, and 7 rows without one
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
POSITIONS = {"max_position_embeddings": 40}
# The settings that make a tiny network of each architecture.
ARCHITECTURES = {
    "albert": {**SIZES, **POSITIONS, "embedding_size": 8},
    "bert": {**SIZES, **POSITIONS},
    "big_bird": {**SIZES, **POSITIONS, "attention_type": "original_full"},
    "camembert": {**SIZES, **POSITIONS},
    "deberta-v2": {**SIZES, **POSITIONS},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, **POSITIONS},
    "electra": {**SIZES, **POSITIONS, "embedding_size": 8},
    "esm": {**SIZES, **POSITIONS, "mask_token_id": 4, "pad_token_id": 0},
    "eurobert": {**SIZES, **POSITIONS, "num_key_value_heads": 2},
    "longformer": {**SIZES, **POSITIONS, "attention_window": 4},
    "modernbert": {**SIZES, **POSITIONS},
    "mpnet": {**SIZES, **POSITIONS},
    "roberta": {**SIZES, **POSITIONS},
    "roformer": {**SIZES, **POSITIONS, "embedding_size": 16},
    "xlm-roberta": {**SIZES, **POSITIONS},
}


def tiny_tokenizer():
    """Letters one by one, with [CLS] and [SEP] around a text."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(zip(names, SPECIAL)))


def tiny_model(architecture, **settings):
    torch.manual_seed(0)
    known = {"vocab_size": NUM_ROWS, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = AutoConfig.for_model(architecture, **{**known, **ARCHITECTURES[architecture], **settings})
    return AutoModelForMaskedLM.from_config(config)


def quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def training_steps(pipeline, count=20):
    """The first and the last loss of a few steps on one batch of texts, special tokens known and not scored."""
    model = pipeline.text_model.train()
    generator = torch.Generator().manual_seed(0)
    x_0 = pipeline.encode(["acdc" * 4, "hill" * 4] * 8)
    counts = ~torch.isin(x_0, torch.tensor(pipeline.scheduler.never_data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(count):
        timesteps = torch.randint(0, len(pipeline.scheduler), (len(x_0),), generator=generator)
        x_t = torch.where(counts, pipeline.scheduler.add_noise(x_0, timesteps, generator), x_0)
        output = d3pm_loss(
            pipeline.scheduler,
            pipeline.denoiser(x_t, timesteps),
            x_0,
            x_t,
            timesteps,
            hybrid_coeff=1.0,
            loss_mask=counts,
        )
        output.loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.cross_entropy[counts].mean().item())
    model.eval()
    return losses


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architectures(architecture, tmp_path):
    """Build, train 20 steps, save, load and sample, with the class of transformers as it is."""
    model = tiny_model(architecture)
    pipeline = quiet(
        D3PMTextPipeline.from_masked_lm(model, tiny_tokenizer(), num_train_timesteps=50, sequence_length=12)
    )
    assert pipeline.scheduler.never_data == (0, 1, 2, 3, 4, *range(25, NUM_ROWS))
    losses = training_steps(pipeline)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    pipeline.save_pretrained(tmp_path)
    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path))
    assert type(loaded.text_model) is type(model) and loaded.config.add_special_tokens
    settings = {"batch_size": 3, "num_inference_steps": 5}
    for one in (pipeline, loaded):
        output = one(generator=torch.Generator().manual_seed(0), **settings)
        tokens = output.sequences
        assert tokens.shape == (3, 12)
        assert (tokens[:, 0] == 2).all() and (tokens[:, -1] == 3).all()  # [CLS] and [SEP] stay where they are
        inside = tokens[:, 1:-1]
        assert inside.min() >= 5 and inside.max() < 25  # neither special tokens nor rows without a token
        assert all(set(text) <= set(LETTERS) and len(text) == 10 for text in output.texts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_of_unequal_lengths(architecture):
    """Each architecture continues the prompts of a padded batch as it continues each of them alone."""
    pipeline = quiet(
        D3PMTextPipeline.from_masked_lm(tiny_model(architecture), tiny_tokenizer(), num_train_timesteps=50)
    )
    prompts, options = ["acdc", "hi", "k"], {"max_new_tokens": 6, "num_inference_steps": 5}
    batch = pipeline(prompts, generator=[torch.Generator().manual_seed(i) for i in range(3)], **options).texts
    assert [len(text) for text in batch] == [10, 8, 7]
    for i, prompt in enumerate(prompts):
        assert pipeline(prompt, generator=torch.Generator().manual_seed(i), **options).texts == [batch[i]]


def test_the_default_length_fits_the_positions():
    """Networks in the manner of RoBERTa have fewer positions than `max_position_embeddings`."""
    pipeline = quiet(D3PMTextPipeline.from_masked_lm(tiny_model("roberta"), tiny_tokenizer(), num_train_timesteps=10))
    assert pipeline.config.sequence_length == num_positions(pipeline.text_model) == 39
    assert pipeline(num_inference_steps=1).sequences.shape == (1, 39)


def test_from_a_folder(tmp_path):
    """An id or a folder gives network and tokenizer; a prompt is continued inside of the special tokens."""
    tiny_model("bert").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipeline = quiet(
        D3PMTextPipeline.from_masked_lm(tmp_path, num_train_timesteps=20, scheduler_kwargs={"beta_schedule": "cosine"})
    )
    assert pipeline.scheduler.config.beta_schedule == "cosine" and len(pipeline.scheduler) == 20
    assert not pipeline.text_model.training and pipeline.config.sequence_length == 40
    output = pipeline("ac[MASK]dc", num_inference_steps=3)
    assert output.sequences.shape == (1, 7) and output.texts[0][:2] == "ac" and output.texts[0][3:] == "dc"
    output = pipeline(["ac", "hill"], sequence_length=9, num_inference_steps=3)
    assert [text[:2] for text in output.texts] == ["ac", "hi"] and all(len(text) == 7 for text in output.texts)


def test_pickled_weights(tmp_path):
    """Pickles are read if they are asked for by name, and the checkpoint of the pipeline holds safetensors."""
    model = tiny_model("bert")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    model.config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(OSError, match="has pickled weights only, which can run code: pass `use_safetensors=False`"):
        D3PMTextPipeline.from_masked_lm(tmp_path)
    pipeline = D3PMTextPipeline.from_masked_lm(tmp_path, use_safetensors=False)
    assert torch.equal(pipeline.text_model.bert.embeddings.word_embeddings.weight, model.get_input_embeddings().weight)
    pipeline.save_pretrained(tmp_path / "pipeline")
    assert not [*(tmp_path / "pipeline").glob("*/*.bin")]
    loaded = D3PMPipeline.from_pretrained(tmp_path / "pipeline")
    assert torch.equal(loaded.text_model.cls.predictions.bias, model.cls.predictions.bias)
    model.save_pretrained(tmp_path / "safe")
    with pytest.raises(OSError, match="has no pickled weights .*: leave out use_safetensors=False"):
        D3PMTextPipeline.from_masked_lm(tmp_path / "safe", tiny_tokenizer(), use_safetensors=False)


REMOTE_CODE = """
from transformers import BertForMaskedLM

class MyBert(BertForMaskedLM):
    pass
"""


def test_remote_code(tmp_path):
    """A repository without code loads with trust_remote_code; a class that a repository brings is refused."""
    model = tiny_model("bert")
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipeline = D3PMTextPipeline.from_masked_lm(tmp_path, trust_remote_code=True)
    assert type(pipeline.text_model) is type(model)
    (tmp_path / "modeling_mine.py").write_text(REMOTE_CODE)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForMaskedLM": "modeling_mine.MyBert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="MyBert of .* is code of the repository and no class of transformers"):
        D3PMTextPipeline.from_masked_lm(tmp_path, trust_remote_code=True)
    assert type(D3PMTextPipeline.from_masked_lm(tmp_path).text_model) is type(model)


def test_without_special_tokens():
    pipeline = quiet(D3PMTextPipeline.from_masked_lm(tiny_model("bert"), tiny_tokenizer(), add_special_tokens=False))
    output = pipeline(sequence_length=6, num_inference_steps=3)
    assert output.sequences.shape == (1, 6) and output.sequences.min() >= 5


def test_wrong_parts():
    model, tokenizer = tiny_model("bert"), tiny_tokenizer()
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask token, which an absorbing process turns tokens into"):
        D3PMTextPipeline.from_masked_lm(model, tokenizer)
    with pytest.raises(ValueError, match="vocabulary of 25 and the network one of 20: use the tokenizer"):
        D3PMTextPipeline.from_masked_lm(tiny_model("bert", vocab_size=20), tiny_tokenizer())
    with pytest.raises(ValueError, match="tokenizer is None: it must be the tokenizer of the model"):
        D3PMTextPipeline.from_masked_lm(model)
    with pytest.raises(ValueError, match="model is 3: it must be an id on the Hub"):
        D3PMTextPipeline.from_masked_lm(3)
    without_vocabulary = tiny_tokenizer()
    without_vocabulary.add_special_tokens({"additional_special_tokens": list(LETTERS)})
    with pytest.raises(
        ValueError, match="has 25 special tokens and no others, as if its vocabulary file were missing"
    ):
        D3PMTextPipeline.from_masked_lm(model, without_vocabulary)
    with pytest.raises(ValueError, match="scheduler_kwargs has 'transition': it must have arguments of D3PMScheduler"):
        D3PMTextPipeline.from_masked_lm(model, tiny_tokenizer(), scheduler_kwargs={"transition": "uniform"})
    with pytest.raises(ValueError, match="got revision and a model that is loaded already"):
        D3PMTextPipeline.from_masked_lm(model, tiny_tokenizer(), revision="main")
    with pytest.raises(ValueError, match="add_special_tokens is True, and there is no tokenizer"):
        pipeline = D3PMTextPipeline.from_masked_lm(model, tiny_tokenizer())
        D3PMTextPipeline(model, pipeline.scheduler, add_special_tokens=True)
