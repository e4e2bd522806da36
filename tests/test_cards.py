# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Model cards: every number with its protocol and its error, for pipelines of this package and of others."""

import pytest

from d3pm_hf.hub.cards import eval_result


def test_an_eval_result_has_its_protocol_and_its_error():
    result = eval_result(
        "bits_per_dim",
        "Bits per dimension",
        1.234567,
        task="text-generation",
        dataset_name="two\nlines",
        split="validation",
        protocol="all of 3 examples",
        standard_error=0.012345,
        num_samples=3,
    )
    assert (result.metric_value, result.dataset_name, result.dataset_type) == (1.2346, "two lines", "two lines")
    assert (result.dataset_split, result.task_type) == ("validation", "text-generation")
    assert result.metric_args == {"protocol": "all of 3 examples", "num_samples": 3, "standard_error": 0.012}


@pytest.mark.parametrize("error", [None, float("nan")])
def test_an_eval_result_without_an_error(error):
    result = eval_result(
        "fid", "FID", 3.0, task="unconditional-image-generation", dataset_name="digits", standard_error=error
    )
    assert result.metric_args == {} and result.dataset_split == "test"


def test_an_unknown_task():
    with pytest.raises(ValueError, match="task is 'text': it must be one of text-generation, unconditional-image-gen"):
        eval_result("fid", "FID", 3.0, task="text", dataset_name="digits")
