# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The loss of a network, which is asked for logits only where they count."""

from collections.abc import Callable
from typing import Any

import torch

from ..schedulers import D3PMScheduler
from ..utils.checks import check_choice, check_float, check_type
from ..utils.kept_logits import accepted_names, is_asked_for_rows
from .variational import D3PMLossOutput, check_loss_mask, d3pm_loss


def logits_to_keep(
    scheduler: D3PMScheduler,
    x_t: torch.Tensor,
    timesteps: torch.Tensor | int,
    *,
    hybrid_coeff: float = 0.0,
    auxiliary: str = "raw",
    previous_timesteps: torch.Tensor | int | None = None,
    loss_mask: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The elements whose logits [`d3pm_loss`] depends on, as indices `[n]` into the flattened elements; `None` if it is all of them.

    In an absorbing process these are the masks, about half of all elements. In other processes only elements that do not count
    are left out. A cross-entropy of the output as it is (`auxiliary="raw"`) depends on all elements that count; that of the
    denoising posterior is zero where x_0 = x_t is certain. If no logits are needed, the first element is returned.

    Args:
        scheduler ([`D3PMScheduler`]): The scheduler that added the noise.
        x_t (`torch.LongTensor` of shape `[B, ...]`): The states that the network sees.
        timesteps, hybrid_coeff, auxiliary, previous_timesteps, loss_mask: As in [`d3pm_loss`].

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler, TextDenoiser, create_text_model, d3pm_loss, logits_to_keep

        scheduler, denoiser = D3PMScheduler(1000), TextDenoiser(create_text_model("tiny", vocab_size=1000))
        x_0, timesteps = torch.randint(0, 999, (2, 16)), torch.tensor([300, 700])
        x_t = scheduler.add_noise(x_0, timesteps)
        kept = logits_to_keep(scheduler, x_t, timesteps)  # [n], where x_t is the mask
        logits = denoiser(x_t, timesteps, logits_to_keep=kept)  # [n, 1000]
        loss = d3pm_loss(scheduler, logits, x_0, x_t, timesteps, logits_to_keep=kept).loss.mean()
        ```
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_choice("auxiliary", auxiliary, ("raw", "denoising"))
    check_float("hybrid_coeff", hybrid_coeff, 0)
    scheduler.check_states(x_t)
    scheduler.check_timesteps(timesteps, x_t, previous_timesteps)
    needed, config = check_loss_mask(loss_mask, x_t), scheduler.config
    is_converted = auxiliary == "denoising" and config.x0_posterior != "denoising"
    if (
        config.prediction_type != "previous"
        and config.reconstruction == "posterior"
        and (is_converted or not hybrid_coeff)
    ):
        t = scheduler.num_steps_behind(timesteps)
        s = None if previous_timesteps is None else scheduler.num_steps_behind(previous_timesteps)
        # The cross-entropy depends on the logits wherever the step from the data does.
        depends = scheduler.transition.needs_logits(x_t, 0 if hybrid_coeff else s, t)
        needed = depends if needed is None else needed if depends is None else needed & depends
    if needed is None:
        return None
    index = needed.flatten().nonzero().squeeze(-1)
    if not len(index):
        index = index.new_zeros(1)  # many functions refuse tensors without elements
    return None if len(index) == x_t.numel() else index


def network_loss(
    scheduler: D3PMScheduler,
    model: Callable[..., torch.Tensor],
    x_0: torch.Tensor,
    x_t: torch.Tensor,
    timesteps: torch.Tensor,
    condition: dict[str, Any] | None = None,
    **options: Any,
) -> D3PMLossOutput:
    """[`d3pm_loss`] of a network, which computes no more logits than the loss depends on, and no more at a time than it has to.

    A network that takes `logits_to_keep` is asked for these ([`logits_to_keep`]); all other elements have a loss and a
    cross-entropy of zero. One that takes `apply_head` computes the loss from the input of its output layer. Any other network is
    asked for all logits.

    Args:
        scheduler, x_0, x_t, timesteps: As in [`d3pm_loss`].
        model (`Callable`): `model(x_t, timesteps, **condition)`, such as a [`Denoiser`].
        condition (`dict`, *optional*): Further arguments of the network.
        options: Further arguments of [`d3pm_loss`].
    """
    check_type("scheduler", scheduler, D3PMScheduler, "a `D3PMScheduler`")
    check_type("model", model, Callable, "a function or a module")
    if condition is not None:
        check_type("condition", condition, dict, "a dictionary of arguments of the network")
    check_type("x_t", x_t, torch.Tensor, "a `torch.LongTensor`")
    names = accepted_names(model) if is_asked_for_rows(model, scheduler.config.num_classes, x_t.device) else ()
    if "apply_head" not in names or scheduler.config.prediction_type != "x0":
        output, index = predict_needed(scheduler, model, x_t, timesteps, condition, **options)
        return d3pm_loss(scheduler, output, x_0, x_t, timesteps, **options, logits_to_keep=index)
    index = logits_to_keep(scheduler, x_t, timesteps, **options)

    def apply_head(rows, output_layer=None):
        kept = {"logits_to_keep": index, "output_layer": output_layer}
        output = d3pm_loss(scheduler, rows, x_0, x_t, timesteps, **options, **kept)
        return output.loss, output.vb, output.cross_entropy

    return D3PMLossOutput(*model(x_t, timesteps, **(condition or {}), logits_to_keep=index, apply_head=apply_head))


def predict_needed(
    scheduler: D3PMScheduler,
    model: Callable[..., torch.Tensor],
    x_t: torch.Tensor,
    timesteps: torch.Tensor,
    condition: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output of a network, and the elements `[n]` that it has rows for, or `None` for all; see [`network_loss`]."""
    condition, index = condition or {}, None
    if is_asked_for_rows(model, scheduler.config.num_classes, x_t.device):
        index = logits_to_keep(scheduler, x_t, timesteps, **options)
        condition = condition if index is None else {**condition, "logits_to_keep": index}
    return model(x_t, timesteps, **condition), index
