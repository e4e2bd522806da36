# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Conversions between images of integers and a U-Net: scaling, the one-hot residual, the logistic head."""

import pytest
import torch
from diffusers import UNet2DModel

from d3pm_hf import D3PMScheduler, create_unet, predict_image
from d3pm_hf.models.image_denoiser import logistic_parameters, normalize, residual_logits


# Not square, and no two axes alike.
B, C, H, W, K = 2, 3, 8, 4, 17


def states(seed=0):
    return torch.randint(0, K, (B, C, H, W), generator=torch.Generator().manual_seed(seed))


def test_normalize_reaches_both_ends():
    for num_classes in (2, 17, 256):
        x = normalize(torch.arange(num_classes), num_classes)
        torch.testing.assert_close(x, torch.linspace(-1, 1, num_classes))


def test_residual_logits():
    """Channel c, class k of the output is the logit of class k at channel c, and x_t's own class has one more."""
    output, x_t = torch.randn(B, C * K, H, W), states()
    logits = residual_logits(output, x_t)
    expected = torch.nn.functional.one_hot(x_t, K).float()
    for c in range(C):
        for k in range(K):
            expected[:, c, :, :, k] += output[:, c * K + k]
    torch.testing.assert_close(logits, expected)


def test_residual_logits_leave_the_output_alone():
    output = torch.randn(B, K, H, W, requires_grad=True)
    before = output.detach().clone()
    residual_logits(output, states()[:, :1]).square().sum().backward()
    assert torch.equal(output.detach(), before) and output.grad.abs().sum() > 0


def test_logistic_parameters():
    output, x_t = torch.randn(B, 2 * C, H, W), states()
    location, log_scale = logistic_parameters(output, x_t, K).unbind(-1)
    torch.testing.assert_close(location, torch.tanh(output[:, :C] + x_t / 8 - 1))
    assert torch.equal(log_scale, output[:, C:])


@pytest.mark.parametrize("prediction_type", ["x0", "logistic", "previous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_predict_image_fits_the_scheduler(prediction_type, dtype):
    torch.manual_seed(0)
    unet = create_unet("tiny", K, (H, W), C, prediction_type).to(dtype).eval()
    assert isinstance(unet, UNet2DModel)
    scheduler = D3PMScheduler(K, transition="gaussian", beta_schedule="linear", prediction_type=prediction_type)
    x_t, timesteps = states(), torch.tensor([4, 900])
    with torch.no_grad():
        output = predict_image(unet, x_t, timesteps, K, prediction_type)
        scheduler.check_model_output(output, x_t)
        assert output.dtype == torch.float32 and output.isfinite().all()
        # Each sample has its own timestep, and is not moved about: one alone gives the same.
        alone = predict_image(unet, x_t[1:], timesteps[1:], K, prediction_type)
    torch.testing.assert_close(output[1:], alone, atol=0.05 if dtype == torch.bfloat16 else 1e-5, rtol=1e-3)


@pytest.mark.parametrize(("prediction_type", "parameters"), [("x0", 36_628_352), ("logistic", 35_749_766)])
def test_size_of_the_paper(prediction_type, parameters):
    """36.6M and 35.7M in the paper; to the last weight those of the authors' own network."""
    with torch.device("meta"):
        unet = create_unet("paper", 256, 32, 3, prediction_type)
    assert unet.num_parameters() == parameters
    with pytest.raises(ValueError, match="preset is 'huge': it must be one of tiny, paper"):
        create_unet("huge", 256, 32)
