# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Class-conditional networks: labels reach the rows they belong to, and a network without classes is as it was."""

import json

import pytest
import torch
from comparison import assert_same_draws
from diffusers import UNet2DModel
from huggingface_hub.errors import StrictDataclassClassValidationError
from test_pipelines import quiet, seeded, states

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextModel,
    D3PMTextPipeline,
    Denoiser,
    ImageDenoiser,
    TextDenoiser,
    create_model_card,
    create_text_model,
    create_unet,
)
from d3pm_hf.pipelines.drawing import draw_samples


K, LENGTH, LABELS = 5, 6, 4
KINDS = pytest.mark.parametrize("kind", ["text", "image"])


def make(kind, num_class_labels=LABELS, **network):
    """A pipeline whose network has an embedding for each class, and one for "no class"."""
    torch.manual_seed(0)
    network = {"num_class_labels": num_class_labels, **network}
    if kind == "text":
        model = create_text_model("tiny", K, **{"initializer_range": 0.5, **network}).eval()
        scheduler = D3PMScheduler(K, 20)
        return quiet(D3PMTextPipeline(model, scheduler, sequence_length=LENGTH, num_class_labels=num_class_labels))
    unet = create_unet("tiny", K, 4, 1, **network).eval()
    scheduler = D3PMScheduler(K, 20, transition="uniform", beta_schedule="cosine")
    return quiet(D3PMImagePipeline(unet, scheduler, num_class_labels=num_class_labels))


def network_of(pipeline):
    return getattr(pipeline, pipeline.network_name)


def spy(pipeline):
    """The class labels of each call of the network, as they come in."""
    seen = []
    network_of(pipeline).register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["class_labels"].tolist()), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("backbone", ["bert", "t5"])
def test_a_text_model_without_classes_is_as_it_was(backbone):
    torch.manual_seed(0)
    plain = create_text_model("tiny", K, backbone=backbone).eval()
    torch.manual_seed(0)
    classes = create_text_model("tiny", K, backbone=backbone, num_class_labels=LABELS).eval()
    assert not any("class" in name for name in plain.state_dict()) and plain.config.num_class_embeds is None
    assert classes.class_embedding.weight.shape == (LABELS + 1, 32)
    x_t, t, labels = torch.randint(0, K, (3, LENGTH)), torch.tensor([1, 5, 9]), torch.tensor([0, 3, 4])
    with torch.no_grad():
        classes.load_state_dict(plain.state_dict(), strict=False)
        classes.class_embedding.weight[3] = 0
        before, after = plain(x_t, t).logits, classes(x_t, t, class_labels=labels).logits
    torch.testing.assert_close(after[1], before[1])
    assert not torch.allclose(after[0], before[0]) and not torch.allclose(after[2], before[2])


def test_sentences_of_the_text_model():
    plain, classes = create_text_model("tiny", K), create_text_model("tiny", K, num_class_labels=LABELS)
    x_t = torch.zeros(2, LENGTH, dtype=torch.long)
    with pytest.raises(ValueError, match="this network has no class embedding: leave out `class_labels`, or create"):
        plain(x_t, 0, class_labels=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="is conditioned on a class: pass `class_labels`, one per sample"):
        classes(x_t, 0)
    with pytest.raises(ValueError, match=r"`class_labels` has shape \[1\] for 2 samples: pass one per sample"):
        classes(x_t, 0, class_labels=torch.tensor([0]))
    with pytest.raises(
        StrictDataclassClassValidationError, match="num_class_embeds is 0: it must be an integer of at least 1"
    ):
        create_text_model("tiny", K, num_class_embeds=0)


def test_the_class_embedding_is_saved_and_learns(tmp_path):
    model = make("text").text_model
    model.save_pretrained(tmp_path)
    loaded = D3PMTextModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.class_embedding.weight, model.class_embedding.weight)
    x_t = torch.zeros(2, LENGTH, dtype=torch.long)
    loaded(x_t, 0, class_labels=torch.tensor([0, 3]), labels=x_t).loss.backward()
    assert (loaded.class_embedding.weight.grad.abs().sum(-1) > 0).tolist() == [True, False, False, True, False]


