# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Training: what a step sees, on any number of processes; runs that are killed and resumed; what a run leaves behind."""

import itertools
import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.training_utils import EMAModel
from forked_runs import ForkedRun
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from training_run import LENGTH, SETTINGS, Sentences, T, make_pipeline, run, run_or_die

from d3pm_hf import (
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextModel,
    D3PMTextPipeline,
    autoregressive_loss,
    create_text_model,
    d3pm_loss,
    evaluate_bound,
)
from d3pm_hf.numerics import derive_seed
from d3pm_hf.training import D3PMTrainingArguments, progress, read_log
from d3pm_hf.training.objective import noise_generators
from d3pm_hf.training.optimization import AveragedWeights
from d3pm_hf.training.state_files import load_states
from d3pm_hf.training.step_batches import IndexedExamples, StepBatches


pytestmark = pytest.mark.usefixtures("fresh_accelerator")


def launch(folder, processes=1, **settings):
    """A run in processes of its own: their exit codes, and what they have written to stderr."""
    with ForkedRun(run_or_die, folder, processes, **settings) as started:
        return started.wait(), started.output()


def state_of(folder, step=50):
    """All that a checkpoint holds: weights, optimizer, progress, learning rate and average."""
    folder = Path(folder) / f"checkpoint-{step}"
    weights = load_file(folder / "model.safetensors")
    rest = [torch.load(folder / "optimizer.bin"), *load_states(folder, ["progress", "lr_scheduler", "ema"]).values()]
    return {"weights": weights, "rest": rest}


def assert_same(a, b, tolerance=0.0):
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], tolerance)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y, tolerance)
    else:
        assert a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(output_dir=str(folder))
    return folder


# What a step sees


def items(batch_size, batches_per_step, steps=range(7), num_examples=50, seed=3):
    batches = StepBatches(num_examples, batch_size, batches_per_step, 1000, seed, steps)
    result = list(batches)
    assert len(result) == len(batches) and all(len(batch) == batch_size for batch in result)
    return [item for batch in result for item in batch]


def test_a_step_does_not_depend_on_how_it_is_shared_out():
    assert items(12, 1) == items(4, 3) == items(1, 12)
    assert items(12, 1, range(3, 7)) == items(12, 1)[3 * 12 :]
    assert items(12, 1, seed=4) != items(12, 1)


def test_epochs():
    """Each example once, in another order each time; what does not fill a step is left out."""
    one, two = ([index for index, _, _ in items(12, 1, steps)] for steps in (range(0, 4), range(4, 8)))
    assert len(set(one)) == len(set(two)) == 48 and one != two
    seeds = [seed for _, seed, _ in items(12, 1, range(8))]
    assert len(set(seeds)) == len(seeds)


