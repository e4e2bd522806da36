# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`examples/antibodies.py`: a pretrained masked language model from the package registry."""

from pathlib import Path

import antibodies
import pytest
import torch

from d3pm_hf import D3PMPipeline, D3PMTextPipeline


def test_loops():
    """Each loop stands once in its chain, chains consist of the twenty residues, and the page shows them."""
    page = (Path(__file__).parents[1] / "docs" / "source" / "en" / "antibodies.md").read_text(encoding="utf-8")
    assert len(antibodies.ANTIBODIES) == 6
    for sequence, loops in antibodies.ANTIBODIES.values():
        assert set(sequence) <= set("ACDEFGHIKLMNPQRSTVWY") and len(loops) == 3 and f" {sequence}\n" in page
        starts = [sequence.index(loop) for loop in loops]
        assert starts == sorted(starts) and all(sequence.count(loop) == 1 for loop in loops)


def test_without_the_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match="antiberty==0.1.3 cannot be downloaded .*: check that pip reaches its index"):
        antibodies.download(tmp_path, "antiberty==0.1.3")


@pytest.mark.slow
def test_antiberty(tmp_path, monkeypatch):
    """Pickled weights of a real model: the bound without training, a checkpoint in safetensors, and infilling."""
    try:
        model = antibodies.prepare_model(tmp_path)
    except OSError as error:
        pytest.skip(str(error))
    with pytest.raises(OSError, match="has no weights in safetensors: pass use_safetensors=False"):
        D3PMTextPipeline.from_masked_lm(model)
    pipeline = D3PMTextPipeline.from_masked_lm(model, use_safetensors=False)
    assert pipeline.scheduler.never_data == (0, 1, 2, 3, 4) and len(pipeline.tokenizer) == 25
    bounds = antibodies.measure_bounds(pipeline, num_terms=10)
    assert 0.5 < bounds["all"] < 1.0 and bounds["uniform"] == 2.996
    pipeline.save_pretrained(tmp_path / "pipeline")
    loaded = D3PMPipeline.from_pretrained(tmp_path / "pipeline")
    x_0 = antibodies.encode(pipeline, "EVQLVESGG")["x_0"]
    with torch.no_grad():
        assert torch.equal(loaded.denoiser(x_0, 0), pipeline.denoiser(x_0, 0))
    name, (sequence, _) = ("adalimumab", "heavy"), antibodies.ANTIBODIES["adalimumab", "heavy"]
    monkeypatch.setattr(antibodies, "ANTIBODIES", {name: (sequence, ("DYAMH",))})
    figures = antibodies.infill_loops(loaded, num_samples=4, num_inference_steps=8)
    assert figures["adalimumab, heavy 1"]["recovered"] > 0.5  # 0.05 by chance


@pytest.mark.slow
def test_recombinations(tmp_path):
    try:
        chains = antibodies.recombine(tmp_path, 20, seed=0)
    except OSError as error:
        pytest.skip(str(error))
    assert len(set(chains)) == 20 and chains == antibodies.recombine(tmp_path, 20, seed=0)
    for before, loop, after in chains:
        sequence = before + loop + after
        assert 100 < len(sequence) < 160 and sequence[:1] in "QE" and sequence.endswith("VSS")
        assert before[-3] == "C" and after[:2] == "WG"
