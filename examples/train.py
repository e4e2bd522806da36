# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
# /// script
# requires-python = ">=3.11"
# dependencies = ["d3pm-hf[lora,training] @ git+https://github.com/d3pm-hf/d3pm-hf", "scikit-learn"]
# ///
"""Trains a model of your own text or images, or a language model of transformers on texts of a data set.

    accelerate launch --quiet examples/train.py --dataset_path novel.txt --preset cpu --output_dir my-text-model
    accelerate launch --quiet examples/train.py --dataset_path pictures/ --preset images,cpu_images --output_dir my-image-model
    accelerate launch --quiet examples/train.py --dataset_path digits --preset images,digits --output_dir digits-model
    accelerate launch --quiet examples/train.py --model_name_or_path distilbert/distilroberta-base --dataset_name your-name/poems \\
        --text_column poem --preset finetune --output_dir poems-model
    accelerate launch --quiet examples/train.py --model_name_or_path your-name/digits --dataset_path digits --use_peft --lora_r 8 \\
        --output_dir digits-lora

`--dataset_path`: a file is text: it is read character by character, and cut 90 : 5 : 5 for training, validation and test. So is a
folder of text files, one for each split, such as novel.train.txt and novel.validation.txt. Any other folder is images, with or
without the folders train/ and test/. `digits` are the digits of scikit-learn.

`--model_name_or_path`: a masked language model is the start of an absorbing process, and a causal one that of
`--transition autoregressive`. Its tokenizer reads the texts of `--dataset_name`: an id on the Hub, a folder, or a file (csv, json,
jsonl, parquet, or txt with one text per line). They are joined and cut into rows of `--max_seq_length` tokens, or with
`--line_by_line` each is an example. A pipeline of this package, or a LoRA of one, is trained further: on texts of `--dataset_name`, or on
images of `--dataset_path`. `--use_peft` trains a LoRA (docs/source/en/lora_and_trainer.md).
"""

import mimetypes
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.hf_argparser import HfArg

from d3pm_hf.training import D3PMTrainingArguments
from d3pm_hf.training.script_arguments import (
    CPU_IMAGES,
    CPU_TEXT,
    EARLIER_CPU_TEXT,
    ImageModelArguments,
    LanguageModelArguments,
    LoraArguments,
    ProcessArguments,
    TextModelArguments,
    answer_help,
    parse_arguments,
)


# Readers of the package datasets for files, by their endings.
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


@dataclass
class DataArguments:
    """The training data."""

    dataset_path: str | None = HfArg(
        default=None,
        help="Text file, folder of text files (one for each split), folder of images, or `digits`, for a network of "
        "this package.",
    )
    sequence_length: int = HfArg(default=256, help="Number of characters of an example.")
    resolution: int | None = HfArg(default=None, help="Height and width to which images are scaled and cropped.")
    num_levels: int = HfArg(default=256, help="Number of levels of a pixel.")
    grayscale: bool = HfArg(default=False, help="Whether images are converted to one channel.")
    random_flip: bool = HfArg(default=False, help="Whether images are flipped horizontally at random.")


@dataclass
class DocumentArguments:
    """Texts for a language model. The names of the flags are those of `run_mlm.py` of transformers where it has them."""

    dataset_name: str | None = HfArg(
        default=None, help=f"Id of a data set on the Hub, a folder, or a file: {', '.join(READERS)}."
    )
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of the data set.")
    text_column: str = HfArg(default="text", help="Column of the texts.")
    streaming: bool = HfArg(default=False, help="Whether the data set is streamed, not downloaded first.")
    max_seq_length: int | None = HfArg(
        default=None,
        help="Number of tokens of an example, special tokens included. Defaults to the number of positions of the "
        "network, at most 256.",
    )
    line_by_line: bool = HfArg(
        default=False,
        help="Whether each text is an example. Otherwise they are joined and cut into rows of equal length.",
    )
    truncation: bool = HfArg(
        default=False, help="With --line_by_line, whether longer texts are cut. Otherwise they are errors."
    )
    validation_split_percentage: int = HfArg(
        default=5,
        help="Share of the texts for validation if the data set has no validation split; a stream gives its first "
        "--max_eval_samples texts.",
    )
    preprocessing_num_workers: int | None = HfArg(
        default=None, help="Number of processes that tokenize; not for streams."
    )