def test_timesteps_are_stratified_and_uniform():
    counts = np.zeros(1000)
    for step in range(200):
        timesteps = np.array([t for _, _, t in items(50, 1, range(step, step + 1))])
        assert sorted(timesteps // 20) == list(range(50))  # one from each fiftieth of time
        counts[timesteps] += 1
    assert counts.sum() == 10_000 and abs(counts - 10).max() < 15 and counts.min() > 0
    # The order says nothing about the timestep.
    firsts = [items(50, 1, range(step, step + 1))[0][2] for step in range(300)]
    assert abs(np.mean(firsts) - 500) < 60


def test_more_examples_than_timesteps():
    batches = StepBatches(64, 64, 1, 6, 0, range(1))
    timesteps = [t for _, _, t in next(iter(batches))]
    assert min(np.bincount(timesteps, minlength=6)) >= 10


def test_noise_is_that_of_the_sample():
    scheduler, x = D3PMScheduler(28), Sentences().rows[:4]
    seeds, timesteps = torch.tensor([5, 6, 7, 8]), torch.tensor([100, 300, 500, 900])
    all_four = scheduler.add_noise(x, timesteps, noise_generators(seeds.tolist()))
    for part in ([2, 0], [3]):
        some = scheduler.add_noise(x[part], timesteps[part], noise_generators(seeds[part].tolist()))
        assert torch.equal(some, all_four[part])


def test_seeds_stay_those_of_recorded_runs():
    """The noise of bounds and dropout: another derivation would change every number that was measured with a seed."""
    assert derive_seed(0, 3) == 3291213472928352369
    assert derive_seed(7, 12, 1, bits=32) == 2857834224
    for bits in (8, 32, 63, 64):
        seeds = {derive_seed(*numbers, bits=bits) for numbers in itertools.product(range(2), repeat=3)}
        assert max(seeds) < 2**bits and len(seeds) > 6


def test_too_little_data():
    with pytest.raises(ValueError, match="the data set has 7 examples, and a step takes 8: use a smaller batch"):
        StepBatches(7, 4, 2, 100, 0, range(1))
    index, x_0, seed, timestep = IndexedExamples(Sentences())[5, 1, 9]
    assert (index, seed, timestep) == (5, 1, 9) and torch.equal(x_0, Sentences()[5, 1])


# One process or many


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        pytest.param(2, {"train_batch_size": 4}, id="two processes"),
        pytest.param(
            1, {"train_batch_size": 4, "gradient_accumulation_steps": 2}, id="accumulation", marks=pytest.mark.slow
        ),
    ],
)
def test_the_same_run_shared_out(whole, tmp_path, processes, settings):
    codes, output = launch(tmp_path / "run", processes, **settings)
    assert codes == [0] * processes, output
    assert "training: 100%" in output
    lines, expected = read_log(tmp_path / "run/log.jsonl"), read_log(whole / "log.jsonl")
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected):
        assert line.keys() == other.keys() and line["step"] == other["step"]
        for name in line:
            assert abs(line[name] - other[name]) < 1e-5, name
    assert_same(state_of(tmp_path / "run")["weights"], state_of(whole)["weights"], 1e-4)
    assert_same(
        load_file(tmp_path / "run/text_model/model.safetensors"),
        load_file(whole / "text_model/model.safetensors"),
        1e-4,
    )


# Killed and resumed


def assert_same_run(folder, whole, step=50):
    assert (folder / "log.jsonl").read_bytes() == (whole / "log.jsonl").read_bytes()
    assert_same(state_of(folder, step), state_of(whole, step))
    assert (folder / "text_model/model.safetensors").read_bytes() == (
        whole / "text_model/model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "death",
    [
        pytest.param({"die_at_step": 17}, marks=pytest.mark.slow),
        pytest.param({"die_at_step": 33}, marks=pytest.mark.slow),
        {"die_while_saving_at": 40},
    ],
    ids=str,
)
def test_killed_at_any_moment(whole, tmp_path, death):
    folder = tmp_path / "run"
    codes, _ = launch(folder, **death)
    assert codes == [-signal.SIGKILL]
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == ([] if death.get("die_at_step") == 17 else ["checkpoint-20"])
    run(output_dir=str(folder), resume_from_checkpoint="latest")
    assert_same_run(folder, whole)
    assert not list(folder.glob(".*partial"))


@pytest.mark.slow
def test_resumed_with_another_split_of_the_batch(whole, tmp_path):
    """In the middle of the run, and with the log between two lines."""
    run(output_dir=str(tmp_path), max_train_steps=23, checkpointing_steps=9, logging_steps=1)
    settings = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "resume_from_checkpoint": str(tmp_path / "checkpoint-9"),
    }
    run(output_dir=str(tmp_path), **settings)
    assert_same(state_of(tmp_path)["weights"], state_of(whole)["weights"], 1e-5)
    assert [line["step"] for line in read_log(tmp_path / "log.jsonl")] == [
        line["step"] for line in read_log(whole / "log.jsonl")
    ]