@KINDS
def test_labels_reach_their_rows(kind):
    pipeline = make(kind)
    seen = spy(pipeline)
    several = {"num_return_sequences" if kind == "text" else "num_images_per_prompt": 2}
    states(pipeline, class_labels=[3, 1], num_particles=2, num_inference_steps=2, **several)
    assert seen == [[3, 3, 3, 3, 1, 1, 1, 1]] * 2
    for labels in (2, [2], torch.tensor(2), torch.tensor([2])):
        assert len(states(pipeline, class_labels=labels, batch_size=3, num_inference_steps=1)) == 3
        assert seen[-1] == [2, 2, 2]
    states(pipeline, condition={"class_labels": torch.tensor([2, 0])}, num_inference_steps=1)
    assert seen[-1] == [2, 0]
    states(pipeline, batch_size=2, num_inference_steps=1)  # without a class
    assert seen[-1] == [LABELS, LABELS]


@KINDS
def test_a_row_is_what_it_is_alone(kind):
    pipeline = make(kind)
    both = states(pipeline, class_labels=[3, 1], generator=[seeded(5), seeded(5)])
    assert_same_draws(both[:1], states(pipeline, class_labels=3, generator=seeded(5)))
    assert_same_draws(both[1:], states(pipeline, class_labels=1, generator=seeded(5)))
    assert not torch.equal(both[0], both[1])


def test_infilling_with_a_class():
    pipeline, image = make("text"), torch.zeros(1, 1, 4, 4, dtype=torch.long)
    tokens = torch.tensor([[0, 1, 2, 4, 4, 4]])  # 4 is the mask
    filled = states(pipeline, input_ids=tokens, class_labels=[0, 1, 2])
    assert filled.shape == (3, LENGTH) and (filled[:, :3] == tokens[:, :3]).all()
    pipeline, mask_image = make("image"), torch.zeros(1, 1, 4, 4)
    mask_image[..., :2] = 1
    painted = states(pipeline, image=image, mask_image=mask_image, class_labels=[0, 1, 2])
    assert painted.shape == (3, 1, 4, 4) and (painted[..., 2:] == 0).all()


@KINDS
def test_the_number_of_labels_is_saved(kind, tmp_path):
    pipeline = make(kind)
    pipeline.save_pretrained(tmp_path / "checkpoint")
    loaded = quiet(D3PMPipeline.from_pretrained(tmp_path / "checkpoint"))
    assert loaded.denoiser.num_class_labels == LABELS and loaded.denoiser.null_class == LABELS
    assert_same_draws(states(loaded, class_labels=[3, 1]), states(pipeline, class_labels=[3, 1]))
    assert type(pipeline).from_pipe(pipeline).denoiser.null_class == LABELS
    # Without it, every embedding is that of a class, and the index is that of a pipeline without classes.
    every = type(pipeline)(network_of(pipeline), pipeline.scheduler)
    assert (every.denoiser.num_class_labels, every.denoiser.null_class) == (LABELS + 1, None)
    every.save_pretrained(tmp_path / "every")
    assert "num_class_labels" not in json.loads((tmp_path / "every" / "model_index.json").read_text())


@KINDS
def test_classes_take_turns_in_samples_for_a_report(kind):
    pipeline = make(kind)
    seen = spy(pipeline)
    draw_samples(pipeline, 6, 1, batch_size=4)
    assert seen == [[0, 1, 2, 3], [0, 1]]
    assert "class_labels=0" in str(create_model_card(pipeline))


