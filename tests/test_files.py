# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Atomic writes: a failed write leaves the old file, and nothing else."""

import pytest
import torch
from safetensors import safe_open

from d3pm_hf.utils.files import (
    replacing,
    write_safetensors_atomically,
    write_text_atomically,
)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "evaluation.json"
    write_text_atomically(path, "first")
    with pytest.raises(OSError, match="no space"):
        with replacing(path) as temporary:
            temporary.write_text("sec")
            raise OSError("no space left on device")
    with pytest.raises(TypeError):
        write_safetensors_atomically(path, {"x": torch.ones(2)}, {"number": 3})
    assert [file.read_text() for file in tmp_path.iterdir()] == ["first"]


def test_the_last_writer_wins(tmp_path):
    path = tmp_path / "log"
    with replacing(path) as first, replacing(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
        assert not path.exists()
    assert [file.read_text() for file in tmp_path.iterdir()] == ["first"]  # the inner block ends first


def test_text_is_written_as_utf_8(tmp_path):
    write_text_atomically(str(tmp_path / "a.txt"), "ä\n")
    assert (tmp_path / "a.txt").read_bytes() == b"\xc3\xa4\n"


def test_safetensors(tmp_path):
    path = tmp_path / "transition.safetensors"
    tensors = {"rates": torch.arange(6.0).view(2, 3).T, "count": torch.tensor([7])}
    write_safetensors_atomically(path, tensors, {"transition": "rate"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "transition": "rate"}
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {
            "rates": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
            "count": [7],
        }
