# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""FID and Inception score of images, through torchmetrics."""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoImageProcessor, AutoModelForImageClassification

from ..pipelines.networks import explain_failure, load_pretrained
from ..utils.checks import check_path, check_tensor, check_type


INCEPTION = "inception"


class ClassifierFeatures(nn.Module):
    """Features of an image classifier of transformers: the input of its last layer.

    Args:
        name_or_path (`str`): Id on the Hub or folder of a checkpoint for `AutoModelForImageClassification`, with its image
            processor. It is reported beside every score.

    Examples:
        ```python
        from transformers import AutoImageProcessor, ResNetConfig, ResNetForImageClassification, ViTImageProcessor
        from d3pm_hf.evaluation import ClassifierFeatures

        config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
        ResNetForImageClassification(config).save_pretrained("classifier")  # untrained; any id on the Hub
        ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained("classifier")
        features = ClassifierFeatures("classifier")  # image_scores(..., feature_extractor=features)
        ```
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, name_or_path: str):
        super().__init__()
        check_path("name_or_path", name_or_path)
        self.name = str(name_or_path)
        network, folder, _ = load_pretrained(AutoModelForImageClassification, os.fspath(name_or_path))
        self.model = network.eval()
        with explain_failure(folder):
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
            side = processor.size.get("shortest_edge")
            self.size = (side, side) if side else (processor.size["height"], processor.size["width"])
            for name, values in (("mean", processor.image_mean), ("std", processor.image_std)):
                self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)  # [3, 1, 1]
        layers = [layer for layer in self.model.modules() if isinstance(layer, nn.Linear)]
        if not layers or layers[-1].out_features != self.model.config.num_labels:
            raise ValueError(
                f"{name_or_path} does not end in a linear layer with one output per class: pass another classifier"
            )
        self.head = layers[-1]
        self.num_features = self.head.in_features

    @torch.no_grad()
    def class_logits(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the classes `[n, C]` for images `[n, 3, H, W]` in [0, 1]."""
        scaled = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        return self.model((scaled - self.mean) / self.std).logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features `[n, num_features]` of images `[n, 3, H, W]` in [0, 1]."""
        seen: list[torch.Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
        self.class_logits(images)
        hook.remove()
        return seen[0]


class _ClassLogits(nn.Module):
    """The class logits of a feature extractor as a module, for the Inception score."""

    def __init__(self, extractor):
        super().__init__()
        self.extractor = extractor
        self.class_logits: Callable[[torch.Tensor], torch.Tensor] = extractor.class_logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.class_logits(images)


def image_scores(samples: torch.Tensor, reference: torch.Tensor, feature_extractor: nn.Module | str) -> dict:
    """FID and Inception score of samples, and the name of the feature extractor.

    Scores of different extractors, or of different numbers of samples, cannot be compared.

    Args:
        samples, reference (`torch.Tensor` of shape `[n, C, H, W]`): Images in [0, 1].
        feature_extractor (`torch.nn.Module` or `str`): `"inception"` for the usual network, whose weights are downloaded (this
            needs the package torch-fidelity); the name of a classifier for [`ClassifierFeatures`]; or any module that maps
            images to features `[n, num_features]`, with an attribute `num_features`. The Inception score is computed if
            the module has a method `class_logits`.
    """
    for name, images in (("samples", samples), ("reference", reference)):
        check_tensor(name, images, None, None, None, None)
    check_type("feature_extractor", feature_extractor, (nn.Module, str), "a module, or the name of one")
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance
        from torchmetrics.image.inception import InceptionScore
    except ImportError as error:
        raise ImportError("FID needs the package torchmetrics: pip install 'd3pm-hf[evaluation]'") from error

    inception: InceptionScore | None = None
    if feature_extractor == INCEPTION:
        name, fid, inception = INCEPTION, FrechetInceptionDistance(normalize=True), InceptionScore(normalize=True)
    else:
        extractor = ClassifierFeatures(feature_extractor) if isinstance(feature_extractor, str) else feature_extractor
        name = getattr(extractor, "name", type(extractor).__name__)
        fid = FrechetInceptionDistance(extractor, normalize=True)
        if hasattr(extractor, "class_logits"):
            inception = InceptionScore(_ClassLogits(extractor))
    for part in reference.split(256):
        fid.update(_colored(part), real=True)
    for part in samples.split(256):
        fid.update(_colored(part), real=False)
        if inception is not None:
            inception.update(_colored(part))
    scores = {"fid": fid.compute().item()}
    if inception is not None:
        with torch.random.fork_rng():  # it shuffles the samples before it splits them
            torch.manual_seed(0)
            mean, deviation = inception.compute()
        scores |= {"inception_score": mean.item(), "inception_score_deviation": deviation.item()}
    return scores | {"feature_extractor": name, "num_reference": len(reference)}


def _colored(images: torch.Tensor) -> torch.Tensor:
    """Images with three channels; gray images have three equal ones."""
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
