# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Language models of transformers, from the Hub, from a folder or from memory, as the network of a text pipeline."""

import inspect
import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..hub.download import HUB_ARGUMENTS
from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.checks import check_str, check_type


# Package of the code of repositories, which transformers imports with `trust_remote_code=True`.
REMOTE_CODE = "transformers_modules"
# Arguments of `from_pretrained` that the tokenizer takes too.
TOKENIZER_ARGUMENTS = (*HUB_ARGUMENTS, "subfolder")
# Arguments of the scheduler that the language model determines, or that the pipeline takes itself.
FIXED_ARGUMENTS = ("num_classes", "num_train_timesteps", "transition", "mask_token_id")


def load_language_model(
    auto_class: Any,
    model: str | os.PathLike | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    trust_remote_code: bool = False,
    use_safetensors: bool = True,
    **kwargs,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The network and the tokenizer of a language model: an id on the Hub, a folder, or both parts themselves.

    Args:
        auto_class (`type`): Class of transformers that loads the network, such as `AutoModelForMaskedLM`.
        model (`str`, `os.PathLike` or `PreTrainedModel`): Id of a repository on the Hub, a folder, or the network itself.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer. By default that of the repository or folder.
        trust_remote_code (`bool`, defaults to `False`): Whether transformers may run code of the repository. The network
            must be a class of transformers all the same, for the checkpoint of the pipeline to load without that code.
        use_safetensors (`bool`, defaults to `True`): Whether weights are read from safetensors. `False` reads pickles.
        kwargs: Arguments of `from_pretrained` of the network.
    """
    check_type("trust_remote_code", trust_remote_code, bool, "True or False")
    check_type("use_safetensors", use_safetensors, bool, "True or False")
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
    try:
        network = auto_class.from_pretrained(
            name, use_safetensors=use_safetensors, trust_remote_code=trust_remote_code, **kwargs
        )
    except OSError as error:
        raise OSError(explain_missing_weights(name, use_safetensors, error, kwargs.get("subfolder", ""))) from error
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = auto_class.__name__.removeprefix("AutoModelFor").removesuffix("LM").lower()  # masked or causal
        raise ValueError(
            f"{name} is no {kind} language model, as {auto_class.__name__} does not know its configuration: choose another model, "
            "or `from_masked_lm` for masked and `from_causal_lm` for causal ones"
        ) from error
    if tokenizer is None:
        hub = {key: value for key, value in kwargs.items() if key in TOKENIZER_ARGUMENTS}
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    for part in (network, tokenizer):
        if type(part).__module__.split(".")[0] == REMOTE_CODE:
            raise ValueError(
                f"{type(part).__name__} of {name} is code of the repository and no class of transformers, so that a saved "
                f"pipeline would not load without it: leave out trust_remote_code, or load the parts with "
                f"{auto_class.__name__} and AutoTokenizer and pass both"
            )
    return network, tokenizer


def explain_missing_weights(name: str, use_safetensors: bool, error: OSError, subfolder: str) -> str:
    """The sentence for weights of the other format than the one asked for; any other error keeps its own."""
    folder = Path(name, subfolder)
    if folder.is_dir():
        is_pickled = any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors"))
        is_safe = any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin"))
    else:
        is_pickled, is_safe = "cannot be loaded with `safetensors`" in str(error), False
    if use_safetensors and is_pickled:
        return (
            f"{name} has no weights in safetensors: pass use_safetensors=False to read its pickled weights "
            "(`torch.load` with weights_only=True); `save_pretrained` of the pipeline then writes safetensors"
        )
    if not use_safetensors and is_safe:
        return f"{name} has weights in safetensors and no pickled ones: leave out use_safetensors=False"
    return str(error)


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
