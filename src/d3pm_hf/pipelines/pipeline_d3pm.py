# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMPipeline: what pipelines for images and for text have in common."""

import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from ..sampling import categorical, uniforms
from .checkpoint import CheckpointMixin
from .particles import effective_number, evidence, resample


class D3PMPipeline(CheckpointMixin, DiffusionPipeline):
    """The base of the D3PM pipelines. `from_pretrained` returns the subclass that the checkpoint was saved from.

    Subclasses say what the network predicts and how states become data; the loop between is here.
    """

    _callback_tensor_inputs = ["latents", "sample", "pred_original_sample"]

    @property
    def num_timesteps(self) -> int:
        """The number of steps of the last call."""
        return self._num_timesteps

    def predict(self, latents: torch.LongTensor, timestep: torch.LongTensor) -> torch.Tensor:
        """The network's output for x_t, `[B, ..., K]` (or `[B, ..., 2]`, logistic)."""
        raise NotImplementedError

    def check_callback(self, callback_on_step_end, tensor_inputs: list[str]) -> list[str]:
        """The names of the tensors that the callback shall see."""
        if isinstance(callback_on_step_end, (PipelineCallback, MultiPipelineCallbacks)):
            tensor_inputs = callback_on_step_end.tensor_inputs
        unknown = [name for name in tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs names {unknown}: choose from {self._callback_tensor_inputs}"
            )
        return tensor_inputs

    def set_timesteps(self, num_inference_steps: int | None, timesteps: list[int] | None, start: int | None) -> None:
        """Chooses the timesteps of a call: those given, or so many (all by default) from `start` down."""
        if timesteps is not None and start is not None:
            raise ValueError("got timesteps and start_timestep: the first of the timesteps is where the call starts")
        if timesteps is None:
            if start is not None:
                self.scheduler.check_timesteps(start, torch.empty(1))
            last = len(self.scheduler) - 1 if start is None else start
            timesteps = self.scheduler.spaced_timesteps(num_inference_steps or last + 1, last)
        elif num_inference_steps is not None:
            raise ValueError(
                f"got num_inference_steps={num_inference_steps} and timesteps={timesteps}: pass one of the two"
            )
        self.scheduler.set_timesteps(timesteps=timesteps, device=self._execution_device)
        self._num_timesteps = len(self.scheduler.timesteps)

    def prepare_latents(self, shape, latents, generator, data=None, start: int | None = None) -> torch.LongTensor:
        """The state that sampling starts from: the caller's, the data corrupted up to `start`, or a draw from the prior."""
        if latents is not None:
            if tuple(latents.shape) != tuple(shape):
                raise ValueError(f"latents have the shape {tuple(latents.shape)}, and this call needs {tuple(shape)}")
            return latents.to(self._execution_device)
        if start is not None:
            return self.scheduler.add_noise(data, start, generator)
        return self.scheduler.sample_prior(shape, generator, self._execution_device)

    def sample_states(
        self,
        shape,
        known: torch.LongTensor | None = None,
        is_known: torch.BoolTensor | None = None,
        *,
        num_inference_steps: int | None,
        timesteps: list[int] | None,
        start_timestep: int | None,
        num_particles: int,
        generator,
        latents: torch.LongTensor | None,
        callback_on_step_end,
        callback_on_step_end_tensor_inputs: list[str],
        **step_arguments,
    ) -> torch.LongTensor:
        """x_0 of the given shape `[B, ...]`: drawn, filled in around what `is_known` of `known`, or `known` reconstructed."""
        names = self.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        if num_particles < 1:
            raise ValueError(f"num_particles is {num_particles}: it must be at least 1")
        self.set_timesteps(num_inference_steps, timesteps, start_timestep)
        known, is_known = (
            None if value is None else self.repeat(self.expand(value, shape), num_particles)
            for value in (known, is_known)
        )
        generator, latents = self.repeat(generator, num_particles), self.repeat(latents, num_particles)
        shape = (shape[0] * num_particles, *shape[1:])
        latents = self.prepare_latents(shape, latents, generator, known, start_timestep)
        if is_known is None:
            known = None  # it has served as the start
        latents = self.denoise(
            latents, known, is_known, num_particles, generator, callback_on_step_end, names, **step_arguments
        )
        self.maybe_free_model_hooks()
        return latents

    def denoise(
        self,
        latents: torch.LongTensor,
        known: torch.LongTensor | None = None,
        is_known: torch.BoolTensor | None = None,
        num_particles: int = 1,
        generator=None,
        callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=("latents",),
        **step_arguments,
    ) -> torch.LongTensor:
        """From x_T to x_0, over `scheduler.timesteps`.

        Args:
            latents: x_T, `[B, ...]`; with particles `[B * num_particles, ...]`.
            known, is_known: data `[B * num_particles, ...]`, and where it is to be kept.
            step_arguments: of `scheduler.step`.
        """
        log_weights = torch.zeros(len(latents) // num_particles, num_particles, device=latents.device)  # [B, P]
        for i, t in enumerate(self.progress_bar(self.scheduler.timesteps)):
            timestep = int(t)
            sample = latents
            if known is not None:
                sample = torch.where(is_known, self.scheduler.reveal(known, timestep), sample)
            model_output = self.predict(sample, t)
            output = self.scheduler.step(model_output, timestep, sample, generator=generator, **step_arguments)
            latents = output.prev_sample
            if known is not None:
                previous = self.scheduler.previous_timestep(timestep)
                latents = torch.where(is_known, self.scheduler.reveal(known, previous), latents)
                if num_particles > 1:
                    log_posterior = self.scheduler.posterior_logits(model_output, timestep, sample, previous)
                    log_weights = log_weights + evidence(log_posterior, latents, is_known).view_as(log_weights)
                    latents, log_weights = self._resample(latents, log_weights, generator)
            if callback_on_step_end is not None:
                tensors = {"latents": latents, "sample": sample}
                if "pred_original_sample" in callback_on_step_end_tensor_inputs:
                    tensors["pred_original_sample"] = output.pred_original_sample
                tensors = {name: tensors[name] for name in callback_on_step_end_tensor_inputs}
                latents = callback_on_step_end(self, i, t, tensors).pop("latents", latents)
        if num_particles > 1:
            u = uniforms(log_weights.shape[:1], self._one_each(generator, num_particles), latents.device)
            latents = self._take(latents, categorical(log_weights, u)[:, None])
        return latents

    def _resample(self, latents, log_weights, generator):
        """Replaces particles of little weight by copies of others, where the weights have become too uneven."""
        num_particles = log_weights.shape[1]
        u = uniforms(log_weights.shape[:1], self._one_each(generator, num_particles), latents.device)
        uneven = (effective_number(log_weights) < num_particles / 2)[:, None]
        stay = torch.arange(num_particles, device=latents.device)
        latents = self._take(latents, torch.where(uneven, resample(log_weights, u), stay))
        return latents, log_weights.masked_fill(uneven, 0)

    @staticmethod
    def _take(latents: torch.Tensor, particles: torch.Tensor) -> torch.Tensor:
        """The particles `[B, p]` of each sample, from `[B * P, ...]` to `[B * p, ...]`."""
        grouped = latents.unflatten(0, (len(particles), -1))  # [B, P, ...]
        rows = torch.arange(len(particles), device=latents.device)[:, None]
        return grouped[rows, particles].flatten(0, 1)

    @staticmethod
    def _one_each(generator, num_particles: int):
        """One generator per sample, of a list with one per particle."""
        return generator[::num_particles] if isinstance(generator, list) else generator

    @staticmethod
    def expand(value: torch.Tensor, shape) -> torch.Tensor:
        """A tensor for all samples of a batch, or one per sample, as one per sample."""
        if len(value) not in (1, shape[0]):
            raise ValueError(f"got {len(value)} inputs for a batch of {shape[0]}: pass one, or one per sample")
        return value.expand(shape)

    @staticmethod
    def repeat(value, num_particles: int):
        """A tensor `[B, ...]`, or a list of one generator per sample, with each entry as often as there are particles."""
        if isinstance(value, torch.Tensor):
            return value.repeat_interleave(num_particles, dim=0)
        if isinstance(value, (list, tuple)):
            return [one for one in value for _ in range(num_particles)]
        return value
