# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Causal language models of transformers as denoisers of the autoregressive process."""

import os
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..models.text_denoisers import CausalLMDenoiser, check_reads_left_only, num_positions
from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.checks import check_int
from .language_models import check_fits, check_options, load_language_model


DEFAULT_LENGTH = 256


class CausalLMMixin:
    """Gives a text pipeline `from_causal_lm`."""

    @classmethod
    def from_causal_lm(
        cls,
        model: str | os.PathLike | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
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

        Args:
            model (`str`, `os.PathLike` or `PreTrainedModel`): Id of a repository on the Hub, a folder, or the network itself.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer. By default that of the repository or folder.
            sequence_length (`int`, *optional*): Number of tokens N of an example, which is the number of timesteps too. By
                default the number of positions of the network, at most 256.
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
        network, tokenizer = load_language_model(
            AutoModelForCausalLM,
            model,
            tokenizer,
            trust_remote_code=trust_remote_code,
            use_safetensors=use_safetensors,
            **kwargs,
        )
        denoiser = CausalLMDenoiser(network.eval())
        length = choose_length(network, sequence_length)
        check_reads_left_only(denoiser, length)
        scheduler = autoregressive_scheduler(denoiser, tokenizer, length, **options)
        create: Any = cls
        return create(network, scheduler, tokenizer, length)


def choose_length(network: PreTrainedModel, sequence_length: int | None) -> int:
    """`sequence_length`, which must fit the positions of the network, or its default."""
    positions = num_positions(network)
    if sequence_length is None:
        return min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    check_int("sequence_length", sequence_length, 1, positions)
    return sequence_length


def autoregressive_scheduler(
    denoiser: CausalLMDenoiser, tokenizer: PreTrainedTokenizerBase, length: int, **options: Any
) -> D3PMScheduler:
    """The autoregressive process over the vocabulary of a causal language model, with a mask behind all of its tokens.

    Rows of the output layer without a token are never data.
    """
    num_rows = denoiser.num_rows
    check_fits(tokenizer, num_rows)
    options.setdefault("suppress_tokens", list(range(len(tokenizer), num_rows)) or None)
    return D3PMScheduler(num_rows + 1, length, transition="autoregressive", mask_token_id=num_rows, **options)
