# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""`pipeline.denoiser` and the classes behind it."""

import copy
import pickle

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from torch.testing import assert_close
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Denoiser,
    ImageDenoiser,
    TextDenoiser,
    create_text_model,
    create_unet,
)
from d3pm_hf.models.image_denoiser import residual_logits


K, C, SIZE, LENGTH = 5, 1, 4, 6


def make(kind):
    torch.manual_seed(0)
    if kind == "text":
        return D3PMTextPipeline(create_text_model("tiny", K), D3PMScheduler(K, 20), sequence_length=LENGTH)
    return D3PMImagePipeline(create_unet("tiny", K, SIZE, C), D3PMScheduler(K, 20))


def inputs(kind, batch_size=2):
    shape = (LENGTH,) if kind == "text" else (C, SIZE, SIZE)
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, K, (batch_size, *shape), generator=generator), torch.tensor([3, 17])[:batch_size]


KINDS = pytest.mark.parametrize("kind", ["text", "image"])


@torch.no_grad()
def test_an_image_denoiser_is_the_network_between_two_conversions():
    pipeline = make("image")
    x_t, t = inputs("image")
    output = pipeline.unet.eval()(x_t / 2 - 1, t).sample  # [B, C * K, H, W]; K - 1 is 4
    assert_close(pipeline.denoiser(x_t, t), residual_logits(output, x_t))
    assert pipeline.denoiser.sample_shape == (C, SIZE, SIZE) and pipeline.denoiser.num_classes == K


@torch.no_grad()
def test_a_text_denoiser_passes_the_timestep_to_networks_that_read_it():
    x_t, t = inputs("text")
    model = make("text").text_model.eval()
    denoiser = TextDenoiser(model, K)
    assert_close(denoiser(x_t, t), model(x_t, t).logits)
    assert (denoiser.reads_timestep, denoiser.is_causal) == (True, False)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    bert = BertForMaskedLM(BertConfig(vocab_size=K, **sizes)).eval()
    assert_close(TextDenoiser(bert)(x_t, t), bert(x_t).logits)
    assert not TextDenoiser(bert).reads_timestep and TextDenoiser(bert).num_classes == K
    causal = TextDenoiser(create_text_model("tiny", K, is_decoder=True, timestep_conditioning=False))
    assert (causal.reads_timestep, causal.is_causal) == (False, True)


@torch.no_grad()
def test_condition_is_handed_to_the_network():
    x_t, t = inputs("text")
    pipeline = make("text")
    model, mask = pipeline.text_model.eval(), torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    assert_close(pipeline.denoiser(x_t, t, attention_mask=mask), model(x_t, t, attention_mask=mask).logits)
    unet = create_unet("tiny", K, SIZE, C, num_class_embeds=3).eval()
    x_t, labels = inputs("image")[0], torch.tensor([2, 0])
    expected = residual_logits(unet(x_t / 2 - 1, t, class_labels=labels).sample, x_t)
    assert_close(ImageDenoiser(unet, K)(x_t, t, class_labels=labels), expected)


@KINDS
@torch.no_grad()
def test_a_denoiser_can_be_copied_and_pickled(kind):
    denoiser = make(kind).denoiser.eval()
    expected = denoiser(*inputs(kind))
    for copied in (copy.deepcopy(denoiser), pickle.loads(pickle.dumps(denoiser))):
        assert copied.network is not denoiser.network
        assert_close(copied(*inputs(kind)), expected)


@KINDS
def test_a_denoiser_holds_the_weights_of_its_network_alone(kind):
    pipeline = make(kind)
    state = getattr(pipeline, pipeline.network_name).state_dict()
    assert list(pipeline.denoiser.state_dict()) == [f"network.{name}" for name in state]
    assert {id(p) for p in pipeline.denoiser.parameters()} == {id(p) for p in pipeline.denoiser.network.parameters()}


class Parallel(torch.nn.Module):
    """What `DataParallel` does on devices: replicas whose weights are plain tensors, each with a part of the batch."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def replica(self, module):
        copied = module._replicate_for_data_parallel()
        copied._modules, copied._parameters = {}, {}
        for name, child in module._modules.items():
            copied._modules[name] = None if child is None else self.replica(child)
        for name, parameter in module._parameters.items():
            copied.__dict__[name] = None if parameter is None else parameter.clone()
        return copied

    def forward(self, x_t, t):
        return torch.cat([self.replica(self.module)(x_t[i : i + 1], t[i : i + 1]) for i in range(len(x_t))])


def test_a_text_denoiser_runs_in_replicas():
    """diffusers' `UNet2DModel` does not: its `dtype` fails without parameters."""
    denoiser = make("text").denoiser.eval()
    output = Parallel(denoiser)(*inputs("text"))
    assert_close(output, denoiser(*inputs("text")))
    output.sum().backward()
    assert denoiser.network.lm_head.weight.grad is not None


