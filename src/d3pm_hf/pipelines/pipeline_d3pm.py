# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMPipeline: the base class of the pipelines for images and for text."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from ..hub.adapters import bare_network
from ..models.denoisers import Denoiser
from ..numerics import check_generators
from ..samplers.ancestral import ancestral
from ..samplers.classifier import ClassifierGuidance, ClassifierGuidedScheduler
from ..samplers.guidance import check_guided, guide
from ..samplers.left_to_right import left_to_right, reveals_in_order, start_cache
from ..samplers.particle_filter import particle_filter
from ..samplers.positions_first import is_mixed, positions_first, reveals_once
from ..samplers.sampler import Sampler, get_sampler, run_sampler
from ..samplers.walk import SamplerStep, Walk, check_scheduler
from ..utils.checks import check_int, check_type, describe
from ..utils.modules import without_compilation
from .lora import LoraMixin


@dataclass(frozen=True)
class SamplingArguments:
    """How a call samples: the arguments that the calls of all pipelines share, which [`D3PMTextPipeline`] describes."""

    num_inference_steps: int | None = None
    timesteps: list[int] | None = None
    start_timestep: int | None = None
    spacing: str = "optimized"
    sampler: str | Sampler | None = None
    sampler_kwargs: dict | None = None
    num_particles: int = 1
    condition: dict | None = None
    guidance_scale: float = 1.0
    drops_given: bool = False  # whether guidance without another condition is that of what is given, a prompt
    classifier: ClassifierGuidance | None = None
    reward_fn: Callable[[torch.Tensor], torch.Tensor] | None = None
    reward_scale: float = 1.0
    generator: torch.Generator | list[torch.Generator] | None = None
    latents: torch.Tensor | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    callback_on_step_end: Callable | None = None
    callback_on_step_end_tensor_inputs: list[str] = field(default_factory=lambda: ["latents"])


