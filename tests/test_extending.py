# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The package from outside: nothing here changes a file of it."""

import math
from functools import partial

import families
import pytest
import reference as ref
import torch
import toy
from diffusers import ConfigMixin, DiTTransformer2DModel, ModelMixin, UNet2DConditionModel
from diffusers.configuration_utils import register_to_config
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    Denoiser,
    ImageDenoiser,
    TextDenoiser,
    d3pm_loss,
    evaluate_bound,
)
from d3pm_hf.models.image_denoiser import residual_logits
from d3pm_hf.samplers import SamplerStep, ancestral, register_sampler
from d3pm_hf.training import D3PMTrainingArguments, train


pytestmark = pytest.mark.usefixtures("fresh_accelerator")
T = 20


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(pipeline, **options):
    pipeline.set_progress_bar_config(disable=True)
    options = {"batch_size": 4, "num_inference_steps": 5, "generator": seeded(), **options}
    return pipeline(output_type="latent", return_dict=False, **options)[0]


def reload(pipeline, folder):
    pipeline.save_pretrained(folder)
    return D3PMPipeline.from_pretrained(folder)


def loss_of(pipeline, x_0, seed=0, **condition):
    """The mean hybrid loss at fixed timesteps and noise."""
    t = torch.randint(0, T, x_0.shape[:1], generator=seeded(seed))
    x_t = pipeline.scheduler.add_noise(x_0, t, seeded(seed))
    output = pipeline.denoiser(x_t, t, **condition)
    return d3pm_loss(pipeline.scheduler, output, x_0, x_t, t, hybrid_coeff=0.01).loss.mean()


def train_one_step(pipeline, x_0, **condition):
    """One step of gradient descent, which lowers the loss on the same batch."""
    denoiser = pipeline.denoiser.train()
    optimizer = torch.optim.SGD(denoiser.parameters(), lr=1e-2)
    before = loss_of(pipeline, x_0, **condition)
    before.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert loss_of(pipeline, x_0, **condition) < before
    denoiser.eval()


def check_bound(pipeline, model, x_0, reference):
    """The bound of `model` is that of `reference`, the same network called by hand."""
    scheduler, options = pipeline.scheduler, {"num_inference_steps": 4, "progress_bar": False}
    bound = evaluate_bound(scheduler, model, [x_0], **options)
    assert bound.total == pytest.approx(evaluate_bound(scheduler, reference, [x_0], **options).total, rel=1e-6)
    assert 0 < bound.bits_per_dim < 3 * math.log2(scheduler.config.num_classes)


# A denoiser from outside

K, C, SIZE = 4, 1, 4
IMAGES = torch.randint(0, K, (4, C, SIZE, SIZE), generator=seeded(5))
PROCESS = {"mask_in_data": True, "beta_schedule": "reciprocal"}
LABELS = torch.tensor([0, 1, 2, 1])


def test_a_transformer_of_diffusers(tmp_path):
    """`DiTTransformer2DModel` is called as a U-Net is: it needs no adapter. Its labels are a condition."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "norm_num_groups": 4}
    network = DiTTransformer2DModel(
        in_channels=C, out_channels=C * K, sample_size=SIZE, patch_size=2, num_embeds_ada_norm=3, **sizes
    )
    nn.init.normal_(network.transformer_blocks[0].norm1.emb.class_embedder.embedding_table.weight)
    pipeline = D3PMImagePipeline(network, D3PMScheduler(K, T, **PROCESS))
    train_one_step(pipeline, IMAGES, class_labels=LABELS)

    labeled = partial(pipeline.denoiser, class_labels=LABELS)
    check_bound(
        pipeline,
        labeled,
        IMAGES,
        lambda x_t, t: residual_logits(network(x_t / 1.5 - 1, timestep=t, class_labels=LABELS).sample, x_t),
    )
    scheduler, generator = pipeline.scheduler, seeded()
    x_T = scheduler.sample_prior(IMAGES.shape, generator)
    by_hand = ancestral(scheduler, labeled, x_T, scheduler.sampling_timesteps(5), generator=generator)
    samples = draw(pipeline, condition={"class_labels": LABELS})
    assert torch.equal(samples, by_hand)
    assert not torch.equal(samples, draw(pipeline, condition={"class_labels": (LABELS + 1) % 3}))
    again = reload(pipeline, tmp_path / "dit")
    assert type(again.unet) is DiTTransformer2DModel
    assert torch.equal(draw(again, condition={"class_labels": LABELS}), samples)


class LabeledUNet(Denoiser, ModelMixin, ConfigMixin):
    """A `UNet2DConditionModel` that attends to the embedding of a label, of which 0 stands for none."""

    @register_to_config
    def __init__(self, num_levels: int, channels: int, size: int, num_labels: int):
        super().__init__()
        self.sample_shape, self.num_classes = (channels, size, size), num_levels
        self.labels = nn.Embedding(1 + num_labels, 8)
        self.unet = UNet2DConditionModel(
            size, channels, channels * num_levels, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=8, attention_head_dim=4,
        )  # fmt: skip

    def forward(self, x_t, timestep, labels=None):
        labels = torch.zeros(len(x_t), dtype=torch.long, device=x_t.device) if labels is None else labels
        denoiser = ImageDenoiser(self.unet, self.num_classes)
        return denoiser(x_t, timestep, encoder_hidden_states=self.labels(labels)[:, None])


class Examples(torch.utils.data.Dataset):
    """`[index]` of evaluation, and `[index, seed]` of training."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, key):
        return self.rows[key[0] if isinstance(key, tuple) else key]


