# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMScheduler: the methods that diffusers expects of a scheduler, over any family of transition matrices."""

import operator
import os
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open

from ..numerics import categorical, compute_dtype, uniforms, without_autocast
from ..transitions.base import Transition, expand_time
from ..transitions.family import TransitionFamily, TransitionSettings, get_family, transition_families
from ..utils.checks import (
    check_choice,
    check_device,
    check_int,
    check_path,
    check_tensor,
    check_timestep,
    check_type,
    shorten,
    values_are_known,
)
from ..utils.files import write_safetensors_atomically
from ..utils.subclasses import find_subclass
from .arguments import DEFAULT_NUM_TIMESTEPS, check_config, check_inference_timesteps, element_options, named_options
from .logistic import logistic_logits
from .warping import apply_warpers, create_warpers


TENSORS_NAME = "transition.safetensors"

# True while a scheduler is loaded: a file of a few bytes must not decide how long that takes.
_is_loading = ContextVar("is_loading", default=False)


@contextmanager
def loading():
    """A context in which schedulers check their tensors, and build the transition when it is first used."""
    token = _is_loading.set(True)
    try:
        yield
    finally:
        _is_loading.reset(token)


@dataclass
class D3PMSchedulerOutput(BaseOutput):
    """Output of [`D3PMScheduler.step`].

    Args:
        prev_sample (`torch.LongTensor` of shape `[B, ...]`): x_s, the input of the next step.
        pred_logits (`torch.Tensor` of shape `[B, ..., K]`):
            The logits that the step used, after `temperature`, `top_k` and `top_p`: of x_0, or of x_s with
            `prediction_type="previous"`.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler

        output = D3PMScheduler(28).step(torch.randn(2, 8, 28), 999, torch.full((2, 8), 27))
        assert output.prev_sample.shape == (2, 8) and output.pred_logits.shape == (2, 8, 28)
        ```
    """

    prev_sample: torch.Tensor
    pred_logits: torch.Tensor