PRESETS = {
    "text": {},
    # For a pretrained network: a lower learning rate, and no average over its first steps.
    "finetune": {
        "learning_rate": 5e-5,
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 100,
        "use_ema": False,
        "train_batch_size": 32,
        "max_train_steps": 10_000,
        "validation_steps": 1000,
        "checkpointing_steps": 1000,
        "checkpoints_total_limit": 2,
    },
    "images": {
        "transition": "gaussian",
        "prediction_type": "logistic",
        "hybrid_coeff": 0.001,
        "learning_rate": 2e-4,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 0,
        "train_batch_size": 128,
    },
    "cpu": CPU_TEXT,
    "cpu_earlier": EARLIER_CPU_TEXT,
    "cpu_images": CPU_IMAGES,
    "digits": {
        **CPU_IMAGES,
        "num_train_timesteps": 400,
        "block_out_channels": [32, 64],
        "layers_per_block": 2,
        "unet_dropout": 0.0,
        "train_batch_size": 64,
        "max_train_steps": 1000,
        "learning_rate": 2e-3,
    },
}
CLASSES = DataArguments, DocumentArguments, ProcessArguments, LanguageModelArguments
CLASSES += TextModelArguments, ImageModelArguments, LoraArguments, D3PMTrainingArguments
ARGUMENTS = CLASSES, PRESETS, __doc__

if __name__ == "__main__":
    answer_help(*ARGUMENTS)

from d3pm_hf import D3PMImagePipeline, D3PMTextPipeline
from d3pm_hf.data import digits, load_images, load_text, tokenize
from d3pm_hf.data.sources import choose_split, load_splits
from d3pm_hf.models.text_denoisers import num_positions
from d3pm_hf.training import train
from d3pm_hf.training.script_parts import (
    add_lora,
    create_image_parts,
    create_language_pipeline,
    create_text_parts,
    is_pipeline,
    load_pipeline,
)
from d3pm_hf.utils.checks import check_int
from d3pm_hf.utils.scripts import run_script


def main():
    data, documents, process, language_model, text_network, image_network, lora, training = parse_arguments(*ARGUMENTS)
    has_model = language_model.model_name_or_path is not None or language_model.config_name is not None
    has_files, has_documents = data.dataset_path is not None, documents.dataset_name is not None
    is_trained_further = has_files and is_pipeline(language_model)
    if has_files == has_documents or has_model != (has_documents or is_trained_further):
        raise ValueError(
            "pass --model_name_or_path (or --config_name) with --dataset_name for a language model of transformers, or "
            "--dataset_path alone for a network of this package, or with --model_name_or_path for a pipeline of images"
        )
    is_text = has_documents or holds_text(data.dataset_path)
    if is_text and is_trained_further:
        raise ValueError(
            f"{data.dataset_path} is text, and --model_name_or_path a pipeline: pass the text as --dataset_name for a pipeline of "
            "text, or a folder of images or `digits` as --dataset_path"
        )
    if training.label_column is not None and is_text:
        raise ValueError(
            f"label_column is {training.label_column!r}, and classes are those of images: leave it out, or pass a folder of "
            "images or `digits` as --dataset_path"
        )
    if has_documents:
        train_language_model(documents, process, language_model, lora, training)
        return
    if is_text:
        length = data.sequence_length
        train_dataset, tokenizer = load_text(data.dataset_path, "train", length)
        eval_dataset, _ = load_text(data.dataset_path, "validation", length)
        model, scheduler = create_text_parts(process, text_network, train_dataset, length, training.seed)
        pipeline = D3PMTextPipeline(model, scheduler, tokenizer, sequence_length=length)
    else:
        pipeline = load_pipeline(language_model, D3PMImagePipeline) if is_trained_further else None
        train_dataset, eval_dataset = load_image_splits(data, training.label_column, pipeline)
        if pipeline is None:
            pipeline = D3PMImagePipeline(*create_image_parts(process, image_network, train_dataset, training.seed))
        training = replace(training, label_column=None)  # the classes have the name that `train` expects
    train(
        training,
        add_lora(pipeline, lora, training),
        train_dataset,
        eval_dataset,
        {"dataset_name": Path(data.dataset_path).name},
    )


