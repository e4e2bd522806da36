# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Elements with numbers of states, and processes, of their own, against the dense reference of each element."""

import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import reference as ref
import torch
from families import BETAS, NUM_STEPS, needs_kernels, without_fused_loss

from d3pm_hf import D3PMScheduler, d3pm_loss, evaluate_bound, prior_loss
from d3pm_hf.kernels import kernels_disabled
from d3pm_hf.samplers import get_sampler, registered_samplers
from d3pm_hf.transitions import ByElementTransition
from d3pm_hf.transitions.rank_one import UniformTransition


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
SIZES = [4, 3, 6, 4, 2]
N = len(SIZES)
NAMES = ("absorbing", "uniform", "absorbing_uniform", "stationary", "gaussian", "band_diagonal")
MIXED = ["gaussian", "absorbing", "band_diagonal", "stationary", "absorbing_uniform"]
CASES = {
    **{name: [name] * N for name in NAMES},
    "mixed": MIXED,
    "unmasked": ["gaussian", "uniform", "gaussian", "uniform", "uniform"],
}
PAIRS = torch.tensor([(s, t) for t in range(1, NUM_STEPS + 1) for s in range(t)])
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-4}


@dataclass
class Elements:
    """A process by element, twice: as a scheduler, and as dense matrices [T, N, K, K] with a prior [N, K]."""

    scheduler: D3PMScheduler
    matrices: torch.Tensor
    prior: torch.Tensor
    is_data: torch.Tensor  # [N, K]

    def data(self, num_rows, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.stack([torch.randint(size, (num_rows,), generator=generator) for size in SIZES], 1)

    def corrupt(self, x_0, n, seed=0):
        probs = ref.marginal(self.matrices, x_0, 0, n)
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(probs.flatten(0, -2), 1, generator=generator).view_as(x_0)

    def forbid(self, logits):
        return logits.double().masked_fill(~self.is_data, -torch.inf)


def frequencies(num_classes):
    """[N, K], zero at the states that an element does not have."""
    probs = torch.zeros(N, num_classes, dtype=torch.float64)
    for element, size in enumerate(SIZES):
        probs[element, :size] = (torch.arange(size) + 1.0 + element).double()
    return probs / probs.sum(-1, keepdim=True)


def local_matrices(name, size, betas, pi):
    """Q_t [T, k, k] over the states of one element, and its prior [k]; the mask is the last state."""
    if name == "absorbing":
        pi = ref.stationary_mix(size + 1, size)
    elif name == "absorbing_uniform":
        pi = ref.stationary_mix(size + 1, size, 0.7)
    elif name != "stationary":
        pi = ref.stationary_mix(size)
    if name == "gaussian":
        return ref.gaussian(betas, size)[:, 0], pi
    if name == "band_diagonal":
        return ref.band_diagonal(betas, size, 1)[:, 0], pi
    return ref.rank_one(betas, pi)[:, 0], pi


def build(case, betas="plain", **kwargs):
    names = CASES[case]
    betas = torch.tensor(BETAS[betas], dtype=torch.float64)
    has_mask = any(name.startswith("absorbing") for name in names)
    K = max(SIZES) + has_mask
    pi, matrices, prior = frequencies(K), torch.eye(K).double().repeat(len(betas), N, 1, 1), torch.zeros(N, K).double()
    for element, (name, size) in enumerate(zip(names, SIZES)):
        steps, own = local_matrices(name, size, betas, pi[element, :size])
        states = torch.tensor([*range(size), *([K - 1] if name.startswith("absorbing") else [])])
        matrices[:, element, states[:, None], states] = steps
        prior[element, states] = own
    tensors = {"stationary_probs": pi} if "stationary" in names else {}
    transition = names if case in ("mixed", "unmasked") else case
    options = {"transition": transition, "trained_betas": betas.tolist(), "mask_fraction": 0.7, "bandwidth": 1}
    scheduler = D3PMScheduler(SIZES, NUM_STEPS, **options, **tensors, **kwargs)
    return Elements(scheduler, matrices, prior, torch.arange(K) < torch.tensor(SIZES)[:, None])


def draw_logits(elements, num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_rows, N, elements.matrices.shape[-1], generator=generator, dtype=torch.float64)
    return logits + 20 * ~elements.is_data  # the network is sure of states that do not exist


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_process_is_that_of_each_element(case, kernels):
    elements = build(case)
    with nullcontext() if kernels else kernels_disabled():
        process, (s, t) = elements.scheduler.transition, PAIRS.unbind(-1)
        x_0 = elements.data(len(PAIRS))
        x_t = elements.corrupt(x_0, t)
        close = {"rtol": 1e-9, "atol": 1e-12}
        law = ref.marginal(elements.matrices, x_0, 0, t)
        torch.testing.assert_close(process.log_marginal(x_0, 0, t, torch.float64).exp(), law, **close)
        columns = ref.likelihood(elements.matrices, x_t, s, t)
        mine = process.log_likelihood(x_t, s, t, torch.float64).exp()
        own = ref.marginal(elements.matrices, torch.eye(law.shape[-1])[x_0], s, t) > -1
        torch.testing.assert_close(mine[own & elements.is_data], columns[own & elements.is_data], **close)
        law = ref.posterior(elements.matrices, x_0, x_t, s, t)
        torch.testing.assert_close(process.log_posterior(x_0, x_t, s, t, torch.float64).exp(), law, **close)
        expected = ref.kl(ref.marginal(elements.matrices, x_0, 0, NUM_STEPS), elements.prior.expand(*x_0.shape, -1))
        torch.testing.assert_close(prior_loss(elements.scheduler, x_0).double(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("x0_posterior", ["leave_one_out", "denoising"])
@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_reverse_steps(case, x0_posterior):
    """Fused and plain, in both precisions; states that an element does not have get no gradient."""
    elements = build(case, x0_posterior=x0_posterior)
    scheduler, (s, t) = elements.scheduler, PAIRS.unbind(-1)
    x_0 = elements.data(len(PAIRS))
    x_t, logits = elements.corrupt(x_0, t), draw_logits(elements, len(PAIRS))
    truth = logits.clone().requires_grad_()
    masked = elements.forbid(truth)
    vb = ref.variational(elements.matrices, masked, x_0, x_t, s, t, x0_posterior=x0_posterior)
    ce = ref.cross_entropy(elements.matrices, masked, x_0, x_t, t, x0_posterior=x0_posterior)
    weights = torch.rand(x_0.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ((vb + 0.3 * ce) * weights).sum().backward()
    if os.environ.get("D3PM_HF_KERNELS") != "0":
        assert scheduler.transition.fused_loss == ("absorbing" if case == "absorbing" else "by_element")
    for dtype, tolerance in TOLERANCE.items():
        for form in (nullcontext(), without_fused_loss(scheduler.transition), kernels_disabled()):
            given = logits.clone().to(dtype).requires_grad_()
            with form:
                out = d3pm_loss(scheduler, given, x_0, x_t, t - 1, previous_timesteps=s - 1, hybrid_coeff=0.3)
            torch.testing.assert_close(out.vb.double(), vb.detach(), rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(out.cross_entropy.double(), ce.detach(), rtol=tolerance, atol=tolerance)
            (out.loss * weights.to(dtype)).sum().backward()
            torch.testing.assert_close(given.grad.double(), truth.grad, rtol=tolerance, atol=tolerance)
            assert (given.grad[(~elements.is_data).expand_as(given)] == 0).all()
    law = ref.reverse(elements.matrices, elements.forbid(logits), x_t, s, t, x0_posterior)
    mine = scheduler.posterior_logits(logits, t - 1, x_t, s - 1).exp()
    torch.testing.assert_close(mine, law, rtol=1e-6, atol=1e-9)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("sizes", [[2], [3, 2]])
@pytest.mark.parametrize("case", NAMES)
def test_samples_of_one_and_of_two_elements(case, sizes, betas, dtype, monkeypatch):
    """All steps, the first and the last one included, with steps that forget everything, in the dtypes of networks."""
    monkeypatch.setattr(sys.modules[__name__], "SIZES", sizes)
    monkeypatch.setattr(sys.modules[__name__], "N", len(sizes))
    elements, (s, t) = build(case, betas=betas), PAIRS.unbind(-1)
    x_0 = elements.data(len(PAIRS))
    x_t, logits = elements.corrupt(x_0, t), draw_logits(elements, len(PAIRS)).to(dtype)
    truth = logits.double().clone().requires_grad_()
    vb = ref.variational(elements.matrices, elements.forbid(truth), x_0, x_t, s, t)
    vb.sum().backward()
    tolerance = TOLERANCE.get(dtype, 2e-4)
    for form in (nullcontext(), kernels_disabled()):
        given = logits.clone().requires_grad_()
        with form:
            loss = d3pm_loss(elements.scheduler, given, x_0, x_t, t - 1, previous_timesteps=s - 1).loss
        torch.testing.assert_close(loss.double(), vb.detach(), rtol=tolerance, atol=tolerance)
        loss.sum().backward()
        close = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(given.grad.double(), truth.grad, **close)


@needs_kernels
@pytest.mark.parametrize("case", ["mixed", "absorbing"])
def test_compiled_losses(case):
    """One graph, whatever the parts are; a sample draws what it draws alone."""
    elements, t = build(case), torch.tensor([1, 4])
    x_0, logits = elements.data(2), draw_logits(elements, 2).float()
    sources = [[torch.Generator().manual_seed(seed) for seed in seeds] for seeds in ([0, 1], [1])]
    x_t = elements.scheduler.add_noise(x_0, t, sources[0])
    assert torch.equal(elements.scheduler.add_noise(x_0[1:], t[1:], sources[1])[0], x_t[1])

    def loss(logits):
        return d3pm_loss(elements.scheduler, logits, x_0, x_t, t, hybrid_coeff=0.1, loss_mask=x_0 > 0).loss

    torch.compiler.reset()
    for form in (loss, torch.compile(loss, backend="eager", fullgraph=True)):
        given = logits.clone().requires_grad_()
        form(given).sum().backward()
        torch.testing.assert_close(form(given), loss(logits))
        if form is loss:
            expected = given.grad
    torch.testing.assert_close(given.grad, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("names", ["absorbing", ["absorbing", "gaussian", "uniform"]])
def test_fitted_priors(names, tmp_path):
    """The prior of an element is the distribution of its data after T steps, for a mask that is not reached by all as well."""
    scheduler = D3PMScheduler(
        [4, 4, 4] if names == "absorbing" else [4, 3, 2],
        5,
        transition=names,
        trained_betas=[0.1] * 5,
        prior="fitted",
        unigram_probs=torch.tensor([[0.1, 0.9, 0, 0, 0]] * 3),
    )
    process = scheduler.transition
    expected = torch.tensor([[0.1, 0.9, 0, 0, 0]], dtype=torch.float64) @ process.matrix(0, 5)  # [N, 1, K]
    torch.testing.assert_close(process.log_prior.exp(), expected[:, 0])
    scheduler.save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.transition.log_prior, process.log_prior)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_draws(case, kernels):
    """Noise, the prior and reverse steps have the laws of the reference, and never reach a state that does not exist."""
    elements = build(case)
    scheduler, rows = elements.scheduler, 20_000
    generator = torch.Generator().manual_seed(0)
    x_0 = elements.data(1).expand(rows, -1)
    with nullcontext() if kernels else kernels_disabled():
        x_t = scheduler.add_noise(x_0, 2, generator)
        assert ref.fit(x_t, ref.marginal(elements.matrices, x_0[:1], 0, 3)[0]) > 1e-4
        assert ref.fit(scheduler.sample_prior((rows, N), generator), elements.prior) > 1e-4
        start, logits = elements.corrupt(x_0[:1], 4), draw_logits(elements, 1)
        for s in (2, 0):
            law = ref.reverse(elements.matrices, elements.forbid(logits), start, s, 4)[0]
            step = scheduler.step(
                logits.expand(rows, -1, -1), 3, start.expand(rows, -1), previous_timestep=s - 1, generator=generator
            )
            assert ref.fit(step.prev_sample, law) > 1e-4


@pytest.mark.parametrize("sampler", sorted(registered_samplers()))
@pytest.mark.parametrize("case", ["absorbing", "uniform", "stationary", "mixed"])
def test_samplers_draw_the_data_or_refuse_in_a_sentence(case, sampler):
    """Independent elements with a network that knows their distributions: samples have them, by any sampler that applies."""
    elements = build(case, betas="end")
    scheduler, generator, timesteps = (
        elements.scheduler,
        torch.Generator().manual_seed(0),
        list(range(NUM_STEPS))[::-1],
    )
    logits = draw_logits(elements, 1).float()
    arguments = scheduler, lambda x_t, t: logits.expand(len(x_t), -1, -1), scheduler.sample_prior((4000, N), generator)
    only_masks = sampler in ("positions_first", "first_hitting", "confidence", "remasking")
    if sampler == "left_to_right" or (only_masks and case != "absorbing"):
        with pytest.raises(ValueError, match="choose 'ancestral'"):
            get_sampler(sampler)(*arguments, timesteps, generator=generator)
        return
    x_0 = get_sampler(sampler)(*arguments, timesteps, generator=generator)
    scheduler.check_data_states(x_0)
    if case != "mixed":  # whose Gaussian part is not at its prior after six steps
        assert ref.fit(x_0, elements.forbid(logits)[0].softmax(-1)) > 1e-4


@pytest.mark.parametrize("corrector", ["gibbs", "forward_backward"])
@pytest.mark.parametrize("case", ["absorbing", "absorbing_uniform", "mixed"])
def test_correctors(case, corrector):
    elements = build(case, betas="end")
    logits = draw_logits(elements, 1)
    x_T = elements.scheduler.sample_prior((64, N), torch.Generator().manual_seed(0))
    x_0 = get_sampler("predictor_corrector")(
        elements.scheduler, lambda x_t, t: logits.expand(len(x_t), -1, -1), x_T, [5, 3, 1], corrector=corrector
    )
    elements.scheduler.check_data_states(x_0)


@pytest.mark.parametrize("case", ["absorbing", "uniform", "mixed"])
def test_the_bound_is_that_of_the_reference(case):
    elements = build(case, betas="end")
    logits = draw_logits(elements, 1)
    rows = elements.data(8)
    bound = evaluate_bound(
        elements.scheduler,
        lambda x_t, t: logits.expand(len(x_t), -1, -1).float(),
        [rows.repeat(400, 1)],
        progress_bar=False,
    )
    total = ref.kl(ref.marginal(elements.matrices, rows, 0, NUM_STEPS), elements.prior.expand(*rows.shape, -1)).sum()
    masked = elements.forbid(logits).expand(len(rows), -1, -1)
    for t in range(1, NUM_STEPS + 1):
        law = ref.marginal(elements.matrices, rows, 0, t)  # [8, N, K]
        for state in range(law.shape[-1]):
            x_t = torch.where(law[..., state] > 0, state, rows)
            term = ref.variational(elements.matrices, masked, rows, x_t, t - 1, t)
            total = total + torch.where(law[..., state] > 0, law[..., state] * term, 0).sum()
    expected = total / rows.numel() / torch.tensor(2.0).log()
    assert abs(bound.bits_per_dim - expected) < 5 * bound.bits_per_dim_standard_error + 1e-4


def test_rows_of_logits_and_continuous_time():
    """An absorbing process is asked for some rows alone, and has a bound in continuous time: both know which element a row is of."""
    elements = build("absorbing", betas="end")
    x_0 = elements.data(6)
    x_t, logits = elements.corrupt(x_0, 3), draw_logits(elements, 6)
    full = d3pm_loss(elements.scheduler, logits, x_0, x_t, 2)
    index = (x_t == 6).flatten().nonzero().squeeze(1)
    kept = d3pm_loss(elements.scheduler, logits.flatten(0, 1)[index], x_0, x_t, 2, logits_to_keep=index)
    torch.testing.assert_close(kept.vb, full.vb)
    layer = torch.nn.Linear(7, 7, dtype=torch.float64)
    layer.weight.data, layer.bias.data = torch.eye(7).double(), torch.zeros(7).double()
    torch.testing.assert_close(d3pm_loss(elements.scheduler, logits, x_0, x_t, 2, output_layer=layer).vb, full.vb)
    bound = evaluate_bound(
        elements.scheduler,
        lambda x_t, t: logits[:1].expand(len(x_t), -1, -1),
        [x_0.repeat(200, 1)],
        continuous_time=True,
        progress_bar=False,
    )
    log_p = elements.forbid(logits[:1]).log_softmax(-1).expand(6, -1, -1).gather(-1, x_0[..., None])
    expected = -log_p.mean() / torch.tensor(2.0).log()
    assert abs(bound.bits_per_dim - expected) < 5 * bound.bits_per_dim_standard_error + 1e-6


@pytest.mark.parametrize("case", CASES)
def test_files(case, tmp_path):
    elements = build(case)
    elements.scheduler.save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    assert loaded.config.element_classes == SIZES
    assert loaded.config.num_classes == elements.scheduler.config.num_classes
    torch.testing.assert_close(loaded.transition.matrix(1, 4), elements.scheduler.transition.matrix(1, 4))
    again = D3PMScheduler.from_config(elements.scheduler.config, **elements.scheduler.transition_tensors)
    torch.testing.assert_close(again.transition.matrix(1, 4), elements.scheduler.transition.matrix(1, 4))


@pytest.mark.filterwarnings("ignore:the process cannot lose information evenly")
def test_mutual_information_by_part(tmp_path):
    """Parts have schedules of their own, which are solved for once and saved."""
    names = ["gaussian", "absorbing", "gaussian", "uniform", "uniform"]
    scheduler = D3PMScheduler(SIZES, 20, transition=names, unigram_probs=frequencies(7))
    schedule = scheduler.transition_tensors["schedule"]
    parts = scheduler.transition.parts
    assert schedule.shape == (len(parts), 20) and (schedule[1] == 0).all()
    for part, row in zip(parts, schedule):
        if row.any():
            alone = D3PMScheduler(
                len(part.states),
                20,
                transition=part.transition.name,
                unigram_probs=frequencies(7)[part.elements][:, part.states].mean(0),
            )
            torch.testing.assert_close(row, alone.transition_tensors["schedule"])
    scheduler.save_pretrained(tmp_path)
    loaded = D3PMScheduler.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.transition.matrix(0, 9), scheduler.transition.matrix(0, 9))


@pytest.mark.parametrize(
    "options, words",
    [
        (5, "transition_kwargs is 5: it must be a dictionary"),
        ({"transitions": 5}, "transitions is 5: it must be a list of names"),
        ({"transitions": ["uniform", ["a"]]}, r"an entry of transitions is \['a'\]: it must be a string"),
    ],
)
def test_files_with_other_options_are_refused(options, words):
    config = D3PMScheduler([4, 3], 10, transition=["uniform", "absorbing"], beta_schedule="cosine").config
    with pytest.raises(ValueError, match=words):
        D3PMScheduler.from_config({**config, "transition_kwargs": options})


def test_a_schedule_has_a_row_for_each_part():
    with pytest.raises(ValueError, match=r"schedule has the shape \(1, 10\), and this scheduler needs \(2, 10\)"):
        options = {"transition": ["uniform", "gaussian"], "unigram_probs": torch.ones(2, 4)}
        D3PMScheduler([4, 4], 10, **options, transition_tensors={"schedule": torch.ones(1, 10)})


def test_infilling_keeps_what_is_known():
    elements = build("mixed", betas="end")
    logits, known = draw_logits(elements, 1), elements.data(64)
    is_known = torch.tensor([True, False, True, False, True]).expand_as(known)
    x_T = elements.scheduler.sample_prior((64, N))
    x_0 = get_sampler("ancestral")(
        elements.scheduler,
        lambda x_t, t: logits.expand(len(x_t), -1, -1),
        x_T,
        [5, 2, 0],
        known=known,
        is_known=is_known,
    )
    assert torch.equal(x_0[is_known], known[is_known])


@needs_kernels
def test_a_part_without_a_fused_loss_is_plain():
    process = build("uniform").scheduler.transition
    plain = type(
        "Plain", (UniformTransition,), {"forbid": lambda self, logits: UniformTransition.forbid(self, logits)}
    )
    exponents = -process.parts[0].transition.log_step_survival[1:]
    own = plain(torch.full((len(process.parts[0].states),), 1 / len(process.parts[0].states)), exponents)
    other = ByElementTransition([process.parts[0]._replace(transition=own), *process.parts[1:]], process.num_classes)
    assert process.kernel() is not None and other.kernel() is None
    torch.testing.assert_close(other.matrix(1, 3), process.matrix(1, 3))


def test_refusals():
    def error(*args, **kwargs):
        with pytest.raises(ValueError) as caught:
            D3PMScheduler(*args, **kwargs)
        return str(caught.value)

    assert "pass num_classes as a list" in error(5, 10, transition=["uniform", "gaussian"])
    assert "empty list" in error([], 10)
    assert "an entry of num_classes is 1" in error([4, 1], 10)
    assert "transition is 5: it must be one of" in error([4, 3], 10, transition=5)
    assert "2 transitions for 3 elements" in error(
        [4, 3, 2], 10, transition=["uniform", "gaussian"], beta_schedule="cosine"
    )
    assert "'matrix' is defined for elements that all have the same states" in error([4, 3], 10, transition="matrix")
    assert "'autoregressive' is defined for" in error([4, 3], 2, transition="autoregressive")
    assert "leave out mask_token_id" in error([4, 3], 10, suppress_tokens=[1])
    assert "choose 'x0'" in error([4, 3], 10, prediction_type="logistic")
    assert "pass num_classes and transition as lists" in error(4, 10, transition="by_element")
    assert "elements of up to 4 states need 5" in error(9, 10, element_classes=[4, 3])
    assert "unigram_probs[1]" in error([4, 3], 10, transition="uniform", unigram_probs=torch.ones(2, 4))
    assert "needs unigram_probs" in str(_error(lambda: D3PMScheduler([4, 3], 10, transition="uniform").transition))
    scheduler = D3PMScheduler([4, 3], 10)
    assert "element 1, which has 3" in str(_error(lambda: scheduler.add_noise(torch.tensor([[0, 3]]), 4)))
    assert "has 2 elements" in str(_error(lambda: scheduler.add_noise(torch.tensor([[0, 3, 1]]), 4)))
    x_t = torch.tensor([[4, 4]])
    assert "element 1" in str(
        _error(lambda: d3pm_loss(scheduler, torch.zeros(1, 2, 5), torch.tensor([[0, 4]]), x_t, 9))
    )
    assert "needs [B, 2, 5]" in str(_error(lambda: scheduler.logits(torch.zeros(1, 3, 5))))
    mixed = D3PMScheduler([4, 3], 10, transition=["uniform", "absorbing"], beta_schedule="cosine")
    assert "element 0" in str(_error(lambda: mixed.add_noise(torch.tensor([[4, 3]]), 4)))
    assert "a sample has 2 elements" in str(_error(lambda: mixed.sample_prior((3, 3))))


def _error(function):
    with pytest.raises(ValueError) as caught:
        function()
    return caught.value
