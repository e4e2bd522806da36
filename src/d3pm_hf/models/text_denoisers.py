# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The denoisers of text: masked language models, and causal ones for the autoregressive process."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..utils.checks import check_int, check_integers, check_type
from ..utils.modules import num_output_rows, without_compilation
from .denoisers import Denoiser
from .output_layer import call_network


CAUSAL_CLASSES = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) - set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())


class TextDenoiser(Denoiser):
    """Wraps a [`D3PMTextModel`], or any masked language model of transformers.

    The network is called as `network(x_t, timestep=timestep, **condition, return_dict=False)`; without `timestep` unless
    its configuration has `timestep_conditioning`.

    Args:
        network (`torch.nn.Module`): The network, with `vocab_size` in its configuration.
        num_classes (`int`, *optional*): Number of states K. Must equal the `vocab_size` of the network, its default.
        num_class_labels (`int`, *optional*): Number of class labels of a network with `num_class_embeds`. By default each
            embedding is that of a class; if there is one more than classes, the last stands for "no class".

    Examples:
        ```python
        import torch
        from d3pm_hf import TextDenoiser, create_text_model

        denoiser = TextDenoiser(create_text_model("tiny", vocab_size=28))
        logits = denoiser(torch.randint(0, 28, (2, 16)), torch.tensor([3, 700]))  # [2, 16, 28]
        ```
    """

    def __init__(self, network: torch.nn.Module, num_classes: int | None = None, num_class_labels: int | None = None):
        check_type("network", network, torch.nn.Module, "a network (`torch.nn.Module`), such as a `D3PMTextModel`")
        if num_classes is not None:
            check_int("num_classes", num_classes, 2)
        config = getattr(network, "config", None)
        vocab_size = getattr(config, "vocab_size", num_classes)
        if num_classes not in (None, vocab_size):
            raise ValueError(
                f"the network has a vocabulary of {vocab_size} and the scheduler one of {num_classes}: use a network and a "
                "scheduler of the same checkpoint"
            )
        super().__init__(network)
        self.num_classes = vocab_size
        self.is_causal = bool(getattr(network, "is_causal", False))
        self.reads_timestep = bool(getattr(config, "timestep_conditioning", False))
        self._set_classes(num_class_labels)

    def forward(
        self,
        x_t: torch.Tensor,
        timestep: torch.Tensor | int,
        logits_to_keep: torch.Tensor | None = None,
        apply_head: Callable | None = None,
        **condition,
    ) -> Any:
        """Predicts logits `[B, N, K]`.

        Args:
            x_t (`torch.LongTensor` of shape `[B, N]`): Tokens.
            timestep (`int`, or `torch.LongTensor` of shape `[B]` or `[]`): Timesteps.
            logits_to_keep (`torch.Tensor`, *optional*): The elements whose logits `[n, K]` are returned in place of all: a mask
                `[B, N]`, or indices `[n]` into the flattened elements.
            apply_head (`Callable`, *optional*): Its result is returned in place of logits; see [`Denoiser`].
            condition: Further arguments of the network, such as `attention_mask` and `class_labels`. Without labels, a
                network with a null class predicts without a class.
        """
        condition = self._with_class(condition, x_t)
        arguments = {"timestep": timestep} if self.reads_timestep else {}
        call = partial(self.network, x_t, **arguments, **condition, return_dict=False)
        return call_network(self.network, call, x_t.shape, logits_to_keep, apply_head)

    def start_cache(self, condition: dict) -> Cache | None:
        """An empty cache, or `None`: only a [`D3PMTextModel`] that is causal, not compiled and has `supports_cache` keeps one."""
        is_compiled = without_compilation(self.network) is not self.network  # for shapes that stay the same
        if is_compiled or not getattr(self.network, "supports_cache", False):
            return None
        return DynamicCache() if set(condition) <= {"attention_mask", "class_labels"} else None

    def next_logits(self, x: torch.Tensor, cache: Cache, **condition) -> torch.Tensor:
        """Logits `[B, K]` of the token after `x` `[B, n]`."""
        check_prefix(x, cache)
        condition = shorten_mask(self._with_class(condition, x), x.shape[1] + 1)
        x = F.pad(x, (0, 1))  # whatever stands at position n, its logits do not depend on it
        return self.network(x, past_key_values=cache, **condition, return_dict=False)[0][:, -1]


