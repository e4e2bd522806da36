# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`temperature=0` takes the most likely state of the prediction, in a step and in every sampler."""

import families
import pytest
import reference as ref
import torch
from test_sampler_faults import SAMPLERS

from d3pm_hf import ClassifierGuidance, D3PMScheduler, Denoiser
from d3pm_hf.samplers import ClassifierGuidedScheduler, ancestral, get_sampler, guide


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
T, K, B, N = families.NUM_STEPS, 5, 16, 6


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Scores(Denoiser):
    """A network whose scores depend on the position, the states around and the class; those of position 0 are all equal."""

    def __init__(self, num_classes, by_state=0.0):
        super().__init__()
        self.num_classes, self.num_class_labels, self.null_class = num_classes, 2, 2
        self.by_state = by_state
        self.scores = torch.nn.Parameter(torch.randn(3, N, num_classes, generator=seeded(4)), requires_grad=False)
        self.scores[:, 0] = 0

    def forward(self, x_t, timestep, class_labels=None):
        labels = torch.zeros(len(x_t), dtype=torch.long) if class_labels is None else class_labels
        return self.scores[labels] + self.by_state * x_t.float().sum(-1)[:, None, None].cos()

    def start_cache(self, condition):
        return {}

    def next_logits(self, x, cache, **condition):
        return self(x, 0, **condition)[:, x.shape[1]]


def build(sampler):
    name = "autoregressive" if sampler == "left_to_right" else "absorbing"
    family = families.build(name, K, "end")
    return family, family.scheduler()


@pytest.mark.cover
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 1, "top_p": 0.1}], ids=str)
@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler(sampler, guidance_scale, options):
    family, scheduler = build(sampler)
    network = Scores(K)
    scores = (
        network.scores[1] if guidance_scale == 1 else torch.lerp(network.scores[2], network.scores[1], guidance_scale)
    )
    expected = ref.forbid(scores, family.mask).argmax(-1)
    assert expected[0] == 0  # of equal states the first one
    guided, denoiser = guide(scheduler, network, guidance_scale)
    if sampler == "left_to_right":
        if guidance_scale != 1:
            pytest.skip("guidance keeps no keys and values")
        denoiser = network
    x_0 = get_sampler(sampler)(
        guided,
        denoiser,
        scheduler.sample_prior((B, N), seeded()),
        list(range(T - 1, -1, -1)),
        condition={"class_labels": torch.ones(B, dtype=torch.long)},
        generator=seeded(1),
        temperature=0,
        **options,
        **{name: value for name, value in SAMPLERS[sampler].items() if name != "sampler_kwargs"},
        **SAMPLERS[sampler].get("sampler_kwargs", {}),
    )
    assert (x_0 == expected).all()


@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("name", [name for name in families.NAMES if not name.endswith("-sparse")])
def test_a_step(name, x0_posterior):
    """x_s ~ q(x_s | x_t, x_0), of the best x_0 that can have led to x_t."""
    family = families.build(name, K)
    scheduler = family.scheduler(x0_posterior=x0_posterior)
    x_t = family.corrupt(family.data((1, N)), 3)
    logits = torch.randn(1, N, K, generator=seeded(2))
    logits[0, 1] = 0
    can_lead = ref.likelihood(family.matrices, x_t, 0, 3) > 0
    best = ref.forbid(logits.double(), family.mask).masked_fill(~can_lead, -torch.inf).argmax(-1)  # [1, N]
    law = ref.posterior(family.matrices, best, x_t, 1, 3)
    many = [v.expand(4000, *v.shape[1:]) for v in (logits, x_t)]
    step = scheduler.step(many[0], 2, many[1], previous_timestep=0, temperature=0, top_k=3, generator=seeded(3))
    assert ref.fit(step.prev_sample, law[0]) > 1e-4
    got = scheduler.posterior_logits(logits, 2, x_t, 0, temperature=0).exp()
    torch.testing.assert_close(got.double(), law, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["uniform", "gaussian", "band_diagonal", "absorbing_uniform"])
def test_samples_of_other_processes(name):
    """The last step gives the best x_0 that can have led to its x_t, also where positions come first."""
    family = families.build(name, K, "plain" if name == "gaussian" else "end")
    scheduler, network = family.scheduler(), Scores(K, by_state=0.1)
    x_T, steps = scheduler.sample_prior((B, N), seeded()), []
    options = {"timesteps": list(range(T - 1, -1, -1)), "generator": seeded(1), "temperature": 0}
    x_0 = ancestral(scheduler, network, x_T, callback=steps.append, **options)
    can_lead = ref.likelihood(family.matrices, steps[-1].sample, 0, 1) > 0  # band-diagonal: not from all states
    best = ref.forbid(steps[-1].model_output.double(), family.mask).masked_fill(~can_lead, -torch.inf)
    assert torch.equal(x_0, best.argmax(-1))
    if name == "absorbing_uniform":
        options["generator"] = seeded(1)
        assert torch.equal(get_sampler("positions_first")(scheduler, network, x_T, **options), x_0)


def test_logistic_and_previous():
    logistic = D3PMScheduler(K, T, transition="gaussian", beta_schedule="cosine", prediction_type="logistic")
    output = torch.tensor([0.4, -1.0]).expand(2, N, 2)
    x_t = torch.zeros(2, N, dtype=torch.long)
    x_0 = logistic.step(output, 0, x_t, temperature=0).prev_sample
    assert (x_0 == logistic.logits(output).argmax(-1)).all()
    previous = families.build("uniform", K).scheduler(prediction_type="previous")
    logits = torch.randn(2, N, K, generator=seeded())
    assert torch.equal(previous.step(logits, 3, x_t, temperature=0).prev_sample, logits.argmax(-1))


def test_a_classifier():
    """A classifier of x_s sees the one x_0 of the prediction, which the last step gives."""
    scheduler, network = families.build("uniform", K).scheduler(), Scores(K)
    guided = ClassifierGuidedScheduler(scheduler, ClassifierGuidance(lambda x, t: (x == 2).float().sum(-1)))
    x_T = scheduler.sample_prior((B, N), seeded())
    x_0 = ancestral(guided, network, x_T, list(range(T - 1, -1, -1)), generator=seeded(1), temperature=0)
    assert (x_0 == network.scores[0].argmax(-1)).all()


def test_half_precision_and_impossible_states():
    scheduler = families.build("uniform", K).scheduler()
    logits = torch.randn(3, N, K, generator=seeded())
    logits[..., 1] = -torch.inf
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x_0 = scheduler.step(logits.to(dtype), 0, torch.zeros(3, N, dtype=torch.long), temperature=0).prev_sample
        assert torch.equal(x_0, logits.to(dtype).argmax(-1))


def test_rows_without_a_state():
    scheduler, logits = families.build("uniform", K).scheduler(), torch.zeros(1, 2, K)
    logits[0, 1] = -torch.inf
    with pytest.raises(ValueError, match=r"all logits at position \(0, 1\) are -inf"):
        scheduler.step(logits, 0, torch.zeros(1, 2, dtype=torch.long), temperature=0)