def run(pipeline, rows, folder):
    """One step of the training loop, with a measured bound on its card, and the pipeline that it wrote."""
    before = [parameter.clone() for parameter in pipeline.denoiser.parameters()]
    arguments = D3PMTrainingArguments(
        str(folder), max_train_steps=1, train_batch_size=2, num_inference_steps=2, num_samples=2, num_eval_timesteps=2,
        use_ema=False, learning_rate=1e-2, lr_warmup_steps=0, lr_scheduler="constant",
    )  # fmt: skip
    train(arguments, pipeline, Examples(rows), Examples(rows))
    assert not all(map(torch.equal, before, pipeline.denoiser.parameters()))
    assert "Bits per dimension" in (folder / "README.md").read_text()
    loaded = D3PMPipeline.from_pretrained(folder)
    assert torch.equal(draw(loaded), draw(pipeline))
    return loaded


def test_an_adapter_that_is_saved(tmp_path):
    torch.manual_seed(0)
    pipeline = D3PMImagePipeline(LabeledUNet(K, C, SIZE, num_labels=3), D3PMScheduler(K, T, **PROCESS))
    assert pipeline.denoiser is pipeline.unet and pipeline.denoiser.dtype == torch.float32
    train_one_step(pipeline, IMAGES, labels=1 + LABELS)
    loaded = run(pipeline, IMAGES, tmp_path)
    assert type(loaded.unet) is LabeledUNet and dict(loaded.unet.config)["num_labels"] == 3
    network = loaded.unet

    def by_hand(x_t, t):
        words = network.labels(torch.zeros(len(x_t), dtype=torch.long))[:, None]
        return residual_logits(network.unet(x_t / 1.5 - 1, t, words).sample, x_t)

    check_bound(loaded, loaded.denoiser, IMAGES, by_hand)
    none = torch.zeros(1, dtype=torch.long)
    assert torch.equal(draw(loaded, condition={"labels": none}), draw(loaded))
    moved = D3PMImagePipeline.from_pipe(loaded, scheduler=D3PMScheduler(K, 2 * T, **PROCESS))
    assert moved.unet is network and len(moved.scheduler) == 2 * T


class PixelNetwork(Denoiser):
    """A plain `nn.Module` over one-hot pixels."""

    num_classes, sample_shape = K, (C, SIZE, SIZE)

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(T, 8)
        self.read, self.write = nn.Conv2d(C * K, 8, 3, padding=1), nn.Conv2d(8, C * K, 3, padding=1)

    def forward(self, x_t, timestep):
        pixels = F.one_hot(x_t, K).float().movedim(-1, 2).flatten(1, 2)  # [B, C * K, H, W]
        hidden = F.silu(self.read(pixels) + self.time(timestep.expand(len(x_t)))[..., None, None])
        return self.write(hidden).unflatten(1, (C, K)).movedim(2, -1)  # [B, C, H, W, K]


def test_a_module_of_torch(tmp_path):
    torch.manual_seed(0)
    network = PixelNetwork()
    pipeline = D3PMImagePipeline(network, D3PMScheduler(K, T, transition="uniform", beta_schedule="cosine"))
    train_one_step(pipeline, IMAGES)
    check_bound(pipeline, pipeline.denoiser, IMAGES, lambda x_t, t: network(x_t, t))
    free = draw(pipeline)
    assert free.shape == IMAGES.shape and network.network is network
    mask = torch.zeros(1, 1, SIZE, SIZE)
    mask[..., :2] = 1
    painted = draw(pipeline, image=IMAGES, mask_image=mask, num_particles=2)
    assert torch.equal(painted[..., 2:], IMAGES[..., 2:])
    pipeline.unet = torch.compile(network, backend="eager")
    assert torch.equal(draw(pipeline), free)
    pipeline.unet = network
    with pytest.raises(ValueError, match="unet is a PixelNetwork, which has no `save_pretrained`: derive it from"):
        pipeline.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


class RecurrentText(Denoiser, ModelMixin, ConfigMixin):
    """A bidirectional GRU that does not read the timestep, for absorbing processes."""

    reads_timestep = False

    @register_to_config
    def __init__(self, vocab_size: int, hidden_size: int = 8):
        super().__init__()
        self.num_classes = vocab_size
        self.words = nn.Embedding(vocab_size, hidden_size)
        self.layer = nn.GRU(hidden_size, hidden_size, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden_size, vocab_size)

    def forward(self, x_t, timestep):
        return self.head(self.layer(self.words(x_t))[0])  # [B, N, K]