class D3PMScheduler(SchedulerMixin, ConfigMixin):
    """The forward and the reverse process of D3PM, for any family of transition matrices.

    The timestep `t` in `0 .. num_train_timesteps - 1` has `t + 1` corruption steps behind it: it is the paper's
    `t + 1`. States are integers `[B, ...]`; logits have the classes last, `[B, ..., num_classes]`.

    Args:
        num_classes (`int` or `list[int]`): Number of states K, including the mask if there is one. That of `transition` if it is
            an object. A list is the number of data states of each element, which may differ: a sample is then `[B, N]`, K is the
            largest of them, and one more for the mask, the last state, if there is one. No noise leads to a state that an
            element does not have, and it is never predicted, drawn or scored.
        num_train_timesteps (`int`, defaults to 1000): Number of timesteps T. An autoregressive process has one per
            position.
        transition (`str` or [`Transition`], defaults to `"absorbing"`): Transition family of the forward process:
            `"absorbing"`, `"uniform"`, `"absorbing_uniform"` (BERT's mix), `"stationary"` (needs `stationary_probs`),
            `"gaussian"`, `"band_diagonal"`, `"matrix"` (`transition_matrices`), `"rate"` (`rate_matrix`),
            `"nearest_neighbor"` and `"absorbing_nearest_neighbor"` (`embeddings`), `"autoregressive"`, or any name given to
            [`register_transition`]. A transition object is used as it is. Beside a list of `num_classes`, a list of names has
            the family of each element, such as `["gaussian", "absorbing"]`.
        beta_schedule (`str`, defaults to `"mutual_information"`): Noise schedule. Also `"linear"`, `"cosine"`,
            `"reciprocal"`, which is 1 / (T - t + 1), and any name given to [`register_schedule`]. Mutual information is
            measured with `unigram_probs`.
        beta_start, beta_end (`float`, *optional*): Both ends of the linear schedule. Defaults to those of the paper: 1e-4
            and 0.02 for Gaussian processes, 0.02 and 1 for all others.
        trained_betas (`list[float]`, *optional*): Your own beta_1 .. beta_T, in place of `beta_schedule`.
        mask_token_id (`int`, *optional*): The absorbing state. Defaults to the last one; images reuse gray, K // 2.
        mask_in_data (`bool`, defaults to `False`): Whether x_0 may be the mask, as for gray pixels. If not, its logit is
            minus infinity.
        mask_fraction (`float`, defaults to 2/3): Share of the noise of `"absorbing_uniform"` that is the mask.
        bandwidth (`int`, defaults to 1): Largest move of one step of `"band_diagonal"`.
        num_neighbors (`int`, defaults to 5): Number of neighbors of each token in the graph of `"nearest_neighbor"`.
        mask_rate (`float`, defaults to 4.0): Rate of masking in `"absorbing_nearest_neighbor"`, in which a token moves to a
            neighbor at a rate of about one.
        prior (`str`, defaults to `"stationary"`): Distribution of x_T. `"fitted"` is `unigram_probs` after T steps, for
            processes that do not reach their stationary distribution.
        prediction_type (`str`, defaults to `"x0"`): Output of the network: `"x0"`, logits of x_0; `"logistic"`, location
            and log-scale of a discretized logistic, `[B, ..., 2]`; or `"previous"`, logits of x_{t-1}.
        x0_posterior (`str`, defaults to `"leave_one_out"`): Meaning of the logits of x_0 at one position.
            `"leave_one_out"`: what the other positions say about it, as eq. 4 of the paper assumes. `"denoising"`:
            q(x_0 | x_t), which is converted.
        reconstruction (`str`, defaults to `"posterior"`): Distribution of the last step, to the data. `"raw"` is the
            network's output as it is, as in the authors' image code.
        trained_exponents (`list[float | str]`, *optional*): Your own alpha_1 .. alpha_T of a process that is a matrix
            exponential, Q_t = exp(alpha_t R), in place of `trained_betas`: beta_t = 1 - exp(-alpha_t) rounds to 1 above
            36.7. `"inf"` is a step that forgets everything.
        transition_kwargs (`dict`, *optional*): Options of a family of your own, saved in the configuration. One with the name
            of an argument above is that argument.
        suppress_tokens (`list[int]`, *optional*): States besides the mask that data never hold, such as special tokens: they
            are never predicted or sampled, and uniform noise does not lead to them.
        inference_timesteps (`dict[int, list[int]]`, *optional*): Timesteps of sampling by their number, each list from T - 1
            down, such as those of [`~evaluation.optimize_timesteps`]. Other numbers of timesteps are spaced evenly.
        unigram_probs (`torch.Tensor` of shape `[K]`, *optional*): Frequencies of the states in the data; `[N, K]` with a list
            of `num_classes`.
        stationary_probs (`torch.Tensor` of shape `[K]`, *optional*): Stationary distribution of `"stationary"`; `[N, K]` with a
            list of `num_classes`, each element its own.
        transition_matrices (`torch.Tensor` of shape `[T, K, K]` or `[K, K]`, *optional*): Q_t of `"matrix"`.
        rate_matrix (`torch.Tensor` of shape `[K, K]`, *optional*): R of `"rate"`, dense or sparse.
        embeddings (`torch.Tensor`, *optional*): Vectors whose neighbors are near, `[K, d]`, or `[K - 1, d]` beside a mask.
        transition_tensors (`dict[str, torch.Tensor]`, *optional*): Tensors of a family of your own.
        element_classes (`list[int]`, *optional*): The list that was passed as `num_classes`, as the configuration has it.

    Tensors are not part of the configuration: `save_pretrained` writes them to `transition.safetensors`, and `from_config`
    takes them as keywords.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler

        scheduler = D3PMScheduler(num_classes=28, num_train_timesteps=1000, transition="absorbing")
        x_t = scheduler.add_noise(torch.randint(0, 27, (2, 16)), torch.tensor([100, 900]))
        scheduler.set_timesteps(num_inference_steps=20)
        sample = scheduler.sample_prior((2, 16))
        for t in scheduler.timesteps:
            sample = scheduler.step(torch.zeros(2, 16, 28), t, sample).prev_sample  # zeros: the output of a network
        ```
    """

    order = 1
    _compatibles: list[str] = []
    ignore_for_config = [
        *("unigram_probs", "stationary_probs", "transition_matrices", "rate_matrix", "embeddings"),
        "transition_tensors",
    ]

    @register_to_config
    def __init__(
        self,
        num_classes: int | list[int] | None = None,
        num_train_timesteps: int = DEFAULT_NUM_TIMESTEPS,
        transition: str | list[str] | Transition = "absorbing",
        beta_schedule: str = "mutual_information",
        beta_start: float | None = None,
        beta_end: float | None = None,
        trained_betas: list[float] | None = None,
        mask_token_id: int | None = None,
        mask_in_data: bool = False,
        mask_fraction: float = 2 / 3,
        bandwidth: int = 1,
        num_neighbors: int = 5,
        mask_rate: float = 4.0,
        prior: str = "stationary",
        prediction_type: str = "x0",
        x0_posterior: str = "leave_one_out",
        reconstruction: str = "posterior",
        trained_exponents: list[float | str] | None = None,
        transition_kwargs: dict | None = None,
        suppress_tokens: list[int] | None = None,
        inference_timesteps: dict[int, list[int]] | None = None,
        unigram_probs: torch.Tensor | None = None,
        stationary_probs: torch.Tensor | None = None,
        transition_matrices: torch.Tensor | None = None,
        rate_matrix: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        transition_tensors: dict[str, torch.Tensor] | None = None,
        element_classes: list[int] | None = None,
    ):
        self._tensors: dict[str, torch.Tensor] = {}
        self._transition: Transition | None = None  # a loaded scheduler creates it when it is first used
        self._element_states: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        if transition_tensors is not None:
            check_type("transition_tensors", transition_tensors, dict, "a dictionary of tensors")
        tensors = {
            "unigram_probs": unigram_probs,
            "stationary_probs": stationary_probs,
            "transition_matrices": transition_matrices,
            "rate_matrix": rate_matrix,
            "embeddings": embeddings,
            **(transition_tensors or {}),
        }
        if isinstance(transition, Transition):
            self._use_transition(transition, tensors)
        else:
            if isinstance(num_classes, (list, tuple)) or isinstance(transition, (list, tuple)):
                self.register_to_config(**element_options(self.config))
            family = get_family(self.config.transition)
            self.register_to_config(**named_options(self.config, family))
            check_config(self.config, family)
            if trained_exponents is not None:  # JSON has no infinity
                self.register_to_config(trained_exponents=["inf" if a == torch.inf else a for a in trained_exponents])
            self._settings = TransitionSettings(family, self.config, self._tensors)
            self._set_tensors(tensors)
        if inference_timesteps is not None:
            self.register_inference_timesteps(inference_timesteps)
        self.init_noise_sigma = 1.0
        self.num_inference_steps: int | None = None
        self.timesteps = torch.arange(len(self) - 1, -1, -1)
        self._previous: dict[int, int] = {}

    # The forward process

    def _use_transition(self, transition: Transition, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Takes a transition object; the configuration describes it if it has a method `to_config`."""
        for name, default, own in (
            ("num_classes", None, transition.num_classes),
            ("num_train_timesteps", DEFAULT_NUM_TIMESTEPS, transition.num_steps),
        ):
            if self.config[name] not in (default, own):
                raise ValueError(f"{name} is {self.config[name]}, and the transition has {own}: leave it out")
        for name, tensor in tensors.items():
            if tensor is not None:
                raise ValueError(f"got {name} and a transition object, which has tensors of its own: leave it out")
        cls = type(transition)
        described = dict(transition.to_config() or {"transition": f"{cls.__module__}.{cls.__qualname__}"})
        self._tensors = described.pop("transition_tensors", {})
        sizes = {"num_classes": transition.num_classes, "num_train_timesteps": transition.num_steps}
        self.register_to_config(**sizes, **described)
        self.register_to_config(**named_options(self.config, cls))
        check_config(self.config, cls)
        family: type[TransitionFamily] = cls
        if self.config.transition in transition_families():
            family = get_family(self.config.transition)
        else:
            self.register_to_config(beta_schedule=None)  # it is not known to be any of ours
        self._settings = TransitionSettings(family, self.config, self._tensors)
        self._transition = transition
        transition.kernel()  # which `torch.compile` cannot create

    @property
    def transition(self) -> Transition:
        """The forward process, with its kernel if it has one. That of a loaded scheduler is created when it is first used."""
        if self._transition is None:
            self._transition = self._settings.create()
        return self._transition.kernel() or self._transition

    @property
    def family(self) -> type[TransitionFamily]:
        """The registered family of the forward process; the class of a transition that was passed as an object."""
        return self._settings.family

    @property
    def mask_token_id(self) -> int:
        """The absorbing state."""
        return self._settings.mask_token_id

    @property
    def never_data(self) -> tuple[int, ...]:
        """The states that x_0 never takes: `suppress_tokens`, and the mask of a process that has one, unless `mask_in_data`."""
        return self._settings.never_data if self._transition is None else self._transition.never_data

    @property
    def gap_token_id(self) -> int | None:
        """The mask, if the process has one that data never hold: it stands for what is not known. Else `None`."""
        mask, has_mask = self._settings.mask_token_id, self._settings.family.has_mask
        return mask if has_mask and mask in self.never_data else None

    @property
    def transition_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the transition by name, float64 on the CPU, as `transition.safetensors` holds them."""
        return dict(self._tensors)

    def _set_tensors(self, given: dict[str, torch.Tensor | None]) -> None:
        """Checks and keeps the tensors of the transition, and builds it unless the scheduler is being loaded."""
        settings = self._settings
        family, shapes = settings.family, settings.tensor_shapes()
        for name, tensor in given.items():
            if tensor is not None:
                check_type(name, tensor, torch.Tensor, "a tensor")
        for name, tensor in family.prepare_tensors(dict(given), settings).items():
            if tensor is None:
                continue
            if name not in shapes:
                takers = [other for other, taker in transition_families().items() if name in taker.input_tensors()]
                choose = f", or choose one that does ({', '.join(takers)})" if takers else ""
                raise ValueError(
                    f"got {name}, which the transition {family.name!r} does not take: leave it out{choose}"
                )
            if tuple(tensor.shape) not in shapes[name]:
                raise ValueError(
                    f"{name} has the shape {tuple(tensor.shape)}, and this scheduler needs "
                    f"{' or '.join(map(str, shapes[name]))}: it belongs to another vocabulary or process"
                )
            if name == "schedule" and not (tensor >= 0).all():
                raise ValueError(
                    f"schedule has the entry {tensor[~(tensor >= 0)][0].item():.4g}: none may be below zero"
                )
            self._tensors[name] = tensor.detach().cpu().double()
        if "unigram_probs" in self._tensors:
            self._tensors["unigram_probs"] = _normalized(self._tensors["unigram_probs"], settings)
        self._transition = None
        if not _is_loading.get() and not settings.missing_tensors():
            self._transition = settings.create()

    # Timesteps: `t` in 0 .. T-1, with t + 1 corruption steps behind it

    def __len__(self) -> int:
        return self.config.num_train_timesteps

    @staticmethod
    def num_steps_behind(timestep):
        """Number of corruption steps at `timestep` (`timestep + 1`). Nothing else converts between the two."""
        return timestep + 1

    def spaced_timesteps(self, num_inference_steps: int, start: int | None = None) -> list[int]:
        """Evenly spaced timesteps from `start` down to the data; the numbers of steps between them differ by at most one.

        Args:
            num_inference_steps (`int`): Number of timesteps.
            start (`int`, *optional*): First timestep. Defaults to T - 1.
        """
        if start is not None:
            check_int("start", start, 0, len(self) - 1)
        total = len(self) if start is None else self.num_steps_behind(start)
        check_int("num_inference_steps", num_inference_steps, 1, total)
        return [i * total // num_inference_steps - 1 for i in range(num_inference_steps, 0, -1)]

    def register_inference_timesteps(self, timesteps: dict[int, list[int]] | None) -> None:
        """Stores the timesteps of sampling by their number in the configuration, which is saved with a checkpoint.

        `set_timesteps(n)` and `pipeline(num_inference_steps=n)` use those stored for n, and evenly spaced ones if there are
        none.

        Args:
            timesteps (`dict[int, list[int]]`, *optional*): For each number of steps n its n timesteps, strictly decreasing
                from T - 1, such as `result.inference_timesteps` of [`~evaluation.optimize_timesteps`]. `None` removes
                the stored ones.
        """
        stored = None
        if timesteps is not None:
            check_inference_timesteps(timesteps, self.config, self.family)
            # The keys of JSON are strings.
            stored = {str(number): [operator.index(t) for t in times] for number, times in timesteps.items()}
        self.register_to_config(inference_timesteps=stored)

    def chosen_timesteps(self, num_inference_steps: int) -> list[int] | None:
        """The timesteps that are stored for this number of steps, `None` if there are none."""
        timesteps = (self.config.get("inference_timesteps") or {}).get(str(num_inference_steps))
        return None if timesteps is None else list(timesteps)

    def sampling_timesteps(
        self,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        start_timestep: int | None = None,
        spacing: str = "optimized",
    ) -> list[int]:
        """The timesteps of a sampling run, strictly decreasing; after the last one comes x_0. The scheduler is not changed.

        Args:
            num_inference_steps (`int`, *optional*): Number of timesteps; all of them by default.
            timesteps (`list[int]`, *optional*): The timesteps themselves, in place of `num_inference_steps`.
            start_timestep (`int`, *optional*): Timestep that `num_inference_steps` starts from; T - 1 by default. From
                another one the timesteps are spaced evenly.
            spacing (`str`, defaults to `"optimized"`): `"optimized"`, the timesteps of [`register_inference_timesteps`] if there are
                any for this number, else evenly spaced ones; or `"even"`, evenly spaced ones.
        """
        spacing = "optimized" if spacing == "chosen" else spacing  # its earlier name
        check_choice("spacing", spacing, ("optimized", "even"))
        last = len(self) - 1 if start_timestep is None else start_timestep
        check_int("start_timestep", last, 0, len(self) - 1)
        if timesteps is None:
            steps = self.num_steps_behind(last) if num_inference_steps is None else num_inference_steps
            chosen = self.chosen_timesteps(steps) if spacing == "optimized" and last == len(self) - 1 else None
            timesteps = self.spaced_timesteps(steps, last) if chosen is None else chosen
        else:
            if num_inference_steps is not None:
                raise ValueError(
                    f"got num_inference_steps={num_inference_steps} and timesteps={timesteps}: pass one of the two"
                )
            if start_timestep is not None:
                raise ValueError(
                    "got timesteps and start_timestep: the first of the timesteps is where the call starts"
                )
            try:
                timesteps = [operator.index(t) for t in timesteps]
            except TypeError:
                raise ValueError(f"timesteps is {timesteps!r}: pass a list of integers") from None
            for before, after in zip(timesteps, timesteps[1:]):
                if after >= before:
                    raise ValueError(f"`timesteps` must be strictly decreasing, got {after} after {before}")
            if not timesteps or timesteps[0] > last or timesteps[-1] < 0:
                raise ValueError(f"timesteps {timesteps[:1]} .. {timesteps[-1:]} leave the range {last} .. 0")
        if self.config.prediction_type == "previous":
            self.check_spacing(timesteps)
        return timesteps

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: list[int] | None = None,
        spacing: str = "optimized",
    ) -> None:
        """Sets the timesteps of sampling, from the noisiest one down; after the last comes x_0.

        Args:
            num_inference_steps (`int`, *optional*): Number of timesteps.
            device (`str` or `torch.device`, *optional*): Device of `self.timesteps`.
            timesteps (`list[int]`, *optional*): Your own timesteps, strictly decreasing, in place of `num_inference_steps`.
            spacing (`str`, defaults to `"optimized"`): `"optimized"`, the timesteps of [`register_inference_timesteps`] if there are
                any for this number, else evenly spaced ones; or `"even"`, evenly spaced ones.
        """
        if num_inference_steps is None and timesteps is None:
            raise ValueError("got num_inference_steps=None and timesteps=None: pass one of the two")
        if device is not None:
            check_device("device", device)
        self._show_timesteps(self.sampling_timesteps(num_inference_steps, timesteps, spacing=spacing), device)

    def _show_timesteps(self, timesteps: list[int], device) -> None:
        """Sets the attributes of the timesteps to those of [`sampling_timesteps`]."""
        self._previous = dict(zip(timesteps, [*timesteps[1:], -1]))
        self.num_inference_steps = len(timesteps)
        self.timesteps = torch.tensor(timesteps, device=device)

    def check_spacing(self, timesteps: list[int]) -> None:
        """Checks that the model can step through `timesteps`: one that predicts x_{t-1} cannot skip any."""
        self.check_timesteps(torch.tensor(timesteps), timesteps, torch.tensor([*timesteps[1:], -1]))

    def previous_timestep(self, timestep: int) -> int:
        """The timestep that follows `timestep` in sampling; -1 stands for the data.

        It is the next entry of `self.timesteps`, or `timestep - 1` before `set_timesteps` was called.
        """
        timestep = check_timestep("timestep", timestep)
        if self.num_inference_steps is None:
            self.check_timesteps(timestep, torch.empty(1))
            return timestep - 1
        if timestep not in self._previous:
            raise ValueError(
                f"timestep {timestep} is not one of those that `set_timesteps` chose: step from one of "
                "`scheduler.timesteps`, or pass `previous_timestep`"
            )
        return self._previous[timestep]

    def check_timesteps(self, timesteps, sample, previous=None) -> None:
        """Checks that `timesteps` lie in 0 .. T-1, and that each of `previous` comes before its timestep.

        With `prediction_type="previous"` the previous timestep must be t - 1.
        """
        given = (
            {"timesteps": timesteps} if previous is None else {"timesteps": timesteps, "previous timesteps": previous}
        )
        for name, times in given.items():
            if not isinstance(times, torch.Tensor) or times.is_floating_point():
                check_int(name, times)
            elif times.ndim and times.shape != (len(sample),):
                raise ValueError(
                    f"{name} have the shape {tuple(times.shape)}: pass one for all, or one per sample of the batch of "
                    f"{len(sample)}"
                )
        times, *others = map(torch.as_tensor, given.values())
        if not values_are_known(times):
            return
        low, high = (value.item() for value in times.aminmax())
        if low < 0 or high >= len(self):
            outside = (times < 0) | (times >= len(self))
            raise ValueError(
                f"timestep {times[outside][0].item()} is outside 0 .. {len(self) - 1}: draw them from "
                "`torch.randint(0, scheduler.config.num_train_timesteps, ...)`"
            )
        if not others or not values_are_known(others[0]):
            return
        times, before = torch.broadcast_tensors(times, others[0])
        after = (before < -1) | (before >= times)
        if after.any():
            raise ValueError(
                f"previous timestep {before[after][0].item()} of t = {times[after][0].item()} is not in -1 .. t - 1"
            )
        if self.config.prediction_type == "previous" and (before != times - 1).any():
            raise ValueError(
                "a network that predicts x_{t-1} directly has no prediction of x_0 to skip timesteps with: use "
                f"every timestep (num_inference_steps={len(self)}), or train with prediction_type='x0'"
            )

    @property
    def has_plain_steps(self) -> bool:
        """Whether `step` draws from eq. 4 by the transition and logits of x_0, so that a sampler may draw the same in another way.

        It does not if the network predicts x_{t-1} itself or its raw output is the last step. Of a step of your own it is not known.
        """
        is_plain = self.config.prediction_type != "previous" and self.config.reconstruction == "posterior"
        return is_plain and type(self).step is D3PMScheduler.step

    def scale_model_input(self, sample: torch.Tensor, timestep: int | None = None) -> torch.Tensor:
        """`sample` itself, for interchangeability with other schedulers."""
        return sample

    # Noising and denoising

    @without_autocast
    def add_noise(self, original_samples: torch.Tensor, timesteps: torch.Tensor | int, generator=None) -> torch.Tensor:
        """Draws x_t from q(x_t | x_0) = Cat(x_0 Qbar_t) (section 3 of the paper).

        Args:
            original_samples (`torch.LongTensor` of shape `[B, ...]`): x_0.
            timesteps (`torch.LongTensor` of shape `[B]`, or `int`): Timesteps in `0 .. num_train_timesteps - 1`.
            generator (`torch.Generator` or a list of one per sample, *optional*): Source of the noise.
        """
        if isinstance(timesteps, torch.Tensor):
            if timesteps.is_floating_point():
                raise ValueError(
                    f"timesteps are {timesteps.dtype}: pass integers, and no noise, which is drawn here: "
                    "add_noise(x_0, timesteps, generator)"
                )
            if timesteps.shape == (1,):
                timesteps = timesteps[0]  # one for all: `scheduler.timesteps[i][None]` of diffusers' scripts
        self.check_states(original_samples)
        self.check_timesteps(timesteps, original_samples)
        return self.transition.sample(original_samples, self.num_steps_behind(timesteps), generator)

    def reveal(self, original_samples: torch.Tensor, timestep: int) -> torch.Tensor:
        """A state x_t for known data: x_0 itself if the process can keep it until t, else a draw from q(x_t | x_0).

        Args:
            original_samples (`torch.LongTensor` of shape `[B, ...]`): x_0.
            timestep (`int`): t; -1 stands for the data.
        """
        self.check_states(original_samples)
        check_int("timestep", timestep, -1, len(self) - 1)
        return self.transition.reveal(original_samples, self.num_steps_behind(timestep))

    def sample_prior(self, shape, generator=None, device=None) -> torch.Tensor:
        """Draws x_T, the start of sampling, from the prior.

        Args:
            shape (`tuple[int]`): Shape of the states, `[B, ...]`.
            generator (`torch.Generator` or a list of one per sample, *optional*): Source of the draw.
            device (`str` or `torch.device`, *optional*): Device of the states. Defaults to the CPU.
        """
        check_type("shape", shape, (tuple, list), "a tuple of integers")
        for size in shape:
            check_int("a size in shape", size, 1)
        device = "cpu" if device is None else device
        check_device("device", device)
        return self.transition.sample_prior(shape, generator, device)

    def logits(self, model_output: torch.Tensor, elements: torch.Tensor | None = None) -> torch.Tensor:
        """Converts the output of the network to logits `[B, ..., K]` of x_0, or of x_{t-1} with `"previous"`.

        With `elements` `[n]`, indices of flattened elements, it has rows for these alone, `[n, K]`.
        """
        check_type("the network's output", model_output, torch.Tensor, "a floating-point tensor")
        last = 2 if self.config.prediction_type == "logistic" else self.config.num_classes
        check_tensor("the network's output", model_output, *[None] * (model_output.ndim - 1), last)
        if self.config.prediction_type == "logistic":
            location, log_scale = model_output.to(compute_dtype(model_output)).unbind(-1)
            return logistic_logits(location, log_scale, self.config.num_classes)
        return self.restrict(model_output, elements)

    def restrict(self, logits: torch.Tensor, elements: torch.Tensor | None = None) -> torch.Tensor:
        """Logits with minus infinity for the states that an element does not have, if elements differ (`element_classes`).

        Args:
            logits (`torch.Tensor` of shape `[B, N, K]`, or `[n, K]`): Logits of x_0. Rows `[n, K]` without `elements` are
                returned as they are.
            elements (`torch.LongTensor` of shape `[n]`, *optional*): The flattened elements that rows `[n, K]` are those of.
        """
        if self.config.get("element_classes") is None or (elements is None and logits.ndim == 2):
            return logits
        is_data = self._states_of_elements(logits.device)[0]  # [N, K]
        if elements is not None:
            is_data = is_data[elements % len(is_data)]
        elif logits.shape[1:] != is_data.shape:
            raise ValueError(
                f"logits have the shape {tuple(logits.shape)}, and this process needs [B, {is_data.shape[0]}, {is_data.shape[1]}]"
            )
        return logits.masked_fill(~is_data, -torch.inf)

    def _states_of_elements(self, device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which states x_0 and x_t can take at each element, both `[N, K]`."""
        device = torch.device(device)
        if device not in self._element_states:
            settings = self._settings
            states, sizes = torch.arange(settings.num_classes), torch.tensor(settings.element_classes)
            is_data = states < sizes[:, None]
            has_mask = torch.tensor([get_family(name).has_mask for name in settings.element_families])
            is_state = is_data | (has_mask[:, None] & (states == settings.mask_token_id))
            self._element_states[device] = is_data.to(device), is_state.to(device)
        return self._element_states[device]

    @without_autocast
    def posterior_logits(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor | int,
        sample: torch.Tensor,
        previous_timestep: torch.Tensor | int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> torch.Tensor:
        """log p(x_s | x_t), `[B, ..., K]`, normalized: the paper's eq. 4 for any number of skipped steps.

            log p(x_s | x_t) = log q(x_t | x_s) + log sum_{x_0} q(x_s | x_0) p(x_0) + const

        Args:
            model_output (`torch.Tensor`): Output of the network.
            timestep (`int`, or `torch.LongTensor` of shape `[B]`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
            previous_timestep (`int`, or `torch.LongTensor` of shape `[B]`, *optional*): s, -1 for the data. Defaults
                to t - 1.
            temperature, top_k, top_p: As in [`D3PMScheduler.step`].
        """
        self.check_model_output(model_output, sample)
        self.check_timesteps(timestep, sample, previous_timestep)
        logits = self.step_logits(model_output, temperature, top_k, top_p).to(compute_dtype(model_output))
        if self.config.prediction_type == "previous":
            return logits.log_softmax(-1)
        self._check_logits(self.transition.forbid(logits))
        t = self.num_steps_behind(timestep)
        s = t - 1 if previous_timestep is None else self.num_steps_behind(previous_timestep)
        raw = logits
        if self.config.x0_posterior == "denoising":
            logits = self.transition.to_leave_one_out(logits, sample, t)
        posterior = self.transition.posterior_logits(logits, sample, s, t)
        if self.config.reconstruction == "raw":
            to_data = expand_time(s, sample) == 0
            posterior = torch.where(to_data[..., None], self.transition.forbid(raw), posterior)
        posterior = posterior.log_softmax(-1)
        if values_are_known(sample):
            self.check_possible(posterior.isnan().any(-1), raw, sample, t)
        return posterior

    def step_logits(
        self,
        model_output: torch.Tensor,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> torch.Tensor:
        """The logits that a step uses: those of the network, after `temperature`, `top_k` and `top_p`.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): Output of the network.
            temperature, top_k, top_p: As in [`D3PMScheduler.step`].
        """
        logits, warpers = self.logits(model_output), create_warpers(temperature, top_k, top_p)
        if warpers:
            logits = logits.to(compute_dtype(logits))
            # The state that is never data must not take a place among the k best.
            is_direct = self.config.prediction_type == "previous"
            logits = logits if is_direct else self.transition.forbid(logits)
        self._check_logits(logits)
        return apply_warpers(warpers, logits) if warpers else logits

    @without_autocast
    def step(
        self,
        model_output: torch.Tensor,
        timestep: int,
        sample: torch.Tensor,
        *,
        previous_timestep: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        return_dict: bool = True,
    ) -> D3PMSchedulerOutput | tuple:
        """Draws x_s from p(x_s | x_t), s being the timestep that follows t in sampling.

            p(x_s | x_t) is proportional to q(x_t | x_s) sum_{x_0} q(x_s | x_0) p(x_0)        (the paper's eq. 4)

        On a CPU, an output that holds NaN or infinity raises an error. On an accelerator that would wait for the device in each
        step: samplers, and so pipelines, look once per call.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): Output of the network.
            timestep (`int`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
            previous_timestep (`int`, *optional*): s, -1 for the data. By default the entry after t in
                `self.timesteps`, or t - 1 before `set_timesteps` was called. With it the step depends on its
                arguments alone, so that threads may share a scheduler.
            temperature, top_k, top_p: Applied to the distribution that the network predicts, as in transformers. With
                `temperature=0` this is the most likely x_0 (the argmax of the logits, of equal ones the first), and x_s is drawn
                from q(x_s | x_t, x_0); with `prediction_type="previous"`, x_s itself is the most likely state.
            generator (`torch.Generator` or a list of one per sample, *optional*): Source of the draw.
            return_dict (`bool`, defaults to `True`): Whether to return a [`D3PMSchedulerOutput`] or the tuple
                `(prev_sample, pred_logits)`.
        """
        timestep = check_timestep("timestep", timestep)
        if previous_timestep is None:
            previous = self.previous_timestep(timestep)
        else:
            previous = check_timestep("previous_timestep", previous_timestep)
        self.check_timesteps(timestep, sample, previous)
        s, t = self.num_steps_behind(previous), self.num_steps_behind(timestep)
        self.check_model_output(model_output, sample)
        direct = self.config.prediction_type == "previous"
        logits = self.step_logits(model_output, temperature, top_k, top_p)
        denoising = self.config.x0_posterior == "denoising"
        if direct or (s == 0 and self.config.reconstruction == "raw"):
            rows = logits if direct else self.transition.forbid(logits)
            u = uniforms(sample.shape, generator, sample.device)
            prev_sample = categorical(rows.flatten(0, -2), u.flatten()).view_as(sample)
        else:
            prev_sample = self.transition.sample_previous(logits, sample, s, t, generator, denoising)
        if not return_dict:
            return prev_sample, logits
        return D3PMSchedulerOutput(prev_sample=prev_sample, pred_logits=logits)

    @without_autocast
    def predict_original_sample(
        self, model_output: torch.Tensor, timestep: torch.Tensor | int, sample: torch.Tensor
    ) -> torch.Tensor:
        """The most likely x_0 given x_t, `[B, ...]`, for previews: the mode of a step from t to the data.

            argmax_{x_0} q(x_t | x_0) p(x_0)

        `temperature`, `top_k` and `top_p` of a step are not applied. The cost is a pass over the classes, often more than
        that of the step.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): Output of the network.
            timestep (`int`, or `torch.LongTensor` of shape `[B]`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
        """
        if self.config.prediction_type == "previous":
            raise ValueError(
                "prediction_type is 'previous': the network predicts x_{t-1}, and there is no x_0 to preview; look at "
                "`prev_sample`"
            )
        self.check_model_output(model_output, sample)
        self.check_timesteps(timestep, sample)
        logits = self.logits(model_output).to(compute_dtype(model_output))
        self._check_logits(logits)
        if self.config.reconstruction == "raw":
            return self.transition.forbid(logits).argmax(-1)
        denoising = self.config.x0_posterior == "denoising"
        return self.transition.most_likely_data(logits, sample, self.num_steps_behind(timestep), denoising)

    # Checks of what these methods take

    def check_states(self, x: torch.Tensor) -> None:
        """Checks that `x` holds states in 0 .. K-1. Values are checked where they are known: see [`values_are_known`]."""
        check_type("the tensor of states", x, torch.Tensor, "a `torch.LongTensor`")
        if x.dtype != torch.long:
            raise ValueError(f"states have the dtype {x.dtype}: pass tokens as `x.long()`")
        if not x.numel():
            raise ValueError(f"states of shape {tuple(x.shape)} hold no element: pass at least one")
        sizes = self.config.get("element_classes")
        if sizes is not None and x.shape[1:] != (len(sizes),):
            raise ValueError(
                f"states have the shape {tuple(x.shape)}, and a sample of this process has {len(sizes)} elements: pass [B, {len(sizes)}]"
            )
        if not values_are_known(x):
            return
        low, high = (value.item() for value in x.aminmax())
        if low < 0 or high >= self.config.num_classes:
            wrong = ((x < 0) | (x >= self.config.num_classes)).nonzero()[0].tolist()
            raise ValueError(
                f"token {x[tuple(wrong)].item()} at position {tuple(wrong)} is outside the vocabulary of "
                f"{self.config.num_classes}: check that the tokenizer and the scheduler agree on num_classes"
            )
        if sizes is not None:
            self._check_elements(x, self._states_of_elements(x.device)[1])

    def _check_elements(self, x: torch.Tensor, allowed: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Checks that the states `[B, N]` are among those that `allowed` `[N, K]` has for their elements, where they count."""
        wrong = ~allowed[torch.arange(x.shape[1], device=x.device), x]
        wrong = wrong if counts is None else wrong & counts
        if wrong.any():
            row, element = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"the state {x[row, element].item()} at position {(row, element)} is none of element {element}, which has "
                f"{self.config.element_classes[element]}, from 0: check that the data and the scheduler agree on num_classes"
            )

    def check_data_states(self, x_0: torch.Tensor, loss_mask: torch.Tensor | None = None) -> None:
        """Checks that no x_0 that counts is a state which is never data, or none of its element, where the values are known."""
        if not values_are_known(x_0):
            return
        if self.config.get("element_classes") is not None:
            self._check_elements(x_0, self._states_of_elements(x_0.device)[0], loss_mask)
        wrong = self.transition.excluded.contain(x_0)
        wrong = wrong if loss_mask is None else wrong & loss_mask
        if wrong.any():
            position = tuple(wrong.nonzero()[0].tolist())
            state = int(x_0[position])
            kind = "mask" if state == self.gap_token_id else "suppressed"
            raise ValueError(
                f"x_0 at position {position} is the {kind} token {state}, which data never hold: exclude "
                "padding with loss_mask, check that the tokenizer and the scheduler agree on the mask, or set mask_in_data=True"
            )

    def check_model_output(
        self, model_output: torch.Tensor, sample: torch.Tensor, elements: torch.Tensor | None = None
    ) -> None:
        """Checks that `sample` holds valid states and that `model_output` has shape `[*sample.shape, K]`, or `[..., 2]`.

        With `elements` `[n]`, it has rows for these alone, `[n, K]`.
        """
        self.check_states(sample)
        shape = sample.shape if elements is None else elements.shape
        last = 2 if self.config.prediction_type == "logistic" else self.config.num_classes
        check_tensor("the network's output", model_output)
        if model_output.shape != (*shape, last):
            raise ValueError(
                f"the network's output has the shape {tuple(model_output.shape)}, and states {tuple(shape)} with "
                f"prediction_type={self.config.prediction_type!r} need {(*shape, last)}, classes last"
            )

    @staticmethod
    def _check_logits(logits: torch.Tensor) -> None:
        """Checks that no logit is NaN or infinite, and that each row leaves at least one state possible.

        Where the values are not known, samplers check what they have seen once per call.
        """
        if not values_are_known(logits):
            return
        low, top = logits.aminmax()
        if low.isfinite() & top.isfinite():
            return
        if not top < torch.inf:
            raise ValueError("the network's output holds NaN or infinity: look at its weights and its input")
        excluded = logits.amax(-1) == -torch.inf
        if excluded.any():
            position = tuple(excluded.nonzero()[0].tolist())
            raise ValueError(f"all logits at position {position} are -inf: leave at least one state possible")

    def check_possible(self, undefined: torch.Tensor, logits: torch.Tensor, sample: torch.Tensor, t) -> None:
        """Checks that the logits of the `undefined` elements `[B, ...]` allow an x_0 that leads to x_t."""
        if not undefined.any():
            return
        self._check_logits(self.transition.forbid(logits.where(undefined[..., None], 0)))
        excluded = undefined & self.transition.excludes_state(logits, sample, t)
        if excluded.any():
            position = tuple(excluded.nonzero()[0].tolist())
            raise ValueError(
                f"the logits at position {position} rule out every x_0 that can lead to x_t = {sample[position].item()}: "
                "leave at least one of them above -inf"
            )

    # Files: `scheduler_config.json` and `transition.safetensors`

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """Writes `scheduler_config.json`, and the tensors of the transition beside it.

        Args:
            save_directory (`str` or `os.PathLike`): The folder.
            push_to_hub (`bool`, defaults to `False`): Whether to push the folder to the Hub as well.
            kwargs: Arguments of `push_to_hub`.
        """
        check_path("save_directory", save_directory)
        self.check_saveable()
        os.makedirs(save_directory, exist_ok=True)
        path = os.path.join(save_directory, TENSORS_NAME)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            if tensor.is_sparse:
                tensor = tensor.coalesce()
                tensors |= {f"{name}.indices": tensor.indices(), f"{name}.values": tensor.values()}
            else:
                tensors[name] = tensor
        if tensors:
            metadata = {"transition": self.config.transition, "num_classes": str(self.config.num_classes)}
            write_safetensors_atomically(path, tensors, metadata)
        elif os.path.exists(path):
            os.remove(path)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def check_saveable(self) -> None:
        """Checks that the configuration and the tensors describe the transition, so that it can be loaded again."""
        if self.config.transition not in transition_families():
            raise ValueError(
                f"the transition is a {self.config.transition} object, which cannot be saved: register its class with "
                "`register_transition` and pass its name, or define its method `to_config`"
            )

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs: bool = False, **kwargs):
        """Creates a scheduler from the configuration of another; tensors of the transition are passed as keywords."""
        if config is not None:
            check_type("config", config, Mapping, "a configuration")
        given = {**(config or {}), **kwargs}
        name = given.get("_class_name", cls.__name__ if "num_classes" in given else "scheduler without num_classes")
        bases = [base.__name__ for base in cls.__mro__ if issubclass(base, D3PMScheduler)]
        if name not in bases and find_subclass(cls, name) is None:
            raise ValueError(
                f"this is the configuration of a {shorten(str(name))}, not of a {cls.__name__}: load a D3PM checkpoint, and import "
                "the class of its scheduler first if that is one of your own"
            )
        # diffusers takes arguments that were passed by position for defaults, and would drop them.
        config = config and {name: value for name, value in config.items() if name != "_use_default_values"}
        tensors = {name: kwargs.pop(name) for name in cls.ignore_for_config if name in kwargs}
        tensors |= tensors.pop("transition_tensors", None) or {}
        with loading():  # the transition is built once, with its tensors
            result = super().from_config(config, return_unused_kwargs, **kwargs)
        scheduler = result[0] if return_unused_kwargs else result
        scheduler._set_tensors(tensors)
        return result

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path=None, subfolder=None, return_unused_kwargs=False, **kwargs):
        """Loads a scheduler, tensors included, from a folder or from the Hub.

        The checkpoint of a subclass is loaded as that subclass, if it has been imported. The transition is built when it is
        first used: until then the values in the files are checked, but not what follows from them.
        """
        if subfolder is not None:
            check_type("subfolder", subfolder, str, "the name of a folder")
        where = os.path.join(str(pretrained_model_name_or_path), subfolder or "", cls.config_name)
        config, unused = cls.load_config(
            pretrained_model_name_or_path, subfolder=subfolder, return_unused_kwargs=True, **kwargs
        )
        target = find_subclass(cls, config.get("_class_name")) or cls
        try:
            with loading():
                result = target.from_config(config, return_unused_kwargs, **unused)
                scheduler = result[0] if return_unused_kwargs else result
                path = os.path.join(str(pretrained_model_name_or_path), subfolder or "", TENSORS_NAME)
                if not os.path.isdir(pretrained_model_name_or_path):
                    names = ("revision", "cache_dir", "token", "local_files_only", "force_download")
                    hub = {name: kwargs[name] for name in names if name in kwargs}
                    try:
                        path = hf_hub_download(
                            str(pretrained_model_name_or_path), TENSORS_NAME, subfolder=subfolder, **hub
                        )
                    except EntryNotFoundError:
                        pass  # there is none
                if os.path.isfile(path):
                    where = path
                    scheduler._load_tensors(path)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        return result

    @classmethod
    def load_config(cls, pretrained_model_name_or_path, **kwargs):
        """Reads the configuration in `scheduler_config.json`."""
        check_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
        try:
            result = super().load_config(pretrained_model_name_or_path, **kwargs)
        except (ValueError, RecursionError) as error:
            raise OSError(f"{cls.config_name} of {pretrained_model_name_or_path} is not JSON ({error})") from error
        if not isinstance(result[0] if isinstance(result, tuple) else result, dict):
            raise OSError(
                f"{cls.config_name} of {pretrained_model_name_or_path} does not hold a dictionary of settings"
            )
        return result

    def _load_tensors(self, path: str) -> None:
        """Takes the tensors of a file, after checks of what process they were written for and of their values."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise OSError(
                f"{path} is truncated or not a safetensors file ({error}): save or download it again"
            ) from error
        of = metadata.get("transition"), metadata.get("num_classes")
        mine = self.config.transition, str(self.config.num_classes)
        if of != mine:
            raise ValueError(
                f"the tensors were written for a {of[0]!r} process over {of[1]} classes, and the configuration beside it is "
                f"{mine[0]!r} over {mine[1]}: the two files are not from the same checkpoint"
            )
        sizes, shapes = (self.config.num_classes, self.config.num_train_timesteps), self._settings.tensor_shapes()
        for name in [name.removesuffix(".indices") for name in tensors if name.endswith(".indices")]:
            if f"{name}.values" in tensors and name in shapes:
                parts = tensors.pop(f"{name}.indices"), tensors.pop(f"{name}.values")
                tensors[name] = torch.sparse_coo_tensor(*parts, shapes[name][0], check_invariants=True).coalesce()
        if "unigram_probs" in tensors and "schedule" in tensors and tensors["schedule"].shape[-1:] != sizes[1:]:
            del tensors["schedule"]  # loaded with another number of timesteps: solve for it again
        for name in [name for name in tensors if name not in shapes]:
            # Earlier versions kept tensors of other families too, if they were passed.
            if not any(name in other.tensor_shapes(*sizes) for other in transition_families().values()):
                raise ValueError(f"unexpected tensor {name!r} in {TENSORS_NAME}: expected one of {', '.join(shapes)}")
            del tensors[name]
        get_family(self.config.transition).check_tensors(tensors)
        self._set_tensors(tensors)


def _normalized(unigram: torch.Tensor, settings: TransitionSettings) -> torch.Tensor:
    """Frequencies of the states, `[K]`, or `[N, K]` by element, checked, and each row divided by its sum."""
    sums = unigram.sum(-1, keepdim=True)
    if not (unigram >= 0).all() or not ((sums > 0) & (sums < torch.inf)).all():
        raise ValueError(
            f"unigram_probs has the minimum {unigram.min().item():.4g} and the sum {sums.min().item():.4g}: pass non-negative "
            "frequencies with a positive sum"
        )
    if settings.element_classes is not None:
        for element, (row, size) in enumerate(zip(unigram, settings.element_classes)):
            if row[size:].any():
                raise ValueError(
                    f"unigram_probs[{element}] gives {row[size:].sum().item():.4g} to states beyond the {size} of the element: "
                    "pass frequencies of its own states"
                )
    else:
        for state in settings.never_data:
            if unigram[state] > 0:
                kind, change = "mask", "set mask_in_data=True"
                if state in settings.suppressed:
                    kind, change = "suppressed", "leave it out of suppress_tokens"
                raise ValueError(
                    f"unigram_probs gives the {kind} token {state} the frequency {unigram[state].item():.4g}: data must not hold "
                    f"it, or {change}"
                )
    # What was saved comes back bit for bit.
    return torch.where((sums - 1).abs() > 1e-12, unigram / sums, unigram)
