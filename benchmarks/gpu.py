# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What only a GPU can show, as one table to paste into an issue. `make test-gpu` runs it.

    python benchmarks/gpu.py                        # everything, some minutes; without a GPU it says so and ends
    python benchmarks/gpu.py --only bfloat16        # the rows whose name holds this
    python benchmarks/gpu.py --device cpu --small   # the rows that a CPU can run, on small shapes

First the device is compared with the CPU: noise, loss and samples of the same random numbers, a compiled loss, training in
bfloat16, and two processes with NCCL beside one. Then come waits of the host, and time and memory on the shapes of
docs/source/en/speed.md. The exit status is 1 if a row fails.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import bench_core
import torch
from bench_core import (
    CASES,
    NUM_STEPS,
    STRIDE,
    Case,
    batch,
    cross_entropy,
    gumbel_argmax,
    number,
    our_loss,
    row,
    table,
)
from safetensors.torch import load_file

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model, d3pm_loss
from d3pm_hf.data import DataCollatorForD3PM
from d3pm_hf.samplers import ancestral
from d3pm_hf.training import D3PMTrainingArguments, read_log, train
from d3pm_hf.training.objective import diffusion_loss
from d3pm_hf.training.step_batches import IndexedExamples, RunCollator


B, N, K, T = 8, 16, 28, 50
FAMILIES = ("absorbing", "uniform", "gaussian")
CONFIGS = Path(__file__).parents[1] / "examples" / "accelerate_configs"

# What a row says: its result, what is expected, and whether they agree (`None`: there is nothing to compare with).
Result = tuple[str, str, bool | None]


