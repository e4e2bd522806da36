# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Compares the numbers of every family with those that an earlier version recorded: no redesign may change them.

The recorded losses, gradients, posteriors, draws and bounds are in fixtures/numbers.safetensors, whose metadata names the
commit of the code that computed them. Rewrite the file only together with a change that is meant to change numbers:

    python tests/test_numbers.py --write

To record the numbers of another commit, copy this file into `tests/` of a checkout of that commit and run it there with
`PYTHONPATH=src`. Only the public interface is used, so that the same file runs on both. Every input is a closed formula.
"""

import argparse
import subprocess
import sys
import warnings
from pathlib import Path

import families
import pytest
import reference as ref
import torch
from diffusers import UNet2DModel
from safetensors import safe_open
from safetensors.torch import save_file

import d3pm_hf
from d3pm_hf import (
    D3PMImagePipeline,
    D3PMTextConfig,
    D3PMTextModel,
    D3PMTextPipeline,
    autoregressive_loss,
    d3pm_loss,
    evaluate_bound,
    prior_loss,
)
from d3pm_hf.schedules import cosine_betas, linear_betas, reciprocal_betas


FIXTURE = Path(__file__).parent / "fixtures" / "numbers.safetensors"
TOLERANCE = 1e-10
# A float32 product may round differently on another CPU, and then a uniform that lies in between flips its draw.
MAX_FLIPPED_DRAWS = 1

NUM_CLASSES = 5
# The first timestep, the last one, steps that skip others, and a long step to the data.
TIMESTEPS, PREVIOUS = torch.tensor([0, 5, 3, 4, 2]), torch.tensor([-1, 4, 0, 1, -1])
STEPS = ((5, 4), (4, 1), (3, -1), (0, -1))

# The readings of the network's output: arguments of the scheduler, the schedule, and arguments of the loss.
READINGS = {
    "leave_one_out": ({}, "plain", {}),
    "denoising": ({"x0_posterior": "denoising"}, "plain", {}),
    "raw": ({"reconstruction": "raw"}, "plain", {}),
    "denoising_raw": ({"x0_posterior": "denoising", "reconstruction": "raw"}, "plain", {}),
    "logistic": ({"prediction_type": "logistic"}, "plain", {}),
    "previous": ({"prediction_type": "previous"}, "plain", {}),
    "auxiliary": ({}, "plain", {"auxiliary": "denoising"}),
    "forgetting": ({}, "middle", {}),
}
SCHEDULES = ("linear", "cosine", "reciprocal", "mutual_information")
SCHEDULED = [name for name in families.NAMES if name not in ("matrix", "absorbing_in_data", *families.BY_POSITION)]


def waves(*shape, scale=2.0):
    """Real numbers without a pattern, float64."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return scale * torch.sin(1.3 * index + 0.01 * index**2).reshape(shape)


def spread(*shape):
    """Numbers that fill [0, 1) evenly, float64: the fractional parts of the multiples of the golden ratio."""
    index = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64)
    return (index * (5**0.5 - 1) / 2).frac().reshape(shape)


def data(family, *shape):
    """States that data can show."""
    states = torch.tensor([k for k in range(family.num_classes) if k != family.mask])
    return states[(spread(*shape) * len(states)).long()]


def corrupt(family, x_0, n):
    """x_n that the process can reach from x_0 after n steps (one per sample), by the dense reference."""
    cumulative = torch.stack([ref.marginal(family.matrices, x[None], 0, int(m))[0] for x, m in zip(x_0, n)]).cumsum(-1)
    u = spread(3, *x_0.shape)[2]
    return (cumulative <= u[..., None] * cumulative[..., -1:]).sum(-1)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def length_of(family):
    return families.NUM_STEPS if family.name == "autoregressive" else 2


def output_classes(scheduler):
    return 2 if scheduler.config.prediction_type == "logistic" else NUM_CLASSES


def reading_numbers(family, scheduler, loss_arguments):
    """Losses, gradients, posteriors and draws of one process under one reading of the network's output."""
    length = length_of(family)
    s = TIMESTEPS - 1 if scheduler.config.prediction_type == "previous" else PREVIOUS
    x_0 = data(family, len(TIMESTEPS), length)
    x_t = corrupt(family, x_0, TIMESTEPS + 1)
    output = waves(*x_t.shape, output_classes(scheduler)).requires_grad_()
    predicts_x_0 = scheduler.config.prediction_type != "previous"
    if predicts_x_0:
        loss_arguments = {"hybrid_coeff": 0.1, **loss_arguments}
    loss = d3pm_loss(scheduler, output, x_0, x_t, TIMESTEPS, previous_timesteps=s, **loss_arguments)
    (gradient,) = torch.autograd.grad((loss.loss * waves(*x_0.shape)).sum(), output)
    terms = (loss.loss, loss.vb, loss.cross_entropy) if predicts_x_0 else (loss.loss, loss.vb)
    with torch.no_grad():
        posterior = scheduler.posterior_logits(output, TIMESTEPS, x_t, s)
    result = {"losses": torch.stack(terms).detach(), "gradient": gradient, "posterior": posterior}

    draws = []
    for seed, (t, previous) in enumerate(STEPS):
        previous = previous if predicts_x_0 else t - 1
        x_0 = data(family, 16, length)
        x_t = corrupt(family, x_0, [t + 1] * len(x_0))
        output = waves(*x_t.shape, output_classes(scheduler))
        warped = {"temperature": 0.8, "top_k": 4, "top_p": 0.9} if t == 4 else {}
        step = scheduler.step(output, t, x_t, previous_timestep=previous, generator=seeded(seed), **warped)
        draws.append(step.prev_sample)
        if predicts_x_0:
            draws.append(scheduler.predict_original_sample(output, t, x_t))
    return result | {"steps": torch.stack(draws)}


