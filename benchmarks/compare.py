# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Compares the speed of two versions of the code, side by side in one run.

    git worktree add ../before main~10
    python benchmarks/compare.py ../before/src                    # against the code of this checkout
    python benchmarks/compare.py ../before/src --only text8       # the cases whose name contains this

Each version runs in a process of its own, in which `PYTHONPATH` decides which code is imported. The two take turns: a
measurement is a short round in each of them, one after the other, and the next round begins with the other one. All cases
are measured in several passes, each with new processes, because where a process has its memory changes its speed by some
percent. The table shows the median of the ratios new / old of all rounds and their interquartile range, and beside it the
ratio of the fastest rounds. The end lists the rows whose median exceeds 1.05.

What is counted is the CPU time of a single thread. On a machine that does other work, caches are still shared: measure two
copies of the same code first, to see how much the ratios scatter.

The cases are those of bench_core.py, the set-up of their schedulers, calls of pipelines with tiny networks, training steps of networks
as small as a laptop trains them, and training steps, samples and bounds of the networks of bench_networks.py. Only the interface that
all versions share is used.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path


MAX_RATIO = 1.05
# A round repeats a call until it has lasted this long; calls that take longer than SLOW get fewer rounds.
MIN_SECONDS, SLOW = 0.02, 1.0
PASSES, ROUNDS, SLOW_ROUNDS = 3, 7, 2


# The worker: one version of the code.


def case_calls(case) -> dict:
    """What is measured of a case of bench_core.py: functions without arguments, by name."""
    import bench_core
    import torch

    from d3pm_hf import d3pm_loss

    torch.manual_seed(0)
    scheduler, (logits, x_0, t) = case.scheduler(), bench_core.batch(case)
    if case == bench_core.NEIGHBORS:
        t = torch.tensor([300, 700])  # as in bench_core.py
    x_t = scheduler.add_noise(x_0, t)
    last = bench_core.NUM_STEPS - 1
    middle = bench_core.NUM_STEPS // 2 - 1
    from_middle, from_last = scheduler.add_noise(x_0, middle), scheduler.add_noise(x_0, last)
    trained = logits.clone().requires_grad_()

    def loss():
        trained.grad = None
        output = d3pm_loss(scheduler, trained, x_0, x_t, t, hybrid_coeff=bench_core.HYBRID_COEFF)
        output.loss.mean().backward()

    return {
        "set-up": case.scheduler,
        "add_noise": lambda: scheduler.add_noise(x_0, t),
        "loss, forward and backward": loss,
        f"step of stride {bench_core.STRIDE}": lambda: scheduler.step(
            logits, middle, from_middle, previous_timestep=middle - bench_core.STRIDE
        ),
        "draw from every row": lambda: scheduler.step(logits, last, from_last, previous_timestep=-1),
    }


def pipeline_calls(name: str) -> dict:
    """A whole call of a pipeline with a tiny network."""
    import torch

    from d3pm_hf import D3PMImagePipeline, D3PMScheduler, D3PMTextPipeline, create_text_model, create_unet

    torch.manual_seed(0)
    if name == "text pipeline":
        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), sequence_length=64)
    else:
        scheduler = D3PMScheduler(256, transition="gaussian", beta_schedule="linear")
        pipeline = D3PMImagePipeline(create_unet("tiny", 256, 8), scheduler)
    pipeline.set_progress_bar_config(disable=True)
    return {"call of 20 steps": lambda: pipeline(batch_size=2, num_inference_steps=20, output_type="latent")}


PIPELINES = ("text pipeline", "image pipeline")


def training_calls(name: str) -> dict:
    """A whole training step of a network as small as a laptop trains it, with the cross-entropy term."""
    import bench_networks
    import torch

    from d3pm_hf import D3PMScheduler, ImageDenoiser, TextDenoiser, create_text_model, create_unet, d3pm_loss

    torch.manual_seed(0)
    transition, num_classes, shape = TRAININGS[name]
    if len(shape) == 2:
        network = create_text_model("tiny", num_classes, **bench_networks.WIDTH_128)
        denoiser = TextDenoiser(network, num_classes)
    else:
        denoiser = ImageDenoiser(create_unet("tiny", num_classes, shape[-1], shape[1]), num_classes)
    is_gray = transition == "absorbing" and len(shape) > 2  # the mask is a data state
    config = {"mask_token_id": num_classes // 2, "mask_in_data": True} if is_gray else {}
    schedule = "reciprocal" if transition == "absorbing" else "linear"
    scheduler = D3PMScheduler(num_classes, transition=transition, beta_schedule=schedule, **config)
    optimizer = torch.optim.AdamW(denoiser.parameters(), fused=True)
    x_0 = torch.randint(0, num_classes - 1, shape)
    t = torch.linspace(0, len(scheduler) - 1, len(x_0)).long()

    def train():
        x_t = scheduler.add_noise(x_0, t)
        d3pm_loss(scheduler, denoiser(x_t, t), x_0, x_t, t, hybrid_coeff=0.01).loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"training step": train}


# Transition, number of states, and shape of a batch.
TRAININGS = {
    "training text8 absorbing": ("absorbing", 28, (16, 64)),
    "training text8 uniform": ("uniform", 27, (16, 64)),
    "training CIFAR-10 absorbing": ("absorbing", 256, (4, 3, 32, 32)),
    "training CIFAR-10 gaussian": ("gaussian", 256, (4, 3, 32, 32)),
}


