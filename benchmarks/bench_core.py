# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What the losses and the steps cost, as multiples of what nobody can avoid, beside the goals. `make bench` runs it.

    python benchmarks/bench_core.py                 # everything, about ten minutes on two cores
    python benchmarks/bench_core.py --only text8    # the cases whose name holds this
    python benchmarks/bench_core.py --cpu-time      # on a machine that is doing other work
    python benchmarks/bench_core.py --compile       # noise and loss inside `torch.compile` too

The floor of the loss is `F.cross_entropy`, forward and backward, on the same float32 logits; ours is `add_noise` and
`d3pm_loss` with its gradient. The floor of a step is `log_softmax` and a Gumbel-argmax. Floor, ours and the peers take
turns, and medians are compared: ratios hold where milliseconds do not. They do not hold on a machine that has other work,
where two threads wait for each other after every operation: `--cpu-time` counts the CPU time of a single thread instead.

Each table comes twice: with glibc's allocator as it is, where a large fresh buffer pays for its page faults, and with
one that keeps its memory, as that of a GPU does. The settings are read when a process starts, so that each is one.

The peers that diffusers does not bring along are optional:

    pip install --no-deps --target PEERS bionemo-moco jaxtyping wadler-lindig pot flow_matching
    PYTHONPATH=PEERS python benchmarks/bench_core.py
