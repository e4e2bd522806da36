# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Trains the character models of "Learning at equal processor time" in docs/source/en/results.md, and measures them.

    python examples/reproduce/learning.py preset --text_path text8-prefix --seeds 0 1 2 --share 0.324
    python examples/reproduce/learning.py earlier preset uniform_timesteps --text_path text8-prefix
    python examples/reproduce/learning.py preset --text_path text8-prefix --seeds 0 1 2 3 4 5 6 7 8 9 --num_steps 400

All recipes get the processor time of `--share` times 3000 steps of the recipe `earlier`. What a step costs depends on the machine
and on its other programs, so the costs of all are measured first, in turns, and a recipe gets the number of steps whose cost is
the same. `--split validation` keeps the test text out of choices. Each result is one line of docs/results/learning.jsonl, with its
protocol. Use one thread: OMP_NUM_THREADS=1.
"""

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import torch


EXAMPLES = Path(__file__).parents[1]
sys.path.insert(0, str(EXAMPLES))

import train_text8  # noqa: E402

from d3pm_hf import D3PMPipeline, D3PMTextPipeline, character_tokenizer, evaluate_bound  # noqa: E402
from d3pm_hf.data import load_text8  # noqa: E402
from d3pm_hf.training import D3PMTrainingArguments, train  # noqa: E402
from d3pm_hf.training.objective import diffusion_loss  # noqa: E402
from d3pm_hf.training.script_arguments import EARLIER_CPU_TEXT, ProcessArguments, TextModelArguments, parse_arguments  # noqa: E402
from d3pm_hf.training.script_parts import create_text_parts  # noqa: E402
from d3pm_hf.training.step_batches import IndexedExamples, RunCollator, StepBatches  # noqa: E402


RESULTS = EXAMPLES.parent / "docs" / "results" / "learning.jsonl"
EARLIER_STEPS = EARLIER_CPU_TEXT["max_train_steps"]
CPU, EARLIER = "--preset absorbing,cpu", "--preset absorbing,cpu_earlier"
WIDE = "--hidden_size 192 --intermediate_size 768 --num_hidden_layers 3 --train_batch_size 8 --learning_rate 3e-3"
# The flags of train_text8.py.
RECIPES = {
    "preset": CPU,
    "earlier": EARLIER,
    "earlier_offset": f"{EARLIER} --num_attention_heads 8 --position_bias_init offset",
    "distance": f"{CPU} --position_bias_init distance",
    "four_heads": f"{CPU} --num_attention_heads 4",
    "uniform_timesteps": f"{CPU} --timestep_sampling uniform",
    "masked_only": f"{CPU} --auxiliary denoising",
    "mean_minus_one": f"{CPU} --logit_mean -1",
    "peak_1.3e-3": f"{CPU} --learning_rate 1.3e-3",
    "peak_5e-3": f"{CPU} --learning_rate 5e-3",
    "beta2_0.99": f"{CPU} --adam_beta2 0.99",
    "no_conditioning": f"{CPU} --no_timestep_conditioning",
    "three_layers": f"{CPU} --num_hidden_layers 3",
    "bfloat16": f"{CPU} --mixed_precision bf16",
    "lambda_0.1": f"{CPU} --hybrid_coeff 0.1",
    "lambda_1": f"{CPU} --hybrid_coeff 1",
    "clipped": f"{CPU} --max_grad_norm 0.01",
    "three_layers_of_96": f"{CPU} --num_hidden_layers 3 --hidden_size 96 --intermediate_size 384",
    "one_layer_of_192": f"{CPU} --num_hidden_layers 1 --hidden_size 192 --intermediate_size 768",
    "weight_decay": f"{CPU} --adam_weight_decay 0.1",
    "wide": f"{CPU} {WIDE}",
    "wide_earlier": f"{EARLIER} {WIDE}",
    "dit": f"{CPU} --backbone dit",
    "bert": f"{CPU} --backbone bert",
    "uniform_noise": "--preset uniform,cpu",
    "uniform_noise_and_timesteps": "--preset uniform,cpu --timestep_sampling uniform",
    "uniform_noise_denoising": "--preset uniform,cpu --loss hybrid --auxiliary denoising",
}
# Flags that no recipe depends on.
QUIET = "--validation_steps 0 --num_samples 0 --overwrite_output_dir --checkpointing_steps 1000000 --logging_steps 100"


class Recipe:
    """A recipe with its parsed arguments and its data."""

    def __init__(self, name: str, options: argparse.Namespace, seed: int, num_steps: int = EARLIER_STEPS):
        folder = options.output_dir / f"{name}-{seed}"
        self.line = f"{RECIPES[name]} --max_train_steps {num_steps} --seed {seed}"
        words = f"{self.line} {QUIET} --output_dir {shlex.quote(str(folder))}"
        classes = (train_text8.DataArguments, ProcessArguments, TextModelArguments, D3PMTrainingArguments)
        arguments = parse_arguments(classes, train_text8.PRESETS, "", arguments=shlex.split(words))
        self.data, self.process, self.network, self.training = arguments
        self.length = self.data.sequence_length
        self.dataset = load_text8("train", length=self.length, dataset_path=options.text_path)

    def create_pipeline(self) -> D3PMTextPipeline:
        parts = create_text_parts(self.process, self.network, self.dataset, self.length, self.training.seed)
        return D3PMTextPipeline(*parts, character_tokenizer(), sequence_length=self.length)


def step_costs(recipes: list[Recipe], rounds: int = 8, steps: int = 5) -> list[float]:
    """Processor seconds of a training step of each recipe: the least mean of a few steps, measured in turns."""
    runs, costs = [training_steps(recipe, (rounds + 1) * steps) for recipe in recipes], [float("inf")] * len(recipes)
    for number in range(rounds + 1):
        for index, run in enumerate(runs):
            begin = time.process_time()
            for _ in range(steps):
                next(run)
            if number:  # the first round allocates memory
                costs[index] = min(costs[index], (time.process_time() - begin) / steps)
    return costs


def training_steps(recipe: Recipe, num_steps: int):
    """Takes a training step with each `next`: the loss, its gradient, the update and the average of the weights."""
    arguments, pipeline = recipe.training, recipe.create_pipeline()
    denoiser, scheduler = pipeline.denoiser.train(), pipeline.scheduler
    parameters = list(denoiser.parameters())
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    examples, size = IndexedExamples(recipe.dataset), arguments.train_batch_size
    collate = RunCollator(lambda rows: {"x_0": torch.stack(rows)}, scheduler.config.num_classes, ())
    for items in StepBatches(
        len(recipe.dataset), size, 1, len(scheduler), 0, range(num_steps), arguments.timestep_law
    ):
        batch = collate([examples[item] for item in items])
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.mixed_precision == "bf16"):
            loss, *_ = diffusion_loss(scheduler, denoiser, batch, arguments)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, arguments.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [parameter.detach() for parameter in parameters], 0.01)
        yield


def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """The bounds of a checkpoint at numbers of steps, on evenly spaced crops of the text of `--split`."""
    pipeline = D3PMPipeline.from_pretrained(folder)
    dataset = load_text8(options.split, length=pipeline.sequence_length, dataset_path=options.text_path)
    indices = torch.linspace(0, len(dataset) - 1, options.max_eval_samples).long().tolist()
    batches, result = torch.stack([dataset[index] for index in indices]).split(64), {}
    for steps in options.num_inference_steps:
        bound = evaluate_bound(
            pipeline.scheduler,
            pipeline.denoiser,
            batches,
            num_inference_steps=steps,
            num_eval_timesteps=20,
            progress_bar=False,
        )
        result |= {
            f"bits_{steps}": round(bound.bits_per_dim, 4),
            f"error_{steps}": round(bound.bits_per_dim_standard_error, 4),
        }
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", choices=RECIPES, metavar="RECIPE", help=f"One of {', '.join(RECIPES)}.")
    parser.add_argument("--text_path", required=True, help="Folder with a file of text for each split.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="Seeds, each of which is a run.")
    parser.add_argument(
        "--share", type=float, default=1.0, help="Processor time, as a share of that of 3000 steps of `earlier`."
    )
    parser.add_argument("--num_steps", type=int, help="Number of steps, in place of --share.")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="Text for the bounds.")
    parser.add_argument("--num_inference_steps", type=int, nargs="+", default=[1000, 20], help="Steps of the bounds.")
    parser.add_argument("--max_eval_samples", type=int, default=512, help="Number of crops for the bounds.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/learning"), help="Folder for checkpoints.")
    parser.add_argument("--output_file", type=Path, default=RESULTS, help="File to which results are appended.")
    options = parser.parse_args()
    costs: dict[str, float] = {}
    if options.num_steps is None:
        names = list(dict.fromkeys([*options.recipes, "earlier"]))
        costs = dict(zip(names, step_costs([Recipe(name, options, 0) for name in names])))
    for name in options.recipes:
        cost, earlier_cost = costs.get(name, 0.0), costs.get("earlier", 0.0)
        num_steps = options.num_steps or round(options.share * EARLIER_STEPS * earlier_cost / cost)
        for seed in options.seeds:
            recipe = Recipe(name, options, seed, num_steps)
            begin = time.process_time()
            train(recipe.training, recipe.create_pipeline(), recipe.dataset)
            seconds = time.process_time() - begin
            result = {
                "recipe": name,
                "seed": seed,
                "share": options.share if options.num_steps is None else None,
                "num_steps": num_steps,
                "step_milliseconds": round(1000 * cost, 1) or None,
                "earlier_step_milliseconds": round(1000 * earlier_cost, 1) or None,
                "processor_minutes": round(seconds / 60, 2),
                "flags": recipe.line,
                "split": options.split,
                "max_eval_samples": options.max_eval_samples,
                **measure(Path(recipe.training.output_dir), options),
            }
            print(json.dumps(result), flush=True)
            with options.output_file.open("a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
