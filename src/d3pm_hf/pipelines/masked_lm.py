# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Masked language models of transformers as denoisers of an absorbing process."""

import os
from typing import Any

from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from ..schedulers.scheduling_d3pm import D3PMScheduler
from ..utils.modules import num_output_rows
from .language_models import check_fits, check_options, load_language_model


class MaskedLMMixin:
    """Gives a text pipeline `from_masked_lm`."""

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
            AutoModelForMaskedLM,
            model,
            tokenizer,
            trust_remote_code=trust_remote_code,
            use_safetensors=use_safetensors,
            **kwargs,
        )
        scheduler = absorbing_scheduler(network, tokenizer, num_train_timesteps, **options)
        create: Any = cls
        return create(network.eval(), scheduler, tokenizer, sequence_length, add_special_tokens)


def absorbing_scheduler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_train_timesteps: int, **options: Any
) -> D3PMScheduler:
    """The absorbing process over the vocabulary of a masked language model, with the mask of its tokenizer.

    Special tokens, and rows of the output layer without a token, are never data.
    """
    num_classes, mask = num_output_rows(model), tokenizer.mask_token_id
    check_fits(tokenizer, num_classes)
    if mask is None:
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__}) has no mask token, which an absorbing process turns tokens into: choose a masked language "
            "model, or add a mask token to the tokenizer and to the embeddings of the network"
        )
    without_text = set(tokenizer.all_special_ids).union(range(len(tokenizer), num_classes)) - {mask}
    options.setdefault("suppress_tokens", sorted(without_text))
    return D3PMScheduler(num_classes, num_train_timesteps, transition="absorbing", mask_token_id=mask, **options)