"""

import argparse
import math
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Callable

import torch
import torch.nn.functional as F
from peers import loss_peers, step_peers
from tqdm.auto import tqdm

from d3pm_hf import D3PMScheduler, create_text_model, create_unet, d3pm_loss


NUM_STEPS, STRIDE = 1000, 50
ROUNDS = 7
# One measurement repeats a call until it has lasted this long; what takes longer than SLOW gets two rounds.
MIN_SECONDS, SLOW = 0.02, 1.0
HYBRID_COEFF = 0.01

# What the clock is: seconds that have passed, or those that this thread has worked.
CLOCKS = {False: time.perf_counter, True: time.thread_time}
clock = CLOCKS[False]

KEEPING = "an allocator that keeps its memory"
ALLOCATORS = {
    "glibc's allocator": {},
    KEEPING: {
        "MALLOC_TOP_PAD_": str(1 << 30),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    },
}
# Goals where memory is kept, by family: the loss, and a step of stride 50. They are for K >= 256.
KEEPING_GOALS = {"absorbing": (0.75, 0.1), "uniform": (2.0, 0.2), "gaussian": (4.0, 0.6)}
# A draw from every row, and the peak memory of the loss beside the logits.
DRAW_GOAL, MEMORY_GOAL = 0.4, 1.3
# The loss and the noise of a batch of four images, as a share of forward and backward of the U-Net of the paper.
SHARE_GOAL = 0.04
# The set-up of nearest neighbors at K = 8192 may take so much more than the imports.
NEIGHBOR_MEMORY_GOAL = 2e9
# Their loss and their step, in seconds on two threads, and a training step, over the same with uniform noise.
NEIGHBOR_LOSS_GOAL, NEIGHBOR_STEP_GOAL, NEIGHBOR_TRAINING_GOAL = 0.2, 0.15, 1.5


@dataclass(frozen=True)
class Case:
    """A shape of the paper's experiments, a process, and the goals with glibc's allocator."""

    data: str
    family: str
    shape: tuple[int, ...]
    num_classes: int
    loss_goal: float | None = None
    step_goal: float | None = None
    config: dict = field(default_factory=dict)
    uses_unigram: bool = False
    embedding_size: int = 64

    @property
    def name(self) -> str:
        return f"{self.data} {self.family}, {'x'.join(map(str, self.shape))} x {self.num_classes}"

    def goals(self, allocator: str) -> tuple[float | None, float | None, float | None]:
        """Of the loss, of a step of stride 50, of a draw from every row."""
        if allocator != KEEPING:
            return self.loss_goal, self.step_goal, None
        loss, step = KEEPING_GOALS.get(self.family, (None, None))
        return (loss, step, DRAW_GOAL) if self.num_classes >= 256 else (None, None, None)

    def scheduler(self) -> D3PMScheduler:
        config = dict(self.config)
        if self.uses_unigram:
            config["unigram_probs"] = zipf(self.num_classes)
        if self.family == "nearest_neighbor":
            config["embeddings"] = torch.randn(self.num_classes, self.embedding_size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # some of the paper's schedules stop short of pure noise
            return D3PMScheduler(self.num_classes, NUM_STEPS, self.family, **config)


TEXT8, LM1B, GPT2, CIFAR = (32, 256), (8, 128), (4, 128), (16, 3, 32, 32)
GRAY = {"mask_token_id": 128, "mask_in_data": True, "beta_schedule": "reciprocal"}
CASES = [
    Case("text8", "absorbing", TEXT8, 28, 2.0, 0.4),
    Case("text8", "uniform", TEXT8, 27, 4.0, 0.7, uses_unigram=True),
    Case("text8", "nearest_neighbor", TEXT8, 27, uses_unigram=True),
    Case("text8", "absorbing_uniform", TEXT8, 28, config={"beta_schedule": "cosine"}),
    Case("LM1B", "absorbing", LM1B, 8192, 0.6, 0.1),
    Case("LM1B", "uniform", LM1B, 8192, 1.0, 0.1, uses_unigram=True),
    Case("LM1B", "absorbing_uniform", LM1B, 8192, config={"beta_schedule": "cosine"}),
    Case("GPT-2", "absorbing", GPT2, 50258, 0.6, 0.1),
    Case("GPT-2", "uniform", GPT2, 50258, 1.0, 0.1, uses_unigram=True),
    Case("CIFAR-10", "absorbing", CIFAR, 256, 0.6, 0.15, GRAY),
    Case("CIFAR-10", "uniform", CIFAR, 256, 1.0, 0.15, {"beta_schedule": "cosine"}),
    Case("CIFAR-10", "gaussian", CIFAR, 256, 2.5, 0.4, {"beta_schedule": "linear"}),
    Case("CIFAR-10", "band_diagonal", CIFAR, 256, config={"beta_schedule": "linear", "bandwidth": 8}),
]
GAUSSIAN = next(case for case in CASES if case.family == "gaussian")
NEIGHBORS = Case("LM1B", "nearest_neighbor", (2, 128), 8192, config={"num_neighbors": 25}, uses_unigram=True)
# Word pieces on a CPU: the network, the batch and the neighbors of the preset in examples/train_lm1b.py. Among random vectors of
# this size no state has many more neighbors than the others, as among embeddings of words.
PIECES = {
    "nearest_neighbor": Case(
        *("pieces", "nearest_neighbor", (8, 32), 8192),
        config={"num_neighbors": 5},
        uses_unigram=True,
        embedding_size=8,
    ),
    "uniform": Case("pieces", "uniform", (8, 32), 8192, config={"beta_schedule": "cosine"}),
}
# The network of the examples. The other one is that of the paper, which has 12 layers of width 768.
SMALL_NETWORK = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}


def zipf(num_classes: int) -> torch.Tensor:
    weights = 1 / torch.arange(1, num_classes + 1, dtype=torch.float64)
    return weights / weights.sum()


def interleave(calls: dict[str, Callable], rounds: int = ROUNDS) -> dict[str, float]:
    """The median seconds of each call; all take turns."""
    repeats, seconds = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()
        start = clock()
        call()
        once = clock() - start
        repeats[name] = max(1, math.ceil(MIN_SECONDS / once))
        seconds[name] += [once] if once > SLOW else []
    for _ in range(rounds):
        for name, call in calls.items():
            if seconds[name][:1] > [SLOW] and len(seconds[name]) >= 2:
                continue
            start = clock()
            for _ in range(repeats[name]):
                call()
            seconds[name].append((clock() - start) / repeats[name])
    return {name: statistics.median(times) for name, times in seconds.items()}


def cross_entropy(logits: torch.Tensor, x_0: torch.Tensor) -> None:
    """The floor of the loss."""
    logits.grad = None
    F.cross_entropy(logits.flatten(0, -2), x_0.flatten()).backward()


def noisy_loss(scheduler: D3PMScheduler, logits: torch.Tensor, x_0: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    x_t = scheduler.add_noise(x_0, t)
    return d3pm_loss(scheduler, logits, x_0, x_t, t, hybrid_coeff=HYBRID_COEFF).loss.mean()


def our_loss(
    scheduler: D3PMScheduler, logits: torch.Tensor, x_0: torch.Tensor, t: torch.Tensor, loss: Callable = noisy_loss
) -> None:
    logits.grad = None
    loss(scheduler, logits, x_0, t).backward()


def gumbel_argmax(logits: torch.Tensor) -> torch.Tensor:
    """The floor of a step."""
    return (logits.log_softmax(-1) - torch.log(-torch.log(torch.rand_like(logits)))).argmax(-1)


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, x_0 and timesteps."""
    logits = torch.randn(*case.shape, case.num_classes)
    x_0 = torch.randint(case.num_classes - 1, case.shape)
    return logits, x_0, torch.randint(NUM_STEPS, case.shape[:1])