def load_image_splits(data: DataArguments, label_column: str | None, pipeline: D3PMImagePipeline | None) -> tuple:
    """The images for training and those for evaluation, if there are any; as the pipeline has them, if there is one."""
    if data.dataset_path == "digits":
        return digits(labels=label_column is not None)
    options = {"num_levels": data.num_levels, "grayscale": data.grayscale, "resolution": data.resolution}
    if pipeline is not None:
        channels, height, _ = pipeline.sample_shape
        options = {
            "num_levels": pipeline.scheduler.config.num_classes,
            "grayscale": channels == 1,
            "resolution": height,
        }
    options["label_column"] = label_column
    train_dataset = load_images(data.dataset_path, "train", random_flip=data.random_flip, **options)
    has_test = Path(data.dataset_path, "test").is_dir()
    return train_dataset, load_images(data.dataset_path, "test", **options) if has_test else None


def holds_text(path: str) -> bool:
    """Whether `--dataset_path` is text: a file, or a folder with text files, without images and folders."""
    if not Path(path).is_dir():
        return path != "digits"
    files = [file for file in Path(path).iterdir() if not file.name.startswith(".")]
    kinds = ["folder" if file.is_dir() else mimetypes.guess_type(file.name)[0] or "" for file in files]
    return "text/plain" in kinds and not any(kind.startswith(("image/", "folder")) for kind in kinds)


def train_language_model(
    documents: DocumentArguments,
    process: ProcessArguments,
    language_model: LanguageModelArguments,
    lora: LoraArguments,
    training: D3PMTrainingArguments,
) -> None:
    """Trains a language model of transformers on the texts of a data set."""
    if documents.truncation and not documents.line_by_line:
        raise ValueError("--truncation cuts single texts: pass --line_by_line too, or leave it out")
    splits = load_documents(documents, training.max_eval_samples)
    pipeline = create_language_pipeline(process, language_model, documents.max_seq_length, training.seed)
    is_causal = pipeline.scheduler.family.is_autoregressive
    length, positions = pipeline.config.sequence_length, num_positions(pipeline.text_model)
    if positions is not None and length > positions:
        raise ValueError(
            f"max_seq_length is {length}, and the network has {positions} positions: pass --max_seq_length {positions} or less"
        )
    train_dataset, eval_dataset = (
        None
        if texts is None
        else tokenize(
            texts,
            pipeline.tokenizer,
            text_column=documents.text_column,
            max_length=length,
            packing=not documents.line_by_line,
            truncation=documents.truncation,
            add_special_tokens=not is_causal,
            append_eos=is_causal,
            num_proc=documents.preprocessing_num_workers,
        )
        for texts in splits
    )
    name = documents.dataset_name
    is_local = Path(name).exists()
    card = {"dataset_name": Path(name).name if is_local else name, "datasets": None if is_local else name}
    if language_model.model_name_or_path is not None and not Path(language_model.model_name_or_path).exists():
        card["base_model"] = language_model.model_name_or_path
    train(training, add_lora(pipeline, lora, training), train_dataset, eval_dataset, card)


def load_documents(documents: DocumentArguments, num_eval: int) -> tuple:
    """The texts for training and those for validation, as data sets of the package datasets or streams."""
    check_int("validation_split_percentage", documents.validation_split_percentage, 0, 99)
    path, column = Path(documents.dataset_name), documents.text_column
    options = {"streaming": documents.streaming}
    if path.is_file():
        if path.suffix not in READERS:
            raise ValueError(f"dataset_name is the file {path}: its name must end in {', '.join(READERS)}")
        splits = load_splits(READERS[path.suffix], data_files=str(path), **options)
    else:
        splits = load_splits(documents.dataset_name, name=documents.dataset_config_name, **options)
    texts = choose_split(splits, "train", documents.dataset_name)
    columns = texts.column_names
    if columns is not None and column not in columns:
        raise ValueError(
            f"text_column is {column!r}, and {documents.dataset_name} has the columns {', '.join(map(repr, columns))}: pass "
            "one of them as --text_column"
        )
    if path.suffix == ".txt":  # the empty lines between paragraphs are no texts
        texts = texts.filter(lambda row: bool(row[column].strip()))
    if "validation" in splits:
        return texts, splits["validation"]
    if documents.streaming:
        return texts.skip(num_eval), texts.take(num_eval)
    num_eval = len(texts) * documents.validation_split_percentage // 100
    if not num_eval:
        return texts, None
    return texts.select(range(num_eval, len(texts))), texts.select(range(num_eval))


if __name__ == "__main__":
    run_script(main)
