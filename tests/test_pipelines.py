# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What a diffusers user expects of a pipeline: the checks of diffusers' own pipeline tests, and calls for every family."""

import inspect

import families
import numpy as np
import pytest
import torch
from comparison import assert_same_draws
from diffusers import DDPMScheduler, ImagePipelineOutput
from diffusers.callbacks import MultiPipelineCallbacks
from PIL import Image
from transformers import BertConfig, BertForMaskedLM

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    D3PMTextPipelineOutput,
    Trajectory,
    character_tokenizer,
    create_text_model,
    create_unet,
)


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q", "ignore:the process cannot lose information")
LENGTH, STEPS = 12, 5
KINDS = pytest.mark.parametrize("kind", ["text", "image", "logistic"])


def quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def make(kind, **network):
    torch.manual_seed(0)
    if kind == "text":
        model = create_text_model("tiny", 28, **network).eval()
        return quiet(D3PMTextPipeline(model, D3PMScheduler(28), character_tokenizer(), sequence_length=LENGTH))
    prediction_type = "logistic" if kind == "logistic" else "x0"
    transition = "gaussian" if kind == "logistic" else "uniform"
    unet = create_unet("tiny", 17, (8, 4), 2, prediction_type, **network).eval()
    scheduler = D3PMScheduler(
        17, transition=transition, beta_schedule="cosine", prediction_type=prediction_type, num_train_timesteps=100
    )
    return quiet(D3PMImagePipeline(unet, scheduler))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def states(pipeline, **kwargs):
    """The states that a call returns."""
    output_type = "seq" if isinstance(pipeline, D3PMTextPipeline) else "latent"
    kwargs = {"num_inference_steps": STEPS, "generator": seeded(), **kwargs}
    return pipeline(output_type=output_type, return_dict=False, **kwargs)[0]


# The checks of diffusers' pipeline tests


@KINDS
def test_save_load_equality(kind, tmp_path):
    pipeline = make(kind)
    pipeline.save_pretrained(tmp_path / "checkpoint")
    for loader in (D3PMPipeline, type(pipeline)):
        loaded = quiet(loader.from_pretrained(tmp_path / "checkpoint"))
        assert type(loaded) is type(pipeline)
        assert_same_draws(states(loaded), states(pipeline))
    # And once more, from what was loaded, over what is there.
    loaded.save_pretrained(tmp_path / "checkpoint")
    assert_same_draws(states(quiet(D3PMPipeline.from_pretrained(tmp_path / "checkpoint"))), states(pipeline))


@KINDS
def test_save_load_of_every_float_type(kind, tmp_path):
    make(kind).to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    for dtype in (torch.bfloat16, torch.float32):
        loaded = quiet(D3PMPipeline.from_pretrained(tmp_path / "checkpoint", dtype=dtype))
        assert loaded.dtype == dtype
        states(loaded)


@KINDS
def test_passed_components_are_used(kind, tmp_path):
    pipeline = make(kind)
    pipeline.save_pretrained(tmp_path / "checkpoint")
    scheduler = D3PMScheduler.from_config(pipeline.scheduler.config)
    loaded = D3PMPipeline.from_pretrained(tmp_path / "checkpoint", scheduler=scheduler)
    assert loaded.scheduler is scheduler


def test_a_text_pipeline_without_a_tokenizer(tmp_path):
    pipeline = quiet(D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), sequence_length=LENGTH))
    pipeline.save_pretrained(tmp_path / "checkpoint")
    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path / "checkpoint"))
    assert loaded.tokenizer is None
    assert_same_draws(states(loaded), states(pipeline.to("cpu")))
    with pytest.raises(ValueError, match="no tokenizer: pass output_type='latent'"):
        loaded(num_inference_steps=2)
    with pytest.raises(ValueError, match="no tokenizer: pass `input_ids`"):
        loaded("abc")


@KINDS
def test_batch_equals_single_runs(kind):
    pipeline = make(kind)
    batch = states(pipeline, batch_size=3, generator=[seeded(i) for i in range(3)])
    for i in range(3):
        assert_same_draws(batch[i : i + 1], states(pipeline, generator=seeded(i)))
    assert not torch.equal(batch[0], batch[1])
    with pytest.raises(ValueError, match="got 2 generators for a batch of 3"):
        states(pipeline, batch_size=3, generator=[seeded(), seeded()])


