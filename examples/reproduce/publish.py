# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Makes the checkpoints in examples/checkpoints of finished runs of run.py. Each name is one folder, ready to be pushed.

    python examples/reproduce/publish.py text8-absorbing --text_path text8-prefix --checkpoints outputs/reproduce

A folder holds the pipeline and a card, with the command that trains the model, and the one that measures it, which is run here.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
from huggingface_hub import ModelCard


EXAMPLES = Path(__file__).parents[1]
sys.path.insert(0, str(EXAMPLES / "reproduce"))

from run import RUNS, call  # noqa: E402

from d3pm_hf import D3PMPipeline, create_model_card  # noqa: E402


ORGANIZATION = "d3pm-hf"
LARGEST_FOLDER = 8_000_000  # bytes
# Folder: the run, its data, and how they are called on the card's command line.
CHECKPOINTS = {
    "text8-absorbing": (
        "text8-absorbing",
        "text8, first 12.5M characters: 11,300,000 for training, 625,000 for validation, the rest for testing",
        "text8-prefix",
    ),
    "pieces-absorbing": (
        "pieces_long-absorbing",
        "English prose (presidential addresses, novels, encyclopedia articles) in the alphabet of text8, 14.8M characters, as "
        "pieces of the sentencepiece model of the paper's LM1B runs",
        "prose27",
    ),
}


def commands(name: str) -> tuple[str, str]:
    """The command that trains a model, and the one that measures it."""
    run, _, path = CHECKPOINTS[name]
    table, _ = RUNS[run]
    train = f"python examples/reproduce/run.py {run} --text_path {path}"
    measure = f"python -m d3pm_hf.evaluation examples/checkpoints/{name} {table['evaluate']} --dataset_path {path}"
    if table["script"] == "train_lm1b.py":
        train += " --sentencepiece_path lm1b-sentencepiece-8k.model"
    return train, measure


def publish(name: str, source: Path, folder: Path, text_path: str) -> None:
    """Writes the pipeline of a finished run to a folder, measures it, and writes its card."""
    run, data, _ = CHECKPOINTS[name]
    pipeline = D3PMPipeline.from_pretrained(source)
    pipeline.set_progress_bar_config(disable=True)
    (folder / "README.md").unlink(missing_ok=True)  # what an earlier checkpoint measured
    pipeline.save_pretrained(folder)

    generator = torch.Generator().manual_seed(0)
    steps = min(256, len(pipeline.scheduler))
    sample = "\n".join(pipeline(batch_size=4, num_inference_steps=steps, generator=generator).texts)
    train, measure = commands(name)
    timing = json.loads((source / "timing.json").read_text())
    training = {
        "data": data,
        "command": train,
        "processor time": f"{timing['processor_seconds'] / 60:.0f} minutes",
        "measured by": measure,
    }
    words = shlex.split(measure)[1:]
    words[2] = str(folder)
    words[words.index("--dataset_path") + 1] = text_path
    call([*words, "--num_timed_samples", "0", "--output_file", str(source / "published.json")])
    card = create_model_card(
        pipeline,
        f"{ORGANIZATION}/{name}",
        training=training,
        eval_results=ModelCard.load(folder / "README.md").data.eval_results,
        sample=sample,
        license="apache-2.0",
        language="en",
    )
    card.save(folder / "README.md")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.1f} MB")
    if size > LARGEST_FOLDER:
        raise ValueError(f"{folder} has {size:,} bytes, and a checkpoint here may have {LARGEST_FOLDER:,}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="+", choices=CHECKPOINTS, metavar="NAME", help=f"One of {', '.join(CHECKPOINTS)}."
    )
    parser.add_argument("--text_path", required=True, help="Text of the run, as for run.py.")
    parser.add_argument("--checkpoints", type=Path, default=Path("outputs/reproduce"), help="Folder of the runs.")
    parser.add_argument("--output_dir", type=Path, default=EXAMPLES / "checkpoints", help="Folder of the checkpoints.")
    options = parser.parse_args()
    for name in options.names:
        publish(name, options.checkpoints / f"{CHECKPOINTS[name][0]}-0", options.output_dir / name, options.text_path)


if __name__ == "__main__":
    main()
