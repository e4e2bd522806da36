# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMPipeline: what pipelines for images and for text have in common."""

from collections.abc import Callable

import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from ..models.denoisers import Denoiser
from ..numerics import categorical, check_generators, uniforms
from ..samplers.particles import effective_number, evidence, resample
from ..utils.checks import check_int, check_type
from .loading import CheckpointMixin


class D3PMPipeline(CheckpointMixin, DiffusionPipeline):
    """The base of the D3PM pipelines. `from_pretrained` returns the subclass that the checkpoint was saved from.

    Subclasses say what the network predicts and how states become data; the loop between is here.

    Attributes:
        task (`str`): The task on the Hub, `"text-generation"` or `"unconditional-image-generation"`.
        network_name (`str`): Name of the component that is trained, `"text_model"` or `"unet"`.
    """

    task: str
    network_name: str
    _callback_tensor_inputs = ["latents", "sample", "previous_timestep", "pred_original_sample"]
    _interrupt = False

    @property
    def num_timesteps(self) -> int:
        """The number of steps of the call that began last."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether running calls shall return the states that they have reached: set `pipeline._interrupt = True`."""
        return self._interrupt

    @property
    def denoiser(self) -> Denoiser:
        """The network behind the signature `denoiser(x_t, timestep, **condition)`.

        This is the component `network_name` itself if it is a [`Denoiser`], and otherwise a wrapper around it. The property
        is computed: it follows `pipeline.to(...)` and `pipeline.unet = other`.
        """
        network = getattr(self, self.network_name)
        # A compiled module hands on the attributes of the module that it was compiled from.
        is_denoiser = isinstance(getattr(network, "_orig_mod", network), Denoiser)
        return network if is_denoiser else self.wrap_network(network)

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        """Makes the denoiser of a network that is none itself."""
        raise NotImplementedError

    def check_denoiser(self) -> None:
        """Checks that the network and the scheduler have the same number of states."""
        denoiser, num_classes = self.denoiser, self.scheduler.config.num_classes
        if denoiser.num_classes not in (None, num_classes):
            raise ValueError(
                f"the denoiser predicts {denoiser.num_classes} classes and the scheduler has {num_classes}: use a "
                "network and a scheduler of the same checkpoint"
            )

    @staticmethod
    def check_counts(**counts: int) -> None:
        """Checks that arguments that count something are positive integers."""
        for name, value in counts.items():
            check_int(name, value, 1)

    @staticmethod
    def check_parts(scheduler, **networks) -> None:
        """Checks that the parts of a pipeline are of their kinds: networks, and a [`D3PMScheduler`]."""
        for name, network in networks.items():
            check_type(name, network, torch.nn.Module, "a network (`torch.nn.Module`)")
        if not hasattr(getattr(scheduler, "config", None), "num_classes"):
            raise ValueError(f"scheduler is a {type(scheduler).__name__}: it must be a `D3PMScheduler`")

    def check_callback(self, callback_on_step_end, tensor_inputs: list[str]) -> list[str]:
        """The names of the tensors that the callback shall see."""
        if callback_on_step_end is not None:
            check_type("callback_on_step_end", callback_on_step_end, Callable, "a function")
        check_type("callback_on_step_end_tensor_inputs", tensor_inputs, (list, tuple), "a list of names")
        if isinstance(callback_on_step_end, (PipelineCallback, MultiPipelineCallbacks)):
            tensor_inputs = callback_on_step_end.tensor_inputs
        unknown = [name for name in tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs names {unknown}: choose from {self._callback_tensor_inputs}"
            )
        return tensor_inputs

    def check_latents(self, latents, shape) -> torch.LongTensor:
        """Checks that `latents` are states of the given shape, and puts them on the pipeline's device."""
        if not isinstance(latents, torch.Tensor) or latents.dtype != torch.long:
            kind = latents.dtype if isinstance(latents, torch.Tensor) else type(latents).__name__
            raise ValueError(f"latents are of type {kind}: pass states as a `torch.LongTensor`")
        if tuple(latents.shape) != tuple(shape):
            raise ValueError(f"latents have the shape {tuple(latents.shape)}, and this call needs {tuple(shape)}")
        self.scheduler.check_states(latents)
        return latents.to(self._execution_device)

    def prepare_latents(self, shape, num_particles: int, latents, generator, data=None, start: int | None = None):
        """The state that sampling starts from, `[B * num_particles, ...]` for a `shape` of `[B, ...]`.

        It is the caller's, the data corrupted up to `start`, or a draw from the prior.
        """
        if latents is not None:
            return self.repeat(self.check_latents(latents, shape), num_particles)
        if start is not None:
            return self.scheduler.add_noise(data, start, generator)
        return self.scheduler.sample_prior((shape[0] * num_particles, *shape[1:]), generator, self._execution_device)

    def sample_states(
        self,
        batch_size: int,
        shape: tuple[int, ...],
        known: torch.LongTensor | None = None,
        is_known: torch.BoolTensor | None = None,
        *,
        num_per_input: int,
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
        """x_0, `[batch_size * num_per_input, *shape]`.

        It is drawn freely, filled in around what `is_known` of `known`, or `known` reconstructed. The samples of one
        input follow each other.
        """
        names = self.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        # The call keeps its timesteps to itself, so that threads may share a pipeline. The scheduler shows those of the
        # call that began last, as in diffusers.
        timesteps = self.scheduler.sampling_timesteps(num_inference_steps, timesteps, start_timestep)
        self.scheduler.set_timesteps(timesteps=timesteps, device=self._execution_device)
        self._num_timesteps, self._interrupt = len(timesteps), False
        known, is_known = (
            None if value is None else self.repeat(self.expand(value, batch_size), num_per_input * num_particles)
            for value in (known, is_known)
        )
        shape = (batch_size * num_per_input, *shape)
        if isinstance(generator, (list, tuple)):
            check_generators(generator, shape[0])
        generator = self.repeat(generator, num_particles)
        latents = self.prepare_latents(shape, num_particles, latents, generator, known, start_timestep)
        if is_known is None:
            known = None  # it has served as the start
        latents = self.denoise(
            latents,
            timesteps,
            known,
            is_known,
            num_particles,
            generator,
            callback_on_step_end,
            names,
            **step_arguments,
        )
        self.maybe_free_model_hooks()
        return latents

    def denoise(
        self,
        latents: torch.LongTensor,
        timesteps: list[int],
        known: torch.LongTensor | None = None,
        is_known: torch.BoolTensor | None = None,
        num_particles: int = 1,
        generator=None,
        callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=("latents",),
        **step_arguments,
    ) -> torch.LongTensor:
        """From x_T to x_0, over `timesteps`.

        Args:
            latents: x_T, `[B, ...]`; with particles `[B * num_particles, ...]`.
            timesteps: strictly decreasing; after the last one comes x_0.
            known, is_known: data `[B * num_particles, ...]`, and where it is to be kept.
            step_arguments: of `scheduler.step`.
        """
        denoiser = self.denoiser
        log_weights = torch.zeros(len(latents) // num_particles, num_particles, device=latents.device)  # [B, P]
        pairs = list(zip(timesteps, [*timesteps[1:], -1]))  # of t and s
        tensors_of_pairs = torch.tensor(pairs, device=latents.device)
        for i, (t, s) in enumerate(self.progress_bar(pairs)):
            if self.interrupt:
                continue
            timestep, previous_timestep = tensors_of_pairs[i]
            sample = latents
            if known is not None:
                sample = torch.where(is_known, self.scheduler.reveal(known, t), sample)
            model_output = denoiser(sample, timestep)
            latents = self.scheduler.step(
                model_output, t, sample, previous_timestep=s, generator=generator, **step_arguments
            ).prev_sample
            if known is not None:
                latents = torch.where(is_known, self.scheduler.reveal(known, s), latents)
                if num_particles > 1:
                    log_posterior = self.scheduler.posterior_logits(model_output, t, sample, s)
                    log_weights = log_weights + evidence(log_posterior, latents, is_known).view_as(log_weights)
                    latents, log_weights = self._resample(latents, log_weights, generator)
            if callback_on_step_end is not None:
                tensors = {"latents": latents, "sample": sample, "previous_timestep": previous_timestep}
                if "pred_original_sample" in callback_on_step_end_tensor_inputs:
                    prediction = self.scheduler.predict_original_sample(model_output, t, sample)
                    tensors["pred_original_sample"] = prediction
                tensors = {name: tensors[name] for name in callback_on_step_end_tensor_inputs}
                changed = callback_on_step_end(self, i, timestep, tensors)
                latents = self._latents_after_callback(changed, latents)
        if num_particles > 1:
            u = uniforms(log_weights.shape[:1], self._one_each(generator, num_particles), latents.device)
            latents = self._take(latents, categorical(log_weights, u)[:, None])
        return latents

    def _latents_after_callback(self, changed: dict | None, latents: torch.LongTensor) -> torch.LongTensor:
        """The state to go on from: the `latents` that a callback returned, or the present ones."""
        if changed is not None and not isinstance(changed, dict):
            raise ValueError(
                f"callback_on_step_end returned a {type(changed).__name__}: return a dictionary of the tensors that it "
                "has changed, or nothing"
            )
        given = (changed or {}).get("latents")
        return latents if given is None or given is latents else self.check_latents(given, latents.shape)

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
    def expand(value: torch.Tensor, batch_size: int) -> torch.Tensor:
        """A tensor for all samples of a batch, or one per sample, as one per sample."""
        if len(value) not in (1, batch_size):
            raise ValueError(f"got {len(value)} inputs for a batch of {batch_size}: pass one, or one per sample")
        return value.expand(batch_size, *value.shape[1:])

    @staticmethod
    def repeat(value, times: int):
        """A tensor `[B, ...]`, or a list of one generator per sample, with each entry repeated so many times."""
        if isinstance(value, torch.Tensor):
            return value.repeat_interleave(times, dim=0)
        if isinstance(value, (list, tuple)):
            return [one for one in value for _ in range(times)]
        return value
