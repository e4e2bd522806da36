# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a call of a pipeline takes, what it refuses, and that its state is its own."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from comparison import assert_same_draws
from PIL import Image
from test_pipelines import KINDS, LENGTH, STEPS, make, quiet, seeded, states
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from d3pm_hf import (
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Trajectory,
    character_tokenizer,
    create_text_model,
)
from d3pm_hf.data import train_piece_tokenizer


# Numbers of steps and of samples


@KINDS
@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"num_inference_steps": 0}, r"num_inference_steps is 0: it must be an integer in 1 .. \d+"),
        ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5: it must be an integer"),
        ({"num_inference_steps": None, "timesteps": []}, "leave the range"),
        ({"batch_size": 0}, "batch_size is 0: it must be an integer of at least 1"),
        ({"batch_size": 1.5}, "batch_size is 1.5: it must be an integer of at least 1"),
        ({"num_particles": 0}, "num_particles is 0: it must be an integer of at least 1"),
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
    with pytest.raises(ValueError, match="sequence_length is 0: it must be an integer of at least 1"):
        pipeline(sequence_length=0, num_inference_steps=1)
    with pytest.raises(ValueError, match="num_return_sequences is 0: it must be an integer of at least 1"):
        pipeline(num_return_sequences=0, num_inference_steps=1)


