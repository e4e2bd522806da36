# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Configuration of the text denoiser."""

from huggingface_hub.dataclasses import strict
from transformers import BertConfig, T5Config


@strict
class D3PMTextConfig(BertConfig):
    r"""The configuration of a [`D3PMTextModel`]: BERT's, with the paper's sizes and no dropout as defaults.

    Args:
        vocab_size (`int`, defaults to 28): K, the mask included where there is one. 28 is text8's alphabet and a mask.
        backbone (`str`, defaults to `"bert"`): `"bert"`, or `"t5"` for a T5 encoder, whose positions are relative: the
            paper's own architecture, and no limit on the length.
        timestep_conditioning (`bool`, defaults to `True`): whether the network is told the timestep. Absorbing processes
            do without: the share of masks says it already.
        is_decoder (`bool`, defaults to `False`): the autoregressive baseline. Attention is causal and the input is
            shifted by one position, so that the logits of a position depend on the tokens before it alone.
        bos_token_id (`int`, *optional*): what an autoregressive model reads first; the last token (the mask) by default.

    All other arguments are those of [`~transformers.BertConfig`]. A T5 encoder takes from them the vocabulary, the sizes,
    `hidden_act`, `attn_implementation`, and `hidden_dropout_prob` for all of its dropout; it has no use for the others.
    """

    model_type = "d3pm_text"

    vocab_size: int = 28
    backbone: str = "bert"
    timestep_conditioning: bool = True
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    type_vocab_size: int = 1
    use_cache: bool = False
    # With a padding token, BERT's embedding of that token would be zero and stay so.
    pad_token_id: int | None = None

    def validate_architecture(self):
        """Part of the validation by `@strict`."""
        if self.backbone not in ("bert", "t5"):
            raise ValueError(f"backbone is {self.backbone!r}: it must be 'bert' or 't5'")
        super().validate_architecture()

    def to_t5_config(self) -> T5Config:
        """The T5 encoder of the same size."""
        return T5Config(
            vocab_size=self.vocab_size,
            d_model=self.hidden_size,
            d_kv=self.hidden_size // self.num_attention_heads,
            d_ff=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            dropout_rate=self.hidden_dropout_prob,
            feed_forward_proj=self.hidden_act,
            pad_token_id=None,
            eos_token_id=None,
            attn_implementation=self._attn_implementation,
        )