@pytest.mark.parametrize("every", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_a_checkpoint_between_two_lines_of_the_log(tmp_path, every):
    options = {"logging_steps": every, "max_train_steps": 20, "validation_steps": 0, "checkpointing_steps": 7}
    run(make_pipeline(dropout=0.2), output_dir=str(tmp_path / "whole"), **options)
    run(make_pipeline(dropout=0.2), output_dir=str(tmp_path / "run"), **{**options, "max_train_steps": 16})
    resume = {"resume_from_checkpoint": str(tmp_path / "run/checkpoint-7")}
    run(make_pipeline(dropout=0.2), output_dir=str(tmp_path / "run"), **{**options, **resume})
    assert (tmp_path / "run/log.jsonl").read_bytes() == (tmp_path / "whole/log.jsonl").read_bytes()
    assert_same(state_of(tmp_path / "run", 20), state_of(tmp_path / "whole", 20))


def test_a_full_disk_loses_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    run(output_dir=str(folder), max_train_steps=20, validation_steps=0)
    size = (folder / "checkpoint-20/model.safetensors").stat().st_size
    # Room for the weights, none for the optimizer's two moments.
    codes, output = launch(folder, resume_from_checkpoint="latest", largest_file=int(1.5 * size))
    assert codes == [1]
    assert "checkpoint-40 could not be written to" in output and "checkpoint-20 is complete" in output
    assert "--resume_from_checkpoint latest" in output
    assert [path.name for path in folder.glob("*checkpoint-*")] == ["checkpoint-20"]
    run(output_dir=str(folder), resume_from_checkpoint="latest")
    assert_same(state_of(folder), state_of(whole))


# What a run leaves behind


def test_the_average_is_that_of_diffusers():
    """One pass over the weights gives what `EMAModel` gives, at each step of its warm-up."""
    settings = {"decay": 0.9, "use_ema_warmup": True, "inv_gamma": 1.0, "power": 3 / 4}
    weights = torch.nn.Parameter(torch.zeros(4))
    ours, theirs = (average([weights], **settings) for average in (AveragedWeights, EMAModel))
    for step in range(30):
        weights.data = torch.randn(4, generator=torch.Generator().manual_seed(step))
        for average in (ours, theirs):
            average.step([weights])
        torch.testing.assert_close(ours.shadow_params, theirs.shadow_params)


def test_what_is_saved_is_the_average(whole):
    saved, raw = load_file(whole / "text_model/model.safetensors"), state_of(whole)["weights"]
    pipeline = make_pipeline()
    shadow = state_of(whole)["rest"][3]["shadow_params"]
    names = [name for name, _ in pipeline.text_model.named_parameters()]
    for name, average in zip(names, shadow):
        assert torch.equal(saved[name], average)
    assert max((saved[name] - raw[f"network.{name}"]).abs().max() for name in saved) > 1e-4


def test_a_run_ends_with_what_it_has(tmp_path, capsys, caplog):
    """A few lines, and no warning of tied weights that are written once."""
    folder = tmp_path / "my run"
    run(output_dir=str(folder), max_train_steps=2)
    printed = capsys.readouterr().out
    sample = (folder / "samples/final.txt").read_text().splitlines()[0]
    assert f"Trained for 2 steps. The pipeline, its card and its log are in {folder}." in printed
    assert re.search(r"^bound   [\d.]+ ± [\d.]+ bits/dim \(16 examples", printed, re.M)
    assert f"sample  {' '.join(sample.split())}\n" in printed
    assert f"next    python -m d3pm_hf.app '{folder}'" in printed
    assert "shared tensor" not in caplog.text
    assert "network.lm_head.weight" not in load_file(folder / "checkpoint-2/model.safetensors")
    run(output_dir=str(folder), max_train_steps=3, resume_from_checkpoint="latest", num_samples=0, validation_steps=0)
    printed = capsys.readouterr().out
    assert "Trained for 3 steps" in printed and "bound  " not in printed and "sample " not in printed


def test_the_pipeline_and_its_card(whole):
    pipeline = D3PMPipeline.from_pretrained(whole)
    pipeline.set_progress_bar_config(disable=True)
    assert len(pipeline(num_inference_steps=5).texts[0]) == LENGTH
    card = ModelCard.load(whole / "README.md")
    last = [line for line in read_log(whole / "log.jsonl") if "eval_bits_per_dim" in line][-1]
    assert card.data.eval_results[0].metric_value == round(last["eval_bits_per_dim"], 4)
    assert "| max_train_steps | 50 |" in card.text and "5 stratified terms per example" in card.text
    samples = (whole / "samples/final.txt").read_text().splitlines()
    assert len(samples) == 2 and samples[0] in card.text
    assert (whole / "samples/step-25.txt").exists()


def test_the_loss_goes_down(tmp_path):
    options = {"learning_rate": 3e-3, "lr_scheduler": "constant_with_warmup", "ema_inv_gamma": 0.1}
    run(output_dir=str(tmp_path), max_train_steps=300, validation_steps=300, logging_steps=100, **options)
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[0]["bits"] > 4.5 and lines[-1]["eval_bits_per_dim"] < 4.4


def test_checkpoints_total_limit(tmp_path):
    options = {"validation_steps": 0, "num_samples": 0, "max_train_steps": 9, "checkpointing_steps": 2}
    run(output_dir=str(tmp_path), checkpoints_total_limit=2, **options)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-8", "checkpoint-9"]
    older = {"resume_from_checkpoint": str(tmp_path / "checkpoint-8"), "checkpointing_steps": 1}
    (tmp_path / "checkpoint-9").rename(tmp_path / "checkpoint-30")
    run(output_dir=str(tmp_path), checkpoints_total_limit=1, **{**options, **older})
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-30", "checkpoint-9"]


def test_bfloat16(tmp_path):
    run(output_dir=str(tmp_path), mixed_precision="bf16", max_train_steps=3, validation_steps=0)
    assert all(np.isfinite(line["loss"]) for line in read_log(tmp_path / "log.jsonl"))


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    run(output_dir=str(tmp_path), report_to="tensorboard", max_train_steps=3, validation_steps=0)
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))


