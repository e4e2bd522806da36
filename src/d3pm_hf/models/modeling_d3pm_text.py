# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The text denoiser: an encoder that reads x_t and the timestep, and puts out logits of x_0."""

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import nn
from transformers import BertModel, PreTrainedModel, T5EncoderModel
from transformers import initialization as init
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.bert.modeling_bert import BertPredictionHeadTransform
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.utils import can_return_tuple

from .configuration_d3pm_text import D3PMTextConfig


def local_attention_bias(attention: T5Attention) -> torch.Tensor:
    """Initial relative attention biases, which fall with the distance: every head attends to its neighbors first.

        bias[bucket, head] = -distance(bucket) * slope(head)        (slopes fall from 1 to 1/16)

    With T5's own random biases a masked model of characters sees an average over all positions, and may take thousands
    of steps to find out that its neighbors matter most.

    Returns:
        `[buckets, heads]`, float32.
    """
    num_buckets, num_heads = attention.relative_attention_bias.weight.shape
    device, max_distance = attention.relative_attention_bias.weight.device, attention.relative_attention_max_distance
    offsets = torch.arange(-max_distance, max_distance, device=device)
    buckets = attention._relative_position_bucket(
        offsets, bidirectional=True, num_buckets=num_buckets, max_distance=max_distance
    )
    distances = torch.zeros(num_buckets, dtype=torch.float32, device=device)  # of the nearest position in a bucket
    distances.scatter_reduce_(0, buckets, offsets.abs().float(), "amin", include_self=False)
    slopes = torch.logspace(0, -4, num_heads, base=2, dtype=torch.float32, device=device)
    return -distances[:, None] * slopes