def measure_loss(case: Case, compiled: bool) -> dict[str, float | str]:
    scheduler, (logits, x_0, t) = case.scheduler(), batch(case)
    logits.requires_grad_()
    peers = loss_peers(case.family, logits.flatten(1, -2).detach().requires_grad_(), x_0.flatten(1), t)
    calls = {
        "floor": lambda: cross_entropy(logits, x_0),
        "ours": lambda: our_loss(scheduler, logits, x_0, t),
        **{name: call for name, call in peers.items() if callable(call)},
    }
    if compiled:
        compiled_loss = torch.compile(noisy_loss)
        calls["compiled"] = lambda: our_loss(scheduler, logits, x_0, t, compiled_loss)
    return peers | interleave(calls)


@torch.no_grad()
def measure_steps(case: Case) -> dict[str, float | str]:
    """Steps from the middle (of one timestep and of fifty), the last one of twenty, and a single one from x_T."""
    scheduler, (logits, x_0, _) = case.scheduler(), batch(case)
    middle = scheduler.spaced_timesteps(NUM_STEPS // STRIDE)[NUM_STEPS // STRIDE // 2]
    steps = {
        "1": (middle, middle - 1),
        "50": (middle, middle - STRIDE),
        "last": (STRIDE - 1,),
        "x_T": (NUM_STEPS - 1,),
    }

    def call(timesteps):
        x_t = scheduler.add_noise(x_0, timesteps[0])

        def run():
            scheduler.set_timesteps(timesteps=timesteps)
            scheduler.step(logits, timesteps[0], x_t)

        return run

    flat_x_t = scheduler.add_noise(x_0, middle).flatten(1)
    if case.config.get("mask_in_data"):  # the peers have their mask at the end
        flat_x_t = torch.where(flat_x_t == scheduler.mask_token_id, case.num_classes - 1, flat_x_t)
    peers = step_peers(case.family, logits.flatten(1, -2), flat_x_t, middle)
    calls = {
        "floor": lambda: gumbel_argmax(logits),
        **{name: call(timesteps) for name, timesteps in steps.items()},
        **{name: peer for name, peer in peers.items() if callable(peer)},
    }
    return peers | interleave(calls)


def peak_bytes(run: Callable) -> int:
    """The most memory that a call holds at once, beyond what was there before.

    The profiler sees every request to torch's CPU allocator, those inside an operation included. The resident size of
    the process would also count what malloc keeps for itself.
    """
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peak_of_loss(case: Case) -> tuple[float, float]:
    """Of cross-entropy and of ours, in units of the logits."""
    scheduler, (logits, x_0, t) = case.scheduler(), batch(case)
    logits.requires_grad_()

    def fresh(run):  # the gradient of the call before is gone when the next one begins
        logits.grad = None
        run()
        logits.grad = None

    calls = (lambda: cross_entropy(logits, x_0)), (lambda: our_loss(scheduler, logits, x_0, t))
    return tuple(peak_bytes(lambda: fresh(call)) / (4 * logits.numel()) for call in calls)


def verdict(value: float, goal: float | None) -> str:
    return "" if goal is None else "ok" if value <= goal else "**MISS**"


def number(value: float) -> str:
    return f"{value:.3g}" if value < 10 else f"{value:.0f}"


def row(*cells) -> None:
    # tqdm's bar shares the terminal; the table itself goes to standard output.
    tqdm.write("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |", file=sys.stdout)
    sys.stdout.flush()


def table(title: str, *columns: str) -> None:
    tqdm.write(f"\n### {title}\n", file=sys.stdout)
    row(*columns)
    row(*["---"] * len(columns))


def peer_cells(result: dict, names: tuple[str, ...]) -> str:
    """Ratios of the peers that share the process; why not, of those that could not run."""
    known = {name: result[name] for name in names if result[name] != "other process"}
    shown = (f"{n} {v if isinstance(v, str) else number(v / result['floor'])}" for n, v in known.items())
    return ", ".join(shown)


def run_times(allocator: str, cases: list[Case], compiled: bool) -> None:
    bar = tqdm(total=2 * len(cases), desc=allocator, unit="case")
    table(
        f"Loss, forward and backward, over cross-entropy: {allocator}", "case", "floor ms", "ours", "goal", "", "peers"
    )
    for case in cases:
        result, goal = measure_loss(case, compiled), case.goals(allocator)[0]
        ratio = result["ours"] / result["floor"]
        peers = peer_cells(result, ("moco", "flow_matching", *(["compiled"] if compiled else [])))
        row(case.name, f"{1e3 * result['floor']:.1f}", number(ratio), goal, verdict(ratio, goal), peers)
        bar.update()
    table(
        f"Step, over log-softmax + Gumbel-argmax: {allocator}",
        *(
            "case",
            "floor ms",
            "1 step",
            f"{STRIDE} steps",
            "goal",
            "",
            "last of 20",
            "x_T to data",
            "goal",
            "",
            "peers",
        ),
    )
    for case in cases:
        result, (_, goal, draw_goal) = measure_steps(case), case.goals(allocator)
        ratios = {name: result[name] / result["floor"] for name in ("1", "50", "last", "x_T")}
        row(
            *(case.name, f"{1e3 * result['floor']:.1f}", number(ratios["1"])),
            *(number(ratios["50"]), goal, verdict(ratios["50"], goal)),
            *(number(ratios["last"]), number(ratios["x_T"]), draw_goal, verdict(ratios["x_T"], draw_goal)),
            peer_cells(result, ("moco", "VQDiffusion", "DiscreteDDIM", "Amused")),
        )
        bar.update()
    bar.close()


def run_memory(cases: list[Case]) -> None:
    table("Peak memory of the loss beside the logits, in their size", "case", "cross-entropy", "ours", "goal", "")
    for case in tqdm(cases, desc="memory", unit="case"):
        floor, ours = peak_of_loss(case)
        goal = MEMORY_GOAL if case.num_classes >= 256 else None  # a megabyte of logits is one piece, buffers and all
        row(case.name, f"{floor:.2f}", f"{ours:.2f}", goal, verdict(ours, goal))


def run_share(case: Case) -> None:
    """What a Gaussian process adds to the step of the network that it is trained with."""
    title = "Noise and loss, as a share of forward and backward of the U-Net: batch 4"
    table(title, "case", "U-Net ms", "ours ms", "share", "goal", "")
    x_0, t = torch.randint(case.num_classes, (4, *case.shape[1:])), torch.randint(NUM_STEPS, (4,))
    pixels = torch.randn(x_0.shape)
    for prediction_type in ("x0", "logistic"):
        unet = create_unet("paper", case.num_classes, x_0.shape[-1], x_0.shape[1], prediction_type)
        scheduler = replace(case, config={**case.config, "prediction_type": prediction_type}).scheduler()
        output = torch.randn(*x_0.shape, case.num_classes)
        if prediction_type == "logistic":  # as an untrained network: x_t, and the scale that zero stands for
            location = scheduler.add_noise(x_0, t) * 2 / (case.num_classes - 1) - 1
            output = torch.stack([location, torch.zeros_like(location)], -1)
        output.requires_grad_()
        calls = {
            "U-Net": lambda: unet(pixels, t, return_dict=False)[0].square().mean().backward(),
            "ours": lambda: our_loss(scheduler, output, x_0, t),
        }
        seconds = interleave(calls)
        share = seconds["ours"] / seconds["U-Net"]
        cells = f"{1e3 * seconds['U-Net']:.0f}", f"{1e3 * seconds['ours']:.0f}", f"{100 * share:.1f} %", "4 %"
        row(f"{case.data} {case.family}, {prediction_type}", *cells, verdict(share, SHARE_GOAL))


def run_neighbors(case: Case) -> None:
    """25 neighbors of each of 8192 tokens: nothing of the size K^2 may be kept for each t."""

    def peak_resident() -> float:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before, start = peak_resident(), clock()
    scheduler = case.scheduler()
    seconds, peak = clock() - start, peak_resident() - before
    table(case.name, "what", "", "goal", "")
    row("set-up", f"{seconds:.0f} s", None, "")
    memory = f"{peak / 1e9:.2f} GB", f"{NEIGHBOR_MEMORY_GOAL / 1e9:.0f} GB", verdict(peak, NEIGHBOR_MEMORY_GOAL)
    row("peak memory of the set-up beside the imports", *memory)
    logits, x_0, _ = batch(case)
    scheduler.set_timesteps(NUM_STEPS // STRIDE)
    middle = int(scheduler.timesteps[len(scheduler.timesteps) // 2])
    x_t = scheduler.add_noise(x_0, middle)
    loss = "loss, forward and backward, t = 300 and 700"
    step = f"step of stride {STRIDE} from the middle"
    times = interleave(
        {
            loss: lambda: our_loss(scheduler, logits.requires_grad_(), x_0, torch.tensor([300, 700])),
            step: lambda: scheduler.step(logits.detach(), middle, x_t),
        }
    )
    for name, goal in ((loss, NEIGHBOR_LOSS_GOAL), (step, NEIGHBOR_STEP_GOAL)):
        row(name, f"{times[name]:.2f} s", f"{goal} s", verdict(times[name], goal))
    for network, shape, goal in (("small", (8, 32), NEIGHBOR_TRAINING_GOAL), ("paper", (2, 128), None)):
        cases = {family: replace(piece, shape=shape) for family, piece in PIECES.items()}
        times = interleave({family: training_step(case, network) for family, case in cases.items()})
        ratio = times["nearest_neighbor"] / times["uniform"]
        name = f"training step of {shape[0]} x {shape[1]} pieces, {network} network, 5 neighbors, over uniform noise"
        row(name, f"{ratio:.2f}", goal, verdict(ratio, goal))


def training_step(case: Case, network: str) -> Callable:
    """Noise, a network, L_vb, gradients, clipping and AdamW, on other timesteps in each call."""
    sizes = SMALL_NETWORK if network == "small" else {}
    model = create_text_model("paper", case.num_classes, backbone="t5", **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler, (num_rows, _) = case.scheduler(), case.shape
    weights = zipf(case.num_classes).expand(num_rows, -1)

    def step():
        x_0 = torch.multinomial(weights, case.shape[1], replacement=True)
        t = ((torch.arange(num_rows) + torch.rand(num_rows)) * NUM_STEPS / num_rows).long()  # stratified
        x_t = scheduler.add_noise(x_0, t)
        logits = model(x_t, t, return_dict=False)[0]
        d3pm_loss(scheduler, logits, x_0, x_t, t).loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases whose name holds this")
    parser.add_argument("--part", choices=[*ALLOCATORS, "memory", "share", "neighbors"], help=argparse.SUPPRESS)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and the time that it worked")
    help = "measure noise and loss inside torch.compile too, among the peers; each case takes a minute to compile"
    parser.add_argument("--compile", action="store_true", help=help)
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.cpu_time]
    cases = [case for case in CASES if options.only in case.name]
    torch.set_num_threads(1 if options.cpu_time else 2)
    torch.manual_seed(0)
    if options.part in ALLOCATORS:
        run_times(options.part, cases, options.compile)
    elif options.part == "memory":
        run_memory(cases)
    elif options.part == "share":
        run_share(GAUSSIAN)
    elif options.part == "neighbors":
        run_neighbors(NEIGHBORS)
    else:
        load = os.getloadavg()[0]
        print(f"torch {torch.__version__}, threads: {torch.get_num_threads()}, load: {load:.1f}", flush=True)
        if load > 0.5 and not options.cpu_time:
            print("\n**The machine is busy: do not believe these ratios, or use --cpu-time.**", flush=True)
        parts = [*ALLOCATORS, "memory"] if cases else []
        parts += ["share"] if GAUSSIAN in cases else []
        parts += ["neighbors"] if options.only in NEIGHBORS.name else []
        for part in parts:
            command = [sys.executable, __file__, "--part", part, "--only", options.only]
            command += ["--cpu-time"] if options.cpu_time else []
            command += ["--compile"] if options.compile else []
            subprocess.run(command, env={**os.environ, **ALLOCATORS.get(part, {})}, check=True)


if __name__ == "__main__":
    main()
