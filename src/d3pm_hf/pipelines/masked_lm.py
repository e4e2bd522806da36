# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Masked language models of transformers as denoisers of an absorbing process."""

import os
from typing import Any

from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.checks import check_type


def load_masked_lm(
    model: str | os.PathLike | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **kwargs
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The network and the tokenizer of a masked language model: an id on the Hub, a folder, or both parts themselves.

    Weights are read from safetensors only, and no code of the repository is run.
    """
    if isinstance(model, (str, os.PathLike)):
        name = str(model)
        network = AutoModelForMaskedLM.from_pretrained(name, use_safetensors=True, trust_remote_code=False, **kwargs)
        if tokenizer is None:
            hub = {key: value for key, value in kwargs.items() if key not in ("dtype", "torch_dtype", "device_map")}
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **hub)
        return network, tokenizer
    check_type(
        "model", model, PreTrainedModel, "an id on the Hub, a folder, or a masked language model of transformers"
    )
    if kwargs:
        raise ValueError(f"got {', '.join(kwargs)} and a model that is loaded already: leave one of the two out")
    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "the tokenizer of the model")
    assert tokenizer is not None  # it has just been checked
    return model, tokenizer


def absorbing_scheduler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_train_timesteps: int, **options: Any
) -> D3PMScheduler:
    """The absorbing process over the vocabulary of a masked language model, with the mask of its tokenizer.

    Special tokens, and rows of the output layer without a token, are never data.
    """
    mask, name = tokenizer.mask_token_id, type(tokenizer).__name__
    if mask is None:
        raise ValueError(
            f"the tokenizer ({name}) has no mask token, which an absorbing process turns tokens into: choose a masked language "
            "model, or add a mask token to the tokenizer and to the embeddings of the network"
        )
    num_classes = num_output_rows(model)
    if len(tokenizer) > num_classes:
        raise ValueError(
            f"the tokenizer ({name}) has a vocabulary of {len(tokenizer)} and the network one of {num_classes}: use the tokenizer "
            "that the network was trained with, or call `resize_token_embeddings` on it"
        )
    without_text = set(tokenizer.all_special_ids).union(range(len(tokenizer), num_classes)) - {mask}
    options.setdefault("suppress_tokens", sorted(without_text))
    return D3PMScheduler(num_classes, num_train_timesteps, transition="absorbing", mask_token_id=mask, **options)


def num_output_rows(model: PreTrainedModel) -> int:
    """Number of logits that the network has for each token."""
    head = model.get_output_embeddings()
    if head is not None and getattr(head, "weight", None) is not None:
        return len(head.weight)
    return model.config.vocab_size