class D3PMTextModel(PreTrainedModel):
    """An unmodified `BertModel` (or `T5EncoderModel`) over words plus timestep embedding, under a tied output head.

    Args:
        config ([`D3PMTextConfig`]): the sizes, the backbone, and whether the network is told the timestep.
    """

    config_class = D3PMTextConfig
    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["BertEmbeddings", "BertLayer", "T5Block"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # The word embeddings of BERT, or those of T5.
    _tied_weights_keys = {"lm_head.weight": r"backbone\.(embeddings\.word_embeddings|shared)\.weight"}

    def __init__(self, config: D3PMTextConfig):
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # that of `labels`
        if config.backbone == "t5":
            self.backbone = T5EncoderModel(config.to_t5_config())
        else:
            self.backbone = BertModel(config, add_pooling_layer=False)
        if config.timestep_conditioning:
            self.timesteps = Timesteps(config.hidden_size, flip_sin_to_cos=True, downscale_freq_shift=0)
            self.timestep_embedding = TimestepEmbedding(config.hidden_size, config.hidden_size)
        # BERT's own head. Without the transform a tied head starts as a copy of its input: T5's word vectors are long.
        self.transform = BertPredictionHeadTransform(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def is_custom_code(cls) -> bool:
        # transformers would skip modules without parameters of their own, T5's attention among them, in case `_init_weights`
        # overwrites what was loaded. It does not: it writes through `transformers.initialization`.
        return False

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self and self.config.backbone == "t5":
            attention = self.backbone.encoder.block[0].layer[0].SelfAttention  # the one that has the biases
            init.copy_(attention.relative_attention_bias.weight, local_attention_bias(attention))

    @property
    def is_causal(self) -> bool:
        """Whether the logits of a position depend on the tokens before it alone, its own token excluded."""
        return self.config.is_decoder

    def get_input_embeddings(self):
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, new_embeddings):
        self.lm_head = new_embeddings

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        # T5's relative positions are biases of the attention scores. Flash attention has none, and transformers' flex attention
        # reads those of the second sample of a batch outside of their memory.
        if self.config.backbone == "t5" and any(name in (attn_implementation or "") for name in ("flash", "flex")):
            raise ValueError(
                f"attn_implementation is {attn_implementation!r}, which cannot add the relative position biases of "
                "backbone='t5': choose 'sdpa' or 'eager', or backbone='bert'"
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        timestep: torch.Tensor | int | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> MaskedLMOutput:
        """Logits of x_0.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, N]`, *optional*): x_t.
            timestep (`torch.LongTensor` of shape `[B]`, or `int`, *optional*): t. A model without
                `timestep_conditioning` does not look at it.
            attention_mask (`torch.Tensor` of shape `[B, N]`, *optional*): Zero where a position is to be ignored.
            inputs_embeds (`torch.FloatTensor` of shape `[B, N, D]`, *optional*): Word embeddings of x_t, in place of
                `input_ids`.
            labels (`torch.LongTensor` of shape `[B, N]`, *optional*): x_0, or -100 where a position does not count. The
                `loss` is then the mean cross-entropy of the logits, as in `BertForMaskedLM`. It is not the loss that
                diffusion models are trained with: that one is [`d3pm_loss`], which weighs timesteps and positions by the
                process.
            output_attentions (`bool`, *optional*, defaults to `config.output_attentions`): Whether to return the
                `attentions` of the backbone. They are computed with `attn_implementation="eager"` alone.
            output_hidden_states (`bool`, *optional*, defaults to `config.output_hidden_states`): Whether to return the
                `hidden_states` of the backbone.

        Returns:
            [`~transformers.modeling_outputs.MaskedLMOutput`] with `logits` of shape `[B, N, K]`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either `input_ids` or `inputs_embeds`")
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds  # [B, N, D]
        if self.config.backbone == "bert" and embeds.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"the sequence has {embeds.shape[1]} tokens, and this network knows "
                f"{self.config.max_position_embeddings} positions: shorten it, or train with more "
                "(max_position_embeddings, or backbone='t5')"
            )
        for name, value in {"attention_mask": attention_mask, "labels": labels}.items():
            if value is not None and value.shape != embeds.shape[:2]:
                raise ValueError(
                    f"`{name}` has shape {list(value.shape)}: it must have that of the input, {list(embeds.shape[:2])}"
                )
        if self.is_causal:
            embeds = self._shift_right(embeds, attention_mask)
        if self.config.timestep_conditioning:
            embeds = embeds + self._embed_timestep(timestep, embeds)
        if self.is_causal and self.config.backbone == "t5":
            attention_mask = self._causal_mask(embeds, attention_mask)  # T5's encoder has none of its own
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        output = self.backbone(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = self.transform(output.last_hidden_state)
        if self.config.backbone == "t5":
            hidden = hidden * self.config.hidden_size**-0.5  # as T5 does: its word vectors have unit variance
        logits = self.lm_head(hidden)  # [B, N, K]
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )

    def _shift_right(self, embeds: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Embeddings `[B, N, D]` of the token before each position: the start token if there is none, or if it is hidden."""
        start = self.config.vocab_size - 1 if self.config.bos_token_id is None else self.config.bos_token_id
        start = self.get_input_embeddings()(torch.full([1, 1], start, device=embeds.device))  # [1, 1, D]
        previous = torch.cat([start.expand(len(embeds), -1, -1), embeds[:, :-1]], dim=1)
        if attention_mask is None:
            return previous
        is_visible = F.pad(attention_mask[:, :-1] != 0, (1, 0))  # [B, N]
        return torch.where(is_visible[..., None], previous, start)

    def _embed_timestep(self, timestep: torch.Tensor | int | None, embeds: torch.Tensor) -> torch.Tensor:
        """The timestep embedding `[B or 1, 1, D]`, in the dtype of `embeds`."""
        if timestep is None:
            raise ValueError("this network is conditioned on the timestep: pass `timestep`, one per sample")
        timestep = torch.as_tensor(timestep, device=embeds.device).reshape(-1)
        if len(timestep) not in (1, len(embeds)):
            raise ValueError(
                f"`timestep` has {len(timestep)} entries for {len(embeds)} samples: pass one per sample, or one for all"
            )
        return self.timestep_embedding(self.timesteps(timestep).to(embeds.dtype))[:, None]

    @staticmethod
    def _causal_mask(embeds: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """The additive mask `[B, 1, N, N]` that hides what comes later, and what `attention_mask` hides."""
        length = embeds.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=embeds.device).tril()[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None, None]
        hidden = torch.zeros(visible.shape, dtype=embeds.dtype, device=embeds.device)
        # Half the range of float16, to which autocast may convert the sum of mask and biases: it stays finite.
        return hidden.masked_fill(~visible, torch.finfo(torch.float16).min / 2)