def model(scheduler):
    """A network that is a formula of the states, their neighbors and the timesteps."""

    def predict(x_t, timesteps):
        k = torch.arange(output_classes(scheduler), dtype=torch.float64)
        around = x_t.double() + 0.3 * x_t.roll(1, -1)  # [B, N]
        return 2 * torch.sin(1.7 * around[..., None] + 2.3 * k + 0.4 * timesteps.double()[:, None, None])

    return predict


def bound_numbers(family, scheduler, **arguments):
    """The parts of the bound on a small data set in two batches, the second one with padding."""
    x_0 = data(family, 6, length_of(family))
    mask = torch.ones(2, length_of(family), dtype=torch.bool)
    mask[1, -1] = False
    batches = [x_0[:4], {"x_0": x_0[4:], "loss_mask": mask}]
    bound = evaluate_bound(scheduler, model(scheduler), batches, seed=3, progress_bar=False, **arguments)
    parts = [bound.prior, bound.diffusion, bound.reconstruction, bound.total, bound.standard_error, bound.skewness]
    return torch.cat([torch.tensor(parts, dtype=torch.float64), bound.per_timestep.double()])


def fixed_weights(network):
    """Replaces every weight by a formula."""
    with torch.no_grad():
        for i, (_, weight) in enumerate(sorted(network.named_parameters())):
            values = torch.arange(weight.numel(), dtype=torch.float64)
            weight.copy_(0.5 * torch.sin(1.1 * values + 0.01 * values**2 + i).reshape(weight.shape))
    return network.eval()