def test_drop_condition():
    denoiser = make("text").denoiser
    rows, mask = torch.tensor([True, False]), torch.ones(2, LENGTH)
    dropped = denoiser.drop_condition({"class_labels": torch.tensor([1, 2]), "attention_mask": mask}, rows)
    assert dropped["class_labels"].tolist() == [LABELS, 2] and dropped["attention_mask"] is mask
    with pytest.raises(
        ValueError, match="no value of 'text' that stands for no condition: define the method drop_con"
    ):
        denoiser.drop_condition({"text": mask}, rows)
    with pytest.raises(ValueError, match="the network has no class for 'no class': train it with num_class_embeds ="):
        TextDenoiser(denoiser.network).drop_condition({"class_labels": torch.tensor([1, 2])}, rows)


@KINDS
@pytest.mark.parametrize(
    "labels, words",
    [
        (LABELS, "a label in class_labels is 4: it must be an integer in 0 .. 3"),
        (-1, "a label in class_labels is -1: it must be an integer in 0 .. 3"),
        ([0, 2.5], "a label in class_labels is 2.5: it must be an integer in 0 .. 3"),
        ([], r"class_labels are \[\]: pass at least one label"),
        (
            torch.zeros(2),
            r"class_labels are a Tensor of dtype torch.float32 .*: pass a `torch.LongTensor` of shape \[B\]",
        ),
        ([0, 1], "got 2 rows of class_labels for a batch of 3: pass one, or one per entry of the batch"),
    ],
)
def test_refused_labels(kind, labels, words):
    with pytest.raises(ValueError, match=words):
        states(make(kind), batch_size=3, class_labels=labels)


@KINDS
def test_sentences(kind):
    pipeline = make(kind)
    with pytest.raises(ValueError, match=r"got class_labels and condition\['class_labels'\]: pass one of the two"):
        states(pipeline, class_labels=1, condition={"class_labels": torch.tensor([1])})
    with pytest.raises(ValueError, match="a label in class_labels is 9: it must be an integer in 0 .. 3"):
        states(pipeline, condition={"class_labels": torch.tensor([9])})
    every = quiet(type(pipeline)(network_of(pipeline), pipeline.scheduler))
    with pytest.raises(ValueError, match="the network is conditioned on 5 classes: pass class_labels"):
        states(every)
    with pytest.raises(ValueError, match="num_class_labels is 9, and the network has num_class_embeds=5: it needs 9"):
        type(pipeline)(network_of(pipeline), pipeline.scheduler, num_class_labels=9)
    plain = make(kind, num_class_labels=None)
    with pytest.raises(
        ValueError, match="got class_labels, and the network has no classes: leave them out, or create"
    ):
        states(plain, class_labels=1)
    with pytest.raises(
        ValueError, match="num_class_labels is 4, and the network has num_class_embeds=None: it needs 4"
    ):
        type(pipeline)(network_of(plain), pipeline.scheduler, num_class_labels=LABELS)


def test_a_denoiser_of_your_own_counts_its_classes():
    class Own(Denoiser):
        sample_shape, num_class_labels, null_class = (1, 4, 4), 3, 3

        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(9.0))

        def forward(self, x_t, timestep, class_labels=None):
            return torch.nn.functional.one_hot(class_labels[:, None, None, None].expand_as(x_t), K) * self.scale

    pipeline = quiet(D3PMImagePipeline(Own(), D3PMScheduler(K, 20)))
    assert states(pipeline, class_labels=[2, 0]).flatten(1).float().mean(1).tolist() == pytest.approx([2, 0], abs=0.1)
    with pytest.raises(
        ValueError, match="num_class_labels is 4, and the denoiser has num_class_labels=3: leave it out"
    ):
        D3PMImagePipeline(Own(), D3PMScheduler(K, 20), num_class_labels=4)


def test_presets_have_a_row_for_no_class():
    unet = create_unet("tiny", K, 4, 1, num_class_labels=LABELS)
    assert isinstance(unet, UNet2DModel) and unet.config.num_class_embeds == LABELS + 1
    denoiser = ImageDenoiser(unet, K, num_class_labels=LABELS)
    assert (denoiser.num_class_labels, denoiser.null_class) == (LABELS, LABELS)