class D3PMPipeline(LoraMixin):
    """Base class of the D3PM pipelines. `from_pretrained` returns the subclass that the checkpoint was saved from.

    A subclass wraps the network in a denoiser and converts between states and data.

    Attributes:
        task (`str`): The task on the Hub, `"text-generation"` or `"unconditional-image-generation"`; `"tabular-generation"`, which the
            Hub does not have, for tables.
        network_name (`str`): Name of the component that is trained, `"text_model"`, `"unet"` or `"table_model"`.
        batch_argument (`str`): Name of the argument of a call that is the number of samples.

    Examples:
        ```python
        from d3pm_hf import D3PMPipeline, D3PMScheduler, D3PMTextPipeline, character_tokenizer, create_text_model

        D3PMTextPipeline(create_text_model("tiny", 28), D3PMScheduler(28), character_tokenizer()).save_pretrained("mine")
        assert isinstance(D3PMPipeline.from_pretrained("mine"), D3PMTextPipeline)
        ```
    """

    task: str
    network_name: str
    batch_argument = "batch_size"
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
    def bare_network(self) -> torch.nn.Module:
        """The component `network_name`, without what PEFT has wrapped around it."""
        return bare_network(getattr(self, self.network_name))

    @property
    def denoiser(self) -> Denoiser:
        """The network behind the signature `denoiser(x_t, timestep, **condition)`.

        This is the component `network_name` itself if it is a [`Denoiser`], and otherwise a wrapper around it. The property
        is computed: it follows `pipeline.to(...)` and `pipeline.unet = other`.
        """
        network: Any = self.bare_network
        return network if isinstance(without_compilation(network), Denoiser) else self.wrap_network(network)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of the states of one sample: (N,) of text, (C, H, W) of an image."""
        raise NotImplementedError

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        """Wraps a network that is no [`Denoiser`] in one."""
        raise NotImplementedError

    def register_parts(self, network, scheduler, num_class_labels: int | None = None, **others) -> None:
        """Registers the components and the number of class labels, which the index of a pipeline without classes leaves out."""
        check_type(self.network_name, network, torch.nn.Module, "a network (`torch.nn.Module`)")
        check_scheduler(scheduler)
        self.register_modules(**{self.network_name: network}, scheduler=scheduler, **others)
        if num_class_labels is not None:
            check_int("num_class_labels", num_class_labels, 1)
            self.register_to_config(num_class_labels=num_class_labels)

    def check_components(self) -> None:
        """Checks that the network and the scheduler, which may have been replaced, have the same number of states."""
        network = getattr(self, self.network_name)
        check_type(self.network_name, network, torch.nn.Module, "a network (`torch.nn.Module`)")
        check_scheduler(self.scheduler)
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
        report: dict | None = None,
        **arguments,
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
            num_per_input (`int`, defaults to 1): Number of samples for each input.
            report (`dict`, *optional*): Receives `log_normalizer`, `[batch_size * num_per_input]`, if there is a `reward_fn`.
            arguments: Arguments of a call of the pipeline ([`SamplingArguments`]).
        """
        call = SamplingArguments(**arguments)
        check_int("num_particles", call.num_particles, 1)
        walk = self.prepare_walk(call, batch_size, shape, known, is_known, given, is_given, num_per_input)
        sampler, options = self.choose_sampler(call, walk, report)
        try:
            x_0 = run_sampler(sampler, walk, options)
        finally:
            self.maybe_free_model_hooks()
        x_0 = self.check_latents(x_0, (batch_size * num_per_input, *shape), "the states that the sampler returned")
        if walk.given is None:
            return x_0
        return torch.where(walk.is_given[:: call.num_particles], walk.given[:: call.num_particles], x_0)

    def prepare_walk(
        self, call: SamplingArguments, batch_size: int, shape, known, is_known, given, is_given, num_per_input: int
    ) -> Walk:
        """Builds and checks the record that the sampler of a call takes, with one row for each particle of each sample."""
        # 1. Choose the timesteps. Each call has its own list, so that threads may share a pipeline. The scheduler shows
        # those of the latest call, as in diffusers.
        start, device = call.start_timestep, self._execution_device
        timesteps = self.scheduler.sampling_timesteps(call.num_inference_steps, call.timesteps, start, call.spacing)
        self.scheduler._show_timesteps(timesteps, device)
        self._num_timesteps, self._interrupt = len(timesteps), False

        # 2. Repeat what is known, given or a condition.
        times, num_samples = num_per_input * call.num_particles, batch_size * num_per_input
        known, is_known, given, is_given = (
            None if x is None else self.expand(x, batch_size, times) for x in (known, is_known, given, is_given)
        )
        condition = dict(call.condition or {})
        for name, value in condition.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                condition[name] = self.expand(value.to(device), batch_size, times, f"rows of {name}")
        generator = call.generator
        if isinstance(generator, (list, tuple)):
            check_generators(generator, num_samples)
            generator = [one for one in generator for _ in range(call.num_particles)]

        # 3. Draw x_T, or take the latents of the call, or corrupt its data.
        if call.latents is not None:
            x_t = self.check_latents(call.latents, (num_samples, *shape)).repeat_interleave(call.num_particles, dim=0)
        elif start is not None:
            x_t = self.scheduler.add_noise(known, start, generator)
        else:
            x_t = self.scheduler.sample_prior((batch_size * times, *shape), generator, device)

        # 4. Guide the process and the network.
        has_condition = bool(set(condition) - {"attention_mask"})
        drops_given = call.drops_given and is_given is not None and not has_condition
        scheduler, denoiser = guide(self.scheduler, self.denoiser, call.guidance_scale, drops_given)
        if call.guidance_scale != 1 and not drops_given:
            check_guided(condition, call.guidance_scale)
        if call.classifier is not None:
            check_type("classifier", call.classifier, ClassifierGuidance, "a `ClassifierGuidance`")
            scheduler = ClassifierGuidedScheduler(scheduler, call.classifier, given, is_given)

        # 5. Build the record.
        walk = Walk(
            scheduler,
            denoiser,
            x_t,
            timesteps,
            known=None if is_known is None else known,
            is_known=is_known,
            given=given,
            is_given=is_given,
            condition=condition,
            generator=generator,
            progress_bar=self.interruptible,
            step_options={"temperature": call.temperature, "top_k": call.top_k, "top_p": call.top_p},
        )
        walk.check()
        walk = walk if given is None else walk.hide_given()
        return replace(walk, callback=self.wrap_callback(call, walk))

    @staticmethod
    def choose_sampler(call: SamplingArguments, walk: Walk, report: dict | None = None) -> tuple[Sampler, dict]:
        """The sampler of a call, and the options that it takes beside the walk."""
        if call.sampler is not None:
            sampler = get_sampler(call.sampler)
        elif call.num_particles > 1 or call.reward_fn is not None:
            sampler = particle_filter
        elif walk.callback is not None or call.classifier is not None:
            sampler = ancestral
        else:
            sampler = default_sampler(walk.scheduler, walk.denoiser, walk.timesteps, walk.condition)
        parameters = inspect.signature(sampler).parameters
        options = {} if call.sampler_kwargs is None else dict(check_sampler_kwargs(call.sampler_kwargs, parameters))
        if "num_particles" in parameters:
            options["num_particles"] = call.num_particles
        elif call.num_particles > 1:
            raise ValueError(
                f"num_particles is {call.num_particles}, and the sampler takes no num_particles: leave out one of the two"
            )
        reward_fn = call.reward_fn
        if reward_fn is not None:
            check_type("reward_fn", reward_fn, Callable, "a function")
            if "reward_fn" not in parameters:
                raise ValueError("got reward_fn, and the sampler takes no reward_fn: leave out one of the two")
            options["reward_fn"] = lambda x_0: reward_fn(walk.show_given(x_0))
            options |= {"reward_scale": call.reward_scale, "report": report}
        return sampler, options

    def interruptible(self, steps: Iterable) -> Iterator:
        """`steps` with the progress bar of the pipeline, up to the step before which `_interrupt` is set."""
        for step in self.progress_bar(steps):
            if self._interrupt:
                return
            yield step

    def wrap_callback(self, call: SamplingArguments, walk: Walk) -> Callable | None:
        """The callback of a sampler, which calls `callback_on_step_end(pipeline, index, timestep, tensors)`.

        It shows the elements that are given in all states.
        """
        callback, names = call.callback_on_step_end, call.callback_on_step_end_tensor_inputs
        check_type("callback_on_step_end_tensor_inputs", names, (list, tuple), "a list of names")
        if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
            names = callback.tensor_inputs
        unknown = [name for name in names if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"callback_on_step_end_tensor_inputs names {unknown}: choose from {self._callback_tensor_inputs}"
            )
        if callback is None:
            return None
        check_type("callback_on_step_end", callback, Callable, "a function")

        def call_back(step: SamplerStep) -> torch.Tensor:
            latents, sample = walk.show_given(step.prev_sample), walk.show_given(step.sample)
            timestep, previous_timestep = torch.tensor([step.timestep, step.previous_timestep], device=latents.device)
            tensors = {"latents": latents, "sample": sample, "previous_timestep": previous_timestep}
            if "pred_original_sample" in names:
                prediction = walk.scheduler.predict_original_sample(step.model_output, step.timestep, step.sample)
                tensors["pred_original_sample"] = walk.show_given(prediction)
            changed = callback(self, step.index, timestep, {name: tensors[name] for name in names})
            if changed is not None and not isinstance(changed, dict):
                raise ValueError(
                    f"callback_on_step_end returned a {type(changed).__name__}: return a dictionary of the tensors that it "
                    "has changed, or nothing"
                )
            new = (changed or {}).get("latents")
            if new is None:
                return step.prev_sample
            new = new if new is latents else self.check_latents(new, latents.shape)
            return new if walk.is_given is None else torch.where(walk.is_given, step.prev_sample, new)

        return call_back

    @staticmethod
    def expand(value: torch.Tensor, batch_size: int, times: int, name: str = "inputs") -> torch.Tensor:
        """A tensor `[1 or batch_size, ...]` with `times` rows for each entry of the batch."""
        if len(value) not in (1, batch_size):
            raise ValueError(
                f"got {len(value)} {name} for a batch of {batch_size}: pass one, or one per entry of the batch"
            )
        return value.expand(batch_size, *value.shape[1:]).repeat_interleave(times, dim=0)

    def add_classes(self, class_labels, condition: dict | None, batch_size: int) -> tuple[dict | None, int]:
        """The condition with `class_labels` `[B]` in it, and the size of the batch, which several labels set.

        Labels are an integer, a list, or a tensor `[B]`.
        """
        if condition is not None:
            check_type("condition", condition, dict, "a dictionary of arguments of the denoiser")
        given, num_class_labels = (condition or {}).get("class_labels"), self.denoiser.num_class_labels
        if class_labels is None:
            if given is None or num_class_labels is None:
                return condition, batch_size
            class_labels = given
        elif given is not None:
            raise ValueError("got class_labels and condition['class_labels']: pass one of the two")
        elif num_class_labels is None:
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
        return {**(condition or {}), "class_labels": torch.tensor(labels)}, max(batch_size, len(labels))


def check_sampler_kwargs(options: dict, parameters: Mapping[str, inspect.Parameter]) -> dict:
    """Checks that `sampler_kwargs` are arguments of a sampler which a pipeline does not pass itself, and returns them."""
    check_type("sampler_kwargs", options, dict, "a dictionary of options of the sampler")
    passed = {*inspect.signature(Sampler.__call__).parameters, "num_particles", "reward_fn", "reward_scale", "report"}
    names = [name for name, p in parameters.items() if name not in passed and p.kind is not p.VAR_KEYWORD]
    for name in options:
        if name not in names:
            raise ValueError(
                f"sampler_kwargs holds {describe(name)}, and the sampler takes {', '.join(names) or 'no options'}: leave it out"
            )
    return options


def default_sampler(scheduler, denoiser, timesteps: list[int], condition: dict) -> Sampler:
    """The sampler that draws from the distribution of [`ancestral`] with the least work. The arguments are those of a [`Sampler`]."""
    if reveals_once(scheduler) or is_mixed(scheduler):
        return positions_first
    if reveals_in_order(scheduler, timesteps) and start_cache(denoiser, condition) is not None:
        return left_to_right
    return ancestral
