# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The output layer of a language model of transformers, which is asked for the logits of some elements only."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from ..utils.modules import without_compilation


# Networks that return the output of their last linear layer as it is.
LINEAR_LAST = set(
    """
    AlbertForMaskedLM BertForMaskedLM CamembertForMaskedLM D3PMDiT D3PMTextModel DebertaForMaskedLM DebertaV2ForMaskedLM
    DistilBertForMaskedLM ElectraForMaskedLM ErnieForMaskedLM EuroBertForMaskedLM ModernBertForMaskedLM MPNetForMaskedLM
    RoFormerForMaskedLM RobertaForMaskedLM XLMRobertaForMaskedLM
    """.split()
)

# Layers of encoders that end in parts which compute each position by itself, without a residual connection around these parts. They
# begin behind the attention: with the last part of a block of T5, and with `attention.output` of the others.
POINTWISE_LAST = set(
    "BertLayer CamembertLayer ElectraLayer ErnieLayer RoFormerLayer RobertaLayer T5Block XLMRobertaLayer".split()
)


def call_network(
    network: torch.nn.Module,
    call: Callable[[], Any],
    shape: torch.Size,
    logits_to_keep: torch.Tensor | None,
    apply_head: Callable | None,
) -> Any:
    """The first output of `call()`, which calls the network: logits `[B, N, K]`, or those `[n, K]` of some elements.

    The output layer of a network of transformers reads the rows of these elements alone, and so do the parts of its last layer
    that compute each position by itself, if they are known. Of any other network all logits are computed, and some are taken.

    Args:
        network: The network.
        call: Calls it, and returns a tuple.
        shape: That of the elements, `[B, N]`.
        logits_to_keep: The elements: a mask `[B, N]`, indices `[n]` into the flattened elements, or `None` for all.
        apply_head: If it is given, `apply_head(rows, layer)` is returned in place of logits: `rows` are the input of `layer`,
            the output layer, or logits if `layer` is `None`.
    """
    if logits_to_keep is None and apply_head is None:
        return call()[0]
    layer = None if torch.compiler.is_compiling() else find_output_layer(network)
    part = None if layer is None or logits_to_keep is None else find_pointwise_part(network)
    is_left = apply_head is not None and layer is not None and is_last(network, layer)
    taken: list[torch.Size] = []
    found: list[torch.Tensor] = []
    thread = threading.get_ident()  # what other threads do with the network is not touched

    def take(rows: torch.Tensor) -> torch.Tensor:
        return rows if logits_to_keep is None else rows.flatten(0, -2)[logits_to_keep.flatten()]

    def take_early(module, arguments):
        """Replaces the input `[B, N, D]` of the last parts of the encoder by `[1, n, D]`."""
        if threading.get_ident() != thread or arguments[0].shape[:-1] != shape:
            return None
        rows = tuple(take(argument)[None] for argument in arguments)
        taken.append(rows[0].shape[:-1])
        return rows

    def select(module, arguments):
        """Replaces the input of the output layer, `[B, N, D]`, or `[1, n, D]` of rows that are taken already."""
        (rows,), expected = arguments, taken[0] if taken else shape
        if threading.get_ident() != thread or rows.shape[:-1] != expected:
            return None
        found.append(rows[0] if taken else take(rows))
        return (found[0][:0] if is_left else found[0],)

    with ExitStack() as hooks:
        for module, hook in ((part, take_early), (layer, select)):
            if module is not None:
                hooks.callback(module.register_forward_pre_hook(hook).remove)
        logits = call()[0]
    if found and is_left and apply_head is not None:
        return apply_head(found[0], layer)
    logits = logits if found else take(logits)
    return logits if apply_head is None else apply_head(logits, None)


def find_output_layer(network: torch.nn.Module) -> torch.nn.Module | None:
    """The output layer of a network of transformers, or of ours; `None` of a compiled one, whose shapes stay the same."""
    if without_compilation(network) is not network or not isinstance(network, PreTrainedModel):
        return None
    # What a class of another package does with its logits is not known.
    is_known = type(network).__module__.split(".")[0] in ("transformers", "d3pm_hf")
    return network.get_output_embeddings() if is_known else None


def find_pointwise_part(network: PreTrainedModel) -> torch.nn.Module | None:
    """The part of the last layer of an encoder of transformers behind whose input each position is computed by itself, if it is known.

    Its inputs are `[B, N, D]` each. Layers that are compiled, that are computed again in the backward pass, or that somebody listens
    to keep their shapes.
    """
    encoder: Any = getattr(network.base_model, "encoder", None)
    layers = getattr(encoder, "block" if type(encoder).__name__ == "T5Stack" else "layer", None)
    if not isinstance(layers, torch.nn.ModuleList) or type(layers[-1]).__name__ not in POINTWISE_LAST:
        return None
    last: Any = layers[-1]
    if getattr(network.config, "chunk_size_feed_forward", 0) or getattr(network.config, "add_cross_attention", False):
        return None
    for module in (network.base_model, encoder, last):
        if module._forward_hooks or module._compiled_call_impl or getattr(module, "gradient_checkpointing", False):
            return None
    return last.layer[-1] if hasattr(last, "layer") else last.attention.output


def is_last(network: torch.nn.Module, layer: torch.nn.Module) -> bool:
    """Whether the logits are rows @ weight' + bias of the output layer, and nothing else is done to them."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return (
        type(network).__name__ in LINEAR_LAST
        and type(layer) is torch.nn.Linear
        and not any(hooks)
        and "forward" not in vars(layer)  # as Accelerate replaces it, which moves the weights
        and type(layer.weight) is torch.nn.Parameter  # not sharded, nor quantized
    )