@KINDS
def test_a_denoiser_runs_with_other_weights(kind):
    denoiser, other = make(kind).denoiser.eval(), make(kind).denoiser.eval()
    weights = {name: weight + 0.1 for name, weight in denoiser.state_dict().items()}
    other.load_state_dict(weights)
    output = torch.func.functional_call(denoiser, weights, inputs(kind), tie_weights=False)
    assert_close(output, other(*inputs(kind)))


@KINDS
def test_the_denoiser_follows_its_pipeline(kind):
    pipeline, other = make(kind), make(kind)
    pipeline.to(torch.float64)
    assert pipeline.denoiser.dtype == torch.float64 and pipeline.denoiser.device == torch.device("cpu")
    network = getattr(other, other.network_name)
    setattr(pipeline, pipeline.network_name, network)
    assert pipeline.denoiser.network is network and pipeline.denoiser.dtype == torch.float32
    assert pipeline.denoiser not in pipeline.components.values()
    network.eval()
    assert not pipeline.denoiser.training
    pipeline.denoiser.train()
    assert network.training


@KINDS
def test_a_compiled_denoiser_has_one_graph(kind):
    denoiser = make(kind).denoiser.eval()
    with torch.no_grad():
        expected = denoiser(*inputs(kind))
        compiled = torch.compile(denoiser, backend="eager", fullgraph=True)
        assert_close(compiled(*inputs(kind)), expected)


def test_sentences():
    with pytest.raises(
        ValueError, match="5 output channels, and 1 channels of 6 levels .* need 6: use a network and a"
    ):
        ImageDenoiser(create_unet("tiny", K, SIZE, C), 6)
    with pytest.raises(
        ValueError, match="a vocabulary of 5 and the scheduler one of 6: use a network and a scheduler"
    ):
        TextDenoiser(create_text_model("tiny", K), 6)
    with pytest.raises(NotImplementedError, match="Denoiser must define forward"):
        Denoiser()(*inputs("text"))

    with pytest.raises(TypeError, match="name `Denoiser` before `ConfigMixin` among the bases of Misordered"):

        class Misordered(ModelMixin, ConfigMixin, Denoiser):
            pass

    with pytest.raises(TypeError, match="name `PreTrainedModel` before `Denoiser` among the bases of Misordered"):

        class Misordered(Denoiser, PreTrainedModel):
            pass

    class NoShape(Denoiser):
        num_classes = 7

    with pytest.raises(ValueError, match="the denoiser predicts 7 classes and the scheduler has 5: use a network"):
        D3PMImagePipeline(NoShape(), D3PMScheduler(K, 20))
    with pytest.raises(ValueError, match=r"NoShape has sample_shape=None: it must be \(C, H, W\); set it"):
        D3PMImagePipeline(NoShape(), D3PMScheduler(7, 20))


BATCH = torch.export.Dim("batch", min=1, max=63)  # the U-Net of diffusers has another path from 64 on


@pytest.mark.parametrize("kind", ["bert", "t5", "unet", *(pytest.param(f"causal {b}", marks=pytest.mark.slow) for b in ("bert", "t5"))])  # fmt: skip
def test_export_with_a_dynamic_batch(kind):
    """`torch.export` of a text model with classes, and of denoisers, for batches of another size than the example."""
    torch.manual_seed(0)
    if kind == "unet":
        modules, shape = {"x_t": ImageDenoiser(create_unet("tiny", K, 8, C), K)}, (C, 8, 8)
    else:
        options = {"is_decoder": True, "timestep_conditioning": False} if "causal" in kind else {}
        options |= {"backbone": kind.split()[-1]}
        with_classes = create_text_model("tiny", K, num_class_embeds=2, **options)
        modules = {"input_ids": with_classes, "x_t": TextDenoiser(create_text_model("tiny", K, **options))}
        shape = (LENGTH,)
    for name, module in modules.items():
        module.eval()

        def arguments(batch_size):
            x = torch.randint(K, (batch_size, *shape), generator=torch.Generator().manual_seed(batch_size))
            labels = {"class_labels": torch.arange(batch_size) % 2} if name == "input_ids" else {}
            return {name: x, "timestep": torch.arange(batch_size), **labels}

        dynamic = {key: {0: BATCH} for key in arguments(2)}
        exported = torch.export.export(module, (), arguments(2), dynamic_shapes=dynamic).module()
        for batch_size in (2, 5):
            expected, got = (network(**arguments(batch_size)) for network in (module, exported))
            assert_close(*(x if name == "x_t" else x.logits for x in (got, expected)))
