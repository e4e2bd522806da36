# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMPipeline: the base class of the pipelines for images and for text."""

import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from ..models.denoisers import Denoiser
from ..numerics import check_generators
from ..samplers.ancestral import ancestral
from ..samplers.base import Sampler, SamplerStep, check_sampler_kwargs, check_scheduler, get_sampler
from ..samplers.classifier import ClassifierGuidance, ClassifierGuidedScheduler
from ..samplers.default import default_sampler
from ..samplers.given import GivenDenoiser, check_given, hide_given, show_given
from ..samplers.guidance import check_guided, guide
from ..samplers.particle_filter import particle_filter
from ..samplers.reward import Reward
from ..utils.checks import check_int, check_type, describe
from .loading import CheckpointPipeline


class D3PMPipeline(CheckpointPipeline):
    """Base class of the D3PM pipelines. `from_pretrained` returns the subclass that the checkpoint was saved from.

    A subclass wraps the network in a denoiser and converts between states and data.

    Attributes:
        task (`str`): The task on the Hub, `"text-generation"` or `"unconditional-image-generation"`.
        network_name (`str`): Name of the component that is trained, `"text_model"` or `"unet"`.

    Examples:
        ```python
        from d3pm_hf import D3PMPipeline, D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model

        D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer()).save_pretrained("mine")
        assert isinstance(D3PMPipeline.from_pretrained("mine"), D3PMTextPipeline)
        ```
    """

    task: str
    network_name: str
    _callback_tensor_inputs = ["latents", "sample", "previous_timestep", "pred_original_sample"]
    _interrupt = False

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs):
        """Creates a pipeline from the components of another one; `kwargs` replace components and settings."""
        # diffusers would drop a network whose type is none of those in the signature, such as a subclass of theirs.
        if cls.network_name in pipeline.components:
            kwargs.setdefault(cls.network_name, pipeline.components[cls.network_name])
        return super().from_pipe(pipeline, **kwargs)

    @property
    def num_timesteps(self) -> int:
        """Number of timesteps of the latest call."""
        return self._num_timesteps

    @property
    def interrupt(self) -> bool:
        """Whether running calls return the states that they have reached. Set `pipeline._interrupt = True` to do so."""
        return self._interrupt

    @property
    def denoiser(self) -> Denoiser:
        """The network behind the signature `denoiser(x_t, timestep, **condition)`.

        This is the component `network_name` itself if it is a [`Denoiser`], and otherwise a wrapper around it. The property
        is computed: it follows `pipeline.to(...)` and `pipeline.unet = other`.
        """
        network = getattr(self, self.network_name)
        # A module compiled by `torch.compile` gives access to the attributes of the original one.
        is_denoiser = isinstance(getattr(network, "_orig_mod", network), Denoiser)
        return network if is_denoiser else self.wrap_network(network)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of the states of one sample: (N,) of text, (C, H, W) of an image."""
        raise NotImplementedError

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        """Wraps a network that is no [`Denoiser`] in one."""
        raise NotImplementedError

    def check_denoiser(self) -> None:
        """Checks that the network and the scheduler have the same number of states."""
        denoiser, num_classes = self.denoiser, self.scheduler.config.num_classes
        if denoiser.num_classes not in (None, num_classes):
            raise ValueError(
                f"the denoiser predicts {denoiser.num_classes} classes and the scheduler has {num_classes}: use a "
                "network and a scheduler of the same checkpoint"
            )
        num_class_labels = self.config.get("num_class_labels")
        if num_class_labels not in (None, denoiser.num_class_labels):  # a denoiser of your own counts them itself
            raise ValueError(
                f"num_class_labels is {num_class_labels}, and the denoiser has num_class_labels={denoiser.num_class_labels}: "
                "leave it out, or set the attribute of the denoiser"
            )

    def set_classes(self, num_class_labels: int | None) -> None:
        """Records the number of class labels. It is not in the index of a pipeline without one."""
        if num_class_labels is not None:
            check_int("num_class_labels", num_class_labels, 1)
            self.register_to_config(num_class_labels=num_class_labels)

    @staticmethod
    def check_counts(**counts: int) -> None:
        """Checks that all `counts` are positive integers."""
        for name, value in counts.items():
            check_int(name, value, 1)

    @staticmethod
    def check_parts(scheduler, **networks) -> None:
        """Checks the types of the components: networks and a [`D3PMScheduler`]."""
        for name, network in networks.items():
            check_type(name, network, torch.nn.Module, "a network (`torch.nn.Module`)")
        check_scheduler(scheduler)

    def check_callback(self, callback_on_step_end, tensor_inputs: list[str]) -> list[str]:
        """Checks a callback, and returns the names of the tensors that it receives."""
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

    def check_latents(self, latents, shape, name: str = "latents") -> torch.Tensor:
        """Checks that `latents` are states of the given shape, and moves them to the device of the pipeline."""
        is_tensor = isinstance(latents, torch.Tensor)
        if not is_tensor or latents.dtype != torch.long:
            kind = latents.dtype if is_tensor else type(latents).__name__
            raise ValueError(f"{name} are of type {kind}: pass states as a `torch.LongTensor`")
        if tuple(latents.shape) != tuple(shape):
            raise ValueError(f"{name} have the shape {tuple(latents.shape)}, and this call needs {tuple(shape)}")
        self.scheduler.check_states(latents)
        return latents.to(self._execution_device)

    def prepare_latents(self, shape, num_particles: int, latents, generator, data=None, start: int | None = None):
        """The state that sampling starts from, `[B * num_particles, ...]` for a `shape` of `[B, ...]`.

        This is `latents`, or the data corrupted up to the timestep `start`, or a draw from the prior.
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
        known: torch.Tensor | None = None,
        is_known: torch.Tensor | None = None,
        *,
        given: torch.Tensor | None = None,
        is_given: torch.Tensor | None = None,
        num_per_input: int = 1,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        start_timestep: int | None = None,
        spacing: str = "chosen",
        sampler: str | Sampler | None = None,
        num_particles: int = 1,
        condition: dict | None = None,
        guidance_scale: float = 1.0,
        classifier: ClassifierGuidance | None = None,
        reward_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        reward_scale: float = 1.0,
        report: dict | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        sampler_kwargs: dict | None = None,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
        **step_arguments,
    ) -> torch.Tensor:
        """Draws x_0, `[batch_size * num_per_input, *shape]`; the samples of one input follow each other.

        Args:
            batch_size (`int`): Number of inputs.
            shape (`tuple[int, ...]`): Shape of one sample.
            known (`torch.LongTensor` of shape `[1 or batch_size, *shape]`, *optional*): Data to fill in around, or to
                reconstruct from `start_timestep`.
            is_known (`torch.BoolTensor`, *optional*): True where `known` is kept.
            given (`torch.LongTensor` of shape `[1 or batch_size, *shape]`, *optional*): Elements outside of the process,
                such as a prompt, special tokens and padding. The denoiser always sees them, and the result holds them.
            is_given (`torch.BoolTensor`, *optional*): True where `given` is. Those elements are never `known`.
            report (`dict`, *optional*): Receives `log_normalizer`, `[batch_size * num_per_input]`, if there is a `reward_fn`.
            others: The arguments of the call of the pipeline.
        """
        self.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        check_given(self.scheduler, given, is_given, shape)
        # Each call has its own list of timesteps, so that threads may share a pipeline. The scheduler shows the timesteps
        # of the latest call, as in diffusers.
        timesteps = self.scheduler.sampling_timesteps(num_inference_steps, timesteps, start_timestep, spacing)
        self.scheduler.set_timesteps(timesteps=timesteps, device=self._execution_device)
        self._num_timesteps, self._interrupt = len(timesteps), False
        times = num_per_input * num_particles
        known, is_known, given, is_given = (
            None if x is None else self.repeat(self.expand(x, batch_size), times)
            for x in (known, is_known, given, is_given)
        )
        condition = self.prepare_condition(condition, batch_size, times)
        scheduler, denoiser = guide(self.scheduler, self.denoiser, guidance_scale)
        check_guided(condition, guidance_scale)
        if classifier is not None:
            check_type("classifier", classifier, ClassifierGuidance, "a `ClassifierGuidance`")
            scheduler = ClassifierGuidedScheduler(scheduler, classifier, given, is_given)
        if sampler is None and num_particles == 1 and callback_on_step_end is None and classifier is None:
            sampler = default_sampler(scheduler, denoiser, timesteps, condition)
        sampler, options = self.choose_sampler(sampler, num_particles, reward_fn is not None, sampler_kwargs)
        callback = self.wrap_callback(
            callback_on_step_end, callback_on_step_end_tensor_inputs, scheduler, given, is_given
        )
        if reward_fn is not None:
            reward = Reward(reward_fn, reward_scale).function
            options["reward_fn"] = lambda x_0: reward(show_given(x_0, given, is_given))
            options |= {"reward_scale": reward_scale, "report": report}
        shape = (batch_size * num_per_input, *shape)
        if isinstance(generator, (list, tuple)):
            check_generators(generator, shape[0])
        generator = self.repeat(generator, num_particles)
        x_t = self.prepare_latents(shape, num_particles, latents, generator, known, start_timestep)
        if given is not None and is_given is not None:
            denoiser = GivenDenoiser(scheduler, denoiser, given, is_given)
            condition = {**condition, "given": given, "is_given": is_given}
            x_t = hide_given(self.scheduler, x_t, timesteps[0], is_given)
            is_known = None if is_known is None else is_known & ~is_given
        try:
            x_0 = sampler(
                scheduler,
                denoiser,
                x_t,
                timesteps,
                known=None if is_known is None else known,
                is_known=is_known,
                generator=generator,
                condition=condition,
                callback=callback,
                progress_bar=self.interruptible,
                **options,
                **step_arguments,
            )
        finally:
            self.maybe_free_model_hooks()
        x_0 = self.check_latents(x_0, shape, "the states that the sampler returned")
        if given is None or is_given is None:
            return x_0
        return show_given(x_0, given[::num_particles], is_given[::num_particles])

    @staticmethod
    def choose_sampler(
        sampler: str | Sampler | None,
        num_particles: int,
        has_reward: bool = False,
        sampler_kwargs: dict | None = None,
    ) -> tuple[Sampler, dict]:
        """The sampler of a call, and the options that it takes. The default is the particle filter for several particles."""
        if has_reward and num_particles == 1:
            raise ValueError("reward_fn needs several particles to choose from: pass num_particles of at least 2")
        if sampler is None:
            sampler = particle_filter if num_particles > 1 else ancestral
        sampler = get_sampler(sampler)
        parameters = inspect.signature(sampler).parameters
        options = check_sampler_kwargs(sampler_kwargs, sampler)
        if has_reward and "reward_fn" not in parameters:
            raise ValueError("got reward_fn, and the sampler takes no reward_fn: leave out one of the two")
        if "num_particles" in parameters:
            return sampler, {**options, "num_particles": num_particles}
        if num_particles > 1:
            raise ValueError(
                f"num_particles is {num_particles}, and the sampler takes no num_particles: leave out one of the two"
            )
        return sampler, options

    def interruptible(self, steps: Iterable) -> Iterator:
        """`steps` with the progress bar of the pipeline, up to the step before which `_interrupt` is set."""
        for step in self.progress_bar(steps):
            if self.interrupt:
                return
            yield step

    def wrap_callback(
        self,
        callback_on_step_end,
        tensor_inputs: list[str],
        scheduler,
        given: torch.Tensor | None = None,
        is_given: torch.Tensor | None = None,
    ) -> Callable | None:
        """The callback of a sampler that calls `callback_on_step_end(pipeline, index, timestep, tensors)`.

        It shows the elements that are `given` in all states. `scheduler` is the one that the sampler steps with.
        """
        names = self.check_callback(callback_on_step_end, tensor_inputs)
        if callback_on_step_end is None:
            return None

        def call(step: SamplerStep) -> torch.Tensor:
            latents, sample = (show_given(x, given, is_given) for x in (step.prev_sample, step.sample))
            timestep, previous_timestep = torch.tensor([step.timestep, step.previous_timestep], device=latents.device)
            tensors = {"latents": latents, "sample": sample, "previous_timestep": previous_timestep}
            if "pred_original_sample" in names:
                prediction = scheduler.predict_original_sample(step.model_output, step.timestep, step.sample)
                tensors["pred_original_sample"] = show_given(prediction, given, is_given)
            changed = callback_on_step_end(self, step.index, timestep, {name: tensors[name] for name in names})
            if changed is not None and not isinstance(changed, dict):
                raise ValueError(
                    f"callback_on_step_end returned a {type(changed).__name__}: return a dictionary of the tensors that it "
                    "has changed, or nothing"
                )
            new = (changed or {}).get("latents")
            if new is None:
                return step.prev_sample
            new = new if new is latents else self.check_latents(new, latents.shape)
            return show_given(new, step.prev_sample, is_given)

        return call

    @staticmethod
    def expand(value: torch.Tensor, batch_size: int, name: str = "inputs") -> torch.Tensor:
        """A tensor `[1 or batch_size, ...]` with one row per entry of the batch."""
        if len(value) not in (1, batch_size):
            raise ValueError(
                f"got {len(value)} {name} for a batch of {batch_size}: pass one, or one per entry of the batch"
            )
        return value.expand(batch_size, *value.shape[1:])

    def add_classes(self, class_labels, condition: dict | None, batch_size: int) -> tuple[dict | None, int]:
        """The condition with `class_labels` `[B]` in it, and the size of the batch, which several labels set."""
        if condition is not None:
            check_type("condition", condition, dict, "a dictionary of arguments of the denoiser")
        given = (condition or {}).get("class_labels")
        if class_labels is not None and given is not None:
            raise ValueError("got class_labels and condition['class_labels']: pass one of the two")
        if class_labels is None and (given is None or self.denoiser.num_class_labels is None):
            return condition, batch_size
        labels = self.check_classes(given if class_labels is None else class_labels)
        return {**(condition or {}), "class_labels": labels}, max(batch_size, len(labels))

    def check_classes(self, class_labels) -> torch.Tensor:
        """Checks class labels (an integer, a list, or a tensor `[B]`), and returns them as a tensor `[B]`."""
        num_class_labels = self.denoiser.num_class_labels
        if num_class_labels is None:
            raise ValueError(
                "got class_labels, and the network has no classes: leave them out, or create it with num_class_embeds"
            )
        if isinstance(class_labels, torch.Tensor):
            if class_labels.dtype != torch.long or class_labels.ndim > 1 or not class_labels.numel():
                raise ValueError(f"class_labels are {describe(class_labels)}: pass a `torch.LongTensor` of shape [B]")
            class_labels = class_labels.tolist()
        labels = class_labels if isinstance(class_labels, (list, tuple)) else [class_labels]
        if not labels:
            raise ValueError("class_labels are []: pass at least one label")
        for label in labels:
            check_int("a label in class_labels", label, 0, num_class_labels - 1)
        return torch.tensor(labels)

    def prepare_condition(self, condition: dict | None, batch_size: int, times: int) -> dict:
        """The condition with its tensors on the device of the pipeline, and one row per row of x_t."""
        if condition is None:
            return {}
        check_type("condition", condition, dict, "a dictionary of arguments of the denoiser")
        return {
            name: self.repeat(self.expand(value.to(self._execution_device), batch_size, f"rows of {name}"), times)
            if isinstance(value, torch.Tensor) and value.ndim
            else value
            for name, value in condition.items()
        }

    @staticmethod
    def repeat(value, times: int):
        """A tensor `[B, ...]`, or a list of one generator per sample, with each entry repeated `times` times."""
        if isinstance(value, torch.Tensor):
            return value.repeat_interleave(times, dim=0)
        if isinstance(value, (list, tuple)):
            return [one for one in value for _ in range(times)]
        return value