def test_several_samples_of_each_prompt():
    """Those of one prompt follow each other, and each is what it would be alone."""
    pipeline = make("text")
    prompts = ["ab[MASK][MASK]", "[MASK][MASK]cd"]
    generators = [seeded(i) for i in range(6)]
    output = pipeline(prompts, num_return_sequences=3, num_inference_steps=STEPS, generator=generators)
    assert [text[:2] for text in output.texts[:3]] == ["ab"] * 3
    assert [text[2:] for text in output.texts[3:]] == ["cd"] * 3
    alone = [states(pipeline, prompt=prompts[i // 3], generator=seeded(i)) for i in range(6)]
    assert_same_draws(output.sequences, torch.cat(alone))
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
    alone = [states(pipeline, image=images[i // 2][None], generator=seeded(i), **options) for i in range(4)]
    assert_same_draws(several, torch.cat(alone))
    assert torch.equal(several[..., 2:], images[..., 2:].repeat_interleave(2, 0))
    again = states(pipeline, image=images, start_timestep=0, num_images_per_prompt=3, num_inference_steps=1)
    assert (again == images.repeat_interleave(3, 0)).float().mean() > 0.8  # hardly corrupted
    picture = Image.new("L", (4, 8))
    with pytest.raises(ValueError, match="num_images_per_prompt is -1: it must be an integer of at least 1"):
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
    assert torch.equal(watched, states(pipeline, sampler="ancestral")) and seen == list(range(STEPS))
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
            output = pipe.denoiser(tensors["sample"], t)
        preview = pipe.scheduler.predict_original_sample(output, t, tensors["sample"])
        assert torch.equal(tensors["pred_original_sample"], preview)

    names = pipeline._callback_tensor_inputs
    states(pipeline, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names, temperature=0.5)
    timesteps = pipeline.scheduler.timesteps.tolist()
    assert calls == list(zip(timesteps, [*timesteps[1:], -1]))
    pipeline.scheduler.predict_original_sample = None  # not needed by those who do not ask
    states(pipeline, callback_on_step_end=lambda *_: None)


def test_a_network_without_a_preview():
    pipeline = make("image")
    pipeline.scheduler = D3PMScheduler.from_config(pipeline.scheduler.config, prediction_type="previous")
    states(pipeline, num_inference_steps=100)
    with pytest.raises(ValueError, match="prediction_type is 'previous': .* no x_0 to preview; look at `prev_sample`"):
        states(pipeline, num_inference_steps=100, callback_on_step_end=Trajectory(predictions=True))


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


@KINDS
def test_a_fault_in_the_middle(kind):
    """A callback that raises, a network that yields NaN or an unknown sampler leave the pipeline as it was."""
    pipeline = make(kind)
    expected = states(pipeline)

    def fail(pipe, i, t, tensors):
        if i == 1:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        states(pipeline, callback_on_step_end=fail)
    calls = []
    hook = pipeline.denoiser.network.register_forward_hook(
        lambda module, args, output: (
            calls.append(1) or (output[0] * torch.nan,) if len(calls) == 1 else calls.append(1)
        )
    )
    with pytest.raises(ValueError, match="NaN"):
        states(pipeline)
    assert len(calls) == 2
    hook.remove()
    with pytest.raises(ValueError, match="sampler is 'best': it must be one of ancestral, .*; register your own"):
        states(pipeline, sampler="best")
    assert torch.equal(states(pipeline), expected)


# Threads


@KINDS
def test_threads_share_a_pipeline(kind):
    """Calls of different lengths at the same time give what they give one after the other, from the first one on."""
    interval, calls = sys.getswitchinterval(), 30 if kind == "text" else 10

    def call(pipeline, seed):
        trajectory = Trajectory(predictions=True)
        steps = 1 + seed % 7
        options = {"num_inference_steps": steps, "generator": seeded(seed), "callback_on_step_end": trajectory}
        if seed % 3 == 0 and kind == "text":
            options |= {"prompt": "ab[MASK][MASK]"}
        elif seed % 3 == 0:
            options |= {"image": torch.zeros(1, 2, 8, 4).long(), "mask_image": torch.arange(4).expand(1, 1, 8, 4) < 2}
        return states(pipeline, batch_size=2, num_particles=1 + seed % 2, **options), trajectory

    alone, shared = make(kind), make(kind)
    expected = [call(alone, seed) for seed in range(calls)]
    try:
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda seed: call(shared, seed), range(calls)))
    finally:
        sys.setswitchinterval(interval)
    for (got, trajectory), (due, of_due) in zip(results, expected):
        assert_same_draws(got, due)
        assert trajectory.timesteps == of_due.timesteps
        assert_same_draws(torch.stack(trajectory.states), torch.stack(of_due.states))
        assert_same_draws(torch.stack(trajectory.predictions), torch.stack(of_due.predictions))


# Parts that belong together


def word_tokenizer(mask_token="[MASK]"):
    """A vocabulary with its mask in the middle, as BERT's."""
    words = ["[PAD]", "[UNK]", "[MASK]", "the", "quick", "brown", "fox"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", mask_token=mask_token)


def test_words_that_a_tokenizer_does_not_know():
    """They would be missing from the text. Who writes the unknown token means it."""
    pipeline = D3PMTextPipeline(create_text_model("tiny", 7), D3PMScheduler(7, 4, mask_token_id=2), word_tokenizer())
    with pytest.raises(
        ValueError, match=r"words that the tokenizer does not know \('lazy' 'dog'\): replace or remove them"
    ):
        pipeline("the lazy dog [MASK] the lazy fox")
    assert pipeline.encode("the [UNK] fox").tolist() == [[3, 1, 6]]
    with pytest.raises(ValueError, match=r"\('dog'\)"):
        pipeline("the [UNK] dog")


def test_characters_that_word_pieces_lack():
    tokenizer = train_piece_tokenizer(["the cat sat on the mat and the dog sat on the cat"], 21)
    pipeline = D3PMTextPipeline(create_text_model("tiny", 22), D3PMScheduler(22, 4), tokenizer)
    with pytest.raises(ValueError, match=r"words that .* \('Cat' 'x'\): .*; it knows a, c, d, e, .* and space"):
        pipeline("the Cat [MASK] on x")


def test_characters_that_a_tokenizer_without_an_unknown_token_drops():
    pairs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0, "b": 1}, [])), mask_token="[MASK]")
    pipeline = D3PMTextPipeline(create_text_model("tiny", 3), D3PMScheduler(3, 4), pairs)
    with pytest.raises(ValueError, match=r"characters that the tokenizer does not know \('c'\)"):
        pipeline("abc[MASK]")
    assert pipeline.encode("ab[MASK]").tolist() == [[0, 1, 2]]
    words = Tokenizer(WordLevel({"cat": 0, "dog": 1}))  # it raises in place of dropping
    words.pre_tokenizer = WhitespaceSplit()
    pipeline.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]")
    with pytest.raises(ValueError, match=r"words that the tokenizer does not know \('mouse'\)"):
        pipeline("cat mouse [MASK]")


MASKS = (
    "the mask of the scheduler is token 6 \\('fox'\\), and that of the tokenizer is token 2 \\('\\[MASK\\]'\\): pass "
)
MASKS += "mask_token_id=2 to D3PMScheduler"
CLOSE = {"embeddings": torch.eye(6), "num_neighbors": 2, "beta_schedule": "cosine"}


