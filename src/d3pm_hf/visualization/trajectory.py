# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The states of a call of a pipeline as an animation, as an HTML page, on the terminal, or as a picture of the predictions."""

import html
import json
import sys

import torch
from diffusers.callbacks import PipelineCallback
from diffusers.utils import make_image_grid

from .grids import LINE_LENGTH, enlarge, image_grid, text_pictures


MASK_SIGN = "·"


class Trajectory(PipelineCallback):
    """Records the states of a call. Pass it as `callback_on_step_end`, then save or print it.

    Args:
        predictions (`bool`, defaults to `False`): Whether to record the most likely x_0 at each step, which
            `save_progressive` needs.

    Attributes:
        states (`list[torch.LongTensor]`): x_T, ..., x_0, one more than the number of steps, each `[B, ...]` on the CPU.
        predictions (`list[torch.LongTensor]`): The most likely x_0 at each step.
        timesteps (`list[int]`): Timesteps of the states, -1 for the data.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler, D3PMTextPipeline, Trajectory, character_tokenizer, create_text_model

        pipeline = D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer(), sequence_length=16)
        trajectory = Trajectory()
        pipeline(num_inference_steps=4, callback_on_step_end=trajectory)
        trajectory.print()
        trajectory.save_html("denoising.html")  # an animated page; save_gif writes an animation
        ```
    """

    def __init__(self, predictions: bool = False):
        super().__init__()
        self._keeps_predictions = predictions
        self.states: list[torch.Tensor] = []
        self.predictions: list[torch.Tensor] = []
        self.timesteps: list[int] = []

    @property
    def tensor_inputs(self):
        return ["latents", "sample", "previous_timestep"] + ["pred_original_sample"] * self._keeps_predictions

    def callback_fn(self, pipeline, step_index, timesteps, callback_kwargs):
        if step_index == 0:
            self.pipeline = pipeline
            self.states, self.predictions, self.timesteps = [callback_kwargs["sample"].cpu()], [], [int(timesteps)]
        self.states.append(callback_kwargs["latents"].cpu())
        self.timesteps.append(int(callback_kwargs["previous_timestep"]))
        if self._keeps_predictions:
            self.predictions.append(callback_kwargs["pred_original_sample"].cpu())
        return callback_kwargs

    def keep(self, samples) -> "Trajectory":
        """The trajectory of some samples of the batch.

        Args:
            samples (`Iterable[int]`): Indices of the samples.
        """
        kept, samples = Trajectory(self._keeps_predictions), [int(sample) for sample in samples]
        kept.pipeline, kept.timesteps = self.pipeline, self.timesteps
        kept.states = [state[samples] for state in self.states]
        kept.predictions = [prediction[samples] for prediction in self.predictions]
        return kept

    def frames(self, num_frames: int) -> list[int]:
        """Indices of `num_frames` states, spaced evenly from the first to the last."""
        if not self.states:
            raise ValueError("nothing has been recorded: pass the trajectory to a call as `callback_on_step_end`")
        last = len(self.states) - 1
        return sorted({round(i * last / max(num_frames - 1, 1)) for i in range(num_frames)} | {last})

    def save_gif(self, path, num_frames: int = 60, duration: float = 4.0) -> None:
        """Writes an animation of all samples of the batch. Tokens of text that have changed are highlighted.

        Args:
            path (`str` or `os.PathLike`): Path of the file.
            num_frames (`int`, defaults to 60): Maximum number of frames.
            duration (`float`, defaults to 4.0): Duration in seconds. The last frame is shown for 1.5 seconds more.
        """
        frames = self.frames(num_frames)
        if self.states[0].ndim == 2:  # tokens, [B, N]
            pictures = text_pictures(self._lay_out(num_frames))
        else:
            pictures = [image_grid(self.pipeline.decode(self.states[i])) for i in frames]
        each = 1000 * duration / len(pictures)
        times = [each] * (len(pictures) - 1) + [each + 1500]
        pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=times, loop=0)

    # Images

    def save_progressive(self, path, num_frames: int = 10) -> None:
        """Writes a picture of progressive sampling, as in the paper: for each sample x_t, and below it the most likely x_0.

        Time runs from noise on the left to data on the right.
        """
        if not self.predictions:
            raise ValueError("the predictions were not kept: record with `Trajectory(predictions=True)`")
        frames = self.frames(num_frames)
        noisy = [enlarge(self.pipeline.decode(self.states[i])) for i in frames]
        predicted = [enlarge(self.pipeline.decode(self.predictions[i])) for i in frames[:-1]]
        predicted.append(noisy[-1])  # the last state is the data
        cells = [row[b] for b in range(len(noisy[0])) for part in (noisy, predicted) for row in part]
        make_image_grid(cells, rows=2 * len(noisy[0]), cols=len(noisy)).save(path)

    # Text

    def save_html(self, path, sample: int = 0, num_frames: int = 60) -> None:
        """Writes an HTML page that plays the denoising of one sample and highlights the tokens that have changed.

        The page is self-contained: it loads no other files.
        """
        frames = []
        for tokens, changed, timestep in self._changes(sample, num_frames):
            spans = [
                f"<mark>{html.escape(token)}</mark>" if new else html.escape(token)
                for token, new in zip(tokens, changed)
            ]
            frames.append({"t": timestep, "text": "".join(spans)})
        with open(path, "w", encoding="utf-8") as file:
            # "</" would end the script element.
            file.write(PAGE.replace("FRAMES", json.dumps(frames).replace("</", "<\\/")))

    def print(self, sample: int = 0, num_frames: int = 12, file=None) -> None:
        """Prints the denoising of one sample; on a terminal, tokens that have changed are green."""
        file = file or sys.stdout
        on, off = ("\033[1;32m", "\033[0m") if file.isatty() else ("", "")
        for tokens, changed, timestep in self._changes(sample, num_frames):
            text = "".join(f"{on}{token}{off}" if new else token for token, new in zip(tokens, changed))
            label = "data" if timestep < 0 else f"t = {timestep}"
            file.write(f"{label:>9}  {text}\n")

    def _lay_out(self, num_frames: int) -> list[list[tuple[str, bool]]]:
        """For each frame, the characters of all samples and whether they have changed. Each sample starts a new line."""
        samples = [list(self._changes(b, num_frames)) for b in range(len(self.states[0]))]  # [B][frames]
        rows = [
            [[(c, new) for token, new in zip(tokens, changed) for c in token] for tokens, changed, _ in frames]
            for frames in samples
        ]
        widths = [-(-max(map(len, frames)) // LINE_LENGTH) * LINE_LENGTH for frames in rows]
        padded = [[row + [(" ", False)] * (width - len(row)) for row in frames] for frames, width in zip(rows, widths)]
        return [[cell for row in frame for cell in row] for frame in zip(*padded)]

    def _changes(self, sample: int, num_frames: int):
        """For each frame: its tokens, which of them differ from the previous frame, and its timestep."""
        before = None
        for i in self.frames(num_frames):
            states = self.states[i][sample]
            changed = [False] * len(states) if before is None else (states != before).tolist()
            yield show_tokens(self.pipeline.tokenizer, states), changed, self.timesteps[i]
            before = states


def show_tokens(tokenizer, states: torch.Tensor) -> list[str]:
    """The tokens of states `[N]` as they are shown: a sign for the mask, and spaces for the signs of tokenizers.

    Args:
        tokenizer (`PreTrainedTokenizerBase` or `None`): Without one, tokens are shown as numbers.
        states (`torch.LongTensor` of shape `[N]`): States.
    """
    if tokenizer is None:
        return [f"{token} " for token in states.tolist()]
    tokens = tokenizer.convert_ids_to_tokens(states.tolist())
    signs = [MASK_SIGN if token == tokenizer.mask_token else token for token in tokens]
    return [sign.replace("▁", " ").replace("Ġ", " ") for sign in signs]


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Denoising, step by step</title>
<style>
  body { font-family: system-ui, sans-serif; max-width: 50rem; margin: 3rem auto; padding: 0 1rem; color: #222; }
  #text { font: 1.1rem/1.8 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; min-height: 12rem; }
  mark { background: #ffd54d; border-radius: .2em; }
  .bar { display: flex; gap: 1rem; align-items: center; }
  input { flex: 1; }
  #time { min-width: 6rem; text-align: right; font-variant-numeric: tabular-nums; }
</style>
<h1>Denoising, step by step</h1>
<div class="bar">
  <button id="play">pause</button><input id="step" type="range" min="0" value="0"><span id="time"></span>
</div>
<p id="text"></p>
<script>
  const frames = FRAMES;
  const [play, step, time, text] = ["play", "step", "time", "text"].map(id => document.getElementById(id));
  step.max = frames.length - 1;
  let playing = true;
  function show(i) {
    step.value = i;
    time.textContent = frames[i].t < 0 ? "data" : "t = " + frames[i].t;
    text.innerHTML = frames[i].text;
  }
  step.oninput = () => { playing = false; play.textContent = "play"; show(+step.value); };
  play.onclick = () => {
    playing = !playing;
    play.textContent = playing ? "pause" : "play";
    if (playing && +step.value === frames.length - 1) show(0);
  };
  setInterval(() => {
    if (!playing) return;
    if (+step.value < frames.length - 1) show(+step.value + 1);
    else { playing = false; play.textContent = "play"; }
  }, 150);
  show(0);
</script>
</html>
"""
