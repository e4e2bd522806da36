# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Checks of diffusers' scheduler and pipeline tests, with discrete states, that no other test of ours makes.

docs/source/en/conformance.md lists all of them.
"""

import inspect

import families
import pytest
import torch
from accelerate.hooks import CpuOffload
from comparison import assert_same_draws
from diffusers import DDPMPipeline, DDPMScheduler
from diffusers.hooks import apply_group_offloading
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import retrieve_timesteps
from test_pipelines import KINDS, LENGTH, STEPS, make, quiet, seeded, states
from test_scheduler import OPTIONS, K, T, output_for

from d3pm_hf import D3PMImagePipeline, D3PMPipeline, D3PMScheduler, D3PMTextPipeline, create_unet


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def network(pipeline):
    return pipeline.text_model if isinstance(pipeline, D3PMTextPipeline) else pipeline.unet


# Schedulers


@pytest.mark.parametrize("name", ["defaults", "linear", "linear_gaussian", "cosine", "raw", "logistic", "previous"])
def test_save_config(name, tmp_path):
    """A process without tensors is its configuration, which `save_config` writes and `from_pretrained` reads."""
    scheduler = D3PMScheduler(K, T, **OPTIONS[name])
    scheduler.save_config(tmp_path)
    again = D3PMScheduler.from_pretrained(tmp_path)
    config = {key: value for key, value in scheduler.config.items() if key != "_use_default_values"}
    assert dict(again.config) == config
    x_t = scheduler.sample_prior((2, T), seeded())
    output = output_for(scheduler, x_t.shape)
    for t in (T - 1, 1, 0):
        first, second = (each.step(output, t, x_t, generator=seeded()).prev_sample for each in (scheduler, again))
        assert torch.equal(first, second)


def test_retrieve_timesteps():
    """diffusers' pipelines set the timesteps of any scheduler with this function."""
    scheduler = D3PMScheduler(K, 10)
    timesteps, num_steps = retrieve_timesteps(scheduler, 5, "cpu")
    assert timesteps.tolist() == [9, 7, 5, 3, 1] and num_steps == 5
    timesteps, num_steps = retrieve_timesteps(scheduler, device="cpu", timesteps=[8, 3])
    assert timesteps.tolist() == [8, 3] and num_steps == 2


@pytest.mark.parametrize("name", ["absorbing", "uniform", "gaussian", "rate-sparse", "autoregressive"])
def test_add_noise_takes_one_timestep_for_all(name):
    family = families.build(name)
    scheduler, x_0 = family.scheduler(), family.data((4, T))
    scheduler.set_timesteps(3)
    t = scheduler.timesteps[1][None]  # as diffusers' scripts do
    assert torch.equal(scheduler.add_noise(x_0, t, seeded()), scheduler.add_noise(x_0, int(t), seeded()))
    with pytest.raises(ValueError, match=r"timesteps are torch.float32: .* add_noise\(x_0, timesteps, generator\)"):
        scheduler.add_noise(x_0, torch.randn(x_0.shape), t)


# Pipelines: arguments and parts


@KINDS
def test_call_signature(kind):
    parameters = inspect.signature(make(kind).__call__).parameters
    expected = {"batch_size", "num_inference_steps", "generator", "latents", "output_type", "return_dict", "timesteps"}
    expected |= {"callback_on_step_end", "callback_on_step_end_tensor_inputs"}
    expected |= {"prompt", "num_return_sequences"} if kind == "text" else {"image", "num_images_per_prompt"}
    assert expected <= set(parameters)
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters.values())


def test_a_batch_of_prompts_equals_single_runs():
    pipeline = make("text")
    prompts = ["ab[MASK][MASK]", "[MASK][MASK]cd", "[MASK]bc[MASK]"]
    batch = states(pipeline, prompt=prompts, generator=[seeded(i) for i in range(3)])
    alone = [states(pipeline, prompt=prompt, generator=seeded(i)) for i, prompt in enumerate(prompts)]
    assert_same_draws(batch, torch.cat(alone))


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_a_batch_of_images_equals_single_runs(output_type):
    """Whatever kind of pictures they come as."""
    unet = create_unet("tiny", 256, 8, 3).eval()
    pipeline = quiet(D3PMImagePipeline(unet, D3PMScheduler(256, 20, transition="uniform", beta_schedule="cosine")))
    x = torch.randint(0, 256, (3, 3, 8, 8), generator=seeded())
    images = pipeline.decode(x, output_type)
    mask = torch.zeros(1, 1, 8, 8)
    mask[..., :4] = 1
    batch = states(pipeline, image=images, mask_image=mask, generator=[seeded(i) for i in range(3)])
    alone = [states(pipeline, image=x[i][None], mask_image=mask, generator=seeded(i)) for i in range(3)]
    assert_same_draws(batch, torch.cat(alone))


@KINDS
def test_components(kind):
    pipeline = make(kind)
    names = {"text_model", "tokenizer"} if kind == "text" else {"unet"}
    assert set(pipeline.components) == {"scheduler", *names}
    again = type(pipeline)(**pipeline.components)
    assert all(again.components[name] is part for name, part in pipeline.components.items())


@KINDS
def test_from_pipe(kind):
    """A pipeline of the same parts has the same settings and samples, and leaves the first as it was."""
    pipeline = make(kind)
    expected = states(pipeline)
    again = quiet(type(pipeline).from_pipe(pipeline))
    assert dict(again.config) == dict(pipeline.config)
    assert torch.equal(states(again), expected) and torch.equal(states(pipeline), expected)
    scheduler = D3PMScheduler.from_config(pipeline.scheduler.config, num_train_timesteps=50)
    fewer = type(pipeline).from_pipe(pipeline, scheduler=scheduler)
    assert fewer.scheduler is scheduler and network(fewer) is network(pipeline)


