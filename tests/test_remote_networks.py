# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks like LLaDA and Dream, of classes that this package does not know: their logits, order, and guidance on a prompt."""

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, MaskedLMDenoiser
from d3pm_hf.samplers import guide


K, MASK, T = 11, 9, 24  # the mask is not the last row, which no token has


class Network(torch.nn.Module):
    """Attention over tokens and positions, without a class of transformers around it.

    Args:
        mask_form: `"2d"` for a network that takes an attention mask `[B, N]` as LLaDA does, and `"4d"` for `[B, 1, N, N]`, as
            Dream does.
    """

    def __init__(self, mask_form="2d"):
        super().__init__()
        torch.manual_seed(0)
        self.config, self.mask_form = SimpleNamespace(vocab_size=K), mask_form
        self.words, self.positions = torch.nn.Embedding(K, 16), torch.nn.Embedding(40, 16)
        self.qkv, self.head = torch.nn.Linear(16, 48), torch.nn.Linear(16, K)
        self.calls = []

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        assert use_cache is False
        self.calls.append(input_ids)
        hidden = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        query, key, value = self.qkv(hidden).chunk(3, -1)
        if attention_mask is not None:
            assert attention_mask.ndim == {"2d": 2, "4d": 4}[self.mask_form]
            attention_mask = (attention_mask[:, 0] if self.mask_form == "4d" else attention_mask[:, None]).bool()
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return SimpleNamespace(logits=6 * self.head(hidden + attended))


def tokenizer():
    vocabulary = {f"w{i}": i for i in range(MASK)} | {"[MASK]": MASK}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", pad_token="w0", unk_token="w0")


