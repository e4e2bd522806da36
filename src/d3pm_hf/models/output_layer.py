# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The output layer of a language model of transformers, which is asked for the logits of some elements only."""

import threading
from collections.abc import Callable
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


def call_network(
    network: torch.nn.Module,
    call: Callable[[], Any],
    shape: torch.Size,
    logits_to_keep: torch.Tensor | None,
    apply_head: Callable | None,
) -> Any:
    """The first output of `call()`, which calls the network: logits `[B, N, K]`, or those `[n, K]` of some elements.

    The output layer of a network of transformers reads the rows of these elements alone. Of any other network all logits are
    computed, and some are taken.

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
    is_left = apply_head is not None and layer is not None and is_last(network, layer)
    found: list[torch.Tensor] = []
    thread = threading.get_ident()

    def take(rows: torch.Tensor) -> torch.Tensor:
        return rows if logits_to_keep is None else rows.flatten(0, -2)[logits_to_keep.flatten()]

    def select(module, arguments):
        """Replaces the input of the output layer. What other threads do with the network is not touched."""
        if threading.get_ident() != thread or arguments[0].shape[:-1] != shape:
            return None
        found.append(take(arguments[0]))
        return (found[0][:0] if is_left else found[0],)

    hook = None if layer is None else layer.register_forward_pre_hook(select)
    try:
        logits = call()[0]
    finally:
        if hook is not None:
            hook.remove()
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