@pytest.mark.parametrize(
    "process",
    [
        {},
        {"transition": "absorbing_uniform", "beta_schedule": "cosine"},
        {"transition": "autoregressive"},
        {"transition": "absorbing_nearest_neighbor", **CLOSE},
    ],
)
def test_the_mask_of_the_scheduler_is_that_of_the_tokenizer(process, tmp_path):
    tokenizer, model = word_tokenizer(), create_text_model("tiny", 7).eval()
    with pytest.raises(ValueError, match=MASKS):
        D3PMTextPipeline(model, D3PMScheduler(7, 10, **process), tokenizer)
    pipeline = quiet(D3PMTextPipeline(model, D3PMScheduler(7, 10, mask_token_id=2, **process), tokenizer))
    samples = pipeline(batch_size=20, sequence_length=10, output_type="latent").sequences
    assert (samples != 2).all() and (samples == 6).any()
    # Replaced, or loaded.
    with pytest.raises(ValueError, match=MASKS):
        D3PMTextPipeline.from_pipe(pipeline, scheduler=D3PMScheduler(7, 10, **process))
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=MASKS):
        D3PMPipeline.from_pretrained(tmp_path, scheduler=D3PMScheduler(7, 10, **process))
    pipeline.scheduler = D3PMScheduler(7, 10, **process)
    with pytest.raises(ValueError, match=MASKS):
        pipeline(num_inference_steps=1)
    with pytest.raises(ValueError, match=MASKS):
        pipeline.save_pretrained(tmp_path)
    assert D3PMPipeline.from_pretrained(tmp_path).scheduler.mask_token_id == 2  # what was there is there


@pytest.mark.parametrize(
    "process, mask_token",
    [
        ({"transition": "uniform", "beta_schedule": "cosine"}, "[MASK]"),  # it masks nothing
        ({"mask_in_data": True, "beta_schedule": "cosine"}, "[MASK]"),  # the absorbing state is a word like any other
        ({}, None),  # the tokenizer has no mask
    ],
)
def test_masks_that_need_not_agree(process, mask_token):
    pipeline = D3PMTextPipeline(create_text_model("tiny", 7), D3PMScheduler(7, **process), word_tokenizer(mask_token))
    assert quiet(pipeline)(num_inference_steps=2, sequence_length=4).sequences.shape == (1, 4)


def test_a_checkpoint_of_two_masks_loads_without_its_tokenizer(tmp_path):
    pipeline = D3PMTextPipeline(create_text_model("tiny", 7), D3PMScheduler(7, mask_token_id=2), word_tokenizer())
    pipeline.save_pretrained(tmp_path)
    D3PMScheduler(7).save_pretrained(tmp_path / "scheduler")
    with pytest.raises(ValueError, match=MASKS):
        D3PMPipeline.from_pretrained(tmp_path)
    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path, tokenizer=None))
    samples = loaded(num_inference_steps=5, sequence_length=40, output_type="latent").sequences
    assert loaded.scheduler.mask_token_id == 6 and (samples != 6).all()


def test_a_mask_outside_the_process_does_not_fit_a_masking_one():
    """Its last state would be a space."""
    words = (
        r"scheduler is token 26 \(' '\).* token 27 \('\[MASK\]'\): make the network and the scheduler with 28 classes"
    )
    with pytest.raises(ValueError, match=words):
        D3PMTextPipeline(create_text_model("tiny", 27), D3PMScheduler(27), character_tokenizer())


def test_the_length_of_samples():
    pipeline = make("text")
    assert D3PMTextPipeline.from_pipe(pipeline).config.sequence_length == LENGTH
    assert D3PMTextPipeline.from_pipe(pipeline, sequence_length=5).config.sequence_length == 5
    # `components` are modules, as in diffusers, and `parameters` are the settings.
    assert D3PMTextPipeline(**pipeline.components, **pipeline.parameters).config == pipeline.config
    assert D3PMTextPipeline(**pipeline.components).config.sequence_length == 64  # positions of the network
    model = create_text_model("tiny", 28, max_position_embeddings=512)
    assert D3PMTextPipeline(model, D3PMScheduler(28)).config.sequence_length == 256
    causal = D3PMTextPipeline(model, D3PMScheduler(28, 9, transition="autoregressive"))
    assert D3PMTextPipeline(**causal.components).config.sequence_length == 9
    with pytest.raises(ValueError, match="sequence_length is 0: it must be an integer in 1 .. 16777216"):
        D3PMTextPipeline(model, D3PMScheduler(28), sequence_length=0)
