# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""What samples of images are like, beside photographs: FID and Inception score, through torchmetrics."""

import torch


def image_scores(
    samples: torch.Tensor, reference: torch.Tensor, feature_extractor: torch.nn.Module | None = None
) -> dict:
    """FID and Inception score of samples, and the name of the network whose features they compare.

    Args:
        samples, reference: images `[n, C, H, W]` in [0, 1].
        feature_extractor (`torch.nn.Module`, *optional*): images to features `[n, num_features]`; its attribute
            `num_features` says how many. By default the usual Inception network, whose weights are downloaded (and need the
            package torch-fidelity). Scores of two extractors cannot be compared.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore

    extractor = {} if feature_extractor is None else {"feature": feature_extractor}
    fid, inception = FrechetInceptionDistance(normalize=True, **extractor), InceptionScore(normalize=True, **extractor)
    fid.set_dtype(torch.float64)
    for part in reference.split(256):
        fid.update(_colored(part), real=True)
    for part in samples.split(256):
        fid.update(_colored(part), real=False)
        inception.update(_colored(part))
    mean, deviation = inception.compute()
    return {
        "fid": fid.compute().item(),
        "inception_score": mean.item(),
        "inception_score_deviation": deviation.item(),
        "feature_extractor": "Inception" if feature_extractor is None else type(feature_extractor).__name__,
        "num_samples": len(samples),
        "num_reference": len(reference),
    }


def _colored(images: torch.Tensor) -> torch.Tensor:
    """Grey images with three equal channels, which the extractors read."""
    return images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
