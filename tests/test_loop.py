# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The training loop: what a step averages over, what one run leaves to the next, and what is saved and refused when."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from forked_runs import (
    ForkedRun,
    mask_where_needed,
    train_partly_masked,
)
from training_run import Sentences

from d3pm_hf.training import read_log
from d3pm_hf.training.objective import average, count_scored


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
SHORT = {"max_train_steps": 4, "checkpointing_steps": 2, "validation_steps": 2, "num_inference_steps": 4}
BARE = {"max_train_steps": 2, "validation_steps": 0, "num_samples": 0}


def files_of(folder):
    """The content of each file of a run by its path, without checkpoints."""
    paths = [path.relative_to(folder) for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (folder / path).read_bytes() for path in paths if not path.parts[0].startswith("checkpoint-")}


# The mean of a step


@pytest.mark.parametrize("order", [1, -1])
def test_a_step_may_have_batches_with_and_without_a_mask(order):
    x_0, scored = torch.zeros(2, 5, dtype=torch.long), torch.arange(10).reshape(2, 5) < 3
    batches = [{"x_0": x_0}, {"x_0": x_0, "loss_mask": scored}][::order]
    step = list(count_scored(batches, Accelerator(cpu=True), 2))
    losses = [average(batch.get("loss_mask", torch.ones(2, 5)).float(), batch) for batch in step]
    assert sum(losses).item() / 2 == pytest.approx(1)  # 13 elements with a loss of 1 each


@pytest.mark.parametrize("processes", [1, 2])
def test_masks_where_they_are_needed(tmp_path, processes):
    """Steps of two batches of which one, both or none have a mask average over the same elements as one batch."""
    options = {"max_train_steps": 12, "validation_steps": 0, "num_samples": 0}
    train_partly_masked(output_dir=str(tmp_path / "whole"), train_batch_size=4, **options)
    folder, options = tmp_path / "run", {**options, "train_batch_size": 2}
    if processes == 1:
        train_partly_masked(output_dir=str(folder), gradient_accumulation_steps=2, **options)
    else:
        with ForkedRun(train_partly_masked, folder, 2, **options) as shared:
            assert shared.wait(timeout=100) == [0, 0], shared.output()
    rows = torch.stack([Sentences()[index] for index in range(200)])
    assert 0.2 < (rows == 3).any(1).float().mean() < 0.8 and "loss_mask" not in mask_where_needed([rows[0] * 0])
    for line, other in zip(read_log(folder / "log.jsonl"), read_log(tmp_path / "whole/log.jsonl"), strict=True):
        assert line == pytest.approx(other, abs=1e-5)
