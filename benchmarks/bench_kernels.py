# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training steps, sampling calls and set-ups with each kernel and without it. `make bench` runs it.

    python benchmarks/bench_kernels.py                # about ten minutes on one core
    python benchmarks/bench_kernels.py --only loss    # the rows whose name holds this

A kernel stays if it takes at least 5 % off one of these rows. Without it, the definition is computed in its place, and all other
kernels stay on. Both take turns in one process, on one thread, and what is counted is the CPU time of that thread: the median of all
rounds. Networks are as small as a laptop trains them; the larger the network, the less a kernel weighs.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from unittest import mock

import torch

from d3pm_hf import D3PMScheduler, TextDenoiser, create_text_model, create_unet, d3pm_loss
from d3pm_hf.kernels import dense_tables, rank_one_steps, sparse_series
from d3pm_hf.models import ImageDenoiser
from d3pm_hf.numerics import log_matmul
from d3pm_hf.samplers import ancestral
from d3pm_hf.transitions import Transition


ROUNDS = 5
TEXT = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}


def text(num_classes: int, num_steps: int = 1000, **config) -> tuple[D3PMScheduler, Callable]:
    """A process over tokens, and a network of width 128 with three layers."""
    network = create_text_model("tiny", num_classes, max_position_embeddings=128, **TEXT)
    return D3PMScheduler(num_classes, num_steps, **config), TextDenoiser(network, num_classes)


def image(**config) -> tuple[D3PMScheduler, Callable]:
    """A process over the 256 levels of pixels, and a tiny U-Net for images of 32 x 32."""
    scheduler = D3PMScheduler(256, 1000, beta_schedule="linear", **config)
    network = create_unet("tiny", 256, 32, prediction_type=scheduler.config.prediction_type)
    return scheduler, ImageDenoiser(network, 256, prediction_type=scheduler.config.prediction_type)


def training_step(scheduler: D3PMScheduler, denoiser, shape: tuple[int, ...]) -> Callable[[], None]:
    """Noise, network, loss, and the gradient of all weights."""
    x_0 = torch.randint(0, scheduler.config.num_classes - 1, shape)
    t = torch.randint(0, len(scheduler), shape[:1])

    def step():
        x_t = scheduler.add_noise(x_0, t)
        d3pm_loss(scheduler, denoiser(x_t, t), x_0, x_t, t, hybrid_coeff=0.01).loss.mean().backward()

    return step


def sampling_call(scheduler: D3PMScheduler, denoiser, shape: tuple[int, ...]) -> Callable[[], None]:
    """Twenty steps of ancestral sampling."""
    x_T, timesteps = scheduler.sample_prior(shape), scheduler.sampling_timesteps(20)
    return lambda: ancestral(scheduler, denoiser, x_T, timesteps, generator=torch.Generator().manual_seed(0))


def set_up(**config) -> Callable[[], None]:
    """A scheduler, with the tables that its first loss needs."""

    def create():
        scheduler = D3PMScheduler(**config)
        scheduler.transition.log_marginal(torch.zeros(1, 1, dtype=torch.long), 0, 1)

    return create


def neighbors() -> tuple[D3PMScheduler, Callable]:
    """Nearest neighbors among 4096 tokens: R stays sparse."""
    vectors = torch.randn(4096, 16, generator=torch.Generator().manual_seed(0))
    return text(4096, transition="nearest_neighbor", embeddings=vectors, beta_schedule="cosine")


UNIFORM = {"transition": "uniform", "beta_schedule": "cosine"}
GAUSSIAN = {"num_classes": 256, "num_train_timesteps": 1000, "transition": "gaussian", "beta_schedule": "linear"}
MATRIX = torch.rand(48, 48, generator=torch.Generator().manual_seed(0)) + 20 * torch.eye(48)
OWN = {"num_classes": 48, "num_train_timesteps": 100, "transition": "matrix"}
OWN["transition_matrices"] = MATRIX / MATRIX.sum(-1, keepdim=True)