@pytest.mark.parametrize("loss", ["vb", "hybrid", "hybrid_denoising"])
def test_losses(tmp_path, loss):
    """The first line of the log is the loss of the first batch, whatever the loss."""
    pipeline = make_pipeline(transition="uniform", beta_schedule="cosine")
    run(pipeline, output_dir=str(tmp_path), loss=loss, hybrid_coeff=0.1, max_train_steps=1, validation_steps=0)
    batch = next(iter(StepBatches(200, 8, 1, T, 0, range(1))))
    examples = [IndexedExamples(Sentences())[item] for item in batch]
    x_0 = torch.stack([x_0 for _, x_0, _, _ in examples])
    seeds, t = [seed for *_, seed, _ in examples], torch.tensor([timestep for *_, timestep in examples])
    pipeline = make_pipeline(transition="uniform", beta_schedule="cosine")
    x_t = pipeline.scheduler.add_noise(x_0, t, noise_generators(seeds))
    options = {
        "vb": {},
        "hybrid": {"hybrid_coeff": 0.1},
        "hybrid_denoising": {"hybrid_coeff": 0.1, "auxiliary": "denoising"},
    }
    expected = d3pm_loss(pipeline.scheduler, pipeline.denoiser(x_t, t), x_0, x_t, t, **options[loss])
    line = read_log(tmp_path / "log.jsonl")[0]
    assert line["loss"] == pytest.approx(expected.loss.mean().item(), rel=1e-5)
    assert line["bits"] == pytest.approx(expected.vb.mean().item() * T / np.log(2), rel=1e-5)


def test_every_step_drops_out_differently(tmp_path):
    """Another mask at each micro-step of a run, and the same masks when the run is done again."""

    def masks(folder):
        pipeline, seen = make_pipeline(dropout=0.25), []
        layer = next(part for part in pipeline.text_model.modules() if isinstance(part, torch.nn.Dropout))

        def look(layer, inputs, output):
            if layer.training:
                seen.append((output == 0) & (inputs[0] != 0))

        layer.register_forward_hook(look)
        options = {"max_train_steps": 4, "gradient_accumulation_steps": 2, "validation_steps": 0, "num_samples": 0}
        run(pipeline, output_dir=str(tmp_path / folder), train_batch_size=4, **options)
        return torch.stack(seen)  # [micro-steps, B, N, D]

    dropped = masks("one")
    assert len(dropped) == 8
    assert dropped.float().mean((1, 2, 3)).tolist() == pytest.approx(
        [0.25] * 8, abs=4 * 0.433 / 45
    )  # of 2,048 elements
    for first, second in itertools.combinations(dropped, 2):
        # Two masks that are independent differ in 2 p (1 - p) of the elements.
        assert (first != second).float().mean().item() == pytest.approx(0.375, abs=0.05)
    assert (dropped == masks("two")).all()


