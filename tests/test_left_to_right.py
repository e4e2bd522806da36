# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Causal networks that keep their keys and values: the logits and the samples are those of the plain loop."""

import pytest
import torch
from test_causal_lm import ARCHITECTURES, tiny_model, tiny_pipeline
from toy import indices

from d3pm_hf import (
    CausalLMDenoiser,
    D3PMScheduler,
    D3PMTextConfig,
    D3PMTextModel,
    D3PMTextPipeline,
    Denoiser,
    TextDenoiser,
)
from d3pm_hf.pipelines.pipeline_d3pm import default_sampler
from d3pm_hf.samplers import left_to_right


K, N, B = 9, 6, 4  # classes, the last of which is the mask; length; batch
CACHED = sorted(set(ARCHITECTURES) - {"mamba"})
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def text_model(**settings):
    torch.manual_seed(0)
    options = {
        "is_decoder": True,
        "timestep_conditioning": False,
        "initializer_range": 0.3,
        "max_position_embeddings": N,
    }
    return D3PMTextModel(D3PMTextConfig(vocab_size=K, **SIZES, **{**options, **settings})).eval()


def create_pipeline(network=None, num_class_labels=None, **settings):
    scheduler = D3PMScheduler(K, N, transition="autoregressive", **settings)
    options = {"sequence_length": N, "num_class_labels": num_class_labels}
    pipeline = D3PMTextPipeline(text_model() if network is None else network, scheduler, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generators(count=B):
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def draw(pipeline, sampler=None, batch_size=B, generator=None, **options):
    generator = generators(batch_size) if generator is None else generator
    return pipeline.sample_states(batch_size, (N,), sampler=sampler, generator=generator, **options)


def states():
    return torch.randint(0, K - 1, (B, N), generator=torch.Generator().manual_seed(1))


def count_tokens(pipeline):
    """Number of tokens that each call of the backbone reads, in a list that fills."""
    tokens = []
    pipeline.text_model.transform.register_forward_pre_hook(lambda module, inputs: tokens.append(inputs[0].shape[1]))
    return tokens


MASKS = {
    "no_padding": None,
    "padding": torch.tensor([[1] * N, [1] * 4 + [0] * 2, [0] * 2 + [1] * 4, [1] * N]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["text_model_bert", "text_model_t5", *CACHED])
@torch.no_grad()
def test_logits_are_those_without_a_cache(name, mask):
    """Whatever the number of tokens that a call reads, and wherever there is padding."""
    if name.startswith("text_model"):
        denoiser = TextDenoiser(text_model(backbone=name.removeprefix("text_model_")))
    else:
        denoiser = CausalLMDenoiser(tiny_model(name))
    condition = {} if MASKS[mask] is None else {"attention_mask": MASKS[mask]}
    x = states()
    expected = denoiser(x, 0, **condition)  # [B, N, K]
    for lengths in (range(N), [0, 1, 3, 5], [4, 5], [5]):
        cache = denoiser.start_cache(condition)
        for n in lengths:
            is_visible = torch.ones(B, dtype=torch.bool) if MASKS[mask] is None else MASKS[mask][:, n] == 1
            logits = denoiser.next_logits(x[:, :n], cache, **condition)[is_visible]
            assert torch.allclose(logits, expected[is_visible, n], atol=1e-5, rtol=1e-5)
            assert cache.get_seq_length() == n + 1  # or it would read the tokens again


@torch.no_grad()
def test_windows_of_attention():
    """A window that is shorter than the text, where the cache forgets."""
    denoiser = CausalLMDenoiser(tiny_model("qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1))
    x, cache = states(), denoiser.start_cache({})
    expected = denoiser(x, 0)
    for n in (0, 1, 4, 5):
        assert torch.allclose(denoiser.next_logits(x[:, :n], cache), expected[:, n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_language_models_draw_the_samples_of_the_plain_loop(name):
    pipeline = tiny_pipeline(name)
    plain, default = (
        pipeline(batch_size=B, generator=generators(), sampler=sampler, output_type="latent").sequences
        for sampler in ("ancestral", None)
    )
    assert torch.equal(plain, default)
    prompts = [
        pipeline(prompt=["ab", "cd"], max_new_tokens=4, generator=generators(2), sampler=sampler).texts
        for sampler in ("ancestral", None)
    ]
    assert prompts[0] == prompts[1]


KNOWN = {
    "nothing": torch.zeros(1, N, dtype=torch.bool),
    "prompt": torch.tensor([[True, True, True, False, False, False]]),
    "middle": torch.tensor([[False, False, True, True, False, True]]),
    "uneven": torch.tensor([[True, False] * 3, [False, True] * 3, [True] * 5 + [False], [False] * 6]),
    "everything": torch.ones(1, N, dtype=torch.bool),
}
CALLS = {"nothing": [1] * N, "prompt": [4, 1, 1], "middle": [1, 1, 3], "uneven": [1] * N, "everything": []}


@pytest.mark.parametrize("backbone", ["bert", "t5"])
@pytest.mark.parametrize("kind", ["known", "given"])
@pytest.mark.parametrize("where", KNOWN)
def test_samples_are_those_of_the_plain_loop(where, kind, backbone):
    """Tokens that all rows hold are read with the next call, and one at a time is read otherwise."""
    pipeline = create_pipeline(text_model(backbone=backbone))
    tokens = count_tokens(pipeline)
    fixed = {kind: states(), f"is_{kind}": KNOWN[where].expand(B, -1)}
    plain = draw(pipeline, "ancestral", **fixed)
    tokens.clear()
    samples = draw(pipeline, **fixed)
    assert tokens == CALLS[where]
    assert torch.equal(samples, plain)
    assert torch.equal(samples[fixed[f"is_{kind}"]], states()[fixed[f"is_{kind}"]])
    assert (samples != K - 1).all()


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.6, "temperature": 2.0}, {"start_timestep": 2}], ids=str)  # fmt: skip
def test_options(options):
    pipeline = create_pipeline()
    tokens = count_tokens(pipeline)
    known = {"known": states()} if "start_timestep" in options else {}
    plain = draw(pipeline, "ancestral", **known, **options)
    tokens.clear()
    assert torch.equal(draw(pipeline, **known, **options), plain)
    assert tokens == ([4, 1, 1] if known else [1] * N)


def test_generators_end_in_the_same_state():
    pipeline, ends = create_pipeline(), []
    for sampler in ("ancestral", "left_to_right"):
        for one in (generators(), torch.Generator().manual_seed(0)):
            draw(pipeline, sampler, generator=one)
            ends.append(torch.cat([g.get_state() for g in (one if isinstance(one, list) else [one])]))
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])


def test_a_sample_is_the_same_alone_and_in_a_batch():
    pipeline = create_pipeline()
    together = draw(pipeline, known=states(), is_known=KNOWN["uneven"])
    for row, generator in enumerate(generators()):
        alone = {"known": states()[row : row + 1], "is_known": KNOWN["uneven"][row : row + 1]}
        assert torch.equal(draw(pipeline, batch_size=1, generator=[generator], **alone)[0], together[row])


def test_states_to_start_from():
    """Tokens behind the mask stay, as they do in the plain loop."""
    pipeline, latents = create_pipeline(), torch.full((B, N), K - 1)
    latents[:, 3] = 2
    assert torch.equal(draw(pipeline, latents=latents), draw(pipeline, "ancestral", latents=latents))


def test_padding():
    pipeline = create_pipeline()
    condition = {"attention_mask": MASKS["padding"]}
    given = {"given": torch.zeros(B, N, dtype=torch.long), "is_given": MASKS["padding"] == 0}
    samples = draw(pipeline, condition=condition, **given)
    assert torch.equal(samples, draw(pipeline, "ancestral", condition=condition, **given))


def test_classes():
    network = text_model(num_class_embeds=3)
    pipeline = create_pipeline(network=network)
    condition = {"class_labels": torch.tensor([0, 1, 2, 1])}
    tokens = count_tokens(pipeline)
    samples = draw(pipeline, condition=condition)
    assert tokens == [1] * N
    assert torch.equal(samples, draw(pipeline, "ancestral", condition=condition))


class Table(Denoiser):
    """A causal network over three tokens and a mask that looks p(x^i | x^{i-1}) up, with a cache of its own making."""

    is_causal, reads_timestep, num_classes = True, False, 4

    def __init__(self):
        super().__init__()
        table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
        self.table = torch.nn.Parameter(table, requires_grad=False)

    def forward(self, x_t, timestep):
        return self.table[torch.nn.functional.pad(x_t[:, :-1], (1, 0), value=3)]

    def start_cache(self, condition):
        return []

    def next_logits(self, x, cache):
        cache.append(x.shape[1])
        return self.table[x[:, -1]] if x.shape[1] else self.table[3].expand(len(x), -1)


def test_the_law_of_a_denoiser_of_your_own():
    scheduler, denoiser, count = D3PMScheduler(4, 3, transition="autoregressive"), Table(), 60_000
    x_T = torch.full((count, 3), 3)
    drawn = left_to_right(scheduler, denoiser, x_T, [2, 1, 0], generator=torch.Generator().manual_seed(0))
    p = denoiser.table[:, :3].double().softmax(-1)
    law = p[3][:, None, None] * p[:3][:, :, None] * p[:3][None]  # [3, 3, 3]
    counts = torch.bincount(indices(drawn, 4), minlength=64).view(4, 4, 4)[:3, :3, :3]
    assert counts.sum() == count
    assert ((counts - count * law) ** 2 / (count * law)).sum() < 60  # chi-squared of 26 degrees of freedom


@pytest.mark.parametrize(
    "other",
    [
        {"num_inference_steps": 3},
        {"guidance_scale": 2.0},
        {"callback_on_step_end": lambda *arguments: None},
        {"num_particles": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_calls_that_take_the_plain_loop(other):
    pipeline = create_pipeline(network=text_model(num_class_embeds=3), num_class_labels=2)
    tokens = count_tokens(pipeline)
    draw(pipeline, condition={"class_labels": torch.tensor([0, 1, 0, 1])}, **other)
    assert set(tokens) == {N}


def test_networks_without_a_cache():
    """They take the plain loop, unless the sampler is named, which is refused in one sentence."""
    timed = create_pipeline(network=text_model(timestep_conditioning=True))
    encoder = create_pipeline(network=text_model(is_decoder=False))
    compiled = create_pipeline()
    compiled.text_model = torch.compile(compiled.text_model, backend="eager")
    for pipeline in (timed, encoder, compiled, tiny_pipeline("mamba")):
        timesteps = list(range(N - 1, -1, -1))
        assert default_sampler(pipeline.scheduler, pipeline.denoiser, timesteps, {}).__name__ == "ancestral"
        with pytest.raises(ValueError, match="keeps no keys and values"):
            draw(pipeline, "left_to_right")
    draw(timed)
    with pytest.raises(ValueError, match="choose 'ancestral'"):  # a condition that the cache does not know
        draw(create_pipeline(), "left_to_right", condition={"inputs_embeds": torch.zeros(B, N, 16)})
    with pytest.raises(ValueError, match="this network keeps no keys and values: leave out"):
        timed.text_model(states(), past_key_values=TextDenoiser(text_model()).start_cache({}))


@pytest.mark.parametrize("settings", [{"reconstruction": "raw"}, {"mask_in_data": True}], ids=str)
def test_processes_that_take_the_plain_loop(settings):
    pipeline = create_pipeline(**settings)
    tokens = count_tokens(pipeline)
    draw(pipeline)
    assert tokens == [N] * N
    with pytest.raises(ValueError, match="all timesteps, a mask that is never data"):
        draw(pipeline, "left_to_right")


def test_interruption_and_progress():
    """The state that is reached is that of the plain loop, also if tokens behind it are known."""
    reached = []
    for sampler in ("ancestral", "left_to_right"):
        pipeline, seen = create_pipeline(), []

        def progress_bar(steps, pipeline=pipeline, seen=seen):
            for step in steps:
                pipeline._interrupt = len(seen) == 3
                seen.append(step)
                yield step

        pipeline.progress_bar = progress_bar
        reached.append(draw(pipeline, sampler, known=states(), is_known=KNOWN["middle"].expand(B, -1)))
        assert len(seen) == 4
    assert torch.equal(*reached)
    assert (reached[0][:, 3:] == K - 1).all()


def test_a_failure_leaves_the_pipeline_as_it_was():
    pipeline, calls = create_pipeline(), []
    expected = draw(pipeline)

    def fail(module, arguments, output):
        calls.append(output)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    hook = pipeline.text_model.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        draw(pipeline)
    hook.remove()
    assert torch.equal(draw(pipeline), expected)


def test_outputs_are_checked():
    pipeline = create_pipeline()
    hook = pipeline.text_model.lm_head.register_forward_hook(lambda module, arguments, output: output * torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        draw(pipeline)
    hook.remove()
    with pytest.raises(ValueError, match="num_train_timesteps"):
        scheduler, x_T = pipeline.scheduler, torch.full((B, N - 1), K - 1)
        left_to_right(scheduler, pipeline.denoiser, x_T, list(range(N - 1, -1, -1)))


def test_a_cache_is_for_longer_and_longer_texts():
    denoiser = TextDenoiser(text_model())
    cache = denoiser.start_cache({})
    denoiser.next_logits(states()[:, :3], cache)
    with pytest.raises(ValueError, match="start a new cache"):
        denoiser.next_logits(states()[:, :3], cache)
    for wrong in (None, 3, "ab", states().float(), states()[0]):
        with pytest.raises(ValueError, match="x is"):
            denoiser.next_logits(wrong, cache)
    with pytest.raises(ValueError, match="cache is None: it must be the cache that `start_cache` returns"):
        denoiser.next_logits(states(), None)
