# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The diffusion transformer of MDLM, SEDD, UDLM and Duo: rotary positions and adaptive layer norm."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward
from transformers.utils import can_return_tuple

from .configuration_d3pm_dit import D3PMDiTConfig
from .modeling_d3pm_text import check_class_labels, check_same_shape, expand_timestep


# Number of sinusoids of the timestep, and the largest period of them and of the rotary positions.
NUM_SINUSOIDS, LONGEST_PERIOD = 256, 10_000.0
# The last noise level of MDLM, SEDD, UDLM and Duo leaves this share of the tokens as they were.
LAST_SURVIVAL = 1e-3


def noise_level(timestep: torch.Tensor, num_train_timesteps: int) -> torch.Tensor:
    """sigma = -log(1 - 0.999 (t + 1) / T), the noise level that MDLM, SEDD, UDLM and Duo pass to their networks.

    Args:
        timestep (`torch.Tensor`): Timesteps t in 0 .. T-1.
        num_train_timesteps (`int`): Number of timesteps T.
    """
    steps = timestep.float() + 1
    return -torch.log((num_train_timesteps - steps + LAST_SURVIVAL * steps) / num_train_timesteps)


def sinusoids(values: torch.Tensor) -> torch.Tensor:
    """cos and sin of `values` `[B]` times geometrically spaced frequencies from 1 down to 1/10000, `[B, 256]`."""
    half = NUM_SINUSOIDS // 2
    exponents = torch.arange(half, dtype=torch.float32, device=values.device) / half
    angles = values.float()[:, None] * torch.exp(-math.log(LONGEST_PERIOD) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotary_angles(length: int, head_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the angles of rotary positions, each `[N, head_size / 2]`."""
    frequencies = LONGEST_PERIOD ** -(torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of the first and the second half of each head of x `[B, H, N, d]` by the angles of its position."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x (1 + scale) + shift, the adaptive part of a layer norm."""
    return x * (1 + scale) + shift


class D3PMDiTBlock(GradientCheckpointingLayer):
    """Attention with rotary positions and an MLP, each behind an adaptive layer norm and a gate."""

    is_causal = False

    def __init__(self, config: D3PMDiTConfig):
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.norm1 = nn.LayerNorm(size, bias=False)
        self.attn_qkv = nn.Linear(size, 3 * size, bias=False)
        self.attn_out = nn.Linear(size, size, bias=False)
        self.norm2 = nn.LayerNorm(size, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(size, config.intermediate_size),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.intermediate_size, size),
        )
        self.adaLN_modulation = nn.Linear(config.cond_size, 6 * size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden: torch.Tensor,
        cond: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next hidden states `[B, N, D]`, and the attention if the implementation returns it.

        Args:
            hidden: Hidden states `[B, N, D]`.
            cond: Embedding of timestep and class `[B or 1, cond_size]`.
            angles: cos and sin of the rotary positions.
            attention_mask: What the implementation of the attention takes for a mask, or `None`.
        """
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaLN_modulation(cond)[:, None].chunk(6, dim=-1)
        qkv = self.attn_qkv(modulate(self.norm1(hidden), shift, scale))  # [B, N, 3 D]
        heads = (*hidden.shape[:2], 3, self.config.num_attention_heads, -1)
        query, key, value = qkv.view(heads).permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, d]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, attention = attend(self, rotate(query, *angles), rotate(key, *angles), value, attention_mask)
        hidden = hidden + gate * self.dropout(self.attn_out(attended.flatten(2)))
        return hidden + mlp_gate * self.dropout(
            self.mlp(modulate(self.norm2(hidden), mlp_shift, mlp_scale))
        ), attention


class D3PMDiT(PreTrainedModel):
    """A diffusion transformer: the network of MDLM, SEDD, UDLM and Duo, with attention of transformers.

    The names and shapes of the tensors are those of the authors' networks, except that the word embeddings
    `vocab_embed.embedding` are `vocab_embed.weight`, the class embeddings `cond_map.embedding_table` are `cond_map`, and the
    frequencies of the rotary positions are not stored. `python -m d3pm_hf.convert` reads their checkpoints.

    Positions are relative, so that the length is not limited. `import d3pm_hf.models` registers the class with `AutoConfig`,
    `AutoModel` and `AutoModelForMaskedLM`.

    Args:
        config ([`D3PMDiTConfig`]): Configuration of the network.

    Examples:
        ```python
        import torch
        from d3pm_hf import create_text_model

        model = create_text_model("tiny", vocab_size=28, backbone="dit")  # a D3PMDiT
        logits = model(torch.randint(0, 28, (2, 16)), timestep=torch.tensor([3, 700])).logits  # [2, 16, 28]
        ```
    """

    config_class = D3PMDiTConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    is_causal = False
    _input_embed_layer = "vocab_embed"
    _no_split_modules = ["D3PMDiTBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: D3PMDiTConfig):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # the loss that `labels` ask for
        size, cond_size = config.hidden_size, config.cond_size
        self.vocab_embed = nn.Embedding(config.vocab_size, size)
        mlp = nn.Sequential(nn.Linear(NUM_SINUSOIDS, cond_size), nn.SiLU(), nn.Linear(cond_size, cond_size))
        self.sigma_map = nn.ModuleDict({"mlp": mlp})
        if config.num_class_embeds is not None:
            self.cond_map = nn.Embedding(config.num_class_embeds, cond_size)
        self.blocks = nn.ModuleList([D3PMDiTBlock(config) for _ in range(config.num_hidden_layers)])
        self.output_layer = nn.ModuleDict(
            {
                "norm_final": nn.LayerNorm(size, bias=False),
                "linear": nn.Linear(size, config.vocab_size),
                "adaLN_modulation": nn.Linear(cond_size, 2 * size),
            }
        )
        self.post_init()

    @classmethod
    def is_custom_code(cls) -> bool:
        # Weights that a checkpoint lacks are initialized, and loaded ones are not: see `D3PMTextModel.is_custom_code`.
        return False

    @torch.no_grad()
    def _init_weights(self, module):
        """Initializes gates, modulations and the output layer with zeros, so that every block begins as the identity."""
        super()._init_weights(module)
        zeros = []
        if module is self:
            zeros = [self.output_layer["linear"], self.output_layer["adaLN_modulation"]]
        elif isinstance(module, D3PMDiTBlock):
            zeros = [module.adaLN_modulation]
        for layer in zeros:
            init.zeros_(layer.weight)
            init.zeros_(layer.bias)

    def get_output_embeddings(self):
        return self.output_layer["linear"]

    def set_output_embeddings(self, new_embeddings):
        self.output_layer["linear"] = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        timestep: torch.Tensor | float | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        class_labels: torch.Tensor | None = None,
    ) -> MaskedLMOutput:
        """Logits of x_0.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, N]`, *optional*): x_t.
            timestep (`torch.Tensor` of shape `[B]`, or a number, *optional*): t. Ignored without `timestep_conditioning`.
                Without `num_train_timesteps` it may be any number, such as a noise level sigma.
            attention_mask (`torch.Tensor` of shape `[B, N]`, *optional*): Zero where a position is to be ignored.
            inputs_embeds (`torch.FloatTensor` of shape `[B, N, D]`, *optional*): Word embeddings of x_t, in place of
                `input_ids`.
            labels (`torch.LongTensor` of shape `[B, N]`, *optional*): x_0, or -100 where a position does not count. The
                `loss` is then the mean cross-entropy of the logits, as in `BertForMaskedLM`.
            output_attentions (`bool`, *optional*, defaults to `config.output_attentions`): Whether to return the
                `attentions` of all blocks, which needs `attn_implementation="eager"`.
            output_hidden_states (`bool`, *optional*, defaults to `config.output_hidden_states`): Whether to return the
                `hidden_states`: the word embeddings and the output of each block.
            class_labels (`torch.LongTensor` of shape `[B]`, *optional*): Class of each sample, for a network with
                `num_class_embeds`.

        Returns:
            [`~transformers.modeling_outputs.MaskedLMOutput`] with `logits` of shape `[B, N, K]`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either `input_ids` or `inputs_embeds`")
        hidden = self.vocab_embed(input_ids) if inputs_embeds is None else inputs_embeds  # [B, N, D]
        check_same_shape(hidden, attention_mask=attention_mask, labels=labels)
        cond = self._embed_condition(timestep, class_labels, hidden)  # [B or 1, cond_size]
        head_size = self.config.hidden_size // self.config.num_attention_heads
        angles = rotary_angles(hidden.shape[1], head_size, hidden.device)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states, attentions = [hidden] if output_hidden_states else [], []
        for block in self.blocks:
            hidden, attention = block(hidden, cond, angles, mask)
            if output_hidden_states:
                states.append(hidden)
            if output_attentions:
                attentions.append(attention)
        shift, scale = self.output_layer["adaLN_modulation"](cond)[:, None].chunk(2, dim=-1)
        logits = self.output_layer["linear"](modulate(self.output_layer["norm_final"](hidden), shift, scale))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    def _embed_condition(
        self, timestep: torch.Tensor | float | None, class_labels: torch.Tensor | None, embeds: torch.Tensor
    ) -> torch.Tensor:
        """The embedding of timestep and class `[B or 1, cond_size]`, in the dtype of `embeds`."""
        times = torch.zeros(1, device=embeds.device)
        if self.config.timestep_conditioning:
            times = expand_timestep(timestep, embeds)
            if self.config.num_train_timesteps is not None:
                times = noise_level(times, self.config.num_train_timesteps)
        cond = F.silu(self.sigma_map["mlp"](sinusoids(times).to(embeds.dtype)))
        if self.config.num_class_embeds is not None or class_labels is not None:
            class_labels = check_class_labels(self.config, class_labels, embeds)
            cond = cond + F.silu(self.cond_map(class_labels))
        return cond
