# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMTextPipeline: samples, infilling and reconstructions of text."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import SchedulerMixin
from diffusers.utils import BaseOutput
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.denoisers import Denoiser, TextDenoiser
from ..utils.checks import check_type, describe
from .pipeline_d3pm import D3PMPipeline


@dataclass
class D3PMTextPipelineOutput(BaseOutput):
    """Output of [`D3PMTextPipeline`].

    Args:
        sequences (`torch.LongTensor` of shape `[B, N]`): the tokens.
        texts (`list[str]`, *optional*): the same as text, with `output_type="text"`.
    """

    sequences: torch.LongTensor
    texts: list[str] | None = None


class D3PMTextPipeline(D3PMPipeline):
    """Generates text with a [`D3PMTextModel`] (or a masked language model of transformers) and a [`D3PMScheduler`].

    Args:
        text_model (`PreTrainedModel`): reads x_t, and the timestep if its configuration says so; puts out logits.
        scheduler ([`D3PMScheduler`]): the process over the vocabulary.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): without one the pipeline speaks in tokens. A mask token that is
            not a state of the process may come last in its vocabulary: it marks the gaps of a prompt.
        sequence_length (`int`, *optional*): Number of tokens of a sample without a prompt. By default 256, or as many as
            the network has positions for; an autoregressive process has one timestep per token. `from_pipe` keeps it,
            `components` does not: those are modules.
    """

    task = "text-generation"
    network_name = "text_model"
    model_cpu_offload_seq = "text_model"
    _optional_components = ["tokenizer"]

    def __init__(
        self,
        text_model: PreTrainedModel,
        scheduler: SchedulerMixin,
        tokenizer: PreTrainedTokenizerBase | None = None,
        sequence_length: int | None = None,
    ):
        super().__init__()
        self.check_parts(scheduler, text_model=text_model)
        if tokenizer is not None:
            check_type("tokenizer", tokenizer, PreTrainedTokenizerBase, "a tokenizer of transformers")
        self.register_modules(text_model=text_model, scheduler=scheduler, tokenizer=tokenizer)
        self.check_components()
        if sequence_length is None:
            sequence_length = min(256, getattr(getattr(text_model, "config", None), "max_position_embeddings", 256))
            if scheduler.config.transition == "autoregressive":
                sequence_length = len(scheduler)
        self.check_counts(sequence_length=sequence_length)
        self.register_to_config(sequence_length=sequence_length)

    def check_components(self) -> None:
        """Checks that the network, the scheduler and the tokenizer have one vocabulary, and one mask token."""
        self.check_parts(self.scheduler, text_model=self.text_model)
        self.check_denoiser()
        num_classes = self.scheduler.config.num_classes
        if self.tokenizer is not None:
            states = len(self.tokenizer) - (self.tokenizer.mask_token_id == num_classes)
            if states != num_classes:
                raise ValueError(
                    f"the tokenizer has a vocabulary of {len(self.tokenizer)} and the scheduler one of {num_classes}: load "
                    "the tokenizer that the checkpoint was trained with"
                )
            # A token that is never data must be one that a tokenizer never makes of a text.
            mask, token = self.scheduler._never_data, self.tokenizer.mask_token_id
            if None not in (mask, token) and mask != token:
                change = f"pass mask_token_id={token} to D3PMScheduler"
                if token == num_classes:
                    change = f"make the network and the scheduler with {token + 1} classes"
                raise ValueError(
                    f"the mask of the scheduler is token {mask} ({self.tokenizer.convert_ids_to_tokens(mask)!r}), and that "
                    f"of the tokenizer is token {token} ({self.tokenizer.mask_token!r}): {change}"
                )

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        return TextDenoiser(network, self.scheduler.config.num_classes)

    def encode(self, prompt: str | list[str], sequence_length: int | None = None) -> torch.LongTensor:
        """Prompts as tokens `[B, N]`, in which gaps are the tokenizer's mask token; the end is one long gap."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: pass `input_ids` in place of `prompt`")
        if sequence_length is not None:
            self.check_counts(sequence_length=sequence_length)
        prompts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(prompts, (list, tuple)) or not prompts or not all(isinstance(one, str) for one in prompts):
            raise ValueError(f"prompt is {prompt!r}: pass a string or a list of at least one string")
        try:
            rows = [self.tokenizer(one, add_special_tokens=False).input_ids for one in prompts]
        except Exception as error:
            if type(error) is not Exception:  # tokenizers has no class of its own for this
                raise
            raise ValueError(
                f"the prompt has characters that the tokenizer does not know ({error}): use those of its vocabulary"
            ) from error
        lengths = sorted({len(row) for row in rows})
        if sequence_length is None and len(lengths) > 1:
            raise ValueError(
                f"the prompts have between {lengths[0]} and {lengths[-1]} tokens: write their gaps out to one length, or "
                "pass `sequence_length` to have all of them continued to it"
            )
        length = lengths[-1] if sequence_length is None else sequence_length
        if lengths[-1] > length or not length:
            raise ValueError(f"a prompt has {lengths[-1]} tokens, and sequence_length is {length}: make it longer")
        if self.tokenizer.mask_token_id is None and lengths[0] < length:
            raise ValueError("the tokenizer has no mask token to mark gaps with: give it one, or pass `input_ids`")
        gap = self.tokenizer.mask_token_id
        return torch.tensor([row + [gap] * (length - len(row)) for row in rows])

    def decode(self, sequences: torch.LongTensor) -> list[str]:
        """Tokens `[B, N]` as text."""
        if self.tokenizer is None:
            raise ValueError("this pipeline has no tokenizer: pass output_type='latent'")
        check_type("sequences", sequences, torch.Tensor, "a `torch.LongTensor` of shape [B, N]")
        if sequences.dtype != torch.long or sequences.ndim != 2 or not sequences.numel():
            raise ValueError(f"sequences are {describe(sequences)}: they must be a `torch.LongTensor` of shape [B, N]")
        low, high = sequences.min().item(), sequences.max().item()
        if low < 0 or high >= len(self.tokenizer):
            raise ValueError(
                f"sequences hold the token {low if low < 0 else high}: the tokenizer has those from 0 to {len(self.tokenizer) - 1}"
            )
        return self.tokenizer.batch_decode(sequences.tolist(), skip_special_tokens=True)

    def _find_gaps(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.BoolTensor:
        """Where tokens are to be filled in: `mask`, or wherever the mask token stands."""
        if mask is not None:
            check_type("mask", mask, torch.Tensor, "a tensor with the shape of the tokens")
            if tuple(mask.shape) != tuple(input_ids.shape):
                raise ValueError(f"mask has the shape {tuple(mask.shape)}, and the tokens {tuple(input_ids.shape)}")
            return mask.bool().to(input_ids.device)
        gap = self.scheduler.transition.never_data if self.tokenizer is None else self.tokenizer.mask_token_id
        return torch.zeros_like(input_ids, dtype=torch.bool) if gap is None else input_ids == gap

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        batch_size: int = 1,
        num_return_sequences: int = 1,
        sequence_length: int | None = None,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        input_ids: torch.LongTensor | None = None,
        mask: torch.BoolTensor | None = None,
        start_timestep: int | None = None,
        num_particles: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.LongTensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
    ) -> D3PMTextPipelineOutput | tuple:
        """Generates text; with `prompt` or `input_ids`, fills in its gaps or reconstructs it.

        Args:
            prompt (`str` or `list[str]`, *optional*): text with gaps, as in `"the quick [MASK][MASK] fox"`.
            batch_size (`int`, defaults to 1): how many; with several prompts, as many as those.
            num_return_sequences (`int`, defaults to 1): Number of samples for each entry of the batch, one after the
                other: `batch_size * num_return_sequences` in all.
            sequence_length (`int`, *optional*): a shorter prompt is continued to it. The prompt's own by default, or that
                of the checkpoint where there is none.
            num_inference_steps (`int`, *optional*): all timesteps of the process by default.
            timesteps (`list[int]`, *optional*): your own, descending; instead of `num_inference_steps`.
            input_ids (`torch.LongTensor` of shape `[B, N]`, *optional*): a prompt in tokens.
            mask (`torch.BoolTensor` of shape `[B, N]`, *optional*): true where to fill in `input_ids`; by default where the
                mask token stands. All other tokens come back as they are.
            start_timestep (`int`, *optional*): corrupts the prompt to this timestep, and denoises it from there.
            num_particles (`int`, defaults to 1): samples that compete for the best match with the known tokens. Exact as
                it grows; for absorbing processes 1 is enough.
            generator (`torch.Generator`, or a list of one per sample, *optional*): a batch with a list equals single runs.
            latents (`torch.LongTensor` of shape `[B, N]`, *optional*): the state to start from.
            temperature, top_k, top_p: reshape the network's distribution at each step.
            output_type (`str`, defaults to `"text"`): `"text"`; or `"latent"`, as for images, or `"seq"` for the tokens
                alone.
            return_dict (`bool`, defaults to `True`): a [`D3PMTextPipelineOutput`], or a tuple.
            callback_on_step_end (`Callable`, *optional*): called as `f(pipeline, step, timestep, tensors)` after each step;
                returns nothing, or a dictionary whose `latents` replace the state.
            callback_on_step_end_tensor_inputs (`list[str]`): of `latents`, `sample` (x_t before the step),
                `previous_timestep` (that of `latents`; -1 for the data) and `pred_original_sample` (the most likely x_0;
                computed only if named here).
        """
        self.check_components()
        self.check_counts(
            batch_size=batch_size, num_return_sequences=num_return_sequences, num_particles=num_particles
        )
        length = self.config.sequence_length if sequence_length is None else sequence_length
        self.check_counts(sequence_length=length)
        if output_type not in ("text", "latent", "seq"):
            raise ValueError(f"output_type is {output_type!r}: it must be text, latent or seq")
        if prompt is not None:
            if input_ids is not None:
                raise ValueError("got prompt and input_ids: pass one of the two")
            input_ids = self.encode(prompt, sequence_length)
        if input_ids is None and (mask is not None or start_timestep is not None):
            raise ValueError("infilling and reconstruction need a text: pass `prompt` or `input_ids`")
        known = is_known = None
        if input_ids is not None:
            if not isinstance(input_ids, torch.Tensor) or input_ids.dtype != torch.long or input_ids.ndim != 2:
                shape = tuple(getattr(input_ids, "shape", ()))
                kind = getattr(input_ids, "dtype", type(input_ids).__name__)
                raise ValueError(f"input_ids are {kind} of shape {shape}: pass a `torch.LongTensor` of shape [B, N]")
            input_ids = input_ids.to(self._execution_device)
            gaps = self._find_gaps(input_ids, mask)
            known, length = input_ids.masked_fill(gaps, 0), input_ids.shape[1]
            self.scheduler.check_states(known)
            batch_size = max(batch_size, len(known))
            if start_timestep is None:
                is_known = ~gaps
            elif gaps.any():
                raise ValueError("a text with gaps cannot be corrupted: pass one without, or leave out start_timestep")
        sequences = self.sample_states(
            batch_size,
            (length,),
            known,
            is_known,
            num_per_input=num_return_sequences,
            num_inference_steps=num_inference_steps,
            timesteps=timesteps,
            start_timestep=start_timestep,
            num_particles=num_particles,
            generator=generator,
            latents=latents,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        texts = self.decode(sequences) if output_type == "text" else None
        return D3PMTextPipelineOutput(sequences=sequences, texts=texts) if return_dict else (sequences, texts)
