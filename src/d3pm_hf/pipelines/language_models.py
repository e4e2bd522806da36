# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Language models of transformers as the networks of text pipelines: masked ones of an absorbing process, causal ones of the
autoregressive process, or made to read both sides."""

import copy
import inspect
import os
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..models.text_denoisers import (
    CausalLMDenoiser,
    MaskedLMDenoiser,
    check_causal_lm,
    check_reads_both_sides,
    check_reads_left_only,
    num_positions,
    read_both_sides,
)
from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.checks import check_choice, check_int, check_str, check_type
from ..utils.modules import num_output_rows
from .networks import load_pretrained, reads_safetensors
from .tokenizer_files import load_tokenizer


# Package of the code of repositories, which transformers imports with `trust_remote_code=True`.
REMOTE_CODE = "transformers_modules"
# Arguments of the scheduler that the language model determines, or that the pipeline takes itself.
FIXED_ARGUMENTS = ("num_classes", "num_train_timesteps", "transition", "mask_token_id")
# The token that a causal language model gets with an absorbing process, if its tokenizer has none.
MASK_TOKEN = "[MASK]"
# Processes of a causal language model.
PROCESSES = ("autoregressive", "absorbing")
# Largest default number of tokens.
DEFAULT_LENGTH = 256


class LanguageModelMixin:
    """Gives a text pipeline `from_masked_lm` and `from_causal_lm`."""

    @classmethod
    def from_masked_lm(
        cls,
        model: str | os.PathLike | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        num_train_timesteps: int = 1000,
        sequence_length: int | None = None,
        add_special_tokens: bool = True,
        scheduler_kwargs: dict | None = None,
        trust_remote_code: bool = False,
        use_safetensors: bool | None = None,
        **kwargs,
    ) -> Any:
        """Creates a pipeline around a masked language model, whose process is absorbing with the mask of its tokenizer.

        The network is used as it is. Special tokens, and rows of its output layer that no token has, are never data
        (`suppress_tokens` of the scheduler).

        Args:
            model (`str`, `os.PathLike` or `PreTrainedModel`): Id of a repository on the Hub, a folder, or the network itself.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer. By default that of the repository or folder.
            num_train_timesteps (`int`, defaults to 1000): Number of timesteps T.
            sequence_length (`int`, *optional*): Number of tokens of a sample without a prompt, special tokens included.
            add_special_tokens (`bool`, defaults to `True`): Whether the special tokens of the tokenizer stand around a text,
                as they did when the network was trained.
            scheduler_kwargs (`dict`, *optional*): Further arguments of [`D3PMScheduler`], such as `beta_schedule`.
            trust_remote_code (`bool`, defaults to `False`): Whether transformers may run code of the repository. The network
                must be a class of transformers all the same.
            use_safetensors (`bool`, *optional*): `False` reads pickled weights, with `torch.load(weights_only=True)`;
                `save_pretrained` then writes safetensors. By default weights are read from safetensors only.
            kwargs: Arguments of `AutoModelForMaskedLM.from_pretrained`, such as `revision` and `dtype`.

        Example:
            pipeline = D3PMTextPipeline.from_masked_lm("answerdotai/ModernBERT-base", num_train_timesteps=1000)
        """
        options = check_options(scheduler_kwargs)
        network, tokenizer = load_language_model(
            AutoModelForMaskedLM, model, tokenizer, trust_remote_code, use_safetensors, **kwargs
        )
        num_classes, mask = num_output_rows(network), tokenizer.mask_token_id
        check_fits(tokenizer, num_classes)
        if mask is None:
            raise ValueError(
                f"the tokenizer ({type(tokenizer).__name__}) has no mask token, which an absorbing process turns tokens into: choose a "
                "masked language model, or add a mask token to the tokenizer and to the embeddings of the network"
            )
        without_text = set(tokenizer.all_special_ids).union(range(len(tokenizer), num_classes)) - {mask}
        options = {"suppress_tokens": sorted(without_text), **options, "mask_token_id": mask}
        scheduler = D3PMScheduler(num_classes, num_train_timesteps, transition="absorbing", **options)
        create: Any = cls
        added = () if add_special_tokens is False else (add_special_tokens,)  # it is not an argument of every subclass
        return create(network.eval(), scheduler, tokenizer, sequence_length, *added)

    @classmethod
    def from_causal_lm(
        cls,
        model: str | os.PathLike | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        process: str = "autoregressive",
        num_train_timesteps: int | None = None,
        sequence_length: int | None = None,
        scheduler_kwargs: dict | None = None,
        trust_remote_code: bool = False,
        use_safetensors: bool | None = None,
        **kwargs,
    ) -> Any:
        """Creates a pipeline around a causal language model, whose process masks tokens one by one from the right.

        The network is used as it is, behind a [`CausalLMDenoiser`]: the bound of the process is the likelihood of the model,
        -sum_i log p(x^i | BOS, x^0, ..., x^{i-1}). Rows of its output layer that no token has are never data
        (`suppress_tokens` of the scheduler), so that p is the softmax over all others; special tokens, such as the one
        between two documents, are data.

        With `process="absorbing"` it becomes a masked language model, to be trained as such: its attention is made
        bidirectional, its output at a position stays that of the next token (`shift_logits` of [`MaskedLMDenoiser`]), and the tokenizer
        and, if it has no row to spare, the network get a mask token. The network itself is changed.

        Args:
            model (`str`, `os.PathLike` or `PreTrainedModel`): Id of a repository on the Hub, a folder, or the network itself.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer. By default that of the repository or folder.
            process (`str`, defaults to `"autoregressive"`): `"autoregressive"`, or `"absorbing"` to train the network to fill in
                masks in any order. Llama, Qwen2, Qwen3, GPT-2 and Gemma can; an architecture that cannot is refused.
            num_train_timesteps (`int`, *optional*): Number of timesteps T of an absorbing process, 1000 by default.
            sequence_length (`int`, *optional*): Number of tokens N of an example, which is the number of timesteps of an
                autoregressive process too. By default the number of positions of the network, at most 256.
            scheduler_kwargs (`dict`, *optional*): Further arguments of [`D3PMScheduler`], such as `suppress_tokens`.
            trust_remote_code (`bool`, defaults to `False`): Whether transformers may run code of the repository. The network
                must be a class of transformers all the same.
            use_safetensors (`bool`, *optional*): `False` reads pickled weights, with `torch.load(weights_only=True)`;
                `save_pretrained` then writes safetensors. By default weights are read from safetensors only.
            kwargs: Arguments of `AutoModelForCausalLM.from_pretrained`, such as `revision` and `dtype`.

        Example:
            pipeline = D3PMTextPipeline.from_causal_lm("gpt2", sequence_length=128)
        """
        options = check_options(scheduler_kwargs)
        check_choice("process", process, PROCESSES)
        if num_train_timesteps is not None:
            check_int("num_train_timesteps", num_train_timesteps, 1)
            if process == "autoregressive":
                raise ValueError(
                    "num_train_timesteps is that of process='absorbing': an autoregressive process has `sequence_length` timesteps"
                )
        network, tokenizer = load_language_model(
            AutoModelForCausalLM, model, tokenizer, trust_remote_code, use_safetensors, **kwargs
        )
        if sequence_length is None:
            sequence_length = default_length(network)
        check_int("sequence_length", sequence_length, 1, num_positions(network))
        check_fits(tokenizer, num_output_rows(network))
        if process == "absorbing":
            tokenizer, suppressed = become_masked_lm(network, tokenizer, sequence_length)
            return cls.from_masked_lm(
                network,
                tokenizer,
                num_train_timesteps=num_train_timesteps or 1000,
                sequence_length=sequence_length,
                add_special_tokens=False,
                scheduler_kwargs={"suppress_tokens": suppressed, **options},
            )
        denoiser = CausalLMDenoiser(network.eval())
        num_rows = denoiser.num_rows
        check_reads_left_only(denoiser, sequence_length)
        # The mask comes after all tokens.
        without_token = list(range(len(tokenizer), num_rows)) or None
        options = {"suppress_tokens": without_token, **options, "mask_token_id": num_rows}
        scheduler = D3PMScheduler(num_rows + 1, sequence_length, transition="autoregressive", **options)
        create: Any = cls
        return create(network, scheduler, tokenizer, sequence_length)


def default_length(network: torch.nn.Module) -> int:
    """Number of tokens of a sample: the number of positions of the network, at most 256."""
    lengths = (num_positions(network), getattr(getattr(network, "config", None), "max_position_embeddings", None))
    return min([DEFAULT_LENGTH, *(length for length in lengths if length is not None)])


def become_masked_lm(
    network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[PreTrainedTokenizerBase, list[int] | None]:
    """Makes a causal language model one that reads both sides and has a mask token.

    Returns the tokenizer with the mask token, and the rows of the output layer that no token has.
    """
    check_causal_lm(network)
    layers = read_both_sides(network)
    try:
        check_reads_both_sides(MaskedLMDenoiser(network.eval(), num_output_rows(network), shift_logits=True), length)
    except ValueError:
        network.config.is_causal = True  # as it was
        for layer in layers:
            layer.is_causal = True
        raise
    if tokenizer.mask_token_id is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    if len(tokenizer) > num_output_rows(network):
        network.resize_token_embeddings(len(tokenizer))
    without_token = set(range(len(tokenizer), num_output_rows(network)))
    return tokenizer, sorted(without_token) or None


def load_language_model(
    auto_class: Any,
    model: str | os.PathLike | PreTrainedModel,
    tokenizer: Any,
    trust_remote_code: bool,
    use_safetensors: bool | None,
    **kwargs,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The network and the tokenizer of a language model: an id on the Hub, a folder, or both parts themselves."""
    check_type("trust_remote_code", trust_remote_code, bool, "True or False")
    use_safetensors = reads_safetensors(use_safetensors)
    if tokenizer is not None or isinstance(model, PreTrainedModel):
        check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "the tokenizer of the model")
    if isinstance(model, PreTrainedModel):
        if kwargs:
            raise ValueError(f"got {', '.join(kwargs)} and a model that is loaded already: leave one of the two out")
        return model, tokenizer
    check_type("model", model, (str, os.PathLike), "an id on the Hub, a folder, or a language model of transformers")
    name = os.fspath(model)
    check_str("model", name)
    network, part, settings = load_pretrained(auto_class, name, trust_remote_code, use_safetensors, **kwargs)
    if tokenizer is None:
        tokenizer = load_tokenizer(part, AutoTokenizer, settings, trust_remote_code)
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