def causal_pipeline():
    torch.manual_seed(0)
    model = create_text_model("tiny", 28, is_decoder=True, timestep_conditioning=False)
    return D3PMTextPipeline(model, D3PMScheduler(28, LENGTH, transition="autoregressive"), sequence_length=LENGTH)


def test_the_autoregressive_loss_is_the_bound():
    """One pass over the data gives what the diffusion's loss adds up from one pass per timestep."""
    pipeline, x_0 = causal_pipeline(), Sentences().rows[:5]
    model = pipeline.text_model.eval()
    with torch.no_grad():
        loss = autoregressive_loss(pipeline.scheduler, model(x_0).logits, x_0)
    bound = evaluate_bound(pipeline.scheduler, lambda x_t, t: model(x_t).logits, [x_0], progress_bar=False)
    assert loss.mean().item() == pytest.approx(bound.total, rel=1e-5)


def test_training_an_autoregressive_model(tmp_path):
    options = {"max_train_steps": 200, "learning_rate": 3e-3, "num_samples": 3, "num_eval_timesteps": LENGTH}
    run(causal_pipeline(), output_dir=str(tmp_path), logging_steps=50, validation_steps=200, **options)
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[-1]["eval_bits_per_dim"] < 2.5 < lines[0]["bits"]
    assert lines[-2]["bits"] == pytest.approx(lines[-1]["eval_bits_per_dim"], abs=0.5)
    # What it has learned shows in its samples, which it draws token by token: the same letter again, or the next.
    samples = [
        [int(token) for token in line.split()] for line in (tmp_path / "samples/final.txt").read_text().splitlines()
    ]
    moves = torch.tensor(samples).diff(dim=1) % 27
    assert moves.shape == (3, LENGTH - 1) and (moves <= 1).float().mean() > 0.35  # by chance 0.07


@pytest.mark.parametrize("is_decoder", [False, True], ids=["bidirectional", "causal"])
def test_no_network_beats_the_entropy(tmp_path, is_decoder):
    """Uniformly random characters have log2(27) = 4.755 bits; a network that was shown them would claim fewer."""
    torch.manual_seed(0)
    model = create_text_model("tiny", 28, is_decoder=is_decoder, timestep_conditioning=False)
    scheduler = D3PMScheduler(28, LENGTH, transition="autoregressive")
    pipeline = D3PMTextPipeline(model, scheduler, sequence_length=LENGTH)
    generator = torch.Generator().manual_seed(0)
    noise, other = Sentences(), Sentences()
    noise.rows, other.rows = (torch.randint(0, 27, (n, LENGTH), generator=generator) for n in (200, 32))
    options = {
        "max_train_steps": 60,
        "learning_rate": 1e-2,
        "lr_scheduler": "constant_with_warmup",
        "ema_inv_gamma": 0.1,
    }
    options |= {"validation_steps": 60, "num_eval_timesteps": LENGTH, "max_eval_samples": 32, "num_samples": 1}
    run(pipeline, noise, other, output_dir=str(tmp_path), num_inference_steps=4, **options)
    measured = read_log(tmp_path / "log.jsonl")[-1]
    card = ModelCard.load(tmp_path / "README.md").data.eval_results[0]
    for bits in (measured["eval_bits_per_dim"], card.metric_value):
        assert np.log2(27) - 3.5 * measured["eval_standard_error"] < bits < 8


class Leaking(D3PMTextModel):
    """Calls itself causal, and its input is shifted; but its attention reads both sides."""

    is_causal = True


