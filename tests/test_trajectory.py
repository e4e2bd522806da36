# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a call went through, as an animation, a page, lines in the terminal and a picture."""

import io
import json
import re

import pytest
import torch
from PIL import Image

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Trajectory,
    character_tokenizer,
    create_text_model,
    create_unet,
)
from d3pm_hf.visualization.grids import FRAME


STEPS = 8
# Of a cell: four by eight pixels, enlarged 16 times, and a frame.
WIDTH, HEIGHT = 4 * 16 + 2 * FRAME, 8 * 16 + 2 * FRAME


def cell(picture, column, row):
    """The pixels of one cell of a grid, small again."""
    left, top = column * WIDTH + FRAME, row * HEIGHT + FRAME
    inside = picture.crop((left, top, left + 4 * 16, top + 8 * 16))
    return inside.resize((4, 8), Image.Resampling.NEAREST).tobytes()


def record(pipeline, **kwargs):
    pipeline.set_progress_bar_config(disable=True)
    trajectory = Trajectory(predictions=isinstance(pipeline, D3PMImagePipeline))
    generator = torch.Generator().manual_seed(0)
    output = pipeline(num_inference_steps=STEPS, generator=generator, callback_on_step_end=trajectory, **kwargs)
    return trajectory, output


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    scheduler = D3PMScheduler(17, transition="gaussian", beta_schedule="cosine", prediction_type="logistic")
    return record(D3PMImagePipeline(create_unet("tiny", 17, (8, 4), 1, "logistic").eval(), scheduler), batch_size=6)


@pytest.fixture(scope="module")
def text():
    torch.manual_seed(0)
    alphabet = "abcdef<&>' "
    model = create_text_model("tiny", len(alphabet) + 1).eval()
    tokenizer = character_tokenizer(alphabet)
    return record(D3PMTextPipeline(model, D3PMScheduler(len(alphabet) + 1), tokenizer, sequence_length=40))


def test_states(text):
    trajectory, output = text
    assert len(trajectory.states) == STEPS + 1 and trajectory.timesteps == [999, 874, 749, 624, 499, 374, 249, 124, -1]
    assert (trajectory.states[0] == 11).all()  # masks
    assert torch.equal(trajectory.states[-1], output.sequences)
    record(trajectory.pipeline)
    assert len(trajectory.states) == STEPS + 1


def test_frames(text):
    trajectory, _ = text
    assert trajectory.frames(100) == list(range(STEPS + 1))
    assert trajectory.frames(3) == [0, 4, 8] and trajectory.frames(1)[-1] == 8
    with pytest.raises(ValueError, match="nothing has been recorded"):
        Trajectory().frames(3)


def test_gif(images, tmp_path):
    trajectory, output = images
    trajectory.save_gif(tmp_path / "denoising.gif")
    with Image.open(tmp_path / "denoising.gif") as animation:
        states = trajectory.states
        changes = sum(not torch.equal(a, b) for a, b in zip(states, states[1:]))
        assert animation.n_frames == changes + 1 > 3  # frames that do not differ are shown as one
        assert animation.size == (3 * WIDTH, 2 * HEIGHT)  # six samples in two rows
        animation.seek(changes)
        last = animation.convert("L")
        assert cell(last, 0, 0) == output.images[0].tobytes()


def test_gif_of_text(text, tmp_path):
    trajectory, _ = text
    trajectory.save_gif(tmp_path / "denoising.gif")
    with Image.open(tmp_path / "denoising.gif") as animation:
        assert 1 < animation.n_frames <= STEPS + 1
        marked = []
        for i in range(animation.n_frames):
            animation.seek(i)
            frame = animation.convert("RGB")
            marked.append(sum(frame.getpixel((x, y)) == (255, 213, 77) for x in range(frame.width) for y in (8, 9)))
        assert marked[0] == 0 and max(marked) > 0  # what has changed is highlighted
    record(trajectory.pipeline, batch_size=3)[0].save_gif(tmp_path / "batch.gif", num_frames=2)
    with Image.open(tmp_path / "batch.gif") as animation:
        assert animation.size[1] == 3 * (frame.height - 12) + 12  # a line for each sample


def test_gif_without_a_tokenizer(tmp_path):
    torch.manual_seed(0)
    trajectory, _ = record(
        D3PMTextPipeline(create_text_model("tiny", 120), D3PMScheduler(120), sequence_length=30), output_type="latent"
    )
    trajectory.save_gif(tmp_path / "numbers.gif", num_frames=3)
    with Image.open(tmp_path / "numbers.gif") as animation:
        assert animation.n_frames == 3  # numbers of one to three digits: all frames have one size


def test_progressive_sampling(images, tmp_path):
    trajectory, output = images
    trajectory.save_progressive(tmp_path / "progressive.png", num_frames=5)
    with Image.open(tmp_path / "progressive.png") as picture:
        assert picture.size == (5 * WIDTH, 12 * HEIGHT)  # time to the right; x_t and its prediction for each sample
        for row in (0, 1):
            assert cell(picture.convert("L"), 4, row) == output.images[0].tobytes()
    for samples in ((index for index in (4, 1)), torch.tensor([4, 1])):
        kept = trajectory.keep(samples)
        assert all(torch.equal(ours, whole[[4, 1]]) for ours, whole in zip(kept.states, trajectory.states))
        assert all(torch.equal(ours, whole[[4, 1]]) for ours, whole in zip(kept.predictions, trajectory.predictions))
    with pytest.raises(ValueError, match=r"record with `Trajectory\(predictions=True\)`"):
        trajectory, _ = record(trajectory.pipeline)
        trajectory.predictions = []
        trajectory.save_progressive(tmp_path / "progressive.png")


def test_html(text, tmp_path):
    trajectory, output = text
    trajectory.save_html(tmp_path / "denoising.html")
    page = (tmp_path / "denoising.html").read_text(encoding="utf-8")
    assert "http" not in page and page.count("<script>") == page.count("</script>") == 1
    frames = json.loads(re.search(r"const frames = (.*);$", page, re.MULTILINE).group(1).replace("<\\/", "</"))
    assert len(frames) == STEPS + 1 and frames[-1]["t"] == -1
    assert "<mark>" not in frames[0]["text"] and frames[0]["text"] == "·" * 40
    # What is marked is what has changed, and the tags of the text itself are text.
    last = re.sub("</?mark>", "", frames[-1]["text"])
    for sign, entity in (("<", "&lt;"), (">", "&gt;"), ("'", "&#x27;"), ("&", "&amp;")):
        last = last.replace(entity, sign)
    assert last == output.texts[0]
    changed = int((trajectory.states[-1] != trajectory.states[-2]).sum())
    assert frames[-1]["text"].count("<mark>") == changed > 0


def test_terminal(text):
    trajectory, output = text

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    plain, colored = io.StringIO(), Terminal()
    for file in (plain, colored):
        trajectory.print(num_frames=4, file=file)
    lines = plain.getvalue().splitlines()
    assert len(lines) == 4 and lines[0] == "  t = 999  " + "·" * 40 and lines[-1] == "     data  " + output.texts[0]
    assert re.sub("\033\\[[0-9;]*m", "", colored.getvalue()) == plain.getvalue()
    assert colored.getvalue().count("\033[1;32m") >= 40


def test_tokens_without_a_tokenizer():
    pipeline = D3PMTextPipeline(create_text_model("tiny", 12).eval(), D3PMScheduler(12), sequence_length=5)
    trajectory, _ = record(pipeline, output_type="seq")
    file = io.StringIO()
    trajectory.print(file=file)
    assert file.getvalue().splitlines()[0] == "  t = 999  " + "11 " * 5