class MaskedLMDenoiser(Denoiser):
    """Wraps a network that predicts all tokens from a text with masks, such as LLaDA and Dream, whatever class it is of.

    For networks that are loaded with `trust_remote_code=True`, and for causal language models whose attention was made
    bidirectional (`from_causal_lm(..., process="absorbing")`). A [`TextDenoiser`] does for masked language models of transformers.
    The network is called as `network(x_t, **condition)`; its logits are those of the output's `logits`, of the first entry of a tuple, or the output itself.

    Args:
        network (`torch.nn.Module`): The network.
        num_classes (`int`, *optional*): Number of states K, which is that of its logits. By default the `vocab_size` of its
            configuration.
        shift_logits (`bool`, defaults to `False`): Whether the output at a position is that of the next token, as of Dream and of
            causal language models. The logits of a position are then those at the position before it; the first
            position has its own.
        expand_attention_mask (`bool`, defaults to `False`): Whether the network takes a mask `[B, 1, N, N]` of the tokens that each
            position sees, as Dream does, in place of an attention mask `[B, N]`.

    Examples:
        ```python
        import torch
        from transformers import BertConfig, BertForMaskedLM
        from d3pm_hf import MaskedLMDenoiser

        config = BertConfig(vocab_size=28, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        denoiser = MaskedLMDenoiser(BertForMaskedLM(config), shift_logits=True)  # in place of a Dream model
        logits = denoiser(torch.randint(0, 28, (2, 8)), 0)  # [2, 8, 28]
        ```
    """

    reads_timestep = False

    def __init__(
        self,
        network: torch.nn.Module,
        num_classes: int | None = None,
        shift_logits: bool = False,
        expand_attention_mask: bool = False,
    ):
        check_type("network", network, torch.nn.Module, "a network (`torch.nn.Module`)")
        check_type("shift_logits", shift_logits, bool, "True or False")
        check_type("expand_attention_mask", expand_attention_mask, bool, "True or False")
        if num_classes is None:
            num_classes = getattr(getattr(network, "config", None), "vocab_size", None)
        check_int("num_classes", num_classes, 2)
        super().__init__(network)
        self.num_classes = num_classes
        self.shift_logits, self.expand_attention_mask = shift_logits, expand_attention_mask
        self._has_cache = "use_cache" in inspect.signature(without_compilation(network).forward).parameters

    def forward(
        self,
        x_t: torch.Tensor,
        timestep: torch.Tensor | int | None = None,
        logits_to_keep: torch.Tensor | None = None,
        **condition,
    ) -> torch.Tensor:
        """Predicts logits `[B, N, K]`.

        Args:
            x_t (`torch.LongTensor` of shape `[B, N]`): Tokens.
            timestep: Not read.
            logits_to_keep (`torch.Tensor`, *optional*): The elements whose logits `[n, K]` are returned in place of all: a mask
                `[B, N]`, or indices `[n]` into the flattened elements.
            condition: Further arguments of the network, such as `attention_mask` `[B, N]`.
        """
        check_integers("x_t", x_t, "[B, N]")
        if self.expand_attention_mask and condition.get("attention_mask") is not None:
            visible = condition["attention_mask"].bool()[:, None, None]  # [B, 1, 1, N]
            condition = {**condition, "attention_mask": visible.expand(-1, 1, x_t.shape[1], -1)}
        if self._has_cache:
            condition = {"use_cache": False, **condition}
        kept = logits_to_keep
        if self.shift_logits:
            position = torch.arange(x_t.numel(), device=x_t.device)
            kept = position if kept is None else position[kept.flatten()]
            kept = torch.where(kept % x_t.shape[1] == 0, kept, kept - 1)

        def call():
            output = self.network(x_t, **condition)
            if hasattr(output, "logits"):
                return (output.logits,)
            return (output,) if isinstance(output, torch.Tensor) else output

        logits = call_network(self.network, call, x_t.shape, kept, None)
        return logits if logits_to_keep is not None or not self.shift_logits else logits.view(*x_t.shape, -1)