def rows() -> dict[str, tuple[Callable, tuple]]:
    """Each row: what is run, and the class, the name and the value that switch its kernel off."""
    absorbing, one = rank_one_steps.AbsorbingKernel, rank_one_steps.RankOneKernel
    dense, sparse = dense_tables.DenseKernel, sparse_series.SparseRateKernel
    steps, draws = Transition.sample_previous, Transition.sample
    return {
        "loss, absorbing, K = 28, 16 x 64": (
            lambda: training_step(*text(28), (16, 64)),
            (absorbing, "fused_loss", None),
        ),
        "loss, absorbing, K = 8192, 8 x 64": (
            lambda: training_step(*text(8192), (8, 64)),
            (absorbing, "fused_loss", None),
        ),
        "loss, uniform, K = 28, 16 x 64": (
            lambda: training_step(*text(28, **UNIFORM), (16, 64)),
            (one, "fused_loss", None),
        ),
        "loss, uniform, K = 8192, 8 x 64": (
            lambda: training_step(*text(8192, **UNIFORM), (8, 64)),
            (one, "fused_loss", None),
        ),
        "loss, Gaussian, K = 256, 2 x 3 x 32 x 32": (
            lambda: training_step(*image(transition="gaussian"), (2, 3, 32, 32)),
            (dense, "fused_loss", None),
        ),
        "low rank, Gaussian, K = 256, 2 x 3 x 32 x 32": (
            lambda: training_step(*image(transition="gaussian"), (2, 3, 32, 32)),
            (dense, "factors", lambda *_: None),
        ),
        "low rank, Gaussian with logistic, K = 256, 2 x 3 x 32 x 32": (
            lambda: training_step(*image(transition="gaussian", prediction_type="logistic"), (2, 3, 32, 32)),
            (dense, "factors", lambda *_: None),
        ),
        "noise, uniform, K = 8192, 8 x 64": (
            lambda: training_step(*text(8192, **UNIFORM), (8, 64)),
            (one, "sample", draws),
        ),
        "noise, Gaussian, K = 256, 2 x 3 x 32 x 32": (
            lambda: training_step(*image(transition="gaussian"), (2, 3, 32, 32)),
            (dense, "sample", draws),
        ),
        "steps, uniform, K = 8192, 4 x 64": (
            lambda: sampling_call(*text(8192, **UNIFORM), (4, 64)),
            (one, "sample_previous", rank_one_steps.RankOneTransition.sample_previous),
        ),
        "steps, absorbing, K = 28, 16 x 64": (
            lambda: sampling_call(*text(28), (16, 64)),
            (one, "sample_previous", rank_one_steps.RankOneTransition.sample_previous),
        ),
        "steps, Gaussian, K = 256, 2 x 3 x 32 x 32": (
            lambda: sampling_call(*image(transition="gaussian"), (2, 3, 32, 32)),
            (dense, "sample_previous", steps),
        ),
        "Chebyshev series, neighbors, K = 4096, 2 x 64": (
            lambda: training_step(*neighbors(), (2, 64)),
            (sparse, "_short_series", lambda *_: None),
        ),
        "factors of late tables, Gaussian, K = 256": (
            lambda: set_up(**GAUSSIAN),
            (dense_tables.ToeplitzKernel, "is_doubly_stochastic", False),
        ),
        "half of symmetric matrices, Gaussian, K = 256": (
            lambda: set_up(**GAUSSIAN),
            (dense_tables.ToeplitzKernel, "is_centrosymmetric", False),
        ),
        "products by scaled matrices, own Q, K = 48, T = 100": (
            lambda: set_up(**OWN),
            (dense_tables, "log_matmul", log_matmul),
        ),
    }


def measure(call: Callable[[], None], switch: tuple) -> tuple[float, float]:
    """CPU seconds of a call with the kernel and without it, medians of rounds that take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for n in range(ROUNDS + 1):
        for is_off, part in enumerate(times):
            with mock.patch.object(*switch) if is_off else mock.patch.object(*switch[:2], getattr(*switch[:2])):
                start = time.thread_time()
                call()
                part.append(time.thread_time() - start)
        if n and sum(map(sum, times)) > 60:  # seconds are enough for a row
            break
    with_kernel, without = (statistics.median(part[1:] if len(part) > 2 else part) for part in times)
    return with_kernel, without


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the rows whose name holds this")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| kernel and size | with it, ms | without, ms | with / without |\n| --- | --- | --- | --- |")
    for name, (create, switch) in rows().items():
        if only in name:
            torch.manual_seed(0)
            fast, slow = measure(create(), switch)
            print(f"| {name} | {1e3 * fast:.3g} | {1e3 * slow:.3g} | {fast / slow:.2f} |", flush=True)


if __name__ == "__main__":
    main()