def work() -> None:
    """Answers the requests on standard input, one JSON line each, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints does not mix with the answers
    import warnings

    import bench_core
    import bench_networks
    import torch

    import d3pm_hf

    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    clock = bench_core.CLOCKS[True]
    cases = {case.name: case for case in [*bench_core.CASES, bench_core.NEIGHBORS]}
    networks = {f"network {name}": name for name in bench_networks.NETWORKS}
    calls = {}

    def prepare(name: str) -> dict:
        if name in PIPELINES:
            return pipeline_calls(name)
        if name in TRAININGS:
            return training_calls(name)
        return bench_networks.network_calls(networks[name]) if name in networks else case_calls(cases[name])

    def answer(request: dict):
        if request["do"] == "describe":
            return {
                "source": str(Path(d3pm_hf.__file__).parents[1]),
                "cases": [*cases, *PIPELINES, *TRAININGS, *networks],
            }
        if request["do"] == "prepare":
            calls.clear()
            calls.update(prepare(request["case"]))
            return list(calls)
        call = calls[request["call"]]
        start = clock()
        for _ in range(request["repeats"]):
            call()
        return (clock() - start) / request["repeats"]

    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


# The comparison.


class Version:
    """A worker process that runs the code under `source`."""

    def __init__(self, source: Path, environment: dict[str, str]):
        environment = {**os.environ, **environment, "PYTHONPATH": str(source)}
        environment |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        command = [sys.executable, __file__, "--worker"]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        imported = self.ask(do="describe")["source"]
        if Path(imported) != source:
            raise ValueError(f"{source} was to be measured, and {imported} is imported: pass the folder of d3pm_hf")

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended while it was asked for {request}: its error stands above")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(versions: list[Version], call: str, rounds: int) -> list[tuple[float, float]]:
    """The seconds that a call takes in the old and in the new version, for each round."""
    for version in versions:
        version.ask(do="time", call=call, repeats=1)  # the first call fills caches
    once = min(version.ask(do="time", call=call, repeats=1) for version in versions)
    repeats = max(1, math.ceil(MIN_SECONDS / max(once, 1e-6)))
    if once > SLOW:
        rounds = min(rounds, SLOW_ROUNDS)
    seconds = []
    for i in range(rounds):
        order = versions if i % 2 == 0 else versions[::-1]
        times = {version: version.ask(do="time", call=call, repeats=repeats) for version in order}
        seconds.append(tuple(times[version] for version in versions))
    return seconds


def measure_all(sources: list[Path], environment: dict[str, str], only: str, rounds: int) -> dict:
    """The seconds of all rounds by case and call, from one pair of processes."""
    versions = [Version(source, environment) for source in sources]
    seconds, cases = {}, versions[0].ask(do="describe")["cases"]
    chosen = [case for case in cases if only in case]
    if not chosen:
        raise ValueError(f"--only is {only!r}: it must be part of the name of a case, which are {'; '.join(cases)}")
    for case in chosen:
        names, _ = [version.ask(do="prepare", case=case) for version in versions]
        seconds |= {(case, name): measure(versions, name, rounds) for name in names}
        print(f"measured {case}", file=sys.stderr, flush=True)
    for version in versions:
        version.close()
    return seconds


def report(seconds: dict) -> None:
    """Prints a row for each case and call, and then those that have become slower."""
    slower = []
    print("\n| case | what | old ms | new / old | interquartile range | fastest | |\n|---|---|---|---|---|---|---|")
    for (case, name), rounds in seconds.items():
        olds, news = zip(*rounds)
        low, ratio, high = statistics.quantiles([new / old for old, new in rounds], n=4, method="inclusive")
        cells = [case, name, f"{1e3 * statistics.median(olds):.3g}", f"{ratio:.3f}", f"{low:.3f} - {high:.3f}"]
        cells += [f"{min(news) / min(olds):.3f}", "**slower**" if ratio > MAX_RATIO else ""]
        print("| " + " | ".join(cells) + " |")
        slower += [f"- {case}, {name}: {ratio:.3f}"] if ratio > MAX_RATIO else []
    print("\n".join(["", f"Rows above {MAX_RATIO}:", *slower]) if slower else f"\nNo row exceeds {MAX_RATIO}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="Folder that contains the old d3pm_hf, such as `../before/src`.")
    default = Path(__file__).parents[1] / "src"
    parser.add_argument("new", type=Path, nargs="?", default=default, help="The same for the new one; this checkout.")
    parser.add_argument("--only", default="", help="Measure the cases whose name contains this.")
    parser.add_argument("--passes", type=int, default=PASSES, help="Number of pairs of processes.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="Number of rounds for each row and pass.")
    keep = "Use an allocator that keeps its memory, as in the second tables of bench_core.py."
    parser.add_argument("--keep-memory", action="store_true", help=keep)
    options = parser.parse_args()
    environment = {}
    if options.keep_memory:
        from bench_core import ALLOCATORS, KEEPING

        environment = ALLOCATORS[KEEPING]
    sources = [options.old.resolve(), options.new.resolve()]
    print(f"old: {sources[0]}\nnew: {sources[1]}", flush=True)
    passes = [measure_all(sources, environment, options.only, options.rounds) for _ in range(options.passes)]
    report({row: [one for seconds in passes for one in seconds[row]] for row in passes[0]})


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--worker"] else main()
