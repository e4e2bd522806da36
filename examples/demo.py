# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Draws from the models in examples/checkpoints, then trains a text model and an image model of its own.

The training takes a few minutes on two cores, with data that every installation carries.
The text is the English prose inside Python (its reference and its docstrings) in text8's alphabet, cut into word pieces that
are found in it, under an absorbing process. The images are scikit-learn's digits, under Gaussian noise with a logistic
distribution of x_0; timesteps are chosen for them. Both are evaluated, loaded again from disk, and sampled with 20 steps; the
words of 64 texts of 256 steps are counted.
"""

import argparse
import time
from pathlib import Path


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--output_dir", default="outputs", help="Folder for checkpoints and pictures.")
parser.add_argument("--max_text_steps", type=int, default=6000, help="Number of training steps of the text model.")
parser.add_argument("--max_image_steps", type=int, default=1000, help="Number of training steps of the image model.")
parser.add_argument(
    "--max_eval_samples", type=int, default=200, help="Number of examples on which the bounds are measured."
)
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import bible
import molecules
import numpy as np
import sudoku
import torch
from diffusers.utils import make_image_grid

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, D3PMTextPipeline, Trajectory
from d3pm_hf.data import TextCrops, digits, python_prose, train_piece_tokenizer
from d3pm_hf.data.characters import TEXT8_ALPHABET
from d3pm_hf.evaluation import optimize_timesteps, word_statistics
from d3pm_hf.training import D3PMTrainingArguments, read_log, train
from d3pm_hf.training.script_arguments import ImageModelArguments, ProcessArguments, TextModelArguments
from d3pm_hf.training.script_parts import create_image_parts, create_text_parts
from d3pm_hf.utils.scripts import run_script
from d3pm_hf.visualization.grids import enlarge, image_grid


READY = Path(__file__).parent / "checkpoints"
# Number of word pieces to choose from, and of pieces in a text.
NUM_PIECES, LENGTH = 4096, 32
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
VERSE = "And it [MASK] to [MASK] in those [MASK], that the king of [MASK] went up against [MASK]."
PROMPT = "return the [MASK] of the [MASK] as a [MASK]"
# A small model spreads its probability over many pieces: a temperature below 1 takes the likelier ones.
TEMPERATURE = 0.8
# Above 1, samples follow their class more closely.
GUIDANCE = 1.5
# Examples on which the timesteps of the image model are chosen, and number of timesteps to choose among.
NUM_CHOICE_EXAMPLES, GRID = 128, 24
# Both runs have one evaluation and one checkpoint, at the end.
COMMON = {
    "overwrite_output_dir": True,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 50,
    "logging_steps": 20,
    "validation_steps": 1_000_000,
    "checkpointing_steps": 1_000_000,
    "num_eval_timesteps": 40,
    "num_samples": 0,
}


def look_at_ready_models(output_dir: Path) -> None:
    """Draws from the models that come with the project: prints two texts of each, and saves two images of each class."""
    for folder in sorted(path.parent for path in READY.glob("*/model_index.json")):
        pipeline = D3PMPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(leave=False)
        options = {"num_inference_steps": 20, "generator": torch.Generator().manual_seed(0)}
        if folder.name == "sudoku":
            answer, _ = sudoku.fill_in(pipeline, sudoku.read_puzzle(PUZZLE))
            print(f"     {folder.name}: {PUZZLE}\n          -> {sudoku.write_puzzle(answer)}")
        elif folder.name == "bible":
            filled = pipeline(VERSE, **bible.FILLING, generator=options["generator"]).texts
            print(f"     {folder.name}: {VERSE}\n          -> {filled[0]}")
        elif folder.name == "molecules":
            order = molecules.SAMPLERS["margin, 0.6"]
            texts = pipeline(class_labels=[0, 1, 2, 3], generator=options["generator"], **order).texts
            print(f"     {folder.name} of 0 to 3 rings: {', '.join(texts)}")
        elif isinstance(pipeline, D3PMTextPipeline):
            for text in pipeline(batch_size=2, temperature=TEMPERATURE, **options).texts:
                print(f"     {folder.name}: {text!r}")
        else:
            number = pipeline.denoiser.num_class_labels
            chosen = (
                {"class_labels": [*range(number)] * 2, "guidance_scale": GUIDANCE} if number else {"batch_size": 20}
            )
            images = pipeline(**chosen, **options).images
            path = output_dir / f"ready_{folder.name}.png"
            make_image_grid(enlarge(images), rows=2, cols=len(images) // 2).save(path)
            print(f"     {folder.name}: see {path}")


def read_prose() -> list[str]:
    """The training text and the validation text."""
    return ["".join(TEXT8_ALPHABET[token] for token in dataset.tokens.tolist()) for dataset in python_prose()]


def train_text(texts: list[str], output_dir: Path, max_train_steps: int, max_eval_samples: int) -> None:
    """An absorbing model of word pieces."""
    tokenizer = train_piece_tokenizer(texts[:1], NUM_PIECES)
    pieces = [np.array(tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
    train_dataset, eval_dataset = (TextCrops(tokens, LENGTH, NUM_PIECES) for tokens in pieces)
    network = TextModelArguments(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        intermediate_size=512,
        position_bias_init="offset",
        timestep_conditioning=False,  # the share of masks tells the timestep
    )
    model, scheduler = create_text_parts(ProcessArguments(), network, train_dataset, LENGTH)
    pipeline = D3PMTextPipeline(model, scheduler, tokenizer, sequence_length=LENGTH)
    arguments = D3PMTrainingArguments(
        output_dir=str(output_dir),
        max_train_steps=max_train_steps,
        train_batch_size=16,
        learning_rate=2e-3,
        timestep_sampling="logit_normal",
        logit_mean=-0.5,
        max_eval_samples=max_eval_samples,
        **COMMON,
    )
    train(arguments, pipeline, train_dataset, eval_dataset, {"dataset_name": "the prose inside CPython"})


def train_digits(output_dir: Path, max_train_steps: int, max_eval_samples: int) -> None:
    """A Gaussian and logistic model of 8 x 8 pixels of 17 levels."""
    train_dataset, eval_dataset = digits()
    # The width of the noise is counted in levels: 17 levels need wider noise than 256.
    process = ProcessArguments(
        transition="gaussian", beta_schedule="mutual_information", prediction_type="logistic", num_train_timesteps=400
    )
    network = ImageModelArguments(
        block_out_channels=[32, 64], layers_per_block=2, attention_levels=[1], unet_dropout=0.0
    )
    pipeline = D3PMImagePipeline(*create_image_parts(process, network, train_dataset))
    arguments = D3PMTrainingArguments(
        output_dir=str(output_dir),
        max_train_steps=max_train_steps,
        train_batch_size=64,
        learning_rate=2e-3,
        hybrid_coeff=0.001,
        max_eval_samples=max_eval_samples,
        **COMMON,
    )
    train(arguments, pipeline, train_dataset, eval_dataset, {"dataset_name": "scikit-learn's digits", "split": "test"})


def choose_timesteps(folder: Path, num_examples: int) -> None:
    """Stores with the image model the timesteps of each number of steps that are better than evenly spaced ones."""
    pipeline = D3PMPipeline.from_pretrained(folder)
    result = optimize_timesteps(pipeline, digits()[0], num_examples=num_examples, grid=GRID)
    pipeline.scheduler.register_inference_timesteps(result.inference_timesteps)
    pipeline.scheduler.save_pretrained(folder / "scheduler")


def look_at_text(folder: Path, training_text: str) -> tuple[list[str], str, float]:
    """Draws samples of the text model, fills in a prompt, and saves a page that shows how a sample was drawn.

    The last value is the share of the words of 64 samples at temperature 1 that occur in the training text.
    """
    pipeline = D3PMPipeline.from_pretrained(folder)
    generator, trajectory = torch.Generator().manual_seed(0), Trajectory()
    options = {"num_inference_steps": 20, "temperature": TEMPERATURE, "generator": generator}
    samples = pipeline(batch_size=4, callback_on_step_end=trajectory, **options).texts
    trajectory.save_html(folder.parent / "text.html")
    filled = pipeline(PROMPT, **options).texts[0]
    texts = pipeline(batch_size=64, num_inference_steps=256, generator=generator).texts
    return samples, filled, word_statistics(texts, [training_text])["known_words"]


def look_at_digits(folder: Path) -> None:
    """Saves a picture of samples, an animation of how they were drawn, and the predictions of the network on the way."""
    pipeline = D3PMPipeline.from_pretrained(folder)
    generator, trajectory = torch.Generator().manual_seed(0), Trajectory(predictions=True)
    images = pipeline(
        batch_size=40, num_inference_steps=20, generator=generator, callback_on_step_end=trajectory
    ).images
    image_grid(images).save(folder.parent / "digits.png")
    trajectory.save_gif(folder.parent / "digits.gif")
    trajectory.keep(range(4)).save_progressive(folder.parent / "progressive.png")


def bound_of(folder: Path, elements: float = 1.0) -> str:
    """The last bound of a run in bits, per element or for a number of elements."""
    line = read_log(folder / "log.jsonl")[-1]
    return f"{elements * line['eval_bits_per_dim']:.3f} ± {elements * line['eval_standard_error']:.3f}"


def pieces_per_character(folder: Path, text: str) -> float:
    """Number of word pieces of a text, divided by its number of characters."""
    tokenizer = D3PMPipeline.from_pretrained(folder).tokenizer
    return len(tokenizer(text, add_special_tokens=False).input_ids) / len(text)


def main():
    options = parser.parse_args()
    outputs, began = Path(options.output_dir), time.time()
    outputs.mkdir(parents=True, exist_ok=True)

    print("1/4  models that are ready, 20 steps each")
    look_at_ready_models(outputs)
    print(f"2/4  a model of {NUM_PIECES} word pieces on the prose inside Python")
    texts = read_prose()
    train_text(texts, outputs / "text", options.max_text_steps, options.max_eval_samples)
    print("3/4  an image model on scikit-learn's digits")
    train_digits(outputs / "digits", options.max_image_steps, options.max_eval_samples)
    choose_timesteps(outputs / "digits", min(NUM_CHOICE_EXAMPLES, options.max_eval_samples))
    print("4/4  samples")
    samples, filled, known_words = look_at_text(outputs / "text", texts[0])
    look_at_digits(outputs / "digits")

    print(f"\nDone in {(time.time() - began) / 60:.1f} minutes.\n")
    per_character = bound_of(outputs / "text", pieces_per_character(outputs / "text", texts[1]))
    print(f"text    {per_character} bits per character (upper bound, validation)")
    print(f"        {bound_of(outputs / 'text')} bits per word piece, of which there are {NUM_PIECES}")
    print(
        f"        {known_words:.0%} of the words occur in the training text (64 samples of 256 steps, temperature 1)"
    )
    print(f"        samples at temperature {TEMPERATURE}:")
    for sample in samples:
        print(f"        {sample!r}")
    print(f"        {PROMPT}\n     -> {filled}")
    print(f"digits  {bound_of(outputs / 'digits')} bits per pixel (upper bound, test)\n")
    for name, what in (
        ("ready_mnist.png", "digits of a model in examples/checkpoints, a column for each class"),
        ("ready_binarized-mnist.png", "digits of another one, in black and white"),
        ("text/", "the checkpoint of the text model: pipeline, card and log"),
        ("digits/", "the checkpoint of the image model"),
        ("digits.png", "samples of the image model"),
        ("digits.gif", "how they were drawn, as an animation"),
        ("progressive.png", "x_t, and below it the prediction of x_0"),
        ("text.html", "a page that shows how a text was drawn"),
    ):
        print(f"{outputs / name!s:24} {what}")
    print(
        f'\nNext: `make app` shows both in a browser; D3PMPipeline.from_pretrained("{outputs / "text"}")("return a list of '
        '[MASK][MASK][MASK]") continues a text; and a model of your own is\n      accelerate launch --quiet examples/train.py '
        "--dataset_path your.txt --preset cpu --output_dir yours"
    )


if __name__ == "__main__":
    run_script(main)
