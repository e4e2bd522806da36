# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What is given: outside of the process, always seen by the network, and part of the result."""

import families
import pytest
import reference as ref
import torch
import toy

from d3pm_hf import D3PMTextPipeline, Denoiser
from d3pm_hf.samplers import ancestral, get_sampler


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
T, LENGTH = 6, 3


class ConditionalDenoiser(Denoiser):
    """The exact denoiser of p(x_1, x_2 | x_0 = token) for data of three positions, by the token that it sees in the first."""

    def __init__(self, family, probs):
        super().__init__()
        self.seen = []
        networks = [toy.ExactDenoiser(family, part / part.sum()) for part in probs if part.sum() > 0]
        self.networks = torch.nn.ModuleList(networks)
        self.index = (probs.sum((1, 2)) > 0).cumsum(0) - 1
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.num_classes = family.num_classes

    def forward(self, x_t, timestep, **condition):
        self.seen.append(x_t)
        answers = torch.stack([network(x_t[:, 1:], timestep)[0] for network in self.networks])  # [tokens, B, 2, K]
        answers = answers[self.index[x_t[:, 0]], torch.arange(len(x_t))]
        # Of the token that is given the network says what it likes, such as that nothing is possible.
        return torch.cat([torch.full_like(answers[:, :1], torch.nan), answers], dim=1)


