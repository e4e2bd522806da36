# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training steps, samples and bounds of whole networks, which compute logits only where they count. `make bench` runs it.

    python benchmarks/bench_networks.py                   # about ten minutes on one core
    python benchmarks/bench_networks.py --only pieces     # the rows whose name holds this
    python benchmarks/bench_networks.py --only "output layer"
    python benchmarks/bench_networks.py --only memory

Three ways take turns in one process, on one thread, and the CPU time of that thread is counted, the median of all rounds:

- some: this library as it is;
- all: this library, with a network that is asked for all logits;
- peers: all logits, then those of the masks by an index, then `F.cross_entropy` (training), or the draw (sampling), as MDLM and the
  pipelines of diffusers for masked language models do it.

The networks are random, as their speed does not depend on training. `compare.py` measures the same rows against another version.
"""

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM

from d3pm_hf import D3PMScheduler, D3PMTextPipeline, TextDenoiser, create_text_model, d3pm_loss, evaluate_bound


ROUNDS = 7
# Number of positions of one row that a call of the pipeline fills in: each call of the network reveals about one.
NUM_MASKS = 16
# The network, the number of states, and the shape of a batch.
NETWORKS: dict[str, tuple[Callable, int, tuple[int, int]]] = {
    "pieces": (lambda k: create_text_model("tiny", k, **WIDTH_128), 8192, (16, 32)),
    "BERT": (lambda k: BertForMaskedLM(BertConfig(vocab_size=k, **WIDTH_512)), 30522, (4, 128)),
    "paper": (lambda k: create_text_model("paper", k, backbone="t5"), 8192, (8, 128)),
}
WIDTH_128 = {
    "backbone": "t5",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
}
WIDTH_512 = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "max_position_embeddings": 128,
}


def create(name: str) -> tuple[D3PMScheduler, TextDenoiser, torch.Tensor]:
    """The process, the network and a batch of data."""
    torch.manual_seed(0)
    network, num_classes, shape = NETWORKS[name]
    generator = torch.Generator().manual_seed(0)
    x_0 = torch.randint(0, num_classes - 1, shape, generator=generator)
    return D3PMScheduler(num_classes), TextDenoiser(network(num_classes)), x_0


def network_calls(name: str) -> dict[str, Callable[[], object]]:
    """What is measured of a network, by name, by the interface that all versions share."""
    scheduler, denoiser, x_0 = create(name)
    t = torch.linspace(0, len(scheduler) - 1, len(x_0)).long()
    optimizer = torch.optim.AdamW(denoiser.parameters(), fused=True)
    pipeline = D3PMTextPipeline(denoiser.network, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    try:
        from d3pm_hf import network_loss
    except ImportError:  # of an earlier version

        def network_loss(scheduler, model, x_0, x_t, t):
            return d3pm_loss(scheduler, model(x_t, t), x_0, x_t, t)

    def train():
        denoiser.train()
        x_t = scheduler.add_noise(x_0, t, torch.Generator().manual_seed(1))
        network_loss(scheduler, denoiser, x_0, x_t, t).loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def sample():
        denoiser.eval()
        is_missing = torch.arange(x_0.shape[1])[None] < NUM_MASKS
        generator = torch.Generator().manual_seed(0)
        return pipeline(input_ids=x_0[:1], mask=is_missing, generator=generator, output_type="latent")

    def bound():
        # By the name that earlier versions know.
        return evaluate_bound(scheduler, denoiser, x_0, num_evaluated_timesteps=4, progress_bar=False)

    return {"training step": train, "pipeline(batch_size=1)": sample, "bound": bound}


def peer_calls(name: str) -> dict[str, Callable[[], object]]:
    """The way of others: all logits, then those of the masks."""
    scheduler, denoiser, x_0 = create(name)
    t = torch.linspace(0, len(scheduler) - 1, len(x_0)).long()
    optimizer = torch.optim.AdamW(denoiser.parameters(), fused=True)
    mask = scheduler.config.num_classes - 1

    def train():
        denoiser.train()
        x_t = scheduler.add_noise(x_0, t, torch.Generator().manual_seed(1))
        is_mask = x_t == mask
        F.cross_entropy(denoiser(x_t, t)[is_mask], x_0[is_mask]).backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def sample():
        denoiser.eval()
        x = x_0[:1].clone()
        x[:, :NUM_MASKS] = mask
        for position in torch.randperm(NUM_MASKS, generator=torch.Generator().manual_seed(0)).tolist():
            logits = denoiser(x, torch.tensor([0]))
            x[0, position] = torch.distributions.Categorical(logits=logits[x == mask]).sample()[0]
        return x

    return {"training step": train, "pipeline(batch_size=1)": sample}


def output_layer_calls(name: str) -> dict[str, Callable[[], object]]:
    """The output layer by itself: forward and backward for all elements of a batch and for half, and forward for a row and an element."""
    _, denoiser, x_0 = create(name)
    layer = denoiser.network.get_output_embeddings()
    hidden = torch.randn(x_0.numel(), layer.in_features, requires_grad=True)
    gradient = torch.randn(x_0.numel(), layer.out_features)

    def train(count):
        layer(hidden[:count]).backward(gradient[:count])
        layer.zero_grad()

    def predict(count):
        with torch.no_grad():
            layer(hidden[:count])

    counts = {"all": (train, len(hidden)), "half": (train, len(hidden) // 2)}
    counts |= {"one row": (predict, x_0.shape[1]), "one element": (predict, 1)}
    return {what: partial(call, count) for what, (call, count) in counts.items()}


def asked_for_all(call: Callable[[], object]) -> Callable[[], object]:
    """The call with networks that are asked for all logits, whatever their number of states."""
    import d3pm_hf.utils.kept_logits as kept_logits

    def run():
        before, kept_logits.FEW_STATES = kept_logits.FEW_STATES, sys.maxsize
        try:
            return call()
        finally:
            kept_logits.FEW_STATES = before

    return run


def take_turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median of the CPU seconds of each call; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name in list(calls) if i % 2 else list(calls)[::-1]:
            start = time.thread_time()
            calls[name]()
            if i:  # the first round fills caches
                seconds[name].append(time.thread_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_memory(way: str) -> None:
    """Prints the peak of memory of loss and gradients beside weights and activations, in units of the logits."""
    num_classes, shape, width = 50258, (8, 256), 64
    scheduler = D3PMScheduler(num_classes)
    layer = torch.nn.Linear(width, num_classes, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    hidden = torch.randn(*shape, width, requires_grad=True)
    x_0, t = torch.randint(0, num_classes - 1, shape), torch.linspace(0, 999, shape[0]).long()
    x_t = scheduler.add_noise(x_0, t)
    from d3pm_hf import logits_to_keep

    def loss():
        if way == "all":
            return d3pm_loss(scheduler, layer(hidden), x_0, x_t, t)
        kept = logits_to_keep(scheduler, x_t, t) if way == "some" else torch.arange(x_t.numel())
        rows = hidden.flatten(0, 1)[kept]
        return d3pm_loss(scheduler, rows, x_0, x_t, t, logits_to_keep=kept, output_layer=layer)

    small = d3pm_loss(scheduler, torch.zeros(1, 1, num_classes), x_0[:1, :1], x_t[:1, :1], t[:1])  # loads the code
    assert small.loss.isfinite().all()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read_memory("VmRSS")
    loss().loss.mean().backward()
    print((read_memory("VmHWM") - before) / (4 * x_t.numel() * num_classes))


def read_memory(name: str) -> int:
    """Bytes of this process: `VmRSS`, those that it has now, or `VmHWM`, their peak. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Measure the rows whose name contains this.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="Number of rounds for each row.")
    parser.add_argument("--memory", choices=["all", "pieces", "some"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    if options.memory:
        return measure_memory(options.memory)
    print("| row | some, ms | all, ms | some / all | peers, ms | some / peers |\n|---|---|---|---|---|---|")
    for name, (_, num_classes, shape) in NETWORKS.items():
        calls, peers = network_calls(name), peer_calls(name)
        for what, call in calls.items():
            row = f"{name}, K = {num_classes}, {shape[0]} x {shape[1]}: {what}"
            if options.only not in row:
                continue
            turns = {"some": call, "all": asked_for_all(call)}
            turns |= {"peers": peers[what]} if what in peers else {}
            seconds = take_turns(turns, options.rounds if name != "paper" else min(3, options.rounds))
            some, everything, other = (1e3 * seconds.get(way, float("nan")) for way in ("some", "all", "peers"))
            cells = [row, f"{some:.3g}", f"{everything:.3g}", f"{some / everything:.2f}"]
            cells += [f"{other:.3g}", f"{some / other:.2f}"] if "peers" in seconds else ["", ""]
            print("| " + " | ".join(cells) + " |", flush=True)
    print("\n| output layer | all, both ways, ms | half | one row, forward | one element |\n|---|---|---|---|---|")
    for name in NETWORKS:
        if options.only in f"{name}: output layer":
            seconds = take_turns(output_layer_calls(name), options.rounds)
            print("| " + " | ".join([name, *(f"{1e3 * v:.3g}" for v in seconds.values())]) + " |", flush=True)
    if options.only in "memory of the loss":
        print("\n| peak memory of loss and gradients, 8 x 256 x 50258 | in units of the logits |\n|---|---|")
        for way, title in {
            "all": "all logits",
            "pieces": "all, in pieces",
            "some": "those of the masks, in pieces",
        }.items():
            command = [sys.executable, __file__, "--memory", way]
            share = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
            print(f"| {title} | {float(share):.2f} |", flush=True)


if __name__ == "__main__":
    main()
