# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Configuration of the text network."""

from huggingface_hub.dataclasses import strict
from transformers import BertConfig, T5Config

from ..utils.checks import check_choice, check_int


@strict
class D3PMTextConfig(BertConfig):
    r"""Configuration of a [`D3PMTextModel`]: a `BertConfig` with the sizes of the paper and no dropout by default.

    Args:
        vocab_size (`int`, defaults to 28): Number of states K, including the mask if there is one. The default is the
            alphabet of text8 and a mask.
        backbone (`str`, defaults to `"bert"`): `"bert"`, or `"t5"` for a T5 encoder, the architecture of the paper. Its
            positions are relative, so that the length is not limited.
        timestep_conditioning (`bool`, defaults to `True`): Whether the network reads the timestep. Absorbing processes do
            not need it: the number of masks gives the same information.
        position_bias_init (`str`, defaults to `"distance"`): Initial relative attention biases of a T5 encoder.
            `"distance"`: they decrease with the distance. `"offset"`: each head but two attends to the position at an
            offset of its own, so that a model of characters learns faster. Loaded weights do not depend on it.
        num_class_embeds (`int`, *optional*): Number of class embeddings, for a network that is conditioned on a class
            label, as in `UNet2DModel`. A row for "no class" counts.
        is_decoder (`bool`, defaults to `False`): Whether the network is autoregressive. Attention is then causal and the
            input is shifted by one position, so that the logits of a position depend on the tokens before it alone.
        bos_token_id (`int`, *optional*): Token before the first position of an autoregressive network. The default is the
            last token, which is the mask.

    All other arguments are those of [`~transformers.BertConfig`]. A T5 encoder uses the vocabulary, the sizes, `hidden_act`,
    `attn_implementation`, and `hidden_dropout_prob` for all of its dropout; it ignores the others.

    Examples:
        ```python
        from d3pm_hf import D3PMTextConfig, D3PMTextModel

        config = D3PMTextConfig(vocab_size=28, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        model = D3PMTextModel(config)
        ```
    """

    model_type = "d3pm_text"

    vocab_size: int = 28
    backbone: str = "bert"
    timestep_conditioning: bool = True
    position_bias_init: str = "distance"
    num_class_embeds: int | None = None
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    type_vocab_size: int = 1
    use_cache: bool = False
    # BERT would keep the embedding of a padding token at zero.
    pad_token_id: int | None = None

    def validate_architecture(self):
        """Checks the backbone and the number of classes; called by `@strict`."""
        check_choice("backbone", self.backbone, ("bert", "t5"))
        check_choice("position_bias_init", self.position_bias_init, ("distance", "offset"))
        if self.num_class_embeds is not None:
            check_int("num_class_embeds", self.num_class_embeds, 1)
        super().validate_architecture()

    def to_t5_config(self) -> T5Config:
        """The configuration of a T5 encoder of the same size."""
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