def test_from_a_pipeline_of_diffusers():
    ddpm = DDPMPipeline(create_unet("tiny", 17, 8, 1), DDPMScheduler())
    for make_pipeline in (D3PMImagePipeline.from_pipe, lambda pipe: D3PMImagePipeline(**pipe.components)):
        with pytest.raises(ValueError, match="scheduler is a DDPMScheduler: it must be a `D3PMScheduler`"):
            make_pipeline(ddpm)
    pipeline = D3PMImagePipeline.from_pipe(ddpm, scheduler=D3PMScheduler(17))
    assert pipeline.unet is ddpm.unet
    pipeline.scheduler = DDPMScheduler()
    with pytest.raises(ValueError, match="scheduler is a DDPMScheduler: it must be a `D3PMScheduler`"):
        pipeline()
    with pytest.raises(ValueError, match="scheduler is a DDPMScheduler: it must be a `D3PMScheduler`"):
        D3PMTextPipeline(make("text").text_model, DDPMScheduler())


def test_encode_and_decode():
    pipeline = make("text")
    texts = ["hello world ", "abc def  ghi"]
    tokens = pipeline.encode(texts)
    assert pipeline.decode(tokens) == texts and tokens.shape == (2, LENGTH)
    del pipeline.text_model  # neither needs the network
    continued = pipeline.encode("hello", sequence_length=8)
    assert torch.equal(continued, pipeline.encode("hello[MASK][MASK][MASK]"))
    assert pipeline.decode(continued) == ["hello"]


# Pipelines: files


@KINDS
@HALF
def test_save_and_load_in_half_precision(kind, dtype, tmp_path):
    pipeline = make(kind).to(dtype)
    pipeline.save_pretrained(tmp_path)
    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path, dtype=dtype))
    assert {parameter.dtype for parameter in network(loaded).parameters()} == {dtype}
    assert_same_draws(states(loaded), states(pipeline))


@KINDS
def test_a_dtype_for_each_part(kind, tmp_path):
    pipeline = make(kind)
    pipeline.save_pretrained(tmp_path)
    name = "text_model" if kind == "text" else "unet"
    for dtype in ({name: torch.bfloat16, "default": torch.float32}, {"default": torch.bfloat16}):
        assert network(D3PMPipeline.from_pretrained(tmp_path, dtype=dtype)).dtype == torch.bfloat16
    assert network(D3PMPipeline.from_pretrained(tmp_path, dtype={"default": torch.float32})).dtype == torch.float32


@KINDS
def test_variant_files(kind, tmp_path):
    pipeline = make(kind)
    pipeline.save_pretrained(tmp_path, variant="fp16")
    stem = "text_model/model" if kind == "text" else "unet/diffusion_pytorch_model"
    assert (tmp_path / f"{stem}.fp16.safetensors").exists() and not (tmp_path / f"{stem}.safetensors").exists()
    assert_same_draws(states(quiet(D3PMPipeline.from_pretrained(tmp_path, variant="fp16"))), states(pipeline))
    for variant in ("bf16", None):
        with pytest.raises(OSError):
            D3PMPipeline.from_pretrained(tmp_path, variant=variant)


@KINDS
def test_device_map(kind, tmp_path):
    pipeline = make(kind)
    pipeline.save_pretrained(tmp_path)
    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path, device_map="cpu"))
    assert_same_draws(states(loaded), states(pipeline))


def test_an_optional_part_may_be_left_out(tmp_path):
    pipeline = make("text")
    pipeline.save_pretrained(tmp_path)
    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path, tokenizer=None))
    assert loaded.tokenizer is None
    assert_same_draws(states(loaded), states(pipeline))


# Pipelines: where the weights are


@KINDS
@HALF
def test_to_dtype_and_device(kind, dtype):
    pipeline = make(kind)
    assert pipeline.dtype == torch.float32
    pipeline.to(dtype=dtype)
    assert pipeline.dtype == network(pipeline).dtype == dtype
    pipeline.to("meta")
    assert pipeline.device.type == network(pipeline).device.type == "meta"


@KINDS
def test_model_cpu_offload(kind):
    """The hooks bring the network to the device for a call and take it back; twice as well as once."""
    pipeline = make(kind)
    expected = states(pipeline)
    for _ in range(2):
        pipeline.enable_model_cpu_offload(device="cpu")
        assert isinstance(network(pipeline)._hf_hook, CpuOffload)
        assert_same_draws(states(pipeline), expected)


@KINDS
@pytest.mark.parametrize(
    "level", [{"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 1}]
)
def test_group_offloading(kind, level):
    pipeline = make(kind)
    expected = states(pipeline)
    apply_group_offloading(network(pipeline), onload_device=torch.device("cpu"), **level)
    assert_same_draws(states(pipeline), expected)


@pytest.mark.parametrize("kind", ["image", "logistic"])
def test_layerwise_casting(kind):
    """Weights kept in float8 give other numbers, and no NaN, which a step would refuse."""
    pipeline = make(kind).to(torch.bfloat16)
    pipeline.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert pipeline.unet.mid_block.resnets[0].conv1.weight.dtype == torch.float8_e4m3fn
    pipeline.scheduler.check_states(states(pipeline, batch_size=2, num_inference_steps=STEPS))
