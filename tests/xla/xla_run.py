# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A small run as a script: `python xla_run.py '{"kind": "absorbing", "output_dir": ...}'`, on XLA or on the CPU.

It runs on XLA unless `USE_TORCH_XLA=0` is in the environment. Beside the run it leaves `counters.json`, what torch_xla has
counted, and `drawn.safetensors`, states and logits of the pipeline that `train` returns.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


sys.path.insert(0, str(Path(__file__).parents[1]))
import training_run  # noqa: E402

from d3pm_hf import D3PMImagePipeline, D3PMScheduler, create_unet  # noqa: E402
from d3pm_hf.pipelines.drawing import silenced  # noqa: E402
from d3pm_hf.training import loop  # noqa: E402


ON_XLA = os.environ.get("USE_TORCH_XLA") != "0"
T = 20
SETTINGS = {
    "max_train_steps": 12,
    "validation_steps": 6,
    "checkpointing_steps": 5,
    "num_samples": 2,
    "num_inference_steps": 5,
    "num_eval_timesteps": 4,
}
PROCESSES = {
    "absorbing": {},
    "uniform": {"transition": "uniform", "beta_schedule": "cosine"},
    "gaussian": {"transition": "gaussian", "beta_schedule": "linear", "beta_end": 1.0},
}


class Stripes:
    """Images of 17 levels, 8 x 8: stripes, which a seed rolls."""

    def __init__(self, count=200, seed=0):
        generator = torch.Generator().manual_seed(seed)
        moves = torch.randint(0, 3, (count, 1, 8, 8), generator=generator)
        self.images = (torch.randint(0, 17, (count, 1, 8, 1), generator=generator) + moves) % 17

    def __len__(self):
        return len(self.images)

    def __getitem__(self, item):
        index, seed = item if isinstance(item, tuple) else (item, 0)
        return self.images[index].roll(seed % 3, -1)


def make_run(kind, dropout):
    """The pipeline, the data to train on and the data to evaluate."""
    if kind in PROCESSES:
        return training_run.make_pipeline(dropout, num_train_timesteps=T, **PROCESSES[kind]), None, None
    torch.manual_seed(0)
    scheduler = D3PMScheduler(
        17, T, transition="gaussian", beta_schedule="linear", beta_end=1.0, prediction_type="logistic"
    )
    pipeline = D3PMImagePipeline(create_unet("tiny", 17, 8, 1, prediction_type="logistic"), scheduler)
    return pipeline, Stripes(), Stripes(32, seed=1)


def count():
    """The number of compilations, graphs and copies to the host so far, and of operations that ran on the host."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    xm.wait_device_ops()  # a graph counts when it has run
    names = {"compiled": "CompileTime", "executed": "ExecuteTime", "copied": "TransferFromDeviceTime"}
    data = {name: metrics.metric_data(metric) for name, metric in names.items()}
    counted = {name: value[0] if value else 0 for name, value in data.items()}
    fallbacks = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}
    return {**counted, "fallbacks": fallbacks}


def count_steps():
    """Counts after each step of training."""
    finish, counts = loop.finish_graph, []

    def finish_and_count(device):
        finish(device)
        counts.append(count())

    loop.finish_graph = finish_and_count
    return counts


def draw(pipeline, seed, steps):
    """States of the pipeline. The generator is on the CPU, so that they are the same on every device.

    The sampler is that of XLA: the default one of an absorbing process draws otherwise elsewhere.
    """
    options = {"batch_size": 2, "num_inference_steps": steps, "sampler": "ancestral", "output_type": "latent"}
    with silenced(pipeline):
        return pipeline(**options, generator=torch.Generator().manual_seed(seed), return_dict=False)[0]


@torch.no_grad()
def main(kind, output_dir, dropout=0.0, die_at=None, **settings):
    if die_at is not None:
        training_run.die_at(die_at)
    steps = count_steps() if ON_XLA else []
    pipeline, *data = make_run(kind, dropout)
    with torch.enable_grad():
        pipeline = training_run.run(pipeline, *data, output_dir=output_dir, **{**SETTINGS, **settings})
    calls = [count()] if ON_XLA else []
    states = []
    for seed, num_steps in ((0, 5), (1, 5), (2, 8)):
        states.append(draw(pipeline, seed, num_steps).cpu())
        calls += [count()] if ON_XLA else []
    x_t = torch.cat(states)
    logits = pipeline.denoiser(x_t.to(pipeline.device), torch.tensor(3, device=pipeline.device)).cpu()
    Path(output_dir, "counters.json").write_text(json.dumps({"steps": steps, "calls": calls}))
    device = torch.tensor(list(str(pipeline.device).encode()))
    save_file({"states": x_t, "logits": logits, "device": device}, Path(output_dir, "drawn.safetensors"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**json.loads(sys.argv[1]))