def make_pipeline(network=None, transition="absorbing", **options):
    mask = {"mask_token_id": MASK} if transition == "absorbing" else {}
    scheduler = D3PMScheduler(K, T, transition=transition, beta_schedule="reciprocal", suppress_tokens=[K - 1], **mask)
    denoiser = MaskedLMDenoiser(network or Network(), **options)
    pipeline = D3PMTextPipeline(denoiser, scheduler, tokenizer(), sequence_length=12)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def llada(network, prompt, gen_length, steps, block_length, cfg_scale):
    """The decoding of LLaDA with temperature 0 and the remasking of low confidence, for one prompt `[N]`."""
    x = torch.cat([prompt, torch.full((gen_length,), MASK)])[None]
    is_prompt = x != MASK
    for start in range(len(prompt), x.shape[1], block_length):
        for step in range(steps * block_length // gen_length):
            logits = network(x, use_cache=False).logits
            if cfg_scale > 0:
                without = network(x.masked_fill(is_prompt, MASK), use_cache=False).logits
                logits = without + (cfg_scale + 1) * (logits - without)
            logits[..., [MASK, K - 1]] = -torch.inf  # neither is ever data here
            confidence, best = logits.softmax(-1).max(-1)
            is_next = (x == MASK) & (torch.arange(x.shape[1]) < start + block_length)
            chosen = confidence.masked_fill(~is_next, -torch.inf)[0].topk(gen_length // steps).indices
            x[0, chosen] = best[0, chosen]
    return x[0]


@pytest.mark.parametrize("cfg_scale", [0.0, 0.8])
@pytest.mark.parametrize(("block_length", "steps"), [(12, 12), (4, 6), (3, 4), (6, 12), (2, 6)])
def test_the_decoding_of_llada(block_length, steps, cfg_scale):
    """`block_length`, `temperature=0` and `guidance_scale` = `cfg_scale` + 1 give its tokens."""
    network, prompts = Network(), torch.tensor([[1, 2, 3], [8, 0, 5]])
    with torch.no_grad():
        expected = torch.stack([llada(network, prompt, 12, steps, block_length, cfg_scale) for prompt in prompts])
    sequences = make_pipeline(network)(
        input_ids=prompts,
        max_new_tokens=12,
        num_inference_steps=steps,
        sampler="confidence",
        sampler_kwargs={"block_length": block_length},
        temperature=0.0,
        guidance_scale=cfg_scale + 1,
        output_type="latent",
    ).sequences
    assert torch.equal(sequences, expected)


@pytest.mark.parametrize("block_length", [1, 3, 5])
def test_blocks_are_revealed_from_the_left(block_length):
    """Also in rows with gaps: no mask of a block is revealed while one of an earlier block is left."""
    pipeline, seen = make_pipeline(), []
    text = torch.full((2, 14), MASK)
    text[0, 3:6], text[1, ::4] = 2, 7
    pipeline(
        input_ids=text,
        sampler="confidence",
        sampler_kwargs={"block_length": block_length},
        num_inference_steps=12,
        generator=torch.Generator().manual_seed(0),
        callback_on_step_end=lambda pipeline, step, t, tensors: seen.append(tensors["latents"].clone()),
    )
    assert len(seen) == 12 and not (seen[-1] == MASK).any()
    for latents in seen:
        for row, before in zip(latents, text):
            left = (row[before == MASK] == MASK).nonzero().squeeze(-1)
            revealed = (row[before == MASK] != MASK).nonzero().squeeze(-1)
            if len(left) and len(revealed):
                assert revealed.max() // block_length <= left.min() // block_length


def test_one_block_is_no_block():
    draws = [
        make_pipeline()(
            num_inference_steps=5,
            sampler="confidence",
            sampler_kwargs=kwargs,
            generator=torch.Generator().manual_seed(1),
        ).sequences
        for kwargs in ({}, {"block_length": 12}, {"block_length": 100})
    ]
    assert torch.equal(draws[0], draws[1]) and torch.equal(draws[0], draws[2])


def test_shifted_logits():
    """The logits of a position are those that Dream has at the position before it; the first has its own."""
    network, x = Network(), torch.randint(0, K, (3, 7))
    plain, shifted = MaskedLMDenoiser(network), MaskedLMDenoiser(network, shift_logits=True)
    logits = network(x, use_cache=False).logits
    assert_close(plain(x, 0), logits)
    expected = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    assert_close(shifted(x, 0), expected)
    keep = torch.tensor([0, 6, 7, 8, 20])
    assert_close(shifted(x, 0, logits_to_keep=keep), expected.flatten(0, 1)[keep])
    where = torch.zeros(3, 7, dtype=torch.bool)
    where[1, 2:5] = True
    assert_close(shifted(x, 0, logits_to_keep=where), expected[where])
    assert_close(plain(x, 0, logits_to_keep=keep), logits.flatten(0, 1)[keep])


@pytest.mark.parametrize(("form", "expands"), [("2d", False), ("4d", True)])
def test_a_padded_prompt_is_what_it_is_alone(form, expands):
    pipeline = make_pipeline(Network(form), shift_logits=True, expand_attention_mask=expands)
    prompts = ["w1 w2 w3 w4", "w5"]
    options = {"max_new_tokens": 5, "num_inference_steps": 5, "sampler": "confidence", "temperature": 0.0}
    together = pipeline(prompts, **options).texts
    assert together == [pipeline(prompt, **options).texts[0] for prompt in prompts]


def test_guidance_drops_the_prompt():
    """At w = 0 the network sees masks in place of the prompt, and at w = 2 both in one call."""
    network = Network()
    pipeline = make_pipeline(network)
    for scale, rows in ((0.0, 1), (2.0, 2), (1.0, 1)):
        network.calls.clear()
        output = pipeline("w1 w2 w3", max_new_tokens=4, num_inference_steps=2, guidance_scale=scale)
        assert output.sequences[0, :3].tolist() == [1, 2, 3]
        for x in network.calls:
            assert len(x) == rows
            dropped = x[-1, :3].eq(MASK).all().item()
            assert dropped is (scale != 1) and (scale == 0 or x[0, :3].tolist() == [1, 2, 3])


def test_guidance_without_a_prompt():
    for call in ({}, {"input_ids": torch.tensor([[1, MASK]])}):
        with pytest.raises(ValueError, match="pass class_labels or condition, or a prompt with max_new_tokens"):
            make_pipeline()(guidance_scale=2.0, num_inference_steps=2, **call)
    with pytest.raises(ValueError, match="the process 'uniform' has no mask to put in place of the prompt"):
        make_pipeline(transition="uniform")("w1", max_new_tokens=2, guidance_scale=2.0)


def test_guide_takes_what_is_given():
    """The combined logits are those of both calls."""
    network, scheduler = Network(), D3PMScheduler(K, T, mask_token_id=MASK)
    x, is_given = torch.tensor([[1, 2, MASK, 4]]), torch.tensor([[True, True, False, False]])
    _, guided = guide(scheduler, MaskedLMDenoiser(network), 3.0, drops_given=True)
    with torch.no_grad():
        a, b = (network(tokens, use_cache=False).logits for tokens in (x, x.masked_fill(is_given, MASK)))
        assert_close(guided(x, 3, is_given=is_given), b + 3 * (a - b))


def test_wrong_arguments():
    without = Network()
    without.config = None
    with pytest.raises(ValueError, match="num_classes is None"):
        MaskedLMDenoiser(without)
    assert MaskedLMDenoiser(without, K).num_classes == K
    with pytest.raises(ValueError, match=r"x_t is .*pass a `torch.LongTensor` of shape \[B, N\]"):
        MaskedLMDenoiser(Network())(torch.zeros(3))
    with pytest.raises(ValueError, match="block_length is 0"):
        make_pipeline()(sampler="confidence", sampler_kwargs={"block_length": 0})