def test_a_network_that_calls_itself_causal_is_checked_before_training(tmp_path):
    model = Leaking(create_text_model("tiny", 28, timestep_conditioning=False).config)
    scheduler = D3PMScheduler(28, LENGTH, transition="autoregressive")
    with pytest.raises(
        ValueError, match="is_causal is True, but the logits of position 13 change when it and the tokens"
    ):
        run(D3PMTextPipeline(model, scheduler, sequence_length=LENGTH), output_dir=str(tmp_path))
    assert model.training


def test_a_network_that_predicts_the_previous_step_is_sampled_at_every_step(tmp_path):
    pipeline = make_pipeline(num_train_timesteps=6, prediction_type="previous")
    run(pipeline, output_dir=str(tmp_path), max_train_steps=1, validation_steps=1, num_inference_steps=3, loss="vb")
    assert len((tmp_path / "samples/final.txt").read_text().splitlines()) == 2


# Bad input


def test_a_folder_that_holds_a_run(whole):
    with pytest.raises(ValueError, match="already holds a run: pass --resume_from_checkpoint latest to continue it"):
        run(output_dir=str(whole))


def test_start_anew(tmp_path):
    options = {"validation_steps": 0, "num_samples": 0, "max_train_steps": 2}
    run(output_dir=str(tmp_path), **options)
    (tmp_path / "notes.txt").write_text("mine")
    run(output_dir=str(tmp_path), overwrite_output_dir=True, **{**options, "max_train_steps": 1})
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert len(read_log(tmp_path / "log.jsonl")) == 1 and (tmp_path / "notes.txt").read_text() == "mine"


def test_latest_of_nothing_is_a_fresh_start(tmp_path):
    run(
        output_dir=str(tmp_path), resume_from_checkpoint="latest", max_train_steps=1, validation_steps=0, num_samples=0
    )
    assert (tmp_path / "checkpoint-1").exists()


def test_a_checkpoint_of_other_settings(whole):
    with pytest.raises(
        ValueError, match=r"other settings \(learning_rate is 0.1 and was 0.0005; seed is 7 and was 0\)"
    ):
        run(output_dir=str(whole), resume_from_checkpoint="latest", learning_rate=0.1, seed=7)
    with pytest.raises(ValueError, match="global_batch_size is 4 and was 8"):
        run(output_dir=str(whole), resume_from_checkpoint="latest", train_batch_size=4)
    with pytest.raises(
        ValueError,
        match="checkpoint of a run with other settings .*scheduler.transition is 'uniform' and was 'absorbing'",
    ):
        run(
            make_pipeline(transition="uniform", beta_schedule="cosine"),
            output_dir=str(whole),
            resume_from_checkpoint="latest",
        )