def text_draws(scheduler):
    """Samples of a text pipeline: all timesteps, three of them, and gaps filled in by competing particles."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = D3PMTextConfig(vocab_size=NUM_CLASSES, max_position_embeddings=8, **sizes)
    pipeline = D3PMTextPipeline(fixed_weights(D3PMTextModel(config)), scheduler, sequence_length=families.NUM_STEPS)
    pipeline.set_progress_bar_config(disable=True)
    prompt = torch.tensor([[0, 2, 3, 4, 0, 2]])
    calls = (
        {"batch_size": 4},
        {"batch_size": 4, "num_inference_steps": 3, "temperature": 0.7},
        {"batch_size": 4, "input_ids": prompt, "mask": prompt == 2, "num_particles": 3},
    )
    calls[2]["sampler_kwargs"] = {"known_path": "clamped"}
    for call in calls[:2]:
        call["sampler"] = "ancestral"
    return torch.stack([pipeline(**call, generator=seeded(7), output_type="latent").sequences for call in calls])


def image_draws(scheduler):
    """Samples of an image pipeline: three timesteps, and an image painted in."""
    unet = UNet2DModel(
        sample_size=4,
        in_channels=1,
        out_channels=NUM_CLASSES,
        block_out_channels=(4, 4),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=2,
        attention_head_dim=4,
    )
    pipeline = D3PMImagePipeline(fixed_weights(unet), scheduler)
    pipeline.set_progress_bar_config(disable=True)
    image, paint = torch.tensor([0, 2, 3, 4] * 4).reshape(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    paint[..., 2:] = 1
    calls = ({"num_inference_steps": 3}, {"image": image, "mask_image": paint})
    return torch.stack(
        [
            pipeline(batch_size=2, **call, sampler="ancestral", generator=seeded(8), output_type="latent").images
            for call in calls
        ]
    )


def schedule_numbers(name):
    """Qbar_n after one, half and all of 20 steps of each schedule, `[4, 3, K, K]`."""
    family = families.build(name)
    unigram = spread(NUM_CLASSES).square()
    if family.mask is not None:
        unigram[family.mask] = 0
    result = []
    for schedule in SCHEDULES:
        arguments = {"beta_schedule": schedule, "unigram_probs": unigram, "trained_betas": None}
        if name == "band_diagonal" and schedule == "linear":
            arguments |= {"beta_start": 0.1, "beta_end": 0.5}
        scheduler = family.scheduler(num_train_timesteps=20, **arguments)
        result.append(torch.stack([scheduler.transition.matrix(0, n) for n in (1, 10, 20)]))
    return torch.stack(result)


def family_numbers(name):
    """All numbers of one family, by name."""
    family = families.build(name)
    result = {}
    for reading, (arguments, betas, loss_arguments) in READINGS.items():
        scheduler = families.build(name, betas=betas).scheduler(**arguments)
        for key, value in reading_numbers(families.build(name, betas=betas), scheduler, loss_arguments).items():
            result[f"{name}/{reading}/{key}"] = value
    scheduler, length = family.scheduler(), length_of(family)
    x_0 = data(family, 16, length)
    t = torch.arange(len(x_0)) % families.NUM_STEPS
    generators = [seeded(i) for i in range(len(x_0))]
    noise = [scheduler.add_noise(x_0, t, seeded(1)), scheduler.add_noise(x_0, 3, generators)]
    shown = [scheduler.reveal(x_0, timestep) for timestep in (-1, 2, 5)]
    result[f"{name}/noise"] = torch.stack([*noise, scheduler.sample_prior((16, length), seeded(2)), *shown])
    result[f"{name}/prior"] = prior_loss(scheduler, x_0[:4]).double()
    result[f"{name}/text"] = text_draws(scheduler)
    if name == "autoregressive":
        result[f"{name}/one_pass"] = autoregressive_loss(scheduler, waves(16, length, NUM_CLASSES), x_0)
    else:
        result[f"{name}/image"] = image_draws(scheduler)
        fitted = family.scheduler(prior="fitted", unigram_probs=data(family, 50).bincount(minlength=NUM_CLASSES))
        result[f"{name}/fitted_prior"] = prior_loss(fitted, x_0[:4]).double()
        result[f"{name}/fitted_noise"] = fitted.sample_prior((16, length), seeded(2))
    family = families.build(name, betas="end")  # ends in the prior: otherwise the bound of a mask is infinite
    scheduler = family.scheduler()
    result[f"{name}/bound"] = bound_numbers(family, scheduler)
    result[f"{name}/bound_three_steps"] = bound_numbers(family, scheduler, num_inference_steps=3)
    result[f"{name}/bound_three_terms"] = bound_numbers(family, scheduler, num_evaluated_timesteps=3)
    result[f"{name}/bound_previous"] = bound_numbers(family, family.scheduler(prediction_type="previous"))
    if name in SCHEDULED:
        result[f"{name}/schedules"] = schedule_numbers(name)
    return result


def common_numbers():
    """The schedules in closed form, which do not depend on a family."""
    return {
        "betas/linear": linear_betas(20, 0.02, 1.0),
        "betas/cosine": cosine_betas(20),
        "betas/reciprocal": reciprocal_betas(20),
    }


def compute(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # six steps do not always reach the prior
        values = common_numbers() if name == "betas" else family_numbers(name)
    return {key: v if v.is_floating_point() else v.to(torch.uint8) for key, v in values.items()}


def recorded_names():
    """The families that the fixture has numbers of: one that has been added since needs none."""
    if not FIXTURE.exists():
        return ["betas"]  # the test says that the file is missing
    with safe_open(FIXTURE, framework="pt") as file:
        return sorted({key.split("/")[0] for key in file.keys()})


@pytest.mark.parametrize("name", recorded_names())
def test_numbers_are_those_that_were_recorded(name):
    with safe_open(FIXTURE, framework="pt") as file:
        recorded = {key: file.get_tensor(key) for key in file.keys() if key.split("/")[0] == name}
    computed = compute(name)
    assert computed.keys() == recorded.keys()
    for key, expected in recorded.items():
        got = computed[key]
        if expected.is_floating_point():
            close = {"rtol": TOLERANCE, "atol": TOLERANCE, "equal_nan": True}
            torch.testing.assert_close(got, expected, **close, msg=lambda text, key=key: f"{key}: {text}")
        else:
            assert got.shape == expected.shape, key
            assert (got != expected).sum() <= MAX_FLIPPED_DRAWS, f"{key}: {got.tolist()} is not {expected.tolist()}"


def test_a_number_that_changes_is_noticed(monkeypatch):
    """The comparison is no formality: a draw from another seed, or a gradient off by 1e-9, fails it."""
    original = compute("absorbing")
    changes = {
        "absorbing/leave_one_out/gradient": lambda value: value + 1e-9,
        "absorbing/noise": lambda value: value.roll(1, -1),
    }
    for key, change in changes.items():
        changed = original | {key: change(original[key])}
        monkeypatch.setattr(sys.modules[__name__], "compute", lambda name, changed=changed: changed)
        with pytest.raises(AssertionError, match=key):
            test_numbers_are_those_that_were_recorded("absorbing")


def write(path):
    values = {}
    for name in ["betas", *(name for name in families.NAMES if name != "blockwise")]:  # the families of the package
        values |= compute(name)
    source = Path(d3pm_hf.__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=True
    ).stdout
    tensors = {key: value.contiguous() for key, value in values.items()}
    save_file(tensors, path, metadata={"commit": commit.strip(), "torch": torch.__version__})
    print(f"{len(tensors)} tensors, {path.stat().st_size / 1e3:.0f} kB, of commit {commit.strip()}: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", required=True, help="Record the numbers of the present code.")
    parser.add_argument("path", type=Path, nargs="?", default=FIXTURE, help="File to write.")
    torch.set_num_threads(1)
    write(parser.parse_args().path)