class CausalLMDenoiser(Denoiser):
    """Wraps a causal language model of transformers, such as an unmodified `GPT2LMHeadModel`.

    Its logits at a position are those of the next token, so that the input is shifted right behind the first token of every
    text, BOS:

        logits of x_0^i = network(BOS, x_t^0, ..., x_t^{i-1})

    The mask is one state more than the network has logits, K = V + 1, and the last of them: its logit is minus infinity,
    and softmax(logits) is the model's own. A position of the autoregressive process that still is the mask comes after all
    that are not, where a causal network does not look, so that the mask is read as BOS.

    Args:
        network (`torch.nn.Module`): The network. BOS is `bos_token_id` of its configuration, or `eos_token_id` if it has none.
        num_classes (`int`, *optional*): Number of states K. Must be V + 1, its default.

    Examples:
        ```python
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel
        from d3pm_hf import CausalLMDenoiser

        config = GPT2Config(vocab_size=28, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=26)
        denoiser = CausalLMDenoiser(GPT2LMHeadModel(config))
        logits = denoiser(torch.randint(0, 28, (2, 8)), 0)  # [2, 8, 29]: the mask is one state more
        ```
    """

    is_causal = True
    reads_timestep = False

    def __init__(self, network: torch.nn.Module, num_classes: int | None = None):
        check_causal_lm(network)
        num_rows = num_output_rows(network)
        if num_classes is not None:
            check_int("num_classes", num_classes, 2)
            if num_classes != num_rows + 1:
                raise ValueError(
                    f"num_classes is {num_classes}, and a network with {num_rows} tokens needs {num_rows + 1}, the "
                    "last of which is the mask: use a network and a scheduler of the same checkpoint"
                )
        super().__init__(network)
        self.num_rows, self.num_classes = num_rows, num_rows + 1
        self.bos_token_id = find_bos(network.config, num_rows)
        self._options = inspect.signature(without_compilation(network).forward).parameters

    def forward(
        self,
        x_t: torch.Tensor,
        timestep: torch.Tensor | int | None = None,
        logits_to_keep: torch.Tensor | None = None,
        **condition,
    ) -> torch.Tensor:
        """Predicts logits `[B, N, K]`.

        Args:
            x_t (`torch.LongTensor` of shape `[B, N]`): Tokens, or the mask K - 1.
            timestep: Not read.
            logits_to_keep (`torch.Tensor`, *optional*): The elements whose logits `[n, K]` are returned in place of all: a mask
                `[B, N]`, or indices `[n]` into the flattened elements.
            condition: Further arguments of the network. `attention_mask` `[B, N]` is that of the tokens x_t: the first
                visible one is predicted from BOS, wherever it is.
        """
        check_integers("x_t", x_t, "[B, N]")
        previous, condition = self._shift_right(x_t, condition)
        if "use_cache" in self._options:
            condition = {"use_cache": False, **condition}
        call = partial(self.network, previous, **condition, return_dict=False)
        logits = call_network(self.network, call, x_t.shape, logits_to_keep, None)  # [B, N, V], or [n, V]
        return F.pad(logits, (0, 1), value=-torch.inf)

    def _shift_right(self, x_t: torch.Tensor, condition: dict) -> tuple[torch.Tensor, dict]:
        """The token before each position, `[B, N]`, and the condition with positions that do not count the padding."""
        attention_mask = condition.get("attention_mask")
        tokens = x_t.masked_fill(x_t == self.num_rows, self.bos_token_id)
        if attention_mask is not None:
            visible = attention_mask.bool()
            tokens = tokens.masked_fill(~visible, self.bos_token_id)
            if "position_ids" in self._options:  # without padding on the left
                condition = {"position_ids": (visible.cumsum(-1) - 1).clamp(min=0), **condition}
        return F.pad(tokens[:, :-1], (1, 0), value=self.bos_token_id), condition

    def start_cache(self, condition: dict) -> Cache | None:
        """An empty cache, or `None` for a network that keeps other things than keys and values, or is compiled."""
        is_compiled = without_compilation(self.network) is not self.network  # for shapes that stay the same
        keeps_states = getattr(self.network, "_is_stateful", True)  # such as Mamba
        if is_compiled or keeps_states or not {"past_key_values", "use_cache"} <= set(self._options):
            return None
        return DynamicCache(config=self.network.config) if set(condition) <= {"attention_mask"} else None

    def next_logits(self, x: torch.Tensor, cache: Cache, **condition) -> torch.Tensor:
        """Logits `[B, K]` of the token after `x` `[B, n]`."""
        check_prefix(x, cache)
        x = F.pad(x, (0, 1))  # whatever stands at position n, its logits do not depend on it
        previous, condition = self._shift_right(x, shorten_mask(condition, x.shape[1]))
        num_read = cache.get_seq_length()
        if "position_ids" in condition:
            condition = {**condition, "position_ids": condition["position_ids"][:, num_read:]}
        if "logits_to_keep" in self._options:
            condition = {**condition, "logits_to_keep": 1}
        condition = {**condition, "past_key_values": cache, "use_cache": True}
        logits = self.network(previous[:, num_read:], **condition, return_dict=False)[0][:, -1]  # [B, V]
        return F.pad(logits, (0, 1), value=-torch.inf)


def is_causal_lm(network: torch.nn.Module) -> bool:
    """Whether the network is a causal language model of transformers, such as `GPT2LMHeadModel`, or derives from one."""
    return any(
        parent.__name__ in CAUSAL_CLASSES and parent.__module__.split(".")[0] == "transformers"
        for parent in type(without_compilation(network)).__mro__
    )


