# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The text network: an encoder that predicts logits of x_0 from x_t and the timestep."""

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from torch import nn
from transformers import BertModel, Cache, PreTrainedModel, T5EncoderModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.models.bert.modeling_bert import BertPredictionHeadTransform
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.utils import can_return_tuple

from .configuration_d3pm_text import D3PMTextConfig


def distance_biases(offsets: torch.Tensor, num_heads: int, is_causal: bool = False) -> torch.Tensor:
    """Attention biases that decrease with the distance, so that each head attends to its neighbors on both sides.

        bias[offset, head] = -|offset| * slope(head)        (slopes from 1 down to 1/16)

    With the random biases of T5, a masked model of characters first averages over all positions, and may need thousands of
    steps to attend to the neighbors.
    """
    slopes = torch.logspace(0, -4, num_heads, base=2, dtype=torch.float32, device=offsets.device)
    return -offsets.abs()[:, None] * slopes


def offset_biases(offsets: torch.Tensor, num_heads: int, is_causal: bool = False) -> torch.Tensor:
    """Attention biases by which each head but two attends to the position at an offset of its own: -1, 1, -2, 2, ...

        bias[offset, head] = max(-8, -2 |offset - own(head)|)
        the last two heads:  max(-8, -|offset| / 4 - 4 [offset is not on the left (right)])

    A head with [`distance_biases`] sees the sum of its neighbors, without their order, which many steps of training go into
    separating. A causal network has offsets 0, -1, -2, ..., and one last head for all that came before.
    """
    distances = offsets.abs()
    wide = [(offsets * side <= 0) * -4.0 - distances / 4 for side in (-1, 1)]
    if is_causal or num_heads == 1:
        wide = [-distances / 4]
    own = [
        -head if is_causal else (head // 2 + 1) * (-1) ** (head + 1) for head in range(max(0, num_heads - len(wide)))
    ]
    return torch.stack([-2.0 * (offsets - place).abs() for place in own] + wide, dim=-1).clamp(min=-8)


# The initial attention biases of T5 by name: functions of the offsets `[buckets]`, the heads, and whether the network is causal.
POSITION_BIASES = {"distance": distance_biases, "offset": offset_biases}


def bucket_offsets(attention: T5Attention) -> torch.Tensor:
    """The offset of the nearest position in each bucket of relative positions, `[buckets]`, float32."""
    weight, max_distance = attention.relative_attention_bias.weight, attention.relative_attention_max_distance
    offsets = torch.arange(-max_distance, max_distance, device=weight.device)
    buckets = attention._relative_position_bucket(
        offsets, bidirectional=True, num_buckets=len(weight), max_distance=max_distance
    )
    zeros = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)
    distances = zeros.scatter_reduce(0, buckets, offsets.abs().float(), "amin", include_self=False)
    signs = zeros.scatter_reduce(
        0, buckets, offsets.sign().float(), "amax", include_self=False
    )  # the same in a bucket
    return distances * signs


