# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Laws of timesteps in training: their probabilities, their draws, and the weights that keep the logged bound unbiased."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import chisquare, norm
from training_run import Sentences, T, make_pipeline, run

from d3pm_hf import d3pm_loss
from d3pm_hf.training import D3PMTrainingArguments, read_log
from d3pm_hf.training.objective import noise_generators
from d3pm_hf.training.step_batches import IndexedExamples, StepBatches
from d3pm_hf.training.timestep_laws import LogitNormalLaw, UniformLaw


LAWS = pytest.mark.parametrize("law", [UniformLaw(), LogitNormalLaw(0.0, 1.0), LogitNormalLaw(-1.0, 0.7)], ids=str)


def probabilities(law, num_timesteps):
    """P(t) of all timesteps, by the integral of the density over [t, t + 1) / T."""
    if law == UniformLaw():
        return np.full(num_timesteps, 1 / num_timesteps)

    def density(u):
        return norm.pdf(np.log(u / (1 - u)), law.mean, law.std) / (u * (1 - u)) if 0 < u < 1 else 0.0

    edges = np.linspace(0, 1, num_timesteps + 1)
    return np.array([quad(density, a, b, epsabs=0, epsrel=1e-10)[0] for a, b in zip(edges, edges[1:])])


@LAWS
def test_weights_undo_the_law(law):
    """weight(t) = 1 / (T P(t)), so that the expectation of any weighted term is its mean over all timesteps."""
    for size in (1, 12, 20):
        p, weights = probabilities(law, size), law.weights(torch.arange(size), size)
        weights = torch.ones(size) if weights is None else weights
        assert weights.dtype == torch.float32 and weights.shape == (size,)
        np.testing.assert_allclose(weights.double().numpy(), 1 / (size * p), rtol=1e-6)
        terms = np.random.default_rng(0).random(size)
        assert (p * weights.double().numpy() * terms).sum() == pytest.approx(terms.mean(), rel=1e-6)


@LAWS
def test_draws_have_the_law(law):
    """Each timestep is drawn as often as its probability says, and a step has one timestep in each part of equal probability."""
    size, batch = 20, 8
    p = probabilities(law, size)
    upper = np.cumsum(p)
    counts = np.zeros(size)
    for items in StepBatches(64, batch, 1, size, 0, range(800), law):
        timesteps = np.sort([timestep for *_, timestep in items])
        counts += np.bincount(timesteps, minlength=size)
        # The i-th part of the law is between the quantiles i / B and (i + 1) / B.
        assert (upper[timesteps] > np.arange(batch) / batch - 1e-9).all()
        assert ((upper - p)[timesteps] < (np.arange(batch) + 1) / batch + 1e-9).all()
    often = p * counts.sum() > 5
    observed, expected = (np.append(v[often], v[~often].sum()) for v in (counts, p * counts.sum()))
    kept = expected > 0
    assert chisquare(observed[kept], expected[kept] * observed.sum() / expected[kept].sum()).pvalue > 1e-3


def test_a_step_does_not_depend_on_how_it_is_shared_out():
    def items(batch_size, batches_per_step, steps):
        law = LogitNormalLaw(-0.5, 1.0)
        return [item for batch in StepBatches(50, batch_size, batches_per_step, 1000, 3, steps, law) for item in batch]

    assert items(12, 1, range(7)) == items(4, 3, range(7)) == items(12, 1, range(3)) + items(2, 6, range(3, 7))


def test_loss_and_log(tmp_path):
    """The loss is that of the drawn timesteps; L_vb and the cross-entropy of the log are weighted."""
    options = {"timestep_sampling": "logit_normal", "logit_mean": -0.5, "hybrid_coeff": 0.1, "validation_steps": 0}
    run(make_pipeline(), output_dir=str(tmp_path), max_train_steps=1, **options)
    law = LogitNormalLaw(-0.5, 1.0)
    examples = [IndexedExamples(Sentences())[item] for item in next(iter(StepBatches(200, 8, 1, T, 0, range(1), law)))]
    x_0, t = torch.stack([x_0 for _, x_0, _, _ in examples]), torch.tensor([timestep for *_, timestep in examples])
    pipeline = make_pipeline()
    x_t = pipeline.scheduler.add_noise(x_0, t, noise_generators([seed for *_, seed, _ in examples]))
    terms = d3pm_loss(pipeline.scheduler, pipeline.denoiser(x_t, t), x_0, x_t, t, hybrid_coeff=0.1)
    weights = 1 / (T * torch.from_numpy(probabilities(law, T))[t])  # [B]
    line = read_log(tmp_path / "log.jsonl")[0]
    assert line["loss"] == pytest.approx(terms.loss.mean().item(), rel=1e-5)
    assert line["bits"] == pytest.approx((terms.vb.mean(1) * weights).mean().item() * T / np.log(2), rel=1e-5)
    assert line["cross_entropy"] == pytest.approx((terms.cross_entropy.mean(1) * weights).mean().item(), rel=1e-5)


def test_arguments():
    assert D3PMTrainingArguments().timestep_law == UniformLaw()
    arguments = D3PMTrainingArguments(timestep_sampling="logit_normal", logit_mean=-1, logit_std=0.5)
    assert arguments.timestep_law == LogitNormalLaw(-1, 0.5)
    with pytest.raises(ValueError, match="timestep_sampling is 'bell': it must be one of uniform, logit_normal"):
        D3PMTrainingArguments(timestep_sampling="bell")
    with pytest.raises(ValueError, match="logit_std is 0.0: it must be above 0"):
        D3PMTrainingArguments(logit_std=0.0)
    with pytest.raises(ValueError, match="logit_mean is nan"):
        D3PMTrainingArguments(logit_mean=float("nan"))
