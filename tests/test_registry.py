# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Transition families and schedules from outside the package, and the table that everything else reads."""

import sys
from pathlib import Path

import families
import numpy as np
import pytest
import reference as ref
import torch

from d3pm_hf import (
    D3PMScheduler,
    D3PMTextPipeline,
    create_model_card,
    create_text_model,
    d3pm_loss,
    prior_loss,
    register_schedule,
    register_transition,
)
from d3pm_hf.data import Rows
from d3pm_hf.numerics import categorical, uniforms
from d3pm_hf.schedules import beta_schedules, cosine_betas, schedule_names
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.transitions import DenseTransition, RankOneTransition, Transition, transition_families
from d3pm_hf.utils.registry import is_built_in


K, T = 5, 6
PAGE = Path(__file__).parents[1] / "docs/source/en/forward_process.md"


def ring(num_classes, hold=0.5):
    """The matrix of a step of a random walk on a ring, doubly stochastic."""
    eye = torch.eye(num_classes, dtype=torch.float64)
    return hold * eye + (1 - hold) * (eye.roll(1, 1) + eye.roll(-1, 1)) / 2


@register_transition("ring", "states move along a ring")
class RingTransition(Transition):
    """Only `sample`, `log_marginal` and `log_likelihood`, from powers of one matrix."""

    has_schedule = False
    options = ("hold",)

    def __init__(self, num_classes, num_steps, hold=0.5):
        super().__init__()
        self.num_classes, self.num_steps, self.hold = num_classes, num_steps, hold
        step = ring(num_classes, hold)
        self.log_powers = torch.stack([torch.matrix_power(step, n) for n in range(num_steps + 1)]).log()
        self.log_prior = torch.full((num_classes,), 1 / num_classes, dtype=torch.float64).log()

    @classmethod
    def create(cls, settings):
        return cls(settings.num_classes, settings.num_steps, settings.option("hold", 0.5))

    def to_config(self):
        return {"transition": "ring", "transition_kwargs": {"hold": self.hold}, "prior": "stationary"}

    def stretch(self, s, t, x, dtype):
        s, t = (torch.as_tensor(n, device=x.device).expand(len(x)) for n in (t - 1 if s is None else s, t))
        return self.table("log_powers", x.device, dtype)[t - s]  # [B, K, K]

    def sample(self, x_0, t, generator=None):
        u = uniforms(x_0.shape, generator, x_0.device)
        return categorical(self.log_marginal(x_0, 0, t).flatten(0, -2), u.flatten()).view_as(x_0)

    def log_marginal(self, x, s, t, dtype=torch.float32):
        if x.is_floating_point():
            powers = self.stretch(s, t, x, x.dtype).reshape(len(x), *[1] * (x.ndim - 2), K, K)
            return (x[..., None] + powers).logsumexp(-2)
        powers = self.stretch(s, t, x, dtype)
        return powers[torch.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)), x]

    def log_likelihood(self, x_t, s, t, dtype=torch.float32):
        return self.log_marginal(x_t, t - 1 if s is None else s, t, dtype)  # the matrix is symmetric


@register_transition("fixed_matrix")
class FixedMatrix(DenseTransition):
    """A family with a tensor of its own, and a mask."""

    description = "tokens move by one matrix"
    has_mask = True
    has_schedule = False
    required_tensors = ("step",)

    def __init__(self, step, num_steps):
        super().__init__(len(step), num_steps)
        self.log_step = step.log()
        self.fit_prior(torch.full((len(step),), 1 / len(step), dtype=torch.float64))

    @classmethod
    def create(cls, settings):
        return cls(settings.tensors["step"], settings.num_steps)

    @classmethod
    def tensor_shapes(cls, num_classes, num_steps):
        return {"step": [(num_classes, num_classes)]}

    def log_step_matrices(self, t):
        return self.table("log_step", t.device).expand(len(t), -1, -1)


@register_schedule("quadratic")
def quadratic_betas(num_steps, beta_start=0.01, beta_end=1.0):
    return torch.linspace(beta_start**0.5, beta_end**0.5, num_steps) ** 2  # float32 is converted


def ring_family(hold=0.5):
    """The same process as tests/families.py has others."""
    matrices = ring(K, hold).expand(T, 1, K, K)
    return families.Family("ring", K, matrices, torch.full((K,), 1 / K).double(), {"transition": "ring"})