class WordsConfig(PreTrainedConfig):
    model_type = "words"
    vocab_size: int = 6


class WordsModel(PreTrainedModel, Denoiser):
    """A model of transformers: a word and its neighbors predict it."""

    config_class = WordsConfig

    def __init__(self, config):
        super().__init__(config)
        self.num_classes = config.vocab_size
        self.times, self.words = nn.Embedding(T, 8), nn.Embedding(config.vocab_size, 8)
        self.head = nn.Conv1d(8, config.vocab_size, 3, padding=1)
        self.post_init()

    def forward(self, x_t, timestep):
        hidden = self.words(x_t) + self.times(timestep.reshape(-1))[:, None]  # [B, N, D]
        return self.head(hidden.mT).mT  # [B, N, K]


@pytest.mark.parametrize("network", [RecurrentText, WordsModel])
def test_a_text_network(network, tmp_path):
    torch.manual_seed(0)
    tokens = torch.randint(0, 5, (4, 8), generator=seeded(6))
    network = network(WordsConfig() if network is WordsModel else 6)
    pipeline = D3PMTextPipeline(network, D3PMScheduler(6, T), sequence_length=8)
    train_one_step(pipeline, tokens)
    loaded = run(pipeline, tokens, tmp_path)
    assert type(loaded.text_model) is type(network) and loaded.config.sequence_length == 8
    check_bound(loaded, loaded.denoiser, tokens, lambda x_t, t: loaded.text_model(x_t, t))
    filled = draw(loaded, input_ids=tokens, mask=torch.arange(8).expand(4, 8) % 2 == 0)
    assert torch.equal(filled[:, 1::2], tokens[:, 1::2])


# A sampler from outside


@register_sampler("one_at_a_time")
def reveal_one_at_a_time(scheduler, denoiser, x_t, timesteps, *, generator=None, condition=None, **others):
    """Reveals the masked positions of text in random order, one for each call of the denoiser: N calls, for any T."""
    order = torch.rand(x_t.shape, generator=generator).argsort(-1)  # [B, N]
    rows, timestep = torch.arange(len(x_t)), torch.tensor(timesteps[-1])
    x_t = x_t.clone()
    for position in order.T:
        logits = scheduler.transition.forbid(denoiser(x_t, timestep, **(condition or {})))  # [B, N, K]
        probs = logits[rows, position].softmax(-1)  # [B, K]
        x_t[rows, position] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return x_t


def build(name):
    num_steps, num_classes = 6, 3
    family = families.build(name, num_classes, [1 / (num_steps - t) for t in range(num_steps)])
    probs = toy.joint(family, 3, seed=1)
    pipeline = D3PMTextPipeline(toy.ExactDenoiser(family, probs), family.scheduler(), sequence_length=3)
    return family, probs, pipeline


def test_a_registered_sampler_draws_the_data():
    """One position at a time is exact for an exact network, where six steps of ancestral sampling are not."""
    family, probs, pipeline = build("absorbing")
    calls = []
    hook = pipeline.text_model.register_forward_hook(lambda *_: calls.append(1))
    samples = draw(pipeline, batch_size=4000, sampler="one_at_a_time")
    assert len(calls) == 3
    assert ref.fit(toy.indices(samples, 3)[:, None], probs.flatten()[None]) > 1e-3
    hook.remove()
    plain = draw(pipeline, batch_size=4000, num_inference_steps=2)
    assert ref.fit(toy.indices(plain, 3)[:, None], probs.flatten()[None]) < 1e-6


def skip_and_watch(scheduler, denoiser, x_t, timesteps, *, every=2, **options):
    """Ancestral sampling at every second timestep."""
    return ancestral(scheduler, denoiser, x_t, timesteps[::every], **options)


def test_a_function_as_sampler():
    family, _, pipeline = build("uniform")
    network, steps = pipeline.text_model, []
    options = {"batch_size": 4000, "num_inference_steps": 6, "generator": seeded(2)}
    samples = draw(pipeline, sampler=partial(skip_and_watch, every=3), **options)
    law = toy.ancestral_law(family, network, [5, 2])
    assert ref.fit(toy.indices(samples, 3)[:, None], law[None]) > 1e-3
    whole = toy.ancestral_law(family, network, [5, 4, 3, 2, 1, 0])
    assert ref.fit(toy.indices(samples, 3)[:, None], whole[None]) < 1e-6

    def watch(step: SamplerStep):
        steps.append((step.timestep, step.previous_timestep))

    scheduler = pipeline.scheduler
    x_T = scheduler.sample_prior((2, 3), seeded())
    skip_and_watch(scheduler, TextDenoiser(network), x_T, [5, 4, 3, 2, 1, 0], callback=watch, generator=seeded())
    assert steps == [(5, 3), (3, 1), (1, -1)]