@KINDS
def test_same_seed_same_sample(kind):
    pipeline = make(kind)
    assert torch.equal(states(pipeline), states(pipeline))
    assert not torch.equal(states(pipeline), states(pipeline, generator=seeded(1)))


@KINDS
def test_dict_and_tuple(kind):
    pipeline = make(kind)
    options = {"num_inference_steps": STEPS, "batch_size": 2}
    output = pipeline(generator=seeded(), **options)
    other = pipeline(generator=seeded(), return_dict=False, **options)
    if kind == "text":
        assert isinstance(output, D3PMTextPipelineOutput)
        assert torch.equal(output.sequences, other[0]) and output.texts == other[1]
    else:
        assert isinstance(output, ImagePipelineOutput)
        assert [image.tobytes() for image in output.images] == [image.tobytes() for image in other[0]]


@KINDS
def test_latents_and_timesteps(kind):
    pipeline = make(kind)
    T = len(pipeline.scheduler)
    prior = pipeline.scheduler.sample_prior(states(pipeline).shape, seeded(3))
    chosen = [T - 1, T // 2, 0]
    options = {"latents": prior, "num_inference_steps": None, "timesteps": chosen}
    first = states(pipeline, sampler="ancestral", **options)
    pipeline.scheduler.set_timesteps(timesteps=chosen)
    latents, generator = prior, seeded()
    with torch.no_grad():
        for t in chosen:
            latents = pipeline.scheduler.step(
                pipeline.denoiser(latents, torch.tensor(t)), t, latents, generator=generator
            ).prev_sample
    assert torch.equal(first, latents) and pipeline.num_timesteps == 3
    with pytest.raises(ValueError, match="latents have the shape"):
        states(pipeline, latents=prior[..., :-1])
    with pytest.raises(ValueError, match="pass one of the two"):
        states(pipeline, timesteps=chosen)


@KINDS
def test_all_timesteps_by_default(kind):
    pipeline = make(kind)
    states(pipeline, num_inference_steps=None)
    assert pipeline.num_timesteps == len(pipeline.scheduler)


@KINDS
def test_callbacks(kind):
    pipeline = make(kind)
    assert "callback_on_step_end" in inspect.signature(pipeline.__call__).parameters
    seen = []

    def watch(pipe, step, timestep, tensors):
        assert pipe is pipeline and set(tensors) == set(pipeline._callback_tensor_inputs)
        seen.append((step, int(timestep), tensors["latents"]))
        return tensors

    names = pipeline._callback_tensor_inputs
    final = states(pipeline, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=names)
    assert [step for step, _, _ in seen] == list(range(STEPS))
    assert [t for _, t, _ in seen] == pipeline.scheduler.timesteps.tolist()
    assert torch.equal(seen[-1][2], final)

    def zero_at_the_end(pipe, step, timestep, tensors):
        if step == STEPS - 1:
            tensors["latents"] = torch.zeros_like(tensors["latents"])
        return tensors

    assert (states(pipeline, callback_on_step_end=zero_at_the_end) == 0).all()
    assert torch.equal(states(pipeline, callback_on_step_end=lambda *_: {}), final)
    first, second = Trajectory(), Trajectory()
    states(pipeline, callback_on_step_end=MultiPipelineCallbacks([first, second]))
    assert torch.equal(first.states[-1], final) and len(second.states) == STEPS + 1
    with pytest.raises(ValueError, match=r"names \['noise'\]: choose from \['latents', 'sample'"):
        states(pipeline, callback_on_step_end=watch, callback_on_step_end_tensor_inputs=["noise"])


@KINDS
def test_components_and_device(kind):
    pipeline = make(kind)
    again = quiet(type(pipeline)(**pipeline.components, **({"sequence_length": LENGTH} if kind == "text" else {})))
    assert torch.equal(states(again), states(pipeline))
    assert pipeline.to("cpu").device.type == "cpu"


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_sample_without_nan(kind, dtype):
    pipeline = make(kind).to(dtype)
    outputs = []
    pipeline.denoiser.network.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    result = states(pipeline, batch_size=4)
    assert len(outputs) == STEPS and all(output.dtype == dtype for output in outputs)
    assert all(output.isfinite().all() for output in outputs)
    pipeline.scheduler.check_states(result)


# "eager" captures the graph; "inductor", torch's default, also compiles it, for some 20 seconds.
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@KINDS
def test_compiled_denoiser(kind, backend, tmp_path):
    pipeline = make(kind)
    expected = states(pipeline)
    name = "text_model" if kind == "text" else "unet"
    setattr(pipeline, name, torch.compile(getattr(pipeline, name), backend=backend))
    assert_same_draws(states(pipeline), expected)
    pipeline.save_pretrained(tmp_path / "checkpoint")
    assert_same_draws(states(quiet(D3PMPipeline.from_pretrained(tmp_path / "checkpoint"))), expected)


def test_progress_bar(capfd):
    pipeline = make("text")
    pipeline.set_progress_bar_config(disable=False)
    states(pipeline)
    assert f"{STEPS}/{STEPS}" in capfd.readouterr().err


# Swapping parts


def test_swapped_scheduler():
    pipeline = make("text")
    pipeline.scheduler = D3PMScheduler.from_config(pipeline.scheduler.config, num_train_timesteps=50)
    states(pipeline, num_inference_steps=50)
    # One that lacks its tensors says which.
    neighbors = D3PMScheduler(28, transition="nearest_neighbor", embeddings=torch.randn(28, 8), beta_schedule="cosine")
    pipeline.scheduler = D3PMScheduler.from_config(neighbors.config)
    with pytest.raises(ValueError, match="needs rate_matrix: pass them to the constructor or to `from_config`"):
        states(pipeline)
    with pytest.raises(ValueError, match="not of a D3PMScheduler: load a D3PM checkpoint"):
        D3PMScheduler.from_config(DDPMScheduler().config)
    pipeline.scheduler = D3PMScheduler(27)
    with pytest.raises(ValueError, match="the network has a vocabulary of 28 and the scheduler one of 27"):
        states(pipeline)


def test_parts_that_do_not_fit():
    model, unet = create_text_model("tiny", 28), create_unet("tiny", 17, 8, 1)
    with pytest.raises(ValueError, match="vocabulary of 28 and the scheduler one of 30"):
        D3PMTextPipeline(model, D3PMScheduler(30))
    with pytest.raises(ValueError, match="the tokenizer has a vocabulary of 4 and the scheduler one of 28"):
        D3PMTextPipeline(model, D3PMScheduler(28), character_tokenizer("abc"))
    with pytest.raises(ValueError, match="17 output channels, and 1 channels of 16 levels .* need 16"):
        D3PMImagePipeline(unet, D3PMScheduler(16))
    with pytest.raises(ValueError, match="prediction_type='logistic' need 2"):
        D3PMImagePipeline(unet, D3PMScheduler(17, prediction_type="logistic"))


def test_a_masked_language_model_of_transformers():
    """An absorbing process over a plain `BertForMaskedLM`, which knows nothing of timesteps."""
    config = BertConfig(
        vocab_size=28, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    pipeline = D3PMTextPipeline(
        BertForMaskedLM(config).eval(), D3PMScheduler(28), character_tokenizer(), sequence_length=LENGTH
    )
    assert (states(quiet(pipeline)) < 27).all()


def test_the_mask_of_a_prompt_need_not_be_a_state():
    torch.manual_seed(0)
    scheduler = D3PMScheduler(27, transition="uniform", beta_schedule="cosine")
    pipeline = quiet(D3PMTextPipeline(create_text_model("tiny", 27), scheduler, character_tokenizer()))
    text = pipeline("the [MASK][MASK][MASK] end", num_inference_steps=STEPS, generator=seeded()).texts[0]
    assert len(text) == 11 and text.startswith("the ") and text.endswith(" end")


# Every family


@pytest.mark.parametrize("name", families.NAMES)
def test_every_family_samples_fills_in_and_reconstructs(name):
    family = families.build(name)
    scheduler = family.scheduler()
    torch.manual_seed(0)
    pipeline = quiet(
        D3PMTextPipeline(create_text_model("tiny", family.num_classes).eval(), scheduler, sequence_length=6)
    )
    x_0 = family.data((3, 6))
    free = states(pipeline, batch_size=3)
    mask = torch.rand(3, 6, generator=seeded()) < 0.5
    filled = states(pipeline, input_ids=x_0, mask=mask, num_particles=2)
    again = states(pipeline, input_ids=x_0, start_timestep=2, num_inference_steps=3)
    for result in (free, filled, again):
        assert result.shape == x_0.shape
        scheduler.check_states(result)
        if family.mask is not None:
            assert (result != family.mask).all()
    assert torch.equal(filled[~mask], x_0[~mask])


@pytest.mark.parametrize("name", [name for name in families.NAMES if families.can_take(name, shape="image")])
def test_every_family_inpaints(name):
    family = families.build(name)
    torch.manual_seed(0)
    unet = create_unet("tiny", family.num_classes, (4, 8), 2).eval()
    pipeline = quiet(D3PMImagePipeline(unet, family.scheduler()))
    x_0, mask = family.data((1, 2, 4, 8)), torch.rand(1, 1, 4, 8, generator=seeded()) < 0.5
    filled = states(pipeline, image=x_0, mask_image=mask, batch_size=3)
    known = ~mask.expand(3, 2, -1, -1)
    assert torch.equal(filled[known], x_0.expand_as(filled)[known])


# Images


def test_image_output_types():
    pipeline = make("image")
    options = {"num_inference_steps": STEPS, "batch_size": 2}
    latent, pt, array, pil = (
        pipeline(generator=seeded(), output_type=kind, **options).images for kind in ("latent", "pt", "np", "pil")
    )
    assert latent.shape == (2, 2, 8, 4) and latent.dtype == torch.long
    torch.testing.assert_close(pt, latent.float() / 16)
    np.testing.assert_allclose(array, pt.permute(0, 2, 3, 1).numpy(), rtol=1e-6)
    assert len(pil) == 2 and pil[0].size == (4, 8)
    with pytest.raises(ValueError, match="output_type is 'text': it must be one of pil, np, pt, latent"):
        pipeline(num_inference_steps=1, output_type="text")


@pytest.mark.parametrize(("num_classes", "channels"), [(2, 1), (17, 1), (256, 1), (256, 3)])
def test_pictures_are_read_as_they_are_written(num_classes, channels):
    unet = create_unet("tiny", num_classes, 16, channels)
    pipeline = D3PMImagePipeline(unet, D3PMScheduler(num_classes, transition="uniform", beta_schedule="cosine"))
    x = torch.randint(0, num_classes, (3, channels, 16, 16), generator=seeded())
    for kind in ("pil", "np", "pt", "latent"):
        assert torch.equal(pipeline.encode(pipeline.decode(x, kind)), x), kind
    assert pipeline.decode(x)[0].mode == ("L" if channels == 1 else "RGB")


def test_inpainting_keeps_the_black_part():
    unet = create_unet("tiny", 256, 8, 3).eval()
    pipeline = quiet(D3PMImagePipeline(unet, D3PMScheduler(256, transition="uniform", beta_schedule="cosine")))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    mask = Image.new("L", (8, 8), 0)
    mask.paste(255, (0, 0, 4, 8))  # paint the left half
    result = np.asarray(pipeline(image=image, mask_image=mask, num_inference_steps=3, generator=seeded()).images[0])
    assert (result[:, 4:] == np.asarray(image)[:, 4:]).all()
    assert (result[:, :4] != np.asarray(image)[:, :4]).any()


def test_reconstruction_of_an_image():
    pipeline = make("image")
    image = torch.randint(0, 17, (1, 2, 8, 4), generator=seeded(5))
    one_step = states(pipeline, image=image, start_timestep=0, num_inference_steps=1)
    assert (one_step == image).float().mean() > 0.8  # hardly corrupted
    several = states(pipeline, image=image, start_timestep=50, batch_size=4)
    assert several.shape == (4, 2, 8, 4) and pipeline.scheduler.timesteps[0] == 50
    with pytest.raises(ValueError, match="start_timestep is 100: it must be an integer in 0 .. 99"):
        states(pipeline, image=image, start_timestep=100)
    with pytest.raises(ValueError, match="num_inference_steps is 5: it must be an integer in 1 .. 3"):
        states(pipeline, image=image, start_timestep=2)


def test_bad_image_input():
    pipeline = make("image")
    image, mask = torch.zeros(1, 2, 8, 4).long(), torch.zeros(1, 1, 8, 4)
    for wrong in ({"image": image}, {"mask_image": mask}, {"start_timestep": 3}):
        with pytest.raises(ValueError, match="inpainting takes image and mask_image, reconstruction image and start"):
            states(pipeline, **wrong)
    with pytest.raises(ValueError, match=r"the image has the shape \(2, 4, 8\), and this model generates \(2, 8, 4\)"):
        states(pipeline, image=image.transpose(2, 3), mask_image=mask)
    with pytest.raises(ValueError, match=r"mask_image is \(4, 8\), and the image \(8, 4\)"):
        states(pipeline, image=image, mask_image=mask.transpose(2, 3))
    with pytest.raises(ValueError, match="token 17 at position .* outside the vocabulary of 17"):
        states(pipeline, image=image + 17, mask_image=mask)
    with pytest.raises(ValueError, match="got 2 inputs for a batch of 3"):
        states(pipeline, image=image.expand(2, -1, -1, -1), mask_image=mask, batch_size=3)
    with pytest.raises(ValueError, match="num_particles is 0"):
        states(pipeline, num_particles=0)


# Text


def test_prompts():
    pipeline = make("text")
    text = pipeline("the quick [MASK][MASK] fox", num_inference_steps=STEPS, generator=seeded()).texts[0]
    assert text[:10] == "the quick " and text[12:] == " fox" and len(text) == 16
    # Several samples of one prompt, several prompts, and a prompt to go on with.
    options = {"num_inference_steps": STEPS, "generator": seeded()}
    several = pipeline("a[MASK][MASK][MASK]", batch_size=5, **options).texts
    assert len(set(several)) > 1 and all(text[0] == "a" and len(text) == 4 for text in several)
    two = pipeline(["ab[MASK]", "[MASK]cd"], **options).texts
    assert two[0][:2] == "ab" and two[1][1:] == "cd"
    longer = pipeline(["once upon", "it was a"], sequence_length=20, **options).texts
    assert longer[0].startswith("once upon") and longer[1].startswith("it was a") and {*map(len, longer)} == {20}


def test_reconstruction_of_a_text():
    pipeline = make("text")
    text = pipeline("hello world", start_timestep=0, num_inference_steps=1, generator=seeded()).texts[0]
    assert sum(a == b for a, b in zip(text, "hello world")) >= 9
    free = pipeline("hello world", start_timestep=999, num_inference_steps=5, generator=seeded()).texts[0]
    assert sum(a == b for a, b in zip(free, "hello world")) < 9


def test_bad_text_input():
    pipeline = make("text")
    with pytest.raises(ValueError, match="between 2 and 3 tokens: encode them one by one"):
        pipeline.encode(["ab", "abc"])
    with pytest.raises(ValueError, match="sequence_length is 2: pass a shorter prompt or a larger sequence_length"):
        pipeline("abc", sequence_length=2, num_inference_steps=1)
    with pytest.raises(
        ValueError,
        match=r"characters that the tokenizer does not know \('_' '!'\): replace or remove them; it knows a to z and space; "
        r"\[MASK\] is a gap of one token",
    ):
        pipeline("The Capital of France is ____!", num_inference_steps=1)
    with pytest.raises(ValueError, match="got prompt and input_ids"):
        pipeline("abc", input_ids=torch.zeros(1, 3).long(), num_inference_steps=1)
    with pytest.raises(ValueError, match="need a text: pass `prompt` or `input_ids`"):
        pipeline(start_timestep=3)
    with pytest.raises(ValueError, match="a text with gaps cannot be corrupted"):
        pipeline("a[MASK]", start_timestep=3, num_inference_steps=1)
    with pytest.raises(ValueError, match=r"mask has the shape \(1, 2\), and the tokens \(1, 3\)"):
        pipeline(input_ids=torch.zeros(1, 3).long(), mask=torch.ones(1, 2).bool(), num_inference_steps=1)
    with pytest.raises(ValueError, match="output_type is 'pil': it must be one of text, latent, seq"):
        pipeline(output_type="pil")
    with pytest.raises(ValueError, match="start_timestep: the first of the timesteps"):
        pipeline("abc", start_timestep=3, timesteps=[3, 1])


def test_nan_weights_are_noticed():
    pipeline = make("text")
    pipeline.text_model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the network's output holds NaN or infinity"):
        states(pipeline)


@pytest.mark.parametrize("option", [{"temperature": 0.1}, {"top_k": 1}, {"top_p": 0.1}])
def test_sharper_samples(option):
    """Each of them makes samples of a sure network surer."""
    torch.manual_seed(0)
    pipeline = make("text")
    pipeline.text_model.lm_head.weight.data.mul_(3)

    def log_likelihood(**kwargs):
        latents = torch.full((8, LENGTH), 27)
        sequences = states(pipeline, batch_size=8, num_inference_steps=1, **kwargs)
        with torch.no_grad():
            log_p = pipeline.denoiser(latents, torch.tensor(999))[..., :27].log_softmax(-1)
        return log_p.gather(-1, sequences[..., None]).mean()

    assert log_likelihood(**option) > log_likelihood() + 0.3
