# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Batches of examples of unequal length, and texts as tokens: apart or packed."""

import pytest
import torch
from datasets import Dataset, DatasetDict

from d3pm_hf import character_tokenizer
from d3pm_hf.data import DataCollatorForD3PM, tokenize
from d3pm_hf.data.batches import read_batch
from d3pm_hf.training.step_batches import RunCollator


def tokenizer_with_ends():
    """The letters of text8, a mask, and tokens for padding and the end of a text."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "eos_token": "[EOS]"})
    return tokenizer


PAD, EOS = 28, 29


def test_texts_are_padded_on_the_right():
    batch = DataCollatorForD3PM(tokenizer_with_ends())([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])
    assert batch["x_0"].tolist() == [[1, 2, 3], [4, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert batch["loss_mask"].dtype == torch.bool and "condition" not in batch


def test_texts_of_equal_length_have_no_attention_mask():
    batch = DataCollatorForD3PM()([{"x_0": torch.tensor([1, 2])}, {"x_0": torch.tensor([3, 4])}])
    assert set(batch) == {"x_0", "loss_mask"} and batch["loss_mask"].all()


def test_tensors_stay_as_they_are():
    images = torch.arange(24).reshape(2, 1, 3, 4)
    assert DataCollatorForD3PM()(list(images)).keys() == {"x_0"}
    batch = DataCollatorForD3PM(label_column="digit")([{"x_0": x, "digit": 3 + i} for i, x in enumerate(images)])
    assert torch.equal(batch["x_0"], images) and batch["condition"]["class_labels"].tolist() == [3, 4]
    assert "loss_mask" not in batch  # all of it is scored


def test_labels_and_masks():
    examples = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "note": "x"},
    ]
    batch = DataCollatorForD3PM()(examples)
    assert batch["loss_mask"].tolist() == [[False, False, True, True], [False, True, True, False]]
    one = {"input_ids": [5, 6, 7], "loss_mask": [1, 0, 1], "attention_mask": [1, 1, 0], "condition": {"size": [0.5]}}
    batch = DataCollatorForD3PM()([one, one])
    assert batch["loss_mask"].tolist() == [[True, False, False]] * 2
    assert batch["attention_mask"].tolist() == [[1, 1, 0]] * 2 and batch["condition"]["size"].shape == (2, 1)


def test_lengths():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    tokenizer = tokenizer_with_ends()
    assert DataCollatorForD3PM(pad_to_multiple_of=4)(rows)["x_0"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert DataCollatorForD3PM(padding="max_length", max_length=5)(rows)["x_0"].shape == (2, 5)
    filled = DataCollatorForD3PM(tokenizer, max_length=5, fill_with_eos=True)(rows)
    assert filled["x_0"].tolist() == [[1, 2, 3, EOS, EOS], [4, EOS, EOS, EOS, EOS]]
    assert filled["loss_mask"].all() and "attention_mask" not in filled
    both = DataCollatorForD3PM(tokenizer, max_length=3, fill_with_eos=True, pad_to_multiple_of=4)(rows)
    assert both["x_0"].tolist() == [[1, 2, 3, PAD], [4, EOS, EOS, PAD]]
    assert both["attention_mask"].tolist() == [[1, 1, 1, 0]] * 2


@pytest.mark.parametrize(
    "options, examples, words",
    [
        ({}, [], "examples is empty"),
        ({}, [{"text": "a"}], "the columns 'text': it needs the data in one column named 'x_0' or 'input_ids'"),
        ({}, [{"input_ids": []}], "input_ids is \\[\\]: pass a list or a tensor of integers that is not empty"),
        ({}, [{"input_ids": [0.5]}], "input_ids is \\[0.5\\]: pass a list or a tensor of integers"),
        ({}, [{"input_ids": [1, 2], "labels": [1]}], "labels has the shape \\(1,\\), and input_ids \\(2,\\)"),
        ({}, [{"input_ids": [1, 2], "labels": [-100, 3]}], "labels differ from input_ids where they are not -100"),
        (
            {},
            [{"input_ids": [1, 2], "attention_mask": [1, 2]}],
            "attention_mask holds 2: pass booleans, or 1 where an element counts and 0 elsewhere",
        ),
        (
            {},
            [torch.tensor([1]), torch.tensor([1, 2])],
            "shapes \\(1,\\), \\(2,\\): .* as dictionaries with input_ids",
        ),
        ({}, [{"x_0": [1], "condition": {"a": 1}}, {"x_0": [1]}], "some examples have the entries .* the same ones"),
        ({"label_column": "kind"}, [{"x_0": [1]}], "label_column is 'kind', and an example has the columns 'x_0'"),
        ({"label_column": "kind"}, [{"x_0": [1], "kind": -1}], "the class in column 'kind' is -1"),
        ({"max_length": 2}, [{"input_ids": [1, 2, 3]}], "a text has 3 tokens, and max_length is 2: cut or pack"),
    ],
)
def test_wrong_examples(options, examples, words):
    with pytest.raises(ValueError, match=words):
        DataCollatorForD3PM(**options)(examples)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"padding": "left"}, "padding is 'left': it must be one of longest, max_length"),
        ({"padding": "max_length"}, "need a length to pad texts to: pass max_length"),
        ({"max_length": 4, "fill_with_eos": True}, "there is no tokenizer with an end of text: give it one"),
        ({"max_length": 0}, "max_length is 0"),
    ],
)
def test_wrong_settings(options, words):
    with pytest.raises(ValueError, match=words):
        DataCollatorForD3PM(**options)


# Texts


TEXTS = ["the cat", "a dog and a mouse", "so"]


def documents():
    return Dataset.from_dict({"text": TEXTS, "label": [0, 1, 2]})


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_stay_apart(streaming):
    tokenizer = tokenizer_with_ends()
    data = documents().to_iterable_dataset() if streaming else documents()
    rows = list(tokenize(data, tokenizer, append_eos=True))
    assert [row["label"] for row in rows] == [0, 1, 2] and all("text" not in row for row in rows)
    assert [row["input_ids"][-1] for row in rows] == [EOS] * 3
    assert [tokenizer.decode(row["input_ids"][:-1]) for row in rows] == TEXTS


def test_documents_are_packed():
    tokenizer = tokenizer_with_ends()
    rows = tokenize(documents(), tokenizer, max_length=8, packing=True, append_eos=True)
    assert rows.column_names == ["input_ids"] and all(len(row["input_ids"]) == 8 for row in rows)
    joined = [token for row in rows for token in row["input_ids"]]
    assert tokenizer.decode(joined).replace("[EOS]", "|") == "the cat|a dog and a mouse|so|"[: len(joined)]
    assert len(joined) == 24


def test_documents_are_cut():
    rows = tokenize(documents(), tokenizer_with_ends(), max_length=5, truncation=True, append_eos=True)
    assert [len(row["input_ids"]) for row in rows] == [5, 5, 3]
    assert [row["input_ids"][-1] == EOS for row in rows] == [False, False, True]  # their ends were cut off


def test_splits_together():
    splits = tokenize(DatasetDict({"train": documents(), "test": documents()}), tokenizer_with_ends())
    assert set(splits) == {"train", "test"} and splits["test"].column_names == ["label", "input_ids"]


@pytest.mark.parametrize(
    "texts, options, words",
    [
        (["a", ""], {}, "document 1 is '', which has no text: remove it with `dataset.filter`"),
        (["a", None], {}, "document 1 is None"),
        (["abc"], {"text_column": "body"}, "text_column is 'body', and the data set has the columns 'text': name one"),
        (["a", "abc"], {"max_length": 2}, "document 1 has 3 tokens, and max_length is 2: pass truncation=True to cut"),
        (["a"], {"packing": True}, "packing is True: pass max_length"),
        (["a"], {"packing": True, "truncation": True, "max_length": 2}, "packing and truncation are True"),
    ],
)
def test_wrong_texts(texts, options, words):
    with pytest.raises(ValueError, match=words):
        tokenize(Dataset.from_dict({"text": texts}), tokenizer_with_ends(), **options)


def test_an_end_that_is_not_there():
    with pytest.raises(ValueError, match="append_eos is True, and the tokenizer .* has no end of text: give it one"):
        tokenize(documents(), character_tokenizer(), append_eos=True)
    with pytest.raises(ValueError, match="it must be a data set of the package datasets"):
        tokenize(TEXTS, character_tokenizer())


def test_a_stream_has_one_process():
    splits = tokenize(DatasetDict({"train": documents()}), tokenizer_with_ends(), num_proc=1)
    assert len(splits["train"]) == len(TEXTS)
    with pytest.raises(ValueError, match="num_proc is 2, and dataset is a stream, which one process reads: leave"):
        tokenize(documents().to_iterable_dataset(), tokenizer_with_ends(), num_proc=2)


@pytest.mark.parametrize(
    "columns, scored",
    [
        ({}, None),
        ({"attention_mask": [[1, 1, 0]]}, [[True, True, False]]),
        ({"loss_mask": [[0, 1, 1]]}, [[False, True, True]]),
        ({"labels": [[-100, 1, 2]], "attention_mask": [[1, 1, 0]]}, [[False, True, False]]),
        ({"labels": [7]}, [[True, True, True]]),  # classes
    ],
)
def test_a_collator_of_the_user_is_read_as_by_an_evaluation(columns, scored):
    x_0 = torch.tensor([[0, 1, 2]])
    batch = {"x_0": x_0, **{name: torch.tensor(values) for name, values in columns.items()}}
    run_batch = RunCollator(lambda rows: batch, 5, ())([(0, x_0[0])])
    assert torch.equal(read_batch(run_batch)[1], read_batch(batch)[1])
    assert ("loss_mask" in run_batch) == (scored is not None)
    if scored is not None:
        assert run_batch["loss_mask"].tolist() == scored