def build(name, num_classes=4):
    betas = [0.3] * T if name in ("gaussian", "band_diagonal", "matrix") else [1 / (T - t) for t in range(T)]
    family = families.build(name, num_classes, [0.5] * (LENGTH - 1) + [1] if name in families.BY_POSITION else betas)
    probs = toy.joint(family, LENGTH)
    pipeline = D3PMTextPipeline(ConditionalDenoiser(family, probs), family.scheduler(), sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    return family, probs, pipeline


def first_given(*tokens):
    """`given` and `is_given` for rows whose first token is given."""
    given = torch.tensor([[token] + [0] * (LENGTH - 1) for token in tokens])
    return {"given": given, "is_given": torch.tensor([[True] + [False] * (LENGTH - 1)]).expand(len(tokens), -1)}


def draw(pipeline, batch_size, *tokens, **options):
    return pipeline.sample_states(batch_size, (LENGTH,), **first_given(*tokens), **options)


# The reference of blockwise noise is one of all positions, and not of those that are left.
@pytest.mark.parametrize("name", [name for name in families.NAMES if name != "blockwise"])
def test_every_family_samples_given_a_token(name):
    """The exact denoiser of the rest draws the rest from its distribution given the token, in every family."""
    family, probs, pipeline = build(name, 3 if name.endswith("-sparse") else 4)
    token = int(probs.sum((1, 2)).argmax())
    num_samples = 300 if name.endswith("-sparse") else 2000
    samples = draw(pipeline, num_samples, token, generator=torch.Generator().manual_seed(1))
    assert (samples[:, 0] == token).all()
    assert all((x_t[:, 0] == token).all() for x_t in pipeline.text_model.seen)
    # The law of ancestral sampling over the two positions, whose network is that of p(. | token).
    network = pipeline.text_model.networks[int(pipeline.text_model.index[token])]
    if name == "autoregressive":
        law = (probs[token] / probs[token].sum()).flatten()
    else:
        law = toy.ancestral_law(family, network, list(range(len(family.matrices) - 1, -1, -1)))
    assert ref.fit(toy.indices(samples[:, 1:], family.num_classes)[:, None], law[None]) > 1e-3


def test_rows_of_a_batch_have_their_own():
    _, _, pipeline = build("uniform")
    options = {"num_per_input": 2, "num_particles": 3}
    samples = draw(pipeline, 2, 3, 1, **options)
    assert samples[:, 0].tolist() == [3, 3, 1, 1]
    generators = [torch.Generator().manual_seed(i) for i in range(4)]
    samples = draw(pipeline, 2, 3, 1, generator=generators, **options)
    for i, token in enumerate((3, 3, 1, 1)):
        alone = draw(pipeline, 1, token, num_particles=3, generator=torch.Generator().manual_seed(i))
        assert torch.equal(samples[i : i + 1], alone)


def test_it_is_no_evidence_for_particles():
    """Samplers do not hear that it is known, and without anything else known no particle is preferred."""
    heard = []

    def sampler(scheduler, denoiser, x_t, timesteps, *, known=None, is_known=None, **others):
        heard.append((known, is_known))
        return ancestral(scheduler, denoiser, x_t, timesteps, known=known, is_known=is_known, **others)

    _, _, pipeline = build("uniform")
    everything = {"known": torch.tensor([[2, 1, 1]]), "is_known": torch.tensor([[True, True, False]])}
    samples = pipeline.sample_states(1, (LENGTH,), **everything, **first_given(3), sampler=sampler)
    assert heard[0][1].tolist() == [[False, True, False]] and samples[0, :2].tolist() == [3, 1]


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian"])
def test_callbacks_see_it(name):
    """In every tensor; what a callback writes there is dropped."""
    states = []

    def callback(pipeline, step, timestep, tensors):
        states.extend(tensors[key] for key in ("latents", "sample", "pred_original_sample"))
        return {"latents": torch.full_like(tensors["latents"], 0)}

    _, _, pipeline = build(name)
    names = ["latents", "sample", "pred_original_sample"]
    samples = draw(
        pipeline, 4, 2, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names, num_particles=2
    )
    assert len(states) == 3 * T and all((x[:, 0] == 2).all() for x in states)
    assert (samples == torch.tensor([2, 0, 0])).all()


@pytest.mark.parametrize("name", ["absorbing", "uniform", "absorbing_uniform"])
def test_tokens_that_are_no_data(name):
    """A token that the process cannot produce, such as `[CLS]`, may be given, and latents may show it."""
    kwargs = {} if name == "uniform" else {"mask_token_id": 4}
    family = families.build(name, 5)
    scheduler = family.scheduler(suppress_tokens=[0], **kwargs)
    seen = []

    class Sees(Denoiser):
        num_classes = 5

        def forward(self, x_t, timestep):
            seen.append(x_t[:, 0])
            return torch.zeros(*x_t.shape, 5)

    pipeline = D3PMTextPipeline(Sees(torch.nn.Linear(1, 1)), scheduler, sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    latents = torch.tensor([[0, 1, 2]])
    for options in ({}, {"latents": latents}, {"known": latents, "start_timestep": 3}, {"num_particles": 2}):
        samples = draw(pipeline, 1, 0, **options)
        assert samples[0, 0] == 0 and (samples[0, 1:] != 0).all()
    assert (torch.cat(seen) == 0).all()


@pytest.mark.parametrize("name", families.NAMES)
def test_truncation_leaves_every_given_position_possible(name):
    """Few tokens lead to x_t in some families, and none of them may be among the most likely ones."""
    family = families.build(name, 5, [0.5] * (LENGTH - 1) + [1] if name in families.BY_POSITION else "plain")

    class Copies(Denoiser):
        num_classes = 5

        def forward(self, x_t, timestep):
            logits = 50 * torch.nn.functional.one_hot(x_t, 5).float()
            if family.mask is not None:
                logits[..., family.mask] = 0
            return logits

    pipeline = D3PMTextPipeline(Copies(torch.nn.Linear(1, 1)), family.scheduler(), sequence_length=LENGTH)
    pipeline.set_progress_bar_config(disable=True)
    for seed in range(5):
        options = {"generator": torch.Generator().manual_seed(seed), "num_particles": 2}
        samples = draw(pipeline, 4, 3, top_p=0.1, top_k=1, temperature=0.5, **options)
        assert (samples[:, 0] == 3).all()


def test_a_sampler_that_passes_no_condition_on():
    def sampler(scheduler, denoiser, x_t, timesteps, *, generator=None, **others):
        for t, s in zip(timesteps, [*timesteps[1:], -1]):
            output = denoiser(x_t, torch.tensor(t))
            x_t = scheduler.step(output, t, x_t, previous_timestep=s, generator=generator).prev_sample
        return x_t

    _, _, pipeline = build("absorbing")
    samples = draw(pipeline, 5, 2, sampler=sampler)
    assert (samples[:, 0] == 2).all() and all((x_t[:, 0] == 2).all() for x_t in pipeline.text_model.seen)


@pytest.mark.parametrize(
    "name", ["ancestral", "positions_first", "first_hitting", "predictor_corrector", "confidence"]
)
def test_a_sampler_of_your_own_passes_it_on(name):
    """The same tokens are drawn through a function that calls a sampler, whole or row by row."""

    def whole(scheduler, denoiser, x_t, timesteps, **others):
        return get_sampler(name)(scheduler, denoiser, x_t, timesteps, **others)

    def by_rows(scheduler, denoiser, x_t, timesteps, *, condition, generator, **others):
        rows = [
            get_sampler(name)(
                scheduler,
                denoiser,
                x_t[i : i + 1],
                timesteps,
                condition={key: value[i : i + 1] for key, value in condition.items()},
                generator=generator[i : i + 1],
                **others,
            )
            for i in range(len(x_t))
        ]
        return torch.cat(rows)

    _, _, pipeline = build("absorbing")
    samples = [
        draw(pipeline, 2, 3, 1, sampler=sampler, generator=[torch.Generator().manual_seed(i) for i in range(2)])
        for sampler in (name, whole, by_rows)
    ]
    assert samples[0][:, 0].tolist() == [3, 1]
    assert torch.equal(samples[0], samples[1]) and torch.equal(samples[0], samples[2])


def test_wrong_values():
    _, _, pipeline = build("uniform")
    given, is_given = first_given(1).values()
    for wrong in (
        {"given": given},
        {"is_given": is_given},
        {"given": given.float(), "is_given": is_given},
        {"given": given, "is_given": is_given.long()},
        {"given": given[:, :2], "is_given": is_given},
    ):
        with pytest.raises(ValueError, match=r"pass both given \(torch.int64\) and is_given \(torch.bool\)"):
            pipeline.sample_states(1, (LENGTH,), **wrong)
    with pytest.raises(ValueError, match="token 9 at position"):
        draw(pipeline, 1, 9)
    with pytest.raises(ValueError, match="got 2 inputs for a batch of 3"):
        draw(pipeline, 3, 1, 2)
