# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Trains a model of your own text file, or of your own folder of images.

    accelerate launch examples/train.py --dataset_path novel.txt --preset cpu --output_dir my-text-model
    accelerate launch examples/train.py --dataset_path pictures/ --preset images,cpu_images --output_dir my-image-model
    accelerate launch examples/train.py --dataset_path digits --preset images,digits --output_dir digits-model

A file is text: it is read character by character, and cut 90 : 5 : 5 for training, validation and test. A folder is images,
with or without the folders train/ and test/. `digits` are the digits of scikit-learn.
"""

from dataclasses import dataclass, field
from pathlib import Path

from common import (
    CPU_IMAGES,
    CPU_TEXT,
    ImageModelArguments,
    ProcessArguments,
    TextModelArguments,
    create_image_parts,
    create_text_parts,
    parse_arguments,
)

from d3pm_hf import D3PMImagePipeline, D3PMTextPipeline
from d3pm_hf.data import digits, load_images, load_text
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script


@dataclass
class DataArguments:
    """The training data."""

    dataset_path: str = field(metadata={"help": "Text file, folder of images, or `digits`."})
    sequence_length: int = field(default=256, metadata={"help": "Number of characters of an example."})
    resolution: int | None = field(
        default=None, metadata={"help": "Height and width to which images are scaled and cropped."}
    )
    num_levels: int = field(default=256, metadata={"help": "Number of levels of a pixel."})
    grayscale: bool = field(default=False, metadata={"help": "Whether images are converted to one channel."})
    random_flip: bool = field(default=False, metadata={"help": "Whether images are flipped horizontally at random."})


PRESETS = {
    "text": {},
    "images": {
        "transition": "gaussian",
        "schedule": "linear",
        "prediction_type": "logistic",
        "hybrid_coeff": 0.001,
        "learning_rate": 2e-4,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 0,
        "train_batch_size": 128,
    },
    "cpu": CPU_TEXT,
    "cpu_images": CPU_IMAGES,
    # The width of the noise is counted in levels: 17 levels need wider noise than 256.
    "digits": {
        **CPU_IMAGES,
        "schedule": "mutual_information",
        "num_train_timesteps": 400,
        "block_out_channels": [32, 64],
        "layers_per_block": 2,
        "unet_dropout": 0.0,
        "train_batch_size": 64,
        "max_train_steps": 1000,
        "learning_rate": 2e-3,
    },
}


def main():
    data, process, text_network, image_network, training = parse_arguments(
        (DataArguments, ProcessArguments, TextModelArguments, ImageModelArguments, D3PMTrainingArguments),
        PRESETS,
        __doc__,
    )
    if data.dataset_path == "digits":
        train_dataset, eval_dataset = digits()
        pipeline = D3PMImagePipeline(*create_image_parts(process, image_network, train_dataset, training.seed))
    elif Path(data.dataset_path).is_dir():
        options = {"num_levels": data.num_levels, "grayscale": data.grayscale, "resolution": data.resolution}
        train_dataset = load_images(data.dataset_path, "train", random_flip=data.random_flip, **options)
        pipeline = D3PMImagePipeline(*create_image_parts(process, image_network, train_dataset, training.seed))
        eval_dataset = (
            load_images(data.dataset_path, "test", **options) if Path(data.dataset_path, "test").is_dir() else None
        )
    else:
        train_dataset, tokenizer = load_text(data.dataset_path, "train", data.sequence_length)
        eval_dataset, _ = load_text(data.dataset_path, "validation", data.sequence_length)
        model, scheduler = create_text_parts(process, text_network, train_dataset, data.sequence_length, training.seed)
        pipeline = D3PMTextPipeline(model, scheduler, tokenizer, sequence_length=data.sequence_length)
    train(training, pipeline, train_dataset, eval_dataset, {"dataset_name": Path(data.dataset_path).name})


if __name__ == "__main__":
    run_script(main)