def check_causal_lm(network) -> None:
    """Checks that the network is a causal language model of transformers."""
    if not is_causal_lm(network):
        raise ValueError(
            f"network is a {type(network).__name__}: it must be a causal language model of transformers, such as a "
            "`GPT2LMHeadModel`"
        )


def find_bos(config, num_rows: int) -> int:
    """The token before the first one of a text: `bos_token_id` of the configuration, or the first `eos_token_id`."""
    for name in ("bos_token_id", "eos_token_id"):
        value: Any = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if value is not None:
            check_int(f"{name} of the network", value, 0, num_rows - 1)
            return value
    raise ValueError(
        "the configuration of the network has neither a bos_token_id nor an eos_token_id, before which a text begins: set "
        "`model.config.bos_token_id`"
    )


@torch.no_grad()
def check_reads_left_only(denoiser: CausalLMDenoiser, length: int) -> None:
    """Checks that the logits of a position do not change with the tokens from this position on.

    Some classes of causal language models read both sides unless `is_decoder` is set.
    """
    if denoiser.device.type == "meta":
        return
    length = min(length, 8)
    first = torch.arange(length, device=denoiser.device)[None] % denoiser.num_rows  # [1, N]
    other = first.clone()
    other[:, length // 2 :] = denoiser.num_rows - 1 - first[:, length // 2 :]
    a, b = (denoiser(x)[:, : length // 2 + 1, :-1].float().log_softmax(-1) for x in (first, other))
    tolerance = max(1e-4, 8 * torch.finfo(denoiser.dtype).eps)
    if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise ValueError(
            f"the logits of the {type(denoiser.network).__name__} change with later tokens, so it is no causal network: set "
            "is_decoder=True in its configuration, or use `from_masked_lm` with a masked language model"
        )


def read_both_sides(network: torch.nn.Module) -> list[Any]:
    """Makes the attention of a causal language model of transformers bidirectional.

    `is_causal` of its configuration, which is saved with it, and of its attention layers become `False`. Returns these layers.
    """
    model: Any = without_compilation(network)
    model.config.is_causal = False
    layers = [module for module in model.modules() if getattr(module, "is_causal", False) is True]
    for layer in layers:
        layer.is_causal = False
    return layers


def reads_both_sides(network: torch.nn.Module) -> bool:
    """Whether the attention of a causal language model of transformers was made bidirectional by [`read_both_sides`]."""
    return getattr(getattr(network, "config", None), "is_causal", True) is False


@torch.no_grad()
def check_reads_both_sides(denoiser: MaskedLMDenoiser, length: int) -> None:
    """Checks that the logits of the first and of the last position change with the token at the other end."""
    if denoiser.device.type == "meta":
        return
    length, size = max(3, min(length, 8)), num_output_rows(denoiser.network)
    first = torch.arange(length, device=denoiser.device)[None] % size  # [1, N]
    for changed, read in ((0, -1), (-1, 0)):
        other = first.clone()
        other[:, changed] = (first[:, changed] + size // 2) % size
        cause = None
        try:
            is_blind = torch.equal(denoiser(first)[:, read], denoiser(other)[:, read])
        except Exception as error:  # of an architecture that knows no other attention
            is_blind, cause = True, error
        if is_blind:
            reason = "" if cause is None else f" ({cause})"
            raise ValueError(
                f"the attention of {type(denoiser.network).__name__} cannot be made bidirectional{reason}: choose another architecture "
                "for process='absorbing', such as Llama, Qwen2, Qwen3, GPT-2 or Gemma, or leave out process"
            ) from cause


def num_positions(network: torch.nn.Module) -> int | None:
    """Number of positions of a network of transformers; `None` if it is not known or not limited.

    Networks in the manner of RoBERTa count positions from behind that of the padding token, and have fewer than
    `max_position_embeddings`.
    """
    config = getattr(network, "config", None)
    if getattr(config, "backbone", None) == "t5":  # its positions are relative
        return None
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return getattr(config, "max_position_embeddings", None)


def check_prefix(x: torch.Tensor, cache: Cache) -> None:
    """Checks the arguments of `next_logits`: tokens `[B, n]`, and a cache that holds no more than those before them."""
    check_integers("x", x, "[B, n]")
    check_type("cache", cache, Cache, "the cache that `start_cache` returns")
    if cache.get_seq_length() > x.shape[1]:
        raise ValueError(
            f"the cache holds {cache.get_seq_length()} tokens, the start token included, and x has {x.shape[1]}: pass at least "
            "one more token in each call, or start a new cache"
        )


def shorten_mask(condition: dict, length: int) -> dict:
    """The condition with the first `length` columns of its attention mask, if it has one."""
    if condition.get("attention_mask") is None:
        return condition
    return {**condition, "attention_mask": condition["attention_mask"][:, :length]}