# The formulas of the families as the page shows them.
TYPESET = {
    "(1-b) I + b 1 e_m'": r"$(1 - \beta_t) I + \beta_t \mathbf{1} e_m^\top$",
    "(1-b) I + b 1 1' / K": r"$(1 - \beta_t) I + \beta_t \mathbf{1} \mathbf{1}^\top / K$",
    "(1-b) I + b 1 (f e_m + (1-f) 1 / K)'": r"$(1 - \beta_t) I + \beta_t \mathbf{1} (f e_m + (1 - f) \mathbf{1} / K)^\top$",
    "(1-b) I + b 1 pi'": r"$(1 - \beta_t) I + \beta_t \mathbf{1} \pi^\top$",
    "I, but 1 e_m' at position N - t": r"$I$, but $\mathbf{1} e_m^\top$ at position $N - t$",
    "that of the family of each element": "the matrix of the family of each element",
    "exp(a R)": r"$e^{\alpha_t R}$",
    "exp(a R), R of the neighbors": r"$e^{\alpha_t R}$, $R$ of the neighbors",
    "exp(a R), R of the neighbors and the mask": r"$e^{\alpha_t R}$, $R$ of the neighbors and the mask",
    "exp(-4 d^2 / ((K-1)^2 b)) at the distance d": r"$\exp(-4 d^2 / ((K - 1)^2 \beta_t))$ at the distance $d$",
    "b / K up to the distance bandwidth": r"$\beta_t / K$ up to the distance `bandwidth`",
}


def family_table():
    """The registered families of the package as a Markdown table, as it stands in the docs."""
    lines = ["| `transition` | what it does | $Q_t$ | options | tensors |", "| --- | --- | --- | --- | --- |"]
    for name, family in transition_families().items():
        if is_built_in(family):
            names = family.options, family.input_tensors()
            shown = [f"`{name}`", family.description, TYPESET.get(family.formula, f"`{family.formula}`")]
            shown += [", ".join(f"`{each}`" for each in part) for part in names]
            lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def with_family_table(page):
    """The page with the table of the registered families."""
    before, begin, rest = page.partition("<!-- table: families -->\n")
    _, end, after = rest.partition("\n<!-- end of table -->")
    return before + begin + family_table() + end + after


