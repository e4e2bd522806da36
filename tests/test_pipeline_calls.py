# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a call of a pipeline takes, what it refuses, and that its state is its own."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image
from test_pipelines import KINDS, LENGTH, STEPS, make, seeded, states

from d3pm_hf import (
    D3PMScheduler,
    D3PMTextPipeline,
    Trajectory,
    create_text_model,
)


# Numbers of steps and of samples


@KINDS
@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_inference_steps": 0}, r"num_inference_steps is 0: it must be an integer from 1 to \d+"),
        ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5: it must be an integer"),
        ({"num_inference_steps": None, "timesteps": []}, "leave the range"),
        ({"batch_size": 0}, "batch_size is 0: it must be a positive integer"),
        ({"batch_size": 1.5}, "batch_size is 1.5: it must be a positive integer"),
        ({"num_particles": 0}, "num_particles is 0: it must be a positive integer"),
        ({"latents": torch.zeros(1, 12)}, "latents are of type torch.float32: pass states as a `torch.LongTensor`"),
        ({"latents": [[0] * 12]}, "latents are of type list: pass states as a `torch.LongTensor`"),
    ],
)
def test_refused(kind, arguments, words):
    with pytest.raises(ValueError, match=words):
        states(make(kind), **arguments)


@KINDS
def test_latents_outside_the_vocabulary(kind):
    pipeline = make(kind)
    latents = torch.zeros_like(states(pipeline)) + 28
    with pytest.raises(ValueError, match="token 28 at position .* is outside the vocabulary"):
        states(pipeline, latents=latents)


def test_refused_texts():
    pipeline = make("text")
    for prompt in ([], 3, ["ab", 3], b"ab"):
        with pytest.raises(ValueError, match="prompt is .*: pass a string or a list of at least one string"):
            pipeline(prompt, num_inference_steps=1)
    for tokens in (torch.zeros(1, 3), torch.zeros(3).long(), [[1, 2, 3]]):
        with pytest.raises(ValueError, match=r"pass a `torch.LongTensor` of shape \[B, N\]"):
            pipeline(input_ids=tokens, num_inference_steps=1)
    with pytest.raises(ValueError, match="sequence_length is 0: it must be a positive integer"):
        pipeline(sequence_length=0, num_inference_steps=1)
    with pytest.raises(ValueError, match="num_return_sequences is 0: it must be a positive integer"):
        pipeline(num_return_sequences=0, num_inference_steps=1)


