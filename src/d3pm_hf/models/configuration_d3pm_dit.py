# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Configuration of the diffusion transformer."""

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from ..utils.checks import check_int


@strict
class D3PMDiTConfig(PreTrainedConfig):
    r"""Configuration of a [`D3PMDiT`]. The default sizes are the small ones of MDLM, SEDD and Duo.

    Args:
        vocab_size (`int`, defaults to 28): Number of states K, including the mask if there is one.
        hidden_size (`int`, defaults to 768): Width of the network.
        num_hidden_layers (`int`, defaults to 12): Number of blocks.
        num_attention_heads (`int`, defaults to 12): Number of attention heads. Their size must be even.
        intermediate_size (`int`, defaults to 3072): Width of the MLP of a block.
        cond_size (`int`, defaults to 128): Width of the embedding of the timestep and the class, from which the adaptive layer
            norms take their scales, shifts and gates.
        hidden_dropout_prob (`float`, defaults to 0.0): Dropout after the attention and the MLP of a block.
        timestep_conditioning (`bool`, defaults to `True`): Whether the network reads the timestep. If not, it reads 0, as MDLM
            does with `time_conditioning=False`.
        num_train_timesteps (`int`, *optional*): Number of timesteps T of the scheduler. If it is given, the network reads
            sigma = -log(1 - 0.999 (t + 1) / T) in place of the timestep t: the noise level of MDLM, SEDD, UDLM and Duo.
        num_class_embeds (`int`, *optional*): Number of class embeddings, for a network that is conditioned on a class
            label. A row for "no class" counts.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the initial word and class embeddings.

    All other arguments are those of [`~transformers.PreTrainedConfig`].

    Examples:
        ```python
        from d3pm_hf import D3PMDiT, D3PMDiTConfig

        config = D3PMDiTConfig(vocab_size=28, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        model = D3PMDiT(config)
        ```
    """

    model_type = "d3pm_dit"

    vocab_size: int = 28
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    cond_size: int = 128
    hidden_dropout_prob: float | int = 0.0
    timestep_conditioning: bool = True
    num_train_timesteps: int | None = None
    num_class_embeds: int | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    def validate_architecture(self):
        """Checks the sizes; called by `@strict`."""
        sizes = "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "cond_size"
        for name in ("vocab_size", *sizes, "num_train_timesteps", "num_class_embeds"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size is {self.hidden_size} and num_attention_heads is {self.num_attention_heads}: rotary positions need "
                "heads of an even size, so hidden_size must be a multiple of 2 * num_attention_heads"
            )
        if self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings is True: the output layer of this network is not tied, leave it False"
            )
