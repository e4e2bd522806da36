# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Language models of transformers, from the Hub, from a folder or from memory, as the network of a text pipeline."""

import inspect
import os
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.checks import check_str, check_type
from .integrity import load_tokenizer, reads_safetensors
from .networks import load_network


# Package of the code of repositories, which transformers imports with `trust_remote_code=True`.
REMOTE_CODE = "transformers_modules"
# Arguments of the scheduler that the language model determines, or that the pipeline takes itself.
FIXED_ARGUMENTS = ("num_classes", "num_train_timesteps", "transition", "mask_token_id")


def load_language_model(
    auto_class: Any,
    model: str | os.PathLike | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    trust_remote_code: bool = False,
    use_safetensors: bool | None = None,
    **kwargs,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The network and the tokenizer of a language model: an id on the Hub, a folder, or both parts themselves.

    Args:
        auto_class (`type`): Class of transformers that loads the network, such as `AutoModelForMaskedLM`.
        model (`str`, `os.PathLike` or `PreTrainedModel`): Id of a repository on the Hub, a folder, or the network itself.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer. By default that of the repository or folder.
        trust_remote_code (`bool`, defaults to `False`): Whether transformers may run code of the repository. The network
            must be a class of transformers all the same, for the checkpoint of the pipeline to load without that code.
        use_safetensors (`bool`, *optional*): `False` reads pickled weights. By default they are read from safetensors.
        kwargs: Arguments of `from_pretrained` of the network.
    """
    check_type("trust_remote_code", trust_remote_code, bool, "True or False")
    use_safetensors = reads_safetensors(use_safetensors)
    if tokenizer is not None:
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "the tokenizer of the model")
    if isinstance(model, PreTrainedModel):
        if kwargs:
            raise ValueError(f"got {', '.join(kwargs)} and a model that is loaded already: leave one of the two out")
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "the tokenizer of the model")
        assert tokenizer is not None  # it has just been checked
        return model, tokenizer
    check_type("model", model, (str, os.PathLike), "an id on the Hub, a folder, or a language model of transformers")
    name = os.fspath(model)
    check_str("model", name)
    network, part = load_network(auto_class, name, trust_remote_code, use_safetensors, **kwargs)
    if tokenizer is None:
        tokenizer = load_tokenizer(part, AutoTokenizer, trust_remote_code)
        tokenizer.name_or_path = name
    for component in (network, tokenizer):
        if type(component).__module__.split(".")[0] == REMOTE_CODE:
            raise ValueError(
                f"{type(component).__name__} of {name} is code of the repository and no class of transformers, so that a saved "
                f"pipeline would not load without it: leave out trust_remote_code, or load the parts with "
                f"{auto_class.__name__} and AutoTokenizer and pass both"
            )
    return network, tokenizer


def check_options(options: dict | None) -> dict:
    """Checks that `scheduler_kwargs` are arguments of [`D3PMScheduler`] that are not fixed, and returns them."""
    if options is None:
        return {}
    check_type("scheduler_kwargs", options, dict, "a dictionary of arguments of D3PMScheduler")
    known = set(inspect.signature(D3PMScheduler.__init__).parameters) - {"self", *FIXED_ARGUMENTS}
    for name in options:
        if name not in known:
            raise ValueError(
                f"scheduler_kwargs has {name!r}: it must have arguments of D3PMScheduler other than "
                f"{', '.join(FIXED_ARGUMENTS)}"
            )
    return options


def check_fits(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
    """Checks that the tokenizer has tokens besides the special ones, and no more than the network has logits."""
    name, size = type(tokenizer).__name__, len(tokenizer)
    if size <= len(set(tokenizer.all_special_ids)):
        raise ValueError(
            f"the tokenizer ({name}) has {size} special tokens and no others, as if its vocabulary file were missing: pass "
            "`tokenizer`"
        )
    if size > num_rows:
        raise ValueError(
            f"the tokenizer ({name}) has a vocabulary of {size} and the network one of {num_rows}: use the tokenizer that the "
            "network was trained with, or call `resize_token_embeddings` on it"
        )
