# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A small text model that writes verses: masked word pieces of the King James Bible.

    apt-get install bible-kjv && bible -f Gen1:1-Rev22:21 > kjv.txt
    python examples/bible.py train --data kjv.txt --output_dir outputs/bible
    python examples/bible.py evaluate --data kjv.txt
    python examples/bible.py draw --num_samples 20

`--data` has a verse per line, after its place and a space. An example is a token for the start and 40 word pieces from the beginning of a
verse on, inside one chapter. Of every twenty chapters one is kept for validation and one for testing. docs/source/en/bible.md has
the results.
"""

import argparse
from pathlib import Path


CHECKPOINT = str(Path(__file__).resolve().parent / "checkpoints" / "bible")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("command", choices=["train", "evaluate", "draw"], help="What to do.")
parser.add_argument("--data", help="train, evaluate: text with a verse per line.")
parser.add_argument("--checkpoint", default=CHECKPOINT, help="Folder of the checkpoint to evaluate or to draw with.")
parser.add_argument("--seed", type=int, default=0, help="Seed of weights, masks, orders and samples.")
parser.add_argument("--split", default="test", choices=["validation", "test"], help="evaluate: chapters to measure.")
parser.add_argument("--num_ordered", type=int, default=100, help="evaluate: number of rows of exact likelihoods.")
parser.add_argument("--num_samples", type=int, default=64, help="evaluate, draw: number of samples.")
parser.add_argument("--temperature", type=float, help="evaluate, draw: in place of the temperature of the page.")
parser.add_argument("--output_dir", default="outputs/bible", help="train: folder of the run.")
parser.add_argument("--resume_from_checkpoint", help="train: checkpoint folder to resume from, or `latest`.")
parser.add_argument("--max_train_steps", type=int, default=12_000, help="train: number of steps.")
parser.add_argument("--train_batch_size", type=int, default=32, help="train: number of rows of a step.")
parser.add_argument("--learning_rate", type=float, default=2e-3, help="train: peak learning rate.")
parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"], help="train: dtype of the products.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import re
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

import numpy as np
import torch
from datasets import Dataset
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from d3pm_hf import (
    Bound,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Likelihood,
    create_text_model,
    evaluate_bound,
    evaluate_likelihood,
)
from d3pm_hf.data import Rows, cooccurrence_embeddings
from d3pm_hf.training import D3PMTrainingArguments, train
from d3pm_hf.utils.scripts import run_script


NUM_PIECES, LENGTH, WIDTH = 4096, 40, 160
START = "<s>"
# Samples are written from left to right, at a temperature below 1. In gaps the most certain word comes first.
SAMPLING = {"sampler": "confidence", "sampler_kwargs": {"measure": "left_to_right"}, "temperature": 0.6}
FILLING = {"sampler": "confidence", "sampler_kwargs": {"measure": "margin"}, "temperature": 0.3}
ORDERS = "left_to_right", "margin", "random"


def load_chapters(path: str) -> dict[str, list[list[str]]]:
    """The verses of each chapter, for each split."""
    lines = [line.split(" ", 1) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    chapters = [[verse for _, verse in group] for _, group in groupby(lines, lambda line: line[0].split(":")[0])]
    validation, test = chapters[9::20], chapters[19::20]
    rest = [chapter for number, chapter in enumerate(chapters) if number % 20 not in (9, 19)]
    return {"train": rest, "validation": validation, "test": test}


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A BPE tokenizer whose pieces are words or parts of words with the space before them, or punctuation marks.

    A text begins with a token of its own: a network with relative positions would not know where it starts otherwise.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    marks = pre_tokenizers.Split(Regex("[.,:;?!()]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first"), marks])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=NUM_PIECES, special_tokens=["<unk>", START], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    mask = AddedToken("[MASK]", lstrip=True, special=True)  # a piece that fills it in has a space of its own
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        mask_token=mask,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def cut_rows(tokenizer: PreTrainedTokenizerFast, chapters: list[list[str]], overlap: bool = False) -> Rows:
    """Pieces `[n, 40]` from the beginning of verses on: of each verse, or of those after the end of the row before."""
    rows = []
    for verses in chapters:
        pieces = tokenizer(verses, add_special_tokens=False).input_ids
        chapter, start, end = list(chain.from_iterable(pieces)), 0, 0
        for verse in pieces:
            if (overlap or start >= end) and start + LENGTH <= len(chapter):
                end = start + LENGTH
                rows.append(chapter[start:end])
            start += len(verse)
    return Rows(np.array(rows, dtype=np.uint16), len(tokenizer) - 1)


def with_start(tokenizer: PreTrainedTokenizerFast, rows: Rows) -> Dataset:
    """The rows after the token for the start, which is given and not scored."""
    tokens = np.pad(rows.tokens, ((0, 0), (1, 0)), constant_values=tokenizer.bos_token_id)
    scored = np.broadcast_to(np.arange(LENGTH + 1) > 0, tokens.shape)
    return Dataset.from_dict({"input_ids": tokens, "loss_mask": scored}).with_format("torch")


def create_pipeline(tokenizer: PreTrainedTokenizerFast, rows: Rows) -> D3PMTextPipeline:
    """A T5 encoder without timestep, since the share of masks tells it, and an absorbing process.

    Pieces with similar neighbors begin near each other: of a text that is this small, random word vectors take half of the
    training to get there.
    """
    num_pieces = rows.num_tokens
    model = create_text_model(
        "paper",
        num_pieces + 1,
        backbone="t5",
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=4 * WIDTH,
        position_bias_init="offset",
        timestep_conditioning=False,
    )
    directions = cooccurrence_embeddings(rows, WIDTH)  # [pieces, D or less], of length 1
    with torch.no_grad():
        model.get_input_embeddings().weight[:num_pieces, : directions.shape[1]] = directions * WIDTH**0.5
    scheduler = D3PMScheduler(num_pieces + 1, suppress_tokens=[tokenizer.unk_token_id, tokenizer.bos_token_id])
    return D3PMTextPipeline(model, scheduler, tokenizer, sequence_length=LENGTH + 1, add_special_tokens=True)


def train_network(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    chapters = load_chapters(options.data)
    tokenizer = train_tokenizer(chain.from_iterable(chapters["train"]))
    rows = cut_rows(tokenizer, chapters["train"], overlap=True)
    settings = D3PMTrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=options.resume_from_checkpoint is None,
        resume_from_checkpoint=options.resume_from_checkpoint,
        seed=options.seed,
        max_train_steps=options.max_train_steps,
        train_batch_size=options.train_batch_size,
        timestep_sampling="logit_normal",
        logit_mean=-0.5,
        learning_rate=options.learning_rate,
        lr_scheduler="cosine",
        lr_warmup_steps=min(300, options.max_train_steps // 10),
        ema_max_decay=0.999,
        mixed_precision=options.mixed_precision,
        logging_steps=50,
        checkpointing_steps=1000,
        checkpoints_total_limit=2,
        validation_steps=2500,
        max_eval_samples=128,
        num_eval_timesteps=10,
        num_samples=4,
    )
    pipeline, validation = create_pipeline(tokenizer, rows), cut_rows(tokenizer, chapters["validation"])
    data = [with_start(tokenizer, part) for part in (rows, validation)]
    train(settings, pipeline, *data, {"dataset_name": "the King James Bible"})


def load_pipeline(folder: str) -> D3PMTextPipeline:
    pipeline = D3PMPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: D3PMTextPipeline, options: argparse.Namespace) -> list[str]:
    """Samples without selection, each cut at the end of its last whole word."""
    chosen = {} if options.temperature is None else {"temperature": options.temperature}
    generator = torch.Generator().manual_seed(options.seed)
    texts = pipeline(batch_size=options.num_samples, generator=generator, **{**SAMPLING, **chosen}).texts
    return [text.rpartition(" ")[0] for text in texts]


def find_words(texts: Iterable[str]) -> list[str]:
    return [word for text in texts for word in re.findall("[a-z'-]+", text.lower())]


def count_known(texts: Sequence[str], known: Iterable[str]) -> float:
    """The share of the words of texts that occur in other texts, in any case."""
    vocabulary, words = set(find_words(known)), find_words(texts)
    return sum(word in vocabulary for word in words) / len(words)


def evaluate(options: argparse.Namespace) -> None:
    """Prints bits per word piece, and the share of the words of samples and of the data that occur in the training chapters."""
    pipeline, chapters = load_pipeline(options.checkpoint), load_chapters(options.data)
    rows = cut_rows(pipeline.tokenizer, chapters[options.split])
    data = with_start(pipeline.tokenizer, rows)
    characters = sum(map(len, pipeline.decode(data["input_ids"][:]))) / rows.tokens.size
    print(f"{len(rows)} rows of the {options.split} chapters, {characters:.2f} characters per word piece")
    order = np.random.default_rng(options.seed).permutation(len(rows))

    def batches(places: np.ndarray, size: int) -> list[dict]:
        return [data[places[start : start + size]] for start in range(0, len(places), size)]

    def report(name: str, result: Bound | Likelihood) -> None:
        bits, error = result.bits_per_dim, result.bits_per_dim_standard_error
        unit = f"bits per piece, {bits / characters:.3f} per character"
        print(f"{name:>20} {result.num_examples:5} rows {bits:6.3f} ± {error:.3f} {unit}", flush=True)

    protocol = {"num_eval_timesteps": 10, "seed": options.seed}
    bound = evaluate_bound(pipeline.scheduler, pipeline.denoiser, batches(np.arange(len(rows)), 64), **protocol)
    report(f"bound, {len(pipeline.scheduler)} steps", bound)
    for name in ORDERS if options.num_ordered else ():
        chosen = batches(order[: options.num_ordered], 50)
        report(name, evaluate_likelihood(pipeline, chosen, order=name, seed=options.seed))
    known = list(chain.from_iterable(chapters["train"]))
    real = list(chain.from_iterable(chapters[options.split]))
    for name, texts in {"samples": draw(pipeline, options), options.split: real}.items():
        print(
            f"{name:>20} {len(texts):5} texts {count_known(texts, known):.1%} of the words occur in the training chapters"
        )


def main():
    options = parser.parse_args()
    if options.data is None and options.command != "draw":
        raise ValueError("pass --data, a text with a verse per line: bible -f Gen1:1-Rev22:21 > kjv.txt")
    if options.command == "draw":
        print("\n".join(draw(load_pipeline(options.checkpoint), options)))
    else:
        {"train": train_network, "evaluate": evaluate}[options.command](options)


if __name__ == "__main__":
    run_script(main)