def test_a_checkpoint_of_an_older_version(whole, tmp_path):
    """Settings that were added since, and are not used, do not make it the checkpoint of another run."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    path = folder / "checkpoint-40" / "settings.json"
    settings = json.loads(path.read_text())
    unused = [name for name, value in settings["scheduler"].items() if value is None]
    assert "transition_kwargs" in unused
    for name in unused:
        del settings["scheduler"][name]
    path.write_text(json.dumps(settings))
    run(output_dir=str(folder), resume_from_checkpoint=str(folder / "checkpoint-40"))
    assert_same_run(folder, whole)
    settings["scheduler"]["transition_kwargs"] = {"width": 2}
    path.write_text(json.dumps(settings))
    with pytest.raises(
        ValueError, match=r"other settings \(scheduler.transition_kwargs is None and was {'width': 2}\)"
    ):
        run(output_dir=str(folder), resume_from_checkpoint=str(folder / "checkpoint-40"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "run_state.json", "run_state.safetensors"])
def test_a_broken_checkpoint(whole, tmp_path, name):
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    path = folder / "checkpoint-50" / name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(
        OSError, match=f"checkpoint-50 is broken, as its file {name} is damaged .*: remove the checkpoint"
    ):
        run(output_dir=str(folder), resume_from_checkpoint="latest")
    run(output_dir=str(folder), resume_from_checkpoint=str(folder / "checkpoint-40"))


def test_no_such_checkpoint(whole):
    with pytest.raises(ValueError, match="checkpoint-7 is not a checkpoint: pass a folder named checkpoint-<step>"):
        run(output_dir=str(whole), resume_from_checkpoint=str(whole / "checkpoint-7"))


def test_settings_that_make_no_sense(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="train_batch_size is 0: it must be an integer of at least 1"):
        D3PMTrainingArguments(train_batch_size=0)
    with pytest.raises(ValueError, match="loss is 'mse': it must be one of vb, hybrid$"):
        D3PMTrainingArguments(loss="mse")
    with pytest.raises(ValueError, match="checkpoints_total_limit is 0"):
        D3PMTrainingArguments(checkpoints_total_limit=0)
    with pytest.raises(
        ValueError, match="report_to names 'notes': it must be one or several of .*, tensorboard, wandb,"
    ):
        run(output_dir=str(tmp_path), report_to="notes")
    monkeypatch.setattr(progress, "get_available_trackers", lambda: [])
    with pytest.raises(ValueError, match="report_to names 'wandb', which is not installed: run `pip install wandb`"):
        run(output_dir=str(tmp_path), report_to="wandb")
    assert set(SETTINGS) <= set(vars(D3PMTrainingArguments()))


def test_a_process_without_noise_is_refused(tmp_path):
    """The paper's betas of Gaussian noise are for 1000 timesteps: after 20 of them x_T tells much of x_0."""
    few = {"transition": "gaussian", "beta_schedule": "linear", "num_train_timesteps": 20}
    with pytest.warns(UserWarning, match="nats per element from the prior"):
        pipeline = make_pipeline(**few)
    with pytest.raises(
        ValueError, match=r"after 20 steps .* \(L_T\), more than 10% of the 3.33 nats of the data.*: choose"
    ):
        run(pipeline, output_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    run(make_pipeline(**few, beta_end=1.0), output_dir=str(tmp_path / "run"), max_train_steps=1, num_samples=0)


def test_a_loss_that_is_not_finite(tmp_path):
    pipeline = make_pipeline()
    pipeline.text_model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(
        FloatingPointError, match="the loss is nan at step 1: start a new run with a lower learning_rate"
    ):
        run(pipeline, output_dir=str(tmp_path))


class WithToken(Sentences):
    """Sentences of which the last one holds a certain token."""

    def __init__(self, token, count=200):
        super().__init__(count)
        self.rows[-1, 5] = token


@pytest.mark.parametrize(
    "token, words",
    [
        (
            27,
            "is the mask of the process, which data must not hold: pass the mask token to D3PMScheduler as mask_token_id",
        ),
        (28, "is outside the vocabulary of 28: use the tokenizer of the network"),
        (-1, "is outside the vocabulary of 28"),
    ],
)
@pytest.mark.parametrize("part", ["train_dataset", "eval_dataset"])
def test_data_that_the_process_does_not_have(part, token, words, tmp_path):
    """Whatever the step at which they come: the learning rate is not to blame."""
    settings = {"max_train_steps": 4, "train_batch_size": 8, "validation_steps": 1, "num_samples": 0}
    with pytest.raises(ValueError, match=rf"token {token} at position \(\d,\) of example 31 {words}"):
        run(**{part: WithToken(token, 32)}, output_dir=str(tmp_path), max_eval_samples=32, **settings)


def test_a_mask_that_may_be_data(tmp_path):
    pipeline = make_pipeline(mask_in_data=True, beta_schedule="reciprocal")
    settings = {"max_train_steps": 4, "train_batch_size": 8, "validation_steps": 0, "num_samples": 0}
    run(pipeline, WithToken(27, 32), output_dir=str(tmp_path), **settings)


def test_parts_are_checked_before_anything_is_written(tmp_path):
    pipeline = make_pipeline()
    pipeline.scheduler = D3PMScheduler(28, T, mask_token_id=3)
    with pytest.raises(ValueError, match="scheduler is token 3 .*tokenizer is token 27 .*: pass mask_token_id=27"):
        run(pipeline, output_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
