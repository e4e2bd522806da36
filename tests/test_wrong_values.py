# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Every public function is called with each kind of wrong value for each of its arguments, the others being right.

It must refuse the value in a sentence of its own: a `ValueError`, `TypeError` or `OSError` that a `raise` of this package
raises, and that names the argument. An error that comes out of torch, numpy, diffusers, transformers or the interpreter
fails, and so does a public function without a row in `ROWS`.
"""

import dataclasses
import importlib
import inspect
import linecache
import traceback
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from PIL import Image

import d3pm_hf
from d3pm_hf import D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model, data, training


PACKAGE = Path(d3pm_hf.__file__).parent
MODULES = ("d3pm_hf.data", "d3pm_hf.schedules", "d3pm_hf.training")
NAN, INF = float("nan"), float("inf")

# Wrong values by kind of argument; an optional argument takes None.
NEVER_A_NUMBER = ("3", [], [1, 2], torch.zeros(2), NAN, INF)
INT = (None, *NEVER_A_NUMBER, 2.5, -INF)
INT_FROM_0 = (*INT, -1)
INT_FROM_1 = (*INT_FROM_0, 0)
FLOAT = (None, *NEVER_A_NUMBER, -INF)
FLOAT_FROM_0 = (*FLOAT, -0.5)
POSITIVE = (*FLOAT_FROM_0, 0.0)
SHARE = (*FLOAT_FROM_0, 1.5)
STRING = (None, 3, 2.5, [], ["a"], NAN, torch.zeros(2))
NAME = (*STRING, "")
CHOICE = (*NAME, "nonsense")
PATH = CHOICE
NEW_PATH = NAME
FUNCTION = (None, 3, "f", [])
TOKENS = (None, 3, "ab", [], [0, 1], np.zeros(0, np.uint8), np.zeros((), np.uint8), np.zeros((4, 4)), np.full((4, 4), -1),
          np.full((4, 4), 3))  # fmt: skip
BETAS = (
    None,
    3,
    "ab",
    [],
    [0.5],
    torch.zeros(0),
    torch.zeros(3).long(),
    torch.tensor([0.5, NAN]),
    torch.tensor([-0.5]),
)
PROBABILITIES = (None, 3, "ab", [], torch.zeros(0), torch.zeros(3).long())
DATASET = (None, 3, "text", [], [1], np.zeros((2, 3)), torch.zeros(2, 3))
OTHER = (None, 3, "a", [], {}, torch.zeros(2))  # in place of a component of ours
BOOL = ()  # every value has a truth value


def optional(kind: tuple) -> tuple:
    return tuple(value for value in kind if value is not None)


@dataclasses.dataclass
class Row:
    """A public function.

    Args:
        valid: makes the arguments of a call that works, from the fixture `world`.
        kinds: the wrong values of each argument, by name; those that are missing in `valid` have defaults.
        words: what errors call an argument other than by its name.
    """

    valid: Callable
    kinds: dict[str, tuple]
    words: dict[str, str] = dataclasses.field(default_factory=dict)


def row(valid, words=None, **kinds) -> Row:
    return Row(valid, kinds, words or {})


SOURCE = {
    "dataset_name": (),
    "cache_dir": optional(NEW_PATH),
}  # a path stands in for the Hub, and its name is not read
LENGTHS = {"length": INT_FROM_1}

ROWS = {
    "d3pm_hf.data.Rows": row(
        lambda w: {"tokens": np.zeros((4, 3), np.uint8), "num_tokens": 3},
        {"tokens": "token"}, tokens=TOKENS, num_tokens=INT_FROM_1, random_flip=BOOL, num_words=optional(INT_FROM_0),
    ),
    "d3pm_hf.data.TextCrops": row(
        lambda w: {"tokens": np.zeros(9, np.uint8), "length": 3, "num_tokens": 3},
        {"tokens": "token"}, tokens=TOKENS, num_tokens=INT_FROM_1, length=(*INT_FROM_1, 10),
    ),
    "d3pm_hf.data.character_tokenizer": row(lambda w: {}, alphabet=(*NAME, "aa"), mask_token=(*NAME, "a")),
    "d3pm_hf.data.cooccurrence_embeddings": row(lambda w: {"dataset": w.crops}, dataset=DATASET, dim=INT_FROM_1),
    "d3pm_hf.data.digits": row(lambda w: {}),
    "d3pm_hf.data.load_cifar10": row(
        lambda w: {"dataset_path": w.images, "cache_dir": w.cache},
        split=CHOICE, dataset_path=optional(NEW_PATH), random_flip=BOOL, resolution=INT_FROM_1, **SOURCE,
    ),
    "d3pm_hf.data.load_images": row(
        lambda w: {"path_or_name": w.images, "cache_dir": w.cache},
        path_or_name=NEW_PATH, split=CHOICE, resolution=optional(INT_FROM_1), num_levels=(*INT, 1, 257), random_flip=BOOL,
        grayscale=BOOL, cache_dir=optional(NEW_PATH),
    ),
    "d3pm_hf.data.load_lm1b": row(
        lambda w: {"split": "train", "tokenizer": w.pieces, "dataset_path": w.lines, "length": 8, "cache_dir": w.cache},
        {"dataset_path": "path"}, split=CHOICE, tokenizer=(*DATASET, data.character_tokenizer()),
        dataset_path=optional(PATH), length=INT_FROM_1, max_examples=optional(INT_FROM_1), **SOURCE,
    ),
    "d3pm_hf.data.load_sentencepiece": row(lambda w: {"path": w.sentencepiece}, path=PATH),
    "d3pm_hf.data.load_sentences": row(
        lambda w: {"split": "train", "dataset_path": w.lines, "cache_dir": w.cache}, {"dataset_path": "path"},
        split=CHOICE, dataset_path=optional(PATH), max_examples=optional(INT_FROM_1), **SOURCE,
    ),
    "d3pm_hf.data.load_text": row(
        lambda w: {"path": w.text, "length": 8}, path=PATH, split=CHOICE, length=(*INT_FROM_1, 10**9)
    ),
    "d3pm_hf.data.load_text8": row(
        lambda w: {"dataset_path": w.text, "length": 8}, {"dataset_path": "path"},
        split=CHOICE, dataset_path=optional(PATH), length=INT_FROM_1, dataset_name=(), cache_dir=(),
    ),
    "d3pm_hf.data.python_prose": row(lambda w: {}, length=INT_FROM_1),
    "d3pm_hf.data.text8_normalize": row(lambda w: {"text": "a"}, text=STRING),
    "d3pm_hf.data.train_piece_tokenizer": row(
        lambda w: {"texts": w.sentences, "vocab_size": 60}, {"texts": "texts"},
        texts=(None, 3, "text", [], [1, 2], [None], torch.zeros(2)), vocab_size=(*INT_FROM_1, 2),
    ),
    "d3pm_hf.data.unigram_probs": row(lambda w: {"dataset": w.crops}, dataset=DATASET),
    "d3pm_hf.schedules.accumulate": row(lambda w: {"exponents": torch.ones(3)}, exponents=BETAS),
    "d3pm_hf.schedules.cosine_betas": row(lambda w: {"num_steps": 3}, num_steps=INT_FROM_1, offset=FLOAT_FROM_0),
    "d3pm_hf.schedules.entropy": row(lambda w: {"p": torch.ones(2) / 2}, p=PROBABILITIES),
    "d3pm_hf.schedules.exponents_from_betas": row(
        lambda w: {"betas": torch.ones(3)}, betas=(*BETAS, torch.tensor([1.5]))
    ),
    "d3pm_hf.schedules.linear_betas": row(
        lambda w: {"num_steps": 3, "beta_start": 0.1, "beta_end": 0.2},
        num_steps=INT_FROM_1, beta_start=FLOAT, beta_end=FLOAT,
    ),
    "d3pm_hf.schedules.mutual_information_exponents": row(
        lambda w: {"lost_information": lambda exponents: -torch.expm1(-exponents), "num_steps": 3},
        lost_information=FUNCTION, num_steps=INT_FROM_1, num_exponents=(*INT_FROM_1, 1), in_survival=BOOL,
    ),
    "d3pm_hf.schedules.reciprocal_betas": row(lambda w: {"num_steps": 3}, num_steps=INT_FROM_1),
    "d3pm_hf.training.D3PMTrainingArguments": row(
        lambda w: {},
        **dict.fromkeys(("output_dir", "logging_dir"), NEW_PATH),
        **dict.fromkeys(("resume_from_checkpoint", "report_to", "hub_model_id", "hub_token"), optional(NEW_PATH)),
        **dict.fromkeys(("overwrite_output_dir", "use_ema", "push_to_hub", "hub_private_repo"), BOOL),
        **dict.fromkeys(("seed", "dataloader_num_workers", "lr_warmup_steps", "validation_steps", "num_samples"), INT_FROM_0),
        **dict.fromkeys(("max_train_steps", "train_batch_size", "gradient_accumulation_steps"), INT_FROM_1),
        **dict.fromkeys(("checkpointing_steps", "logging_steps", "eval_batch_size", "max_eval_samples"), INT_FROM_1),
        **dict.fromkeys(("num_eval_timesteps", "num_inference_steps"), INT_FROM_1),
        checkpoints_total_limit=optional(INT_FROM_1), loss=CHOICE, lr_scheduler=CHOICE, mixed_precision=optional(CHOICE),
        **dict.fromkeys(("learning_rate", "adam_epsilon", "max_grad_norm", "ema_inv_gamma"), POSITIVE),
        **dict.fromkeys(("adam_beta1", "adam_beta2", "ema_max_decay"), SHARE),
        **dict.fromkeys(("hybrid_coeff", "adam_weight_decay", "ema_power"), FLOAT_FROM_0),
    ),
    "d3pm_hf.training.read_log": row(lambda w: {"path": w.log}, path=PATH),
    "d3pm_hf.training.train": row(
        lambda w: {"arguments": w.training_arguments(), "pipeline": w.text_pipeline, "train_dataset": w.crops},
        arguments=OTHER, pipeline=OTHER, train_dataset=DATASET, eval_dataset=optional(DATASET), card=(3, "a", []),
    ),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


class World:
    """Files and components of a size that costs nothing."""

    def __init__(self, folder: Path):
        self.folder, self.cache = folder, folder / "cache"
        text = data.text8_normalize(" ".join(topics[name] for name in sorted(topics)[:3]))
        self.sentences = text.split(" the ")
        self.text, self.lines, self.log = folder / "text.txt", folder / "lines.txt", folder / "log.jsonl"
        self.text.write_text("abc " * 100)
        self.lines.write_text("\n".join(self.sentences))
        self.log.write_text('{"step": 1}\n')
        self.images = folder / "images"
        self.images.mkdir()
        Image.new("RGB", (4, 4)).save(self.images / "0.png")
        self.text_pipeline = D3PMTextPipeline(
            create_text_model("tiny", 4), D3PMScheduler(4, 5), character_tokenizer("abc"), sequence_length=9
        )
        self.crops = data.TextCrops(np.random.default_rng(0).integers(0, 3, 99, np.uint8), 9, 3)
        self.pieces = data.train_piece_tokenizer(self.sentences, 60)
        self.sentencepiece = folder / "pieces.model"
        self.sentencepiece.write_bytes(sentencepiece_model())

    def training_arguments(self):
        settings = {"max_train_steps": 1, "train_batch_size": 2, "validation_steps": 0, "num_samples": 0}
        return training.D3PMTrainingArguments(str(self.folder / "run"), overwrite_output_dir=True, **settings)


def sentencepiece_model() -> bytes:
    proto = importlib.import_module("transformers.convert_slow_tokenizer").import_protobuf().ModelProto()
    for piece in ("<unk>", "</s>", "a", "b"):
        proto.pieces.add(piece=piece, score=0.0)
    proto.trainer_spec.model_type, proto.trainer_spec.unk_id = proto.trainer_spec.UNIGRAM, 0
    proto.trainer_spec.eos_id, proto.trainer_spec.bos_id = 1, -1
    return proto.SerializeToString()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


def find(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def public_names() -> set[str]:
    """All that `__all__` of the modules names; functions that a module without one defines."""
    names = set()
    for module in map(importlib.import_module, MODULES):
        own = [name for name, value in vars(module).items()
               if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"]  # fmt: skip
        names |= {f"{module.__name__}.{name}" for name in getattr(module, "__all__", own)}
    return names


def test_every_public_function_has_a_row():
    assert public_names() == set(ROWS)
    for name, entry in ROWS.items():
        assert set(inspect.signature(find(name)).parameters) == set(entry.kinds), name


@pytest.mark.parametrize("name", ROWS)
def test_right_values(name, world):
    """The calls that the wrong values are put into are right by themselves."""
    if name == "d3pm_hf.data.python_prose":
        pytest.skip("takes seconds, and has its own test")
    find(name)(**ROWS[name].valid(world))


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, entry in ROWS.items() for argument in entry.kinds if entry.kinds[argument]]
)  # fmt: skip
def test_wrong_values(name, argument, world):
    entry = ROWS[name]
    complaints = []
    for value in entry.kinds[argument]:
        try:
            find(name)(**{**entry.valid(world), argument: value})
        except Exception as error:  # whatever it is, it is judged
            complaints += [
                f"{value!r}: {complaint}" for complaint in judge(error, entry.words.get(argument, argument))
            ]
        else:
            complaints.append(f"{value!r} is accepted")
    assert not complaints, "\n".join(complaints)


def judge(error: Exception, words: str) -> list[str]:
    """What is wrong with an error: its type, where it comes from, or what it says."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    shown = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    if not isinstance(error, (ValueError, TypeError, OSError)):
        return [f"raw {shown}"]
    line = linecache.getline(frame.filename, frame.lineno).strip()
    if PACKAGE not in Path(frame.filename).parents or not line.startswith("raise "):
        return [f"not raised by this package: {shown}"]
    return [] if any(word in str(error) for word in words.split("|")) else [f"does not name {words}: {shown}"]