def test_several_samples_of_each_prompt():
    """Those of one prompt follow each other, and each is what it would be alone."""
    pipeline = make("text")
    prompts = ["ab[MASK][MASK]", "[MASK][MASK]cd"]
    generators = [seeded(i) for i in range(6)]
    texts = pipeline(prompts, num_return_sequences=3, num_inference_steps=STEPS, generator=generators).texts
    assert [text[:2] for text in texts[:3]] == ["ab"] * 3 and [text[2:] for text in texts[3:]] == ["cd"] * 3
    for i, text in enumerate(texts):
        assert pipeline(prompts[i // 3], num_inference_steps=STEPS, generator=seeded(i)).texts == [text]
    free = states(pipeline, batch_size=2, num_return_sequences=2, generator=generators[:4])
    assert free.shape == (4, LENGTH)
    with pytest.raises(ValueError, match="got 2 generators for a batch of 6"):
        states(pipeline, prompt=prompts, num_return_sequences=3, num_particles=2, generator=generators[:2])


def test_several_samples_of_each_image():
    pipeline = make("image")
    images, mask = torch.randint(0, 17, (2, 2, 8, 4), generator=seeded(5)), torch.zeros(1, 1, 8, 4)
    mask[..., :2] = 1
    generators = [seeded(i) for i in range(4)]
    options = {"mask_image": mask, "num_particles": 2}
    several = states(pipeline, image=images, num_images_per_prompt=2, generator=generators, **options)
    for i in range(4):
        alone = states(pipeline, image=images[i // 2][None], generator=seeded(i), **options)
        assert torch.equal(several[i : i + 1], alone)
        assert torch.equal(several[i, ..., 2:], images[i // 2, ..., 2:])
    again = states(pipeline, image=images, start_timestep=0, num_images_per_prompt=3, num_inference_steps=1)
    assert (again == images.repeat_interleave(3, 0)).float().mean() > 0.8  # hardly corrupted
    picture = Image.new("L", (4, 8))
    with pytest.raises(ValueError, match="num_images_per_prompt is -1: it must be a positive integer"):
        pipeline(image=picture, num_images_per_prompt=-1)


def test_tokens_alone():
    pipeline = make("text")
    outputs = [pipeline(num_inference_steps=STEPS, generator=seeded(), output_type=kind) for kind in ("latent", "seq")]
    whole = pipeline(num_inference_steps=STEPS, generator=seeded())
    for output in outputs:
        assert output.texts is None and torch.equal(output.sequences, whole.sequences)
    assert pipeline.decode(outputs[0].sequences) == whole.texts


# Callbacks and interrupts


@KINDS
def test_callbacks_may_return_nothing(kind):
    pipeline, seen = make(kind), []
    watched = states(pipeline, callback_on_step_end=lambda pipe, i, t, tensors: seen.append(i))
    assert torch.equal(watched, states(pipeline)) and seen == list(range(STEPS))
    with pytest.raises(ValueError, match="callback_on_step_end returned a list: return a dictionary .* or nothing"):
        states(pipeline, callback_on_step_end=lambda *_: [1])
    with pytest.raises(ValueError, match="latents are of type torch.float32"):
        states(pipeline, callback_on_step_end=lambda pipe, i, t, tensors: {"latents": tensors["latents"].float()})
    with pytest.raises(ValueError, match="latents have the shape"):
        states(pipeline, callback_on_step_end=lambda pipe, i, t, tensors: {"latents": tensors["latents"][..., 1:]})


@KINDS
def test_callbacks_see_what_the_scheduler_says(kind):
    """`previous_timestep` belongs to `latents`; the preview is computed for those who ask, from the network's output."""
    pipeline = make(kind)
    calls = []

    def watch(pipe, i, t, tensors):
        calls.append((int(t), int(tensors["previous_timestep"])))
        with torch.no_grad():
            output = pipe.predict(tensors["sample"], t)
        preview = pipe.scheduler.predict_original_sample(output, t, tensors["sample"])
        assert torch.equal(tensors["pred_original_sample"], preview)

    names = pipeline._callback_tensor_inputs
    states(pipeline, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names, temperature=0.5)
    timesteps = pipeline.scheduler.timesteps.tolist()
    assert calls == list(zip(timesteps, [*timesteps[1:], -1]))
    pipeline.scheduler.predict_original_sample = None  # not needed by those who do not ask
    states(pipeline, callback_on_step_end=lambda *_: None)


@KINDS
def test_interrupt(kind):
    """As in diffusers: the call returns what it has reached, and the next one runs to its end."""
    pipeline, seen = make(kind), []

    def stop(pipe, i, t, tensors):
        seen.append(tensors["latents"])
        pipe._interrupt = i == 1

    reached = states(pipeline, callback_on_step_end=stop)
    assert len(seen) == 2 and pipeline.interrupt and torch.equal(reached, seen[-1])
    whole = states(pipeline)
    assert not pipeline.interrupt and not torch.equal(whole, reached)


# Threads


@KINDS
def test_threads_share_a_pipeline(kind):
    """Calls of different lengths at the same time give what they give one after the other."""
    pipeline = make(kind)
    interval, calls = sys.getswitchinterval(), 30 if kind == "text" else 10

    def call(seed):
        trajectory = Trajectory(predictions=True)
        steps = 1 + seed % 7
        options = {"num_inference_steps": steps, "generator": seeded(seed), "callback_on_step_end": trajectory}
        if seed % 3 == 0 and kind == "text":
            options |= {"prompt": "ab[MASK][MASK]"}
        elif seed % 3 == 0:
            options |= {"image": torch.zeros(1, 2, 8, 4).long(), "mask_image": torch.ones(1, 1, 8, 4)}
        return states(pipeline, batch_size=2, num_particles=1 + seed % 2, **options), trajectory

    expected = [call(seed) for seed in range(calls)]
    try:
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(call, range(calls)))
    finally:
        sys.setswitchinterval(interval)
    for (got, trajectory), (due, alone) in zip(results, expected):
        assert torch.equal(got, due) and trajectory.timesteps == alone.timesteps
        for name in ("states", "predictions"):
            assert all(torch.equal(a, b) for a, b in zip(getattr(trajectory, name), getattr(alone, name), strict=True))


# Parts that belong together


def test_the_length_of_samples():
    pipeline = make("text")
    assert D3PMTextPipeline.from_pipe(pipeline).config.sequence_length == LENGTH
    assert D3PMTextPipeline.from_pipe(pipeline, sequence_length=5).config.sequence_length == 5
    # `components` are modules: what they know decides.
    assert D3PMTextPipeline(**pipeline.components).config.sequence_length == 64  # positions of the network
    model = create_text_model("tiny", 28, max_position_embeddings=512)
    assert D3PMTextPipeline(model, D3PMScheduler(28)).config.sequence_length == 256
    causal = D3PMTextPipeline(model, D3PMScheduler(28, 9, transition="autoregressive"))
    assert D3PMTextPipeline(**causal.components).config.sequence_length == 9
    with pytest.raises(ValueError, match="sequence_length is 0: it must be a positive integer"):
        D3PMTextPipeline(model, D3PMScheduler(28), sequence_length=0)