def check_same_shape(embeds: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Checks that each of the tensors has the shape `[B, N]` of the embeddings `[B, N, D]`, unless it is `None`."""
    for name, value in tensors.items():
        if value is not None and value.shape != embeds.shape[:2]:
            raise ValueError(
                f"`{name}` has shape {list(value.shape)}: it must have that of the input, {list(embeds.shape[:2])}"
            )


def expand_timestep(timestep: torch.Tensor | float | None, embeds: torch.Tensor) -> torch.Tensor:
    """The timestep as a tensor `[B or 1]` on the device of the embeddings `[B, N, D]`."""
    if timestep is None:
        raise ValueError("this network is conditioned on the timestep: pass `timestep`, one per sample")
    times = torch.as_tensor(timestep, device=embeds.device).reshape(-1)
    if times.shape[0] not in (1, embeds.shape[0]):  # `len` would fix the size of the batch in `torch.export`
        raise ValueError(
            f"`timestep` has {times.shape[0]} entries for {embeds.shape[0]} samples: pass one per sample, or one for all"
        )
    return times


def check_class_labels(config, class_labels: torch.Tensor | None, embeds: torch.Tensor) -> torch.Tensor:
    """Returns `class_labels` `[B]`, after a check that the network takes them and that there is one per sample."""
    if config.num_class_embeds is None:
        raise ValueError(
            "this network has no class embedding: leave out `class_labels`, or create it with `num_class_embeds`"
        )
    if class_labels is None:
        raise ValueError("this network is conditioned on a class: pass `class_labels`, one per sample")
    if class_labels.shape != embeds.shape[:1]:
        raise ValueError(
            f"`class_labels` has shape {list(class_labels.shape)} for {embeds.shape[0]} samples: pass one per sample"
        )
    return class_labels


class D3PMTextModel(PreTrainedModel):
    """A `BertModel` (or `T5EncoderModel`) on word plus timestep (and class) embeddings, with a tied output head.

    `import d3pm_hf.models` registers it with `AutoConfig`, `AutoModel` and `AutoModelForMaskedLM`.

    Args:
        config ([`D3PMTextConfig`]): Configuration of the network.

    Examples:
        ```python
        import torch
        from d3pm_hf import create_text_model

        model = create_text_model("tiny", vocab_size=28)  # a D3PMTextModel
        logits = model(torch.randint(0, 28, (2, 16)), timestep=torch.tensor([3, 700])).logits  # [2, 16, 28]
        ```
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
        self.loss_type = "ForMaskedLM"  # the loss that `labels` ask for
        if config.backbone == "t5":
            self.backbone = T5EncoderModel(config.to_t5_config())
        else:
            self.backbone = BertModel(config, add_pooling_layer=False)
        if config.timestep_conditioning:
            self.timesteps = Timesteps(config.hidden_size, flip_sin_to_cos=True, downscale_freq_shift=0)
            self.timestep_embedding = TimestepEmbedding(config.hidden_size, config.hidden_size)
        if config.num_class_embeds is not None:
            self.class_embedding = nn.Embedding(config.num_class_embeds, config.hidden_size)
        # The head of BERT. Without its transform, a tied head on the long word vectors of T5 would initially copy the input.
        self.transform = BertPredictionHeadTransform(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def is_custom_code(cls) -> bool:
        # For custom code, transformers does not initialize modules without parameters of their own, such as the attention of
        # T5, lest `_init_weights` overwrite loaded weights. Ours uses `transformers.initialization`, which does not.
        return False

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self and self.config.backbone == "t5":
            attention = self.backbone.encoder.block[0].layer[0].SelfAttention  # it has the biases of all layers
            initial_biases = POSITION_BIASES[self.config.position_bias_init]
            biases = initial_biases(bucket_offsets(attention), attention.n_heads, self.is_causal)
            init.copy_(attention.relative_attention_bias.weight, biases)

    @property
    def is_causal(self) -> bool:
        """Whether the logits of a position depend on the tokens before it alone, its own token excluded."""
        return self.config.is_decoder

    @property
    def supports_cache(self) -> bool:
        """Whether `past_key_values` can be passed: keys and values must not change with later tokens or with the timestep."""
        return self.is_causal and not self.config.timestep_conditioning

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        # The relative positions of T5 are biases of the attention scores. Flash attention supports none, and the flex attention
        # of transformers reads out of bounds for all samples of a batch but the first.
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
        class_labels: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> MaskedLMOutput:
        """Logits of x_0.

        Args:
            input_ids (`torch.LongTensor` of shape `[B, N]`, *optional*): x_t.
            timestep (`torch.LongTensor` of shape `[B]`, or `int`, *optional*): t. Ignored without
                `timestep_conditioning`.
            attention_mask (`torch.Tensor` of shape `[B, N]`, *optional*): Zero where a position is to be ignored.
            inputs_embeds (`torch.FloatTensor` of shape `[B, N, D]`, *optional*): Word embeddings of x_t, in place of
                `input_ids`.
            labels (`torch.LongTensor` of shape `[B, N]`, *optional*): x_0, or -100 where a position does not count. The
                `loss` is then the mean cross-entropy of the logits, as in `BertForMaskedLM`. Diffusion models are
                trained with [`d3pm_loss`] instead, in which the process weights timesteps and positions.
            output_attentions (`bool`, *optional*, defaults to `config.output_attentions`): Whether to return the
                `attentions` of the backbone, which needs `attn_implementation="eager"`.
            output_hidden_states (`bool`, *optional*, defaults to `config.output_hidden_states`): Whether to return the
                `hidden_states` of the backbone.
            class_labels (`torch.LongTensor` of shape `[B]`, *optional*): Class of each sample, for a network with
                `num_class_embeds`.
            past_key_values (`~transformers.Cache`, *optional*): Keys and values of the first positions, of earlier calls with
                the same tokens there, for a network with `supports_cache`. The logits are then those of the other positions
                of `input_ids` alone, whose keys and values are added.

        Returns:
            [`~transformers.modeling_outputs.MaskedLMOutput`] with `logits` of shape `[B, N, K]`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either `input_ids` or `inputs_embeds`")
        embed = self.backbone.get_input_embeddings()
        embeds = embed(input_ids) if inputs_embeds is None else inputs_embeds  # [B, N, D]
        if self.config.backbone == "bert" and embeds.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"the sequence has {embeds.shape[1]} tokens, and this network has "
                f"{self.config.max_position_embeddings} positions: shorten it, or train with a larger "
                "max_position_embeddings or with backbone='t5'"
            )
        check_same_shape(embeds, attention_mask=attention_mask, labels=labels)
        if self.is_causal:
            embeds = self._shift_right(embeds, attention_mask)
        num_read, cached = 0, {}
        if past_key_values is not None:
            if not self.supports_cache:
                raise ValueError(
                    "this network keeps no keys and values: leave out `past_key_values`, or create it with is_decoder=True and "
                    "timestep_conditioning=False"
                )
            num_read = past_key_values.get_seq_length()
            embeds = embeds[:, num_read:]
            cached = {"past_key_values": past_key_values, "use_cache": True}
        if self.config.timestep_conditioning:
            times = self.timesteps(expand_timestep(timestep, embeds)).to(embeds.dtype)
            embeds = embeds + self.timestep_embedding(times)[:, None]  # [B or 1, 1, D]
        if self.config.num_class_embeds is not None or class_labels is not None:
            class_labels = check_class_labels(self.config, class_labels, embeds)
            embeds = embeds + self.class_embedding(class_labels)[:, None]
        if self.is_causal and self.config.backbone == "t5":
            attention_mask = self._causal_mask(embeds, attention_mask, num_read)  # the encoder of T5 is not causal
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        is_cached_t5 = past_key_values is not None and self.config.backbone == "t5"
        output = (self._read_cached_t5 if is_cached_t5 else self.backbone)(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **cached,
        )
        hidden = self.transform(output.last_hidden_state)
        if self.config.backbone == "t5":
            hidden = hidden * self.config.hidden_size**-0.5  # as in T5, whose word vectors have unit variance
        logits = self.lm_head(hidden)  # [B, N, K]
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )

    def _shift_right(self, embeds: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Embeddings `[B, N, D]` of the token before each position; the start token if there is none or it is masked out."""
        start = self.config.vocab_size - 1 if self.config.bos_token_id is None else self.config.bos_token_id
        start = self.backbone.get_input_embeddings()(torch.full([1, 1], start, device=embeds.device))  # [1, 1, D]
        previous = torch.cat([start.expand(embeds.shape[0], -1, -1), embeds[:, :-1]], dim=1)
        if attention_mask is None:
            return previous
        is_visible = F.pad(attention_mask[:, :-1] != 0, (1, 0))  # [B, N]
        return torch.where(is_visible[..., None], previous, start)

    def _read_cached_t5(self, inputs_embeds, attention_mask, past_key_values, **kwargs) -> BaseModelOutput:
        """The encoder of T5, whose blocks take a cache, while the encoder as a whole leaves it out."""
        encoder, position_bias = self.backbone.encoder, None
        hidden = encoder.dropout(inputs_embeds)
        for block in encoder.block:  # the biases of the first one are those of all
            hidden, position_bias = block(hidden, attention_mask, position_bias, past_key_values=past_key_values)[:2]
        return BaseModelOutput(last_hidden_state=encoder.dropout(encoder.final_layer_norm(hidden)))

    @staticmethod
    def _causal_mask(embeds: torch.Tensor, attention_mask: torch.Tensor | None, num_read: int = 0) -> torch.Tensor:
        """The additive attention mask `[B, 1, N, R + N]` that hides later positions and those that `attention_mask` hides.

        The N positions of `embeds` come after R = `num_read` that have been read.
        """
        position = torch.arange(num_read + embeds.shape[1], device=embeds.device)
        visible = (position <= position[num_read:, None])[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None, None]
        hidden = torch.zeros(visible.shape, dtype=embeds.dtype, device=embeds.device)
        # Half the range of float16: autocast may convert the sum of mask and biases to it, which must stay finite.
        return hidden.masked_fill(~visible, torch.finfo(torch.float16).min / 2)