def losses(scheduler, seed=0):
    """Loss and gradient of random logits at every timestep."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, 4, K, generator=generator, dtype=torch.float64, requires_grad=True)
    x_0, t = torch.randint(0, K - 1, (T, 4), generator=generator), torch.arange(T)
    x_t = scheduler.add_noise(x_0, t, generator)
    output = d3pm_loss(scheduler, logits, x_0, x_t, t, hybrid_coeff=0.1)
    return x_0, x_t, logits, output.vb, torch.autograd.grad(output.loss.sum(), logits)[0]


# Transitions


def test_a_family_with_three_methods_has_the_numbers_of_the_reference():
    """The loss is the plain KL; a stored-matrix family with the same Q_t has the same one by its fused form."""
    scheduler = D3PMScheduler(K, T, transition="ring")
    same = D3PMScheduler(K, T, transition="matrix", transition_matrices=ring(K))
    family = ring_family()
    x_0, x_t, logits, vb, gradient = losses(scheduler)
    expected = losses(same)
    torch.testing.assert_close(vb, expected[3], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, expected[4], rtol=1e-9, atol=1e-12)
    for n in range(1, T + 1):
        row = slice(n - 1, n)
        kl = ref.variational(family.matrices, logits[row].detach(), x_0[row], x_t[row], n - 1, n)
        torch.testing.assert_close(vb[row], kl, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prior_loss(scheduler, x_0), prior_loss(same, x_0), rtol=1e-9, atol=1e-12)
    for s, t in ((0, 6), (1, 4), (4, 5)):
        torch.testing.assert_close(scheduler.transition.matrix(s, t), ref.stretch(family.matrices, s, t)[0])


@pytest.mark.filterwarnings("ignore:after 6 steps")
def test_options_are_saved(tmp_path):
    scheduler = D3PMScheduler(K, T, transition="ring", transition_kwargs={"hold": 0.8})
    scheduler.save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    assert loaded.config.transition_kwargs == {"hold": 0.8}
    torch.testing.assert_close(loaded.transition.matrix(0, 3), scheduler.transition.matrix(0, 3))
    with pytest.raises(ValueError, match="transition_kwargs has 'hole', which is no option of 'ring': it takes hold"):
        D3PMScheduler(K, T, transition="ring", transition_kwargs={"hole": 1})
    with pytest.raises(ValueError, match="bandwidth is -3: it must be an integer of at least 1"):
        D3PMScheduler(K, T, transition="band_diagonal", transition_kwargs={"bandwidth": -3})
    with pytest.raises(ValueError, match="mask_token_id is 99: it must be an integer"):
        D3PMScheduler(K, T, transition_kwargs={"mask_token_id": 99})
    named = D3PMScheduler(K, T, transition_kwargs={"mask_token_id": 1})  # one place for each option
    assert named.config.mask_token_id == named.mask_token_id == named.transition.absorbing_state == 1
    assert named.config.transition_kwargs is None and named.never_data == (1,)
    named.save_pretrained(tmp_path / "named")
    assert D3PMScheduler.from_pretrained(tmp_path / "named").mask_token_id == 1
    with pytest.raises(ValueError, match="transition_kwargs is .*: it must be a dictionary"):
        D3PMScheduler(K, T, transition="ring", transition_kwargs=[0.8])


def test_tensors_are_saved(tmp_path):
    step = families.stochastic(K, K, seed=4)
    scheduler = D3PMScheduler(K, T, transition="fixed_matrix", transition_tensors={"step": step})
    assert scheduler.never_data == (K - 1,) == scheduler.transition.never_data
    scheduler.save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    assert loaded.never_data == (K - 1,)
    torch.testing.assert_close(loaded.transition.matrix(0, 2), step @ step)
    again = D3PMScheduler.from_config(scheduler.config, transition_tensors={"step": step})
    torch.testing.assert_close(again.transition.matrix(0, 2), step @ step)
    with pytest.raises(ValueError, match="needs step: pass them"):
        D3PMScheduler(K, T, transition="fixed_matrix").transition
    with pytest.raises(ValueError, match=r"step has the shape \(4, 4\), and this scheduler needs \(5, 5\)"):
        D3PMScheduler(K, T, transition="fixed_matrix", transition_tensors={"step": torch.eye(4)})
    with pytest.raises(ValueError, match="got stop, which the transition 'fixed_matrix' does not take: leave it out"):
        D3PMScheduler(K, T, transition="fixed_matrix", transition_tensors={"stop": step})


def test_a_transition_object(tmp_path):
    """It is used as it is, and saved if it says how it is made."""
    scheduler = D3PMScheduler(transition=RingTransition(K, T, hold=0.7))
    assert (scheduler.config.num_classes, len(scheduler), len(scheduler.timesteps)) == (K, T, T)
    scheduler.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="nats per element from the prior"):
        loaded = D3PMScheduler.from_pretrained(tmp_path).transition
    torch.testing.assert_close(loaded.matrix(0, 4), scheduler.transition.matrix(0, 4))
    assert scheduler.family is RingTransition

    nameless = D3PMScheduler(transition=RankOneTransition(ref.stationary_mix(K), torch.full((T,), 2.0).double()))
    x_0 = torch.zeros(2, 3, dtype=torch.long)
    x_t = nameless.add_noise(x_0, 3)
    assert d3pm_loss(nameless, torch.zeros(2, 3, K), x_0, x_t, 3).loss.isfinite().all()
    with pytest.raises(ValueError, match="RankOneTransition object, which cannot be saved: register its class"):
        nameless.save_pretrained(tmp_path / "nameless")
    assert not (tmp_path / "nameless").exists()
    with pytest.raises(ValueError, match=f"num_classes is 9, and the transition has {K}: leave it out"):
        D3PMScheduler(9, transition=RingTransition(K, T))
    with pytest.raises(ValueError, match="got unigram_probs and a transition object, which has tensors of its own"):
        D3PMScheduler(transition=RingTransition(K, T), unigram_probs=torch.ones(K))
    with pytest.raises(ValueError, match="num_classes is None: it must be an integer"):
        D3PMScheduler(transition="uniform")


def test_names_that_are_not_registered():
    with pytest.raises(ValueError, match="transition is 'rings': it must be one of absorbing, .*register_transition"):
        D3PMScheduler(K, T, transition="rings")
    with pytest.raises(ValueError, match="the transition 'uniform' is part of the package: register yours under"):
        register_transition("uniform")(RingTransition)
    with pytest.raises(ValueError, match="it must be a class that derives from `Transition`"):
        register_transition("function")(ring)
    with pytest.raises(ValueError, match="name is ''"):
        register_transition("")


def test_a_family_without_create():
    class Bare(RingTransition):
        create = classmethod(Transition.create.__func__)

    register_transition("bare")(Bare)
    with pytest.raises(ValueError, match=r"Bare has no `create\(settings\)`"):
        D3PMScheduler(K, T, transition="bare")


def test_a_family_without_a_mutual_information_schedule():
    @register_transition("no_information")
    class NoInformation(RankOneTransition):
        @classmethod
        def create(cls, settings):
            return cls(ref.stationary_mix(settings.num_classes), settings.exponents())

    with pytest.raises(ValueError, match="'no_information' has no mutual-information schedule: choose another"):
        D3PMScheduler(K, T, transition="no_information", unigram_probs=torch.ones(K))
    D3PMScheduler(K, T, transition="no_information", beta_schedule="cosine")


def test_every_family_is_tested_and_documented():
    ours = [name for name, family in transition_families().items() if family.__module__.startswith("d3pm_hf.")]
    tested = {name.removesuffix("-sparse").removesuffix("_in_data") for name in families.NAMES} - {"blockwise"}
    assert set(ours) == tested | {"by_element"}  # tests/test_elements.py
    page = PAGE.read_text(encoding="utf-8")
    assert with_family_table(page) == page, "run `python tests/test_registry.py --write`"


# Schedules


@pytest.mark.filterwarnings("ignore:after 6 steps")
def test_a_schedule_is_saved(tmp_path):
    scheduler = D3PMScheduler(K, T, transition="uniform", beta_schedule="quadratic")
    scheduler.save_pretrained(tmp_path)
    betas = quadratic_betas(T).double()
    for one in (scheduler, D3PMScheduler.from_pretrained(tmp_path)):
        torch.testing.assert_close(
            one.transition.matrix(0, T), ref.stretch(ref.rank_one(betas, ref.stationary_mix(K)), 0, T)[0]
        )
    narrow = D3PMScheduler(
        K, T, transition="gaussian", beta_schedule="quadratic", beta_start=0.04, beta_end=0.09, prior="stationary"
    )
    expected = ref.gaussian(torch.linspace(0.2, 0.3, T, dtype=torch.float32).double() ** 2, K)
    torch.testing.assert_close(narrow.transition.matrix(0, 2), ref.stretch(expected, 0, 2)[0], rtol=1e-6, atol=1e-9)


def test_schedules_that_are_wrong():
    with pytest.raises(
        ValueError, match="beta_schedule is 'cubic': it must be one of mutual_information, .*; register your own"
    ):
        D3PMScheduler(K, T, beta_schedule="cubic")
    for name in ("cosine", "mutual_information"):
        with pytest.raises(ValueError, match=f"the schedule '{name}' is part of the package"):
            register_schedule(name)(quadratic_betas)
    register_schedule("short")(lambda num_steps: torch.ones(num_steps - 1))
    with pytest.raises(
        ValueError, match=rf"'short' returned a tensor of shape \({T - 1},\): .* each of the {T} steps"
    ):
        D3PMScheduler(K, T, transition="uniform", beta_schedule="short")
    register_schedule("negative")(lambda num_steps: -torch.ones(num_steps))
    with pytest.raises(ValueError, match="beta_1 is -1: it must lie between 0 and 1"):
        D3PMScheduler(K, T, transition="uniform", beta_schedule="negative")
    assert beta_schedules()["cosine"] is cosine_betas and schedule_names()[0] == "mutual_information"


# What is kept of a run, and what is written about a process


def test_training_refuses_a_process_that_cannot_be_saved(tmp_path):
    """Before it writes or trains anything."""
    scheduler = D3PMScheduler(transition=RankOneTransition(ref.stationary_mix(28), torch.full((8,), 2.0).double()))
    pipeline = D3PMTextPipeline(create_text_model("tiny", 28), scheduler, sequence_length=8)
    rows = Rows(np.zeros((4, 8), np.uint8), 28)
    with pytest.raises(ValueError, match="RankOneTransition object, which cannot be saved: register its class"):
        train(D3PMTrainingArguments(output_dir=str(tmp_path / "run")), pipeline, rows)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"transition": "absorbing"}, "28 states per token, 8 timesteps, and the schedule `mutual_information`."),
        ({"transition": "absorbing", "trained_betas": [0.5] * 7 + [1.0]}, "8 timesteps, and given betas."),
        ({"transition": "autoregressive"}, "28 states per token, 8 timesteps. The network"),
        (
            {"transition": RankOneTransition(ref.stationary_mix(28), torch.full((8,), 2.0).double())},
            "8 timesteps. The",
        ),
    ],
)
def test_the_card_names_a_schedule_if_there_is_one(arguments, sentence):
    objects = isinstance(arguments["transition"], Transition)
    scheduler = D3PMScheduler(**arguments) if objects else D3PMScheduler(28, 8, **arguments)
    card = create_model_card(D3PMTextPipeline(create_text_model("tiny", 28), scheduler))
    assert sentence in str(card)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(with_family_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