def create(family: str, device: torch.device) -> tuple[D3PMScheduler, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A process, and logits, x_0 and timesteps that are the same on every device."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, N, K, generator=generator)
    x_0 = torch.randint(K - 1, (B, N), generator=generator)
    scheduler = D3PMScheduler(K, T, family, beta_schedule="cosine")
    return scheduler, logits.to(device), x_0.to(device), (torch.arange(B) * T // B).to(device)


def generators() -> list[torch.Generator]:
    """One per sample, on the CPU."""
    return [torch.Generator().manual_seed(seed) for seed in range(B)]


def compare_noise(family: str, device: torch.device) -> Result:
    noisy = []
    for place in (torch.device("cpu"), device):
        scheduler, _, x_0, t = create(family, place)
        noisy.append(scheduler.add_noise(x_0, t, generators()).cpu())
    differing = int((noisy[0] != noisy[1]).sum())
    return f"{differing} tokens differ", "none", differing == 0


def loss_and_gradient(
    family: str, device: torch.device, wrap: Callable = lambda function: function
) -> list[torch.Tensor]:
    """The loss of noise that the CPU has added, and its gradient. `wrap` may compile the function."""
    scheduler, logits, x_0, t = create(family, device)
    x_t = scheduler.add_noise(x_0.cpu(), t.cpu(), generators()).to(device)

    def compute(logits):
        return d3pm_loss(scheduler, logits, x_0, x_t, t, hybrid_coeff=0.01).loss.mean()

    loss = wrap(compute)(logits.requires_grad_())
    loss.backward()
    return [loss.detach().cpu(), logits.grad.cpu()]


def compare_losses(found: list[torch.Tensor], expected: list[torch.Tensor]) -> Result:
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
    return f"{difference:.1e} of the largest", "< 1e-4", difference < 1e-4


def compare_loss(family: str, device: torch.device) -> Result:
    return compare_losses(loss_and_gradient(family, device), loss_and_gradient(family, torch.device("cpu")))


def compare_compiled(family: str, device: torch.device, backend: str) -> Result:
    torch.compiler.reset()
    compiled = loss_and_gradient(family, device, partial(torch.compile, backend=backend))
    return compare_losses(compiled, loss_and_gradient(family, device))


@torch.no_grad()
def compare_samples(family: str, device: torch.device) -> Result:
    """Samples of fixed logits, drawn from generators on the CPU. Rounding may move single draws."""
    samples = []
    for place in (torch.device("cpu"), device):
        scheduler, logits, _, _ = create(family, place)
        x_T = scheduler.sample_prior((B, N), generators(), place)
        steps = scheduler.spaced_timesteps(10)
        samples.append(ancestral(scheduler, lambda x_t, t: logits, x_T, steps, generator=generators()).cpu())  # noqa: B023
    differing = float((samples[0] != samples[1]).float().mean())
    return f"{differing:.1%} of the tokens differ", "< 2 %", differing < 0.02


def count_waits(run: Callable) -> int:
    """How often the host waits for a GPU in a call, of which torch warns."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA" in str(warning.message) for warning in caught)


def training_waits(family: str, device: torch.device) -> Result:
    """Noise, loss and gradient of a batch in pinned memory, with logits in place of a network."""
    scheduler, logits, x_0, t = create(family, device)
    rows, collate = (
        IndexedExamples({(i, i): x_0[i].cpu() for i in range(B)}),
        RunCollator(DataCollatorForD3PM(), K, ()),
    )
    held = collate([rows[i, i, int(t[i])] for i in range(B)])
    held = {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in held.items()}
    logits.requires_grad_()

    def step():
        moved = {
            name: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
            for name, value in held.items()
        }
        diffusion_loss(scheduler, lambda x_t, timesteps: logits, moved, D3PMTrainingArguments())[0].backward()

    step()  # fills caches
    waits, expected = count_waits(step), int(family == "gaussian")  # a product of matrices may underflow
    return str(waits), str(expected), waits <= expected


@torch.no_grad()
def sampling_waits(family: str, device: torch.device) -> Result:
    """Waits of one step more: a call waits once, at its end."""
    scheduler, logits, _, _ = create(family, device)
    steps = scheduler.spaced_timesteps(10)

    def sample(num_steps: int) -> None:
        x_T = scheduler.sample_prior((B, N), device=device)
        ancestral(scheduler, lambda x_t, t: logits, x_T, steps[-num_steps:])

    sample(10)
    few, many = (count_waits(partial(sample, num_steps)) for num_steps in (5, 10))
    return f"{(many - few) / 5:g}", "0", many == few


def run_training(folder: Path, train_batch_size: int = B, **settings) -> D3PMTextPipeline:
    """A short run of a small text network on eight words."""
    torch.manual_seed(0)
    network = create_text_model("tiny", K, backbone="t5", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    pipeline = D3PMTextPipeline(network, D3PMScheduler(K, T), character_tokenizer(), sequence_length=N)
    rows = torch.randint(K - 1, (8, N), generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    arguments = D3PMTrainingArguments(
        output_dir=str(folder),
        max_train_steps=20,
        train_batch_size=train_batch_size,
        learning_rate=1e-3,
        lr_warmup_steps=1,
        logging_steps=20,
        validation_steps=0,
        num_samples=0,
        disable_tqdm=True,
        **{"mixed_precision": "no", **settings},
    )
    return train(arguments, pipeline, rows)


def compare_bfloat16(device: torch.device) -> Result:
    """The mean loss of 20 steps in bfloat16 beside that in float32; then samples of the network in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        losses = []
        for precision in ("no", "bf16"):
            pipeline = run_training(Path(folder, precision), mixed_precision=precision)
            losses.append(read_log(Path(folder, precision, "log.jsonl"))[-1]["loss"])
    pipeline.set_progress_bar_config(disable=True)
    tokens = pipeline.to(device, torch.bfloat16)(batch_size=B, num_inference_steps=5, output_type="latent").sequences
    ratio = losses[1] / losses[0]
    return f"{ratio:.4f} of the loss in float32", "0.98 - 1.02", abs(ratio - 1) < 0.02 and bool((tokens < K - 1).all())


def compare_processes(config: str, device: torch.device) -> Result:
    """The weights of a run on two processes beside those on one, with the same batches and noise."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one"), Path(folder, "two")
        run_training(one)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += ["--config_file", str(CONFIGS / config), "--num_processes", "2"]
        run = subprocess.run([*command, __file__, "--worker", str(two)], capture_output=True, text=True)
        if run.returncode:
            return (run.stderr.strip().splitlines() or ["no message"])[-1], "weights", False
        weights = [load_file(path / "text_model" / "model.safetensors") for path in (two, one)]
    difference = max(float((weights[0][name] - value).abs().max()) for name, value in weights[1].items())
    return f"weights differ by {difference:.1e}", "< 1e-4", difference < 1e-4


def cuda_peak(run: Callable) -> int:
    """The most memory that a call holds at once on the GPU, beyond what was there before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cuda_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(case: Case, device: torch.device) -> Result:
    """Time of loss and step over those of their floors, and the peak memory of the loss in units of the logits."""
    scheduler, (logits, x_0, t) = case.scheduler(), (value.to(device) for value in batch(case))
    middle = scheduler.spaced_timesteps(NUM_STEPS // STRIDE)[NUM_STEPS // STRIDE // 2]
    x_t, fixed = scheduler.add_noise(x_0, middle), logits.clone()
    logits.requires_grad_()

    def step():
        scheduler.set_timesteps(timesteps=(middle, middle - STRIDE))
        scheduler.step(fixed, middle, x_t)

    def loss():
        our_loss(scheduler, logits, x_0, t)
        logits.grad = None

    calls = {"cross-entropy": lambda: cross_entropy(logits, x_0), "loss": loss}
    calls |= {"draw": lambda: gumbel_argmax(fixed), "step": step}
    seconds = bench_core.interleave(calls)
    logits.grad = None
    memory = (cuda_peak if device.type == "cuda" else bench_core.peak_bytes)(loss) / (4 * logits.numel())
    ratios = number(seconds["loss"] / seconds["cross-entropy"]), number(seconds["step"] / seconds["draw"])
    milliseconds = f"{1e3 * seconds['loss']:.3g} ms and {1e3 * seconds['step']:.3g} ms"
    return f"loss {ratios[0]}, step {ratios[1]} ({milliseconds}), memory {memory:.2f}", "", None


def rows(device: torch.device, is_small: bool) -> Iterator[tuple[str, Callable[[], Result]]]:
    """The rows of the table that the machine can fill: their names, and what measures them."""
    has_gpu = device.type == "cuda"
    for family in FAMILIES:
        yield f"noise, {family}, beside the CPU", partial(compare_noise, family, device)
        yield f"loss and gradient, {family}, beside the CPU", partial(compare_loss, family, device)
        yield f"samples, {family}, beside the CPU", partial(compare_samples, family, device)
        if has_gpu:
            yield f"waits of a training step, {family}", partial(training_waits, family, device)
            yield f"waits of a sampling step, {family}", partial(sampling_waits, family, device)
    backend = "aot_eager" if is_small else "inductor"
    yield "compiled loss, absorbing, beside the same without", partial(compare_compiled, "absorbing", device, backend)
    yield "training and samples in bfloat16", partial(compare_bfloat16, device)
    if not has_gpu:
        yield "two processes, replicated (DDP), gloo", partial(compare_processes, "two_cpu_processes.yaml", device)
    elif torch.cuda.device_count() > 1:
        yield "two processes, replicated (DDP), NCCL", partial(compare_processes, "multi_gpu.yaml", device)
        yield "two processes, sharded (FSDP2), NCCL", partial(compare_processes, "fsdp.yaml", device)
    cases = [replace(case, shape=(2, 64)) for case in CASES if case.data == "text8"] if is_small else CASES
    for case in cases:
        yield case.name, partial(measure, case, device)


def describe(device: torch.device) -> str:
    name = "CPU"
    if device.type == "cuda":
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the rows whose name holds this")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="what is compared with the CPU")
    parser.add_argument("--small", action="store_true", help="small shapes, and no compiler behind torch.compile")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the folder of one of two processes
    options = parser.parse_args(arguments)
    if options.worker is not None:
        run_training(options.worker, B // 2)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Skipped: torch finds no GPU on this machine (--device cpu --small runs what a CPU can show).")
        return 0
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    else:
        bench_core.clock = cuda_clock
    device, num_failed = torch.device(options.device), 0
    table(describe(device), "what", "result", "expected", "")
    for name, run in rows(device, options.small):
        if options.only not in name:
            continue
        try:
            result, expected, is_right = run()
        except Exception as error:  # the other rows are worth having
            first = (str(error).splitlines() or [""])[0]
            result, expected, is_right = f"{type(error).__name__}: {first}", "", False
        num_failed += is_right is False
        row(name, result, expected, {True: "ok", False: "**FAIL**", None: ""}[is_right])
    print(f"\nFailed rows: {num_failed}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
