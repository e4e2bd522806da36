# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMScheduler: what diffusers expects of a scheduler, over any of the discrete forward processes."""

import operator
import os
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Integral

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ..numerics import categorical, compute_dtype, uniforms, without_autocast
from ..schedules import cosine_betas, exponents_from_betas, linear_betas, reciprocal_betas
from ..transitions.autoregressive import AutoregressiveTransition
from ..transitions.base import Transition
from ..transitions.dense import (
    MatrixTransition,
    ToeplitzTransition,
    band_log_kernels,
    gaussian_log_kernels,
    information_betas,
)
from ..transitions.memory import check_memory
from ..transitions.rank_one import (
    RankOneTransition,
    absorbing_distribution,
    rank_one_information_exponents,
    uniform_distribution,
)
from ..transitions.rates import (
    add_absorbing_state,
    check_rates,
    nearest_neighbor_rates,
    rate_information_exponents,
    rate_transition,
)
from ..utils.checks import (
    check_device,
    check_float,
    check_int,
    check_path,
    check_positive,
    check_tensor,
    check_timestep,
    check_type,
)
from ..utils.subclasses import find_subclass
from .arguments import check_arguments, check_distributions
from .logistic import logistic_logits


TENSORS_NAME = "transition.safetensors"

# True while a scheduler is loaded: a file of a few bytes must not decide how long that takes.
_is_loading = ContextVar("is_loading", default=False)

# The two ends of a linear schedule, as the paper uses them.
LINEAR_ENDS = {"gaussian": (1e-4, 0.02)}
DEFAULT_LINEAR_ENDS = (0.02, 1.0)

# More nats per element than this between q(x_T | x_0) and the prior are worth a warning.
MAX_PRIOR_DIVERGENCE = 0.01
# That is looked at for so many states x_0, spread evenly over the vocabulary.
NUM_PRIOR_STATES = 32

MASKING = ("absorbing", "absorbing_uniform", "absorbing_nearest_neighbor", "autoregressive")
BY_NEIGHBORS = ("nearest_neighbor", "absorbing_nearest_neighbor")
BY_RATES = ("rate", *BY_NEIGHBORS)


@dataclass
class D3PMSchedulerOutput(BaseOutput):
    """Output of [`D3PMScheduler.step`].

    Args:
        prev_sample (`torch.LongTensor` of shape `[B, ...]`): x_s, the input of the next step.
        pred_logits (`torch.Tensor` of shape `[B, ..., K]`):
            The logits that the step used, after `temperature`, `top_k` and `top_p`: of x_0, or of x_s with
            `prediction_type="previous"`.
    """

    prev_sample: torch.LongTensor
    pred_logits: torch.Tensor


class D3PMScheduler(SchedulerMixin, ConfigMixin):
    """The forward and the reverse process of D3PM, for any family of transition matrices.

    The timestep `t` in `0 .. num_train_timesteps - 1` has `t + 1` corruption steps behind it: it is the paper's
    `t + 1`. States are integers `[B, ...]`; what has a class axis has it last, `[B, ..., num_classes]`.

    Args:
        num_classes (`int`): K, the mask included where there is one.
        num_train_timesteps (`int`, defaults to 1000): T. An autoregressive process has one per position.
        transition (`str`, defaults to `"absorbing"`): where noise leads. `"absorbing"`, `"uniform"`,
            `"absorbing_uniform"` (BERT's mix), `"stationary"` (`stationary_probs`), `"gaussian"`, `"band_diagonal"`,
            `"matrix"` (`transition_matrices`), `"rate"` (`rate_matrix`), `"nearest_neighbor"` and
            `"absorbing_nearest_neighbor"` (`embeddings`), or `"autoregressive"`.
        beta_schedule (`str`, defaults to `"mutual_information"`): how fast it arrives. Also `"linear"`, `"cosine"` and
            `"reciprocal"`, 1 / (T - t + 1). Information is measured with `unigram_probs`.
        beta_start, beta_end (`float`, *optional*): the ends of the linear schedule. The paper's by default: 1e-4 and
            0.02 for Gaussian processes, 0.02 and 1 for all others.
        trained_betas (`list[float]`, *optional*): your own beta_1 .. beta_T; overrides `beta_schedule`.
        trained_exponents (`list[float | str]`, *optional*): your own alpha_1 .. alpha_T of a process that is a matrix
            exponential, Q_t = exp(alpha_t R), in place of `trained_betas`: beta_t = 1 - exp(-alpha_t) rounds to 1 above
            36.7. `"inf"` is a step that forgets everything.
        mask_token_id (`int`, *optional*): the absorbing state; the last one by default. Images reuse grey, K // 2.
        mask_in_data (`bool`, defaults to `False`): whether x_0 may be the mask, as for grey pixels. If not, its logit
            is taken as minus infinity.
        mask_fraction (`float`, defaults to 2/3): the share of `"absorbing_uniform"` noise that is the mask.
        bandwidth (`int`, defaults to 1): how far one step of `"band_diagonal"` reaches.
        num_neighbors (`int`, defaults to 5): of each token in the graph of `"nearest_neighbor"`.
        mask_rate (`float`, defaults to 4.0): the rate of masking in `"absorbing_nearest_neighbor"`, where a token
            leaves for a neighbour at a rate of about one.
        prior (`str`, defaults to `"stationary"`): what x_T is drawn from. `"fitted"` is `unigram_probs` carried to T,
            for processes that do not reach their stationary distribution.
        prediction_type (`str`, defaults to `"x0"`): what the network puts out: logits of x_0; `"logistic"`, location
            and log-scale of a discretized logistic, `[B, ..., 2]`; or `"previous"`, logits of x_{t-1} itself.
        x0_posterior (`str`, defaults to `"leave_one_out"`): what logits of x_0 at one position mean. Leave-one-out:
            what the other positions say about it, as eq. 4 of the paper needs. `"denoising"`: q(x_0 | x_t), which is
            converted.
        reconstruction (`str`, defaults to `"posterior"`): the last step, to the data. `"raw"` draws from the network's
            output as it is, as in the authors' image code.
        unigram_probs (`torch.Tensor` of shape `[K]`, *optional*): the frequencies of the states in the data.
        stationary_probs (`torch.Tensor` of shape `[K]`, *optional*): pi of a `"stationary"` process.
        transition_matrices (`torch.Tensor` of shape `[T, K, K]` or `[K, K]`, *optional*): Q_t of a `"matrix"` process.
        rate_matrix (`torch.Tensor` of shape `[K, K]`, *optional*): R of a `"rate"` process, dense or sparse.
        embeddings (`torch.Tensor`, *optional*): `[K, d]`, or `[K - 1, d]` beside a mask: what neighbours are near in.

    The tensors are not part of the configuration: `save_pretrained` writes them to `transition.safetensors`, and
    `from_config` takes them as keywords.
    """

    order = 1
    _compatibles = []
    ignore_for_config = ["unigram_probs", "stationary_probs", "transition_matrices", "rate_matrix", "embeddings"]

    @register_to_config
    def __init__(
        self,
        num_classes: int,
        num_train_timesteps: int = 1000,
        transition: str = "absorbing",
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
        unigram_probs: torch.Tensor | None = None,
        stationary_probs: torch.Tensor | None = None,
        transition_matrices: torch.Tensor | None = None,
        rate_matrix: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
    ):
        check_arguments(self.config)
        if trained_exponents is not None:  # JSON has no infinity
            self.register_to_config(trained_exponents=["inf" if a == torch.inf else a for a in trained_exponents])
        check_memory(transition, num_classes, num_train_timesteps)
        if embeddings is not None:
            rate_matrix = self._neighbor_rates(embeddings, rate_matrix)
        self._transition: Transition | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._set_tensors(
            unigram_probs=unigram_probs,
            stationary_probs=stationary_probs,
            transition_matrices=transition_matrices,
            rate_matrix=rate_matrix,
        )
        self.init_noise_sigma = 1.0
        self.num_inference_steps: int | None = None
        self.timesteps = torch.arange(num_train_timesteps - 1, -1, -1)
        self._previous: dict[int, int] = {}

    def __len__(self):
        return self.config.num_train_timesteps

    # The forward process

    @property
    def transition(self) -> Transition:
        """The forward process itself. One that was loaded from files is built when it is first asked for."""
        if self._transition is None:
            missing = self._missing_tensors()
            if missing:
                raise ValueError(
                    f"a {self.config.transition!r} process with beta_schedule={self.config.beta_schedule!r} and "
                    f"prior={self.config.prior!r} needs {' and '.join(missing)}: pass them to the constructor or to "
                    "`from_config`, or load the scheduler with `from_pretrained`"
                )
            self._transition = self._build_transition()
        return self._transition

    def _missing_tensors(self) -> list[str]:
        """The tensors without which this process is not defined."""
        config = self.config
        by_name = {"matrix": "transition_matrices", "stationary": "stationary_probs"}
        needed = {by_name.get(config.transition, "rate_matrix" if config.transition in BY_RATES else None)} - {None}
        has_schedule = config.transition in ("matrix", "autoregressive") or config.trained_exponents is not None
        scheduled = not has_schedule and self._closed_form_betas() is None
        if config.prior == "fitted" or (scheduled and not self._loses_by_masking and "schedule" not in self._tensors):
            needed.add("unigram_probs")
        return sorted(needed - self._tensors.keys())

    @property
    def _loses_by_masking(self) -> bool:
        """Whether what is lost is what is masked, so that the schedule is 1 / (T - t + 1) whatever the data are."""
        return self.config.transition == "absorbing" and self._never_data is not None

    @property
    def mask_token_id(self) -> int:
        """The absorbing state."""
        given = self.config.mask_token_id
        return self.config.num_classes - 1 if given is None else given

    def _build_transition(self) -> Transition:
        config = self.config
        if config.transition == "autoregressive":
            if config.prior == "fitted":
                raise ValueError("an autoregressive process always ends in the mask: leave prior='stationary'")
            transition = AutoregressiveTransition(config.num_classes, len(self), self.mask_token_id)
        elif config.transition == "matrix":
            matrices = self._tensors["transition_matrices"]
            transition = MatrixTransition(matrices, len(self), self._tensors.get("stationary_probs"))
        elif config.transition in ("gaussian", "band_diagonal"):
            transition = ToeplitzTransition(self._kernels(self._betas()))
        elif config.transition in BY_RATES:
            rates = self._tensors["rate_matrix"]
            if config.transition == "absorbing_nearest_neighbor":
                rates = add_absorbing_state(rates, config.mask_rate, self.mask_token_id)
            exponents = self._exponents(lambda unigram: rate_information_exponents(rates, unigram, len(self)))
            transition = rate_transition(rates, exponents)
        else:
            pi = self._stationary_probs()
            exponents = self._exponents(lambda unigram: rank_one_information_exponents(pi, unigram, len(self)))
            transition = RankOneTransition(pi, exponents)
        transition.never_data = self._never_data
        if config.prior == "fitted":
            transition.fit_prior(self._tensors["unigram_probs"])
        if config.transition != "autoregressive":
            self._warn_of_prior(transition)
        return transition

    @property
    def _never_data(self) -> int | None:
        """The state that x_0 never takes: the mask of a masking process, unless `mask_in_data`; else `None`."""
        masks = self.config.transition in MASKING
        return self.mask_token_id if masks and not self.config.mask_in_data else None

    def _stationary_probs(self) -> torch.Tensor:
        config = self.config
        if config.transition == "uniform":
            return uniform_distribution(config.num_classes)
        if config.transition == "stationary":
            return self._tensors["stationary_probs"]
        fraction = config.mask_fraction if config.transition == "absorbing_uniform" else 1.0
        return absorbing_distribution(config.num_classes, self.mask_token_id, fraction)

    def _kernels(self, betas: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.transition == "gaussian":
            return gaussian_log_kernels(config.num_classes, betas)
        return band_log_kernels(config.num_classes, betas, config.bandwidth)

    def _closed_form_betas(self) -> torch.Tensor | None:
        """beta_1 .. beta_T, or `None` where they depend on the information in the data."""
        betas = self._chosen_betas()
        if betas is not None:
            # The beta of a Gaussian is its variance; how large that of a band may be, its diagonal decides.
            top = torch.inf if self.config.transition in ("gaussian", "band_diagonal") else 1.0
            wrong = ~((betas >= 0) & (betas <= top))
            if wrong.any():
                step = int(wrong.int().argmax())
                raise ValueError(f"beta_{step + 1} is {betas[step].item():.6g}: it must lie between 0 and {top:g}")
        return betas

    def _chosen_betas(self) -> torch.Tensor | None:
        config = self.config
        if config.trained_betas is not None:
            return torch.tensor(config.trained_betas, dtype=torch.float64)
        if config.beta_schedule == "linear":
            start, end = LINEAR_ENDS.get(config.transition, DEFAULT_LINEAR_ENDS)
            start = start if config.beta_start is None else config.beta_start
            end = end if config.beta_end is None else config.beta_end
            return linear_betas(len(self), start, end)
        if config.beta_schedule == "cosine":
            return cosine_betas(len(self))
        return reciprocal_betas(len(self)) if config.beta_schedule == "reciprocal" else None

    def _betas(self) -> torch.Tensor:
        """beta_1 .. beta_T of a Gaussian or band-diagonal process."""
        betas = self._closed_form_betas()
        if betas is not None:
            return betas
        if "schedule" not in self._tensors:
            # The widest Gaussian is flat; a wider band than this would oscillate rather than mix.
            widest = 1e6
            if self.config.transition == "band_diagonal":
                widest = self.config.num_classes / (2 * self.config.bandwidth + 1)
            unigram = self._informative_unigram()
            self._tensors["schedule"] = information_betas(self._kernels, unigram, len(self), widest)
        return self._tensors["schedule"]

    def _exponents(self, from_information) -> torch.Tensor:
        """alpha_1 .. alpha_T of a process that is a matrix exponential."""
        if self.config.trained_exponents is not None:
            return torch.tensor([float(alpha) for alpha in self.config.trained_exponents], dtype=torch.float64)
        betas = self._closed_form_betas()
        if betas is not None:
            return exponents_from_betas(betas)
        if self._loses_by_masking and "unigram_probs" not in self._tensors:
            return exponents_from_betas(reciprocal_betas(len(self)))
        if "schedule" not in self._tensors:
            self._tensors["schedule"] = from_information(self._informative_unigram())
        return self._tensors["schedule"]

    def _informative_unigram(self) -> torch.Tensor:
        """The frequencies of the states, if they leave anything to be learned about a state."""
        unigram = self._tensors["unigram_probs"]
        if unigram.max() == 1:
            raise ValueError(
                f"all data are in state {int(unigram.argmax())} (unigram_probs), so that there is no mutual information to "
                "schedule by: pass other data, or another beta_schedule, such as 'cosine'"
            )
        return unigram

    def _warn_of_prior(self, transition: Transition) -> None:
        """Warns of a process that does not come near the distribution that sampling starts from."""
        states = torch.linspace(0, self.config.num_classes - 1, min(self.config.num_classes, NUM_PRIOR_STATES)).long()
        states = states[states != self._never_data] if self._never_data is not None else states
        weights = self._tensors.get("unigram_probs", torch.ones(self.config.num_classes, dtype=torch.float64))[states]
        divergences = transition.prior_divergence(states[None])[0]
        average = (torch.where(weights > 0, weights * divergences, 0).sum() / weights.sum()).item()
        if average > MAX_PRIOR_DIVERGENCE:
            warnings.warn(
                f"after {len(self)} steps q(x_T | x_0) is still {average:.3g} nats per element from the prior (L_T): use "
                "more timesteps, a schedule that ends in pure noise, or prior='fitted'",
                stacklevel=6,
            )

    def _neighbor_rates(self, embeddings: torch.Tensor, rate_matrix: torch.Tensor | None) -> torch.Tensor:
        """The rate matrix of the nearest neighbors in `embeddings`, for the transitions that are defined by them."""
        if self.config.transition not in BY_NEIGHBORS or rate_matrix is not None:
            given = "rate_matrix" if rate_matrix is not None else f"transition={self.config.transition!r}"
            raise ValueError(
                f"got embeddings and {given}: embeddings define the rates of the transitions {' and '.join(BY_NEIGHBORS)}; "
                "pass one of the two"
            )
        check_tensor("embeddings", embeddings, None, None)
        if not embeddings.isfinite().all():
            raise ValueError("embeddings hold NaN or infinity: pass finite vectors")
        return nearest_neighbor_rates(embeddings, self.config.num_neighbors)

    def _set_tensors(self, **tensors: torch.Tensor | None) -> None:
        """Takes the tensors of the process after looking at them, and builds it, unless it is being loaded."""
        config = self.config
        classes = config.num_classes
        states = classes - 1 if config.transition == "absorbing_nearest_neighbor" else classes
        shapes = {
            "unigram_probs": [(classes,)],
            "stationary_probs": [(classes,)],
            "transition_matrices": [(classes, classes), (len(self), classes, classes)],
            "rate_matrix": [(states, states)],
            "schedule": [(len(self),)],
        }
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if name not in shapes:
                raise ValueError(
                    f"{TENSORS_NAME} holds {name!r}, which no process of ours has: it is another program's file"
                )
            check_type(name, tensor, torch.Tensor, "a tensor")
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
        unigram = self._tensors.get("unigram_probs")
        if unigram is not None:
            if not (unigram >= 0).all() or not 0 < unigram.sum() < torch.inf:
                raise ValueError(
                    f"unigram_probs has the minimum {unigram.min().item():.4g} and the sum {unigram.sum().item():.4g}: "
                    "pass non-negative frequencies with a positive sum"
                )
            if self._never_data is not None and unigram[self._never_data] > 0:
                raise ValueError(
                    f"unigram_probs gives the mask token {self._never_data} the frequency "
                    f"{unigram[self._never_data].item():.4g}: data must not hold it, unless mask_in_data=True"
                )
            if abs(unigram.sum() - 1) > 1e-12:  # what was saved comes back bit for bit
                self._tensors["unigram_probs"] = unigram / unigram.sum()
        self._transition = None
        if not _is_loading.get() and not self._missing_tensors():
            self._transition = self._build_transition()

    # Timesteps

    @staticmethod
    def num_steps_behind(timestep):
        """The number of corruption steps behind a timestep: the one place where the two clocks meet."""
        return timestep + 1

    def spaced_timesteps(self, num_inference_steps: int, start: int | None = None) -> list[int]:
        """So many timesteps from `start` down, such that the steps between them, and to the data, are equal to within one.

        Args:
            num_inference_steps (`int`): how many.
            start (`int`, *optional*): the first one; T - 1 by default.
        """
        if start is not None:
            check_int("start", start, 0, len(self) - 1)
        total = len(self) if start is None else self.num_steps_behind(start)
        if not isinstance(num_inference_steps, Integral) or not 1 <= num_inference_steps <= total:
            raise ValueError(
                f"num_inference_steps is {num_inference_steps!r}: it must be an integer from 1 to {total}"
            )
        return [i * total // num_inference_steps - 1 for i in range(num_inference_steps, 0, -1)]

    def sampling_timesteps(
        self,
        num_inference_steps: int | None = None,
        timesteps: list[int] | None = None,
        start_timestep: int | None = None,
    ) -> list[int]:
        """The timesteps of a sampling run, strictly decreasing; after the last one comes x_0. Sets nothing.

        Args:
            num_inference_steps (`int`, *optional*): Number of timesteps, spaced evenly; all of them by default.
            timesteps (`list[int]`, *optional*): The timesteps themselves, in place of `num_inference_steps`.
            start_timestep (`int`, *optional*): Timestep that `num_inference_steps` starts from; T - 1 by default.
        """
        last = len(self) - 1 if start_timestep is None else start_timestep
        if not isinstance(last, Integral) or not 0 <= last < len(self):
            raise ValueError(f"start_timestep is {last!r}: it must be an integer from 0 to {len(self) - 1}")
        if timesteps is None:
            steps = self.num_steps_behind(last) if num_inference_steps is None else num_inference_steps
            timesteps = self.spaced_timesteps(steps, last)
        elif num_inference_steps is not None:
            raise ValueError(
                f"got num_inference_steps={num_inference_steps} and timesteps={timesteps}: pass one of the two"
            )
        elif start_timestep is not None:
            raise ValueError("got timesteps and start_timestep: the first of the timesteps is where the call starts")
        try:
            timesteps = [operator.index(t) for t in timesteps]
        except TypeError:
            raise ValueError(f"timesteps is {timesteps!r}: pass a list of integers") from None
        for before, after in zip(timesteps, timesteps[1:]):
            if after >= before:
                raise ValueError(f"`timesteps` must be strictly decreasing, got {after} after {before}")
        if not timesteps or timesteps[0] > last or timesteps[-1] < 0:
            raise ValueError(f"timesteps {timesteps[:1]} .. {timesteps[-1:]} leave the range {last} .. 0")
        self.check_spacing(timesteps)
        return timesteps

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        timesteps: list[int] | None = None,
    ) -> None:
        """Sets the timesteps of sampling, spaced evenly from the noisiest one down; after the last comes x_0.

        Args:
            num_inference_steps (`int`, *optional*): how many.
            device (`str` or `torch.device`, *optional*): where `self.timesteps` shall be.
            timesteps (`list[int]`, *optional*): your own, descending; instead of `num_inference_steps`.
        """
        if num_inference_steps is None and timesteps is None:
            raise ValueError("got num_inference_steps=None and timesteps=None: pass one of the two")
        if device is not None:
            check_device("device", device)
        timesteps = self.sampling_timesteps(num_inference_steps, timesteps)
        self._previous = dict(zip(timesteps, [*timesteps[1:], -1]))
        self.num_inference_steps = len(timesteps)
        self.timesteps = torch.tensor(timesteps, device=device)

    def check_spacing(self, timesteps: list[int]) -> None:
        """Checks that the network can step through `timesteps` (descending): x_{t-1} alone allows no longer steps."""
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

    def scale_model_input(self, sample: torch.Tensor, timestep: int | None = None) -> torch.Tensor:
        """`sample` itself, for interchangeability with other schedulers."""
        return sample

    # Noising and denoising

    @without_autocast
    def add_noise(
        self, original_samples: torch.LongTensor, timesteps: torch.LongTensor | int, generator=None
    ) -> torch.LongTensor:
        """Draws x_t from q(x_t | x_0) = Cat(x_0 Qbar_t).

        Args:
            original_samples (`torch.LongTensor` of shape `[B, ...]`): x_0.
            timesteps (`torch.LongTensor` of shape `[B]`, or `int`): in `0 .. num_train_timesteps - 1`.
            generator (`torch.Generator` or a list of one per sample, *optional*): of the noise.
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

    def reveal(self, original_samples: torch.LongTensor, timestep: int) -> torch.LongTensor:
        """x_t that shows known data as plainly as the process allows: x_0 itself, unless it cannot have stayed that long.

        Args:
            original_samples (`torch.LongTensor` of shape `[B, ...]`): x_0.
            timestep (`int`): t; -1 stands for the data.
        """
        self.check_states(original_samples)
        check_int("timestep", timestep, -1, len(self) - 1)
        return self.transition.reveal(original_samples, self.num_steps_behind(timestep))

    def sample_prior(self, shape, generator=None, device=None) -> torch.LongTensor:
        """Draws x_T, which sampling starts from, of the given shape."""
        check_type("shape", shape, (tuple, list), "a tuple of integers")
        for size in shape:
            check_int("a size in shape", size, 1)
        device = "cpu" if device is None else device
        check_device("device", device)
        return self.transition.sample_prior(shape, generator, device)

    def logits(self, model_output: torch.Tensor) -> torch.Tensor:
        """The logits `[B, ..., K]` that the network's output stands for: of x_0, or of x_{t-1} if it predicts that."""
        check_type("the network's output", model_output, torch.Tensor, "a floating-point tensor")
        last = 2 if self.config.prediction_type == "logistic" else self.config.num_classes
        check_tensor("the network's output", model_output, *[None] * (model_output.ndim - 1), last)
        if self.config.prediction_type == "logistic":
            location, log_scale = model_output.to(compute_dtype(model_output)).unbind(-1)
            return logistic_logits(location, log_scale, self.config.num_classes)
        return model_output

    @without_autocast
    def posterior_logits(
        self,
        model_output: torch.Tensor,
        timestep: torch.LongTensor | int,
        sample: torch.LongTensor,
        previous_timestep: torch.LongTensor | int | None = None,
    ) -> torch.Tensor:
        """log p(x_s | x_t), `[B, ..., K]`, normalised: the paper's eq. 4 for any number of skipped steps.

            log p(x_s | x_t) = log q(x_t | x_s) + log sum_{x_0} q(x_s | x_0) p(x_0) + const

        Args:
            model_output (`torch.Tensor`): the output of the network.
            timestep (`int`, or `torch.LongTensor` of shape `[B]`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
            previous_timestep (`int`, or `torch.LongTensor` of shape `[B]`, *optional*): s, -1 for the data; one step
                before t by default.
        """
        self.check_model_output(model_output, sample)
        self.check_timesteps(timestep, sample, previous_timestep)
        logits = self.logits(model_output).to(compute_dtype(model_output))
        if self.config.prediction_type == "previous":
            self._check_logits(logits)
            return logits.log_softmax(-1)
        self._check_logits(self.transition.forbid(logits))
        t = self.num_steps_behind(timestep)
        s = t - 1 if previous_timestep is None else self.num_steps_behind(previous_timestep)
        raw = logits
        if self.config.x0_posterior == "denoising":
            logits = self.transition.to_leave_one_out(logits, sample, t)
        posterior = self.transition.posterior_logits(logits, sample, s, t)
        if self.config.reconstruction == "raw":
            to_data = (torch.as_tensor(s, device=sample.device) == 0).reshape(-1, *[1] * sample.ndim)
            posterior = torch.where(to_data, self.transition.forbid(raw), posterior)
        posterior = posterior.log_softmax(-1)
        if sample.device.type == "cpu":
            self.check_possible(posterior.isnan().any(-1), raw, sample, t)
        return posterior

    @without_autocast
    def step(
        self,
        model_output: torch.Tensor,
        timestep: int,
        sample: torch.LongTensor,
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

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): the network's output.
            timestep (`int`): t.
            sample (`torch.LongTensor` of shape `[B, ...]`): x_t.
            previous_timestep (`int`, *optional*): s, -1 for the data. By default the entry after t in
                `self.timesteps`, or t - 1 before `set_timesteps` was called. With it the step depends on its
                arguments alone, so that threads may share a scheduler.
            temperature, top_k, top_p: reshape the network's distribution before it is used.
            generator (`torch.Generator` or a list of one per sample, *optional*): of the draw.
            return_dict (`bool`, defaults to `True`): whether to return a [`D3PMSchedulerOutput`] or the tuple
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
        logits = self._warp(self.logits(model_output), temperature, top_k, top_p)
        self._check_logits(logits)
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
        self, model_output: torch.Tensor, timestep: torch.LongTensor | int, sample: torch.LongTensor
    ) -> torch.LongTensor:
        """The most likely x_0 given x_t, `[B, ...]`, for previews: the mode of a step from t to the data.

            argmax_{x_0} q(x_t | x_0) p(x_0)

        This is what the network itself believes: `temperature`, `top_k` and `top_p` belong to `step` and do not enter.
        It costs a pass over the classes, often more than the step.

        Args:
            model_output (`torch.Tensor` of shape `[B, ..., K]`, or `[B, ..., 2]` if logistic): the network's output.
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

    def _warp(self, logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None):
        """transformers' own temperature, top-k and top-p, over the last axis."""
        check_positive("temperature", temperature)
        if top_k is not None:
            check_int("top_k", top_k, 1)
        if top_p is not None:
            check_float("top_p", top_p, 0, 1)
        warpers = LogitsProcessorList()
        if temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k is not None:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p != 1.0:
            warpers.append(TopPLogitsWarper(top_p))
        if not warpers:
            return logits
        logits = logits.to(compute_dtype(logits))
        if self.config.prediction_type != "previous":
            logits = self.transition.forbid(logits)  # what is never data must not take a place among the k best
        return warpers(None, logits.flatten(0, -2)).view_as(logits)

    # What goes in

    def check_states(self, x: torch.Tensor) -> None:
        """Refuses states that are not in 0 .. K-1. Values are looked at on a CPU only: elsewhere that would be a sync."""
        check_type("the tensor of states", x, torch.Tensor, "a `torch.LongTensor`")
        if x.dtype != torch.long:
            raise ValueError(f"states have the dtype {x.dtype}: pass tokens as `x.long()`")
        if not x.numel():
            raise ValueError(f"states of shape {tuple(x.shape)} hold no element: pass at least one")
        if x.device.type != "cpu":
            return
        low, high = (v.item() for v in x.aminmax())
        if low < 0 or high >= self.config.num_classes:
            wrong = ((x < 0) | (x >= self.config.num_classes)).nonzero()[0].tolist()
            raise ValueError(
                f"token {x[tuple(wrong)].item()} at position {tuple(wrong)} is outside the vocabulary of "
                f"{self.config.num_classes}: check that the tokenizer and the scheduler agree on num_classes"
            )

    def check_timesteps(self, timesteps, sample, previous=None) -> None:
        """Refuses timesteps outside 0 .. T-1, and `previous` ones that do not come before them, likewise.

        With `prediction_type="previous"` only t - 1 comes before t.
        """
        for name, times in (("timesteps", timesteps), ("previous timesteps", previous)):
            is_tensor = isinstance(times, torch.Tensor) and not times.is_floating_point()
            if not is_tensor and not (times is None and name == "previous timesteps"):
                check_int(name, times)
            if is_tensor and times.ndim and times.shape != (len(sample),):
                raise ValueError(
                    f"{name} have the shape {tuple(times.shape)}: pass one for all, or one per sample of the batch of "
                    f"{len(sample)}"
                )
        times = torch.as_tensor(timesteps)
        before = times - 1 if previous is None else torch.as_tensor(previous)
        if times.device.type != "cpu" or before.device.type != "cpu":
            return
        outside = (times < 0) | (times >= len(self))
        if outside.any():
            raise ValueError(
                f"timestep {times[outside][0].item()} is outside 0 .. {len(self) - 1}: draw them from "
                "`torch.randint(0, scheduler.config.num_train_timesteps, ...)`"
            )
        times, before = torch.broadcast_tensors(times, before)
        after = (before < -1) | (before >= times)
        if after.any():
            raise ValueError(
                f"previous timestep {before[after][0].item()} of t = {times[after][0].item()} is not in -1 .. t - 1"
            )
        if self.config.prediction_type == "previous" and (before != times - 1).any():
            raise ValueError(
                "a network that predicts x_{t-1} directly knows nothing of x_0, from which longer steps are made: use "
                f"every timestep (num_inference_steps={len(self)}), or train with prediction_type='x0'"
            )

    def check_model_output(self, model_output: torch.Tensor, sample: torch.Tensor) -> None:
        """Refuses states that are none, and an output of the network whose shape does not fit them."""
        self.check_states(sample)
        last = 2 if self.config.prediction_type == "logistic" else self.config.num_classes
        check_tensor("the network's output", model_output)
        if model_output.shape != (*sample.shape, last):
            raise ValueError(
                f"the network's output has the shape {tuple(model_output.shape)}, and states {tuple(sample.shape)} with "
                f"prediction_type={self.config.prediction_type!r} need {(*sample.shape, last)}, classes last"
            )

    @staticmethod
    def _check_logits(logits: torch.Tensor) -> None:
        """Checks that no logit is NaN or infinite, and that each row leaves at least one state possible."""
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

    # On disk

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """Writes `scheduler_config.json`, and the tensors of the process beside it."""
        check_path("save_directory", save_directory)
        os.makedirs(save_directory, exist_ok=True)
        path = os.path.join(save_directory, TENSORS_NAME)
        tensors = {name: tensor for name, tensor in self._tensors.items() if not tensor.is_sparse}
        if "rate_matrix" in self._tensors and self._tensors["rate_matrix"].is_sparse:
            rates = self._tensors["rate_matrix"].coalesce()
            tensors |= {"rate_matrix.indices": rates.indices(), "rate_matrix.values": rates.values()}
        if tensors:
            # Whole or not at all: a run killed here leaves the old file as it was.
            metadata = {"transition": self.config.transition, "num_classes": str(self.config.num_classes)}
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, f"{path}.partial", metadata={"format": "pt", **metadata})
            os.replace(f"{path}.partial", path)
        elif os.path.exists(path):
            os.remove(path)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def from_config(cls, config=None, return_unused_kwargs: bool = False, **kwargs):
        """A scheduler from the configuration of another; tensors of the process are passed as keywords."""
        if config is not None:
            check_type("config", config, Mapping, "a configuration")
        given = {**(config or {}), **kwargs}
        name = given.get("_class_name", cls.__name__ if "num_classes" in given else "scheduler without num_classes")
        bases = [base.__name__ for base in cls.__mro__ if issubclass(base, D3PMScheduler)]
        if name not in bases and find_subclass(cls, name) is None:
            raise ValueError(
                f"this is the configuration of a {name}, not of a {cls.__name__}: load a D3PM checkpoint, and import "
                "the class of its scheduler first if that is one of your own"
            )
        # diffusers takes arguments that were passed by position for defaults, and would drop them.
        config = config and {name: value for name, value in config.items() if name != "_use_default_values"}
        tensors = {name: kwargs.pop(name) for name in cls.ignore_for_config if name in kwargs}
        token = _is_loading.set(True)  # the process is built once, with its tensors
        try:
            result = super().from_config(config, return_unused_kwargs, **kwargs)
        finally:
            _is_loading.reset(token)
        scheduler = result[0] if return_unused_kwargs else result
        embeddings = tensors.pop("embeddings", None)
        if embeddings is not None:
            tensors["rate_matrix"] = scheduler._neighbor_rates(embeddings, tensors.get("rate_matrix"))
        scheduler._set_tensors(**tensors)
        return result

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path=None, subfolder=None, return_unused_kwargs=False, **kwargs):
        """Loads a scheduler, tensors included, from a folder or from the Hub.

        The checkpoint of a subclass is loaded as that subclass, if it has been imported. The process itself is built when
        it is first used: until then the values in the files are checked, but not what follows from them.
        """
        if subfolder is not None:
            check_type("subfolder", subfolder, str, "the name of a folder")
        where = os.path.join(str(pretrained_model_name_or_path), subfolder or "", cls.config_name)
        config, unused = cls.load_config(
            pretrained_model_name_or_path, subfolder=subfolder, return_unused_kwargs=True, **kwargs
        )
        target = find_subclass(cls, config.get("_class_name")) or cls
        token = _is_loading.set(True)
        try:
            result = target.from_config(config, return_unused_kwargs, **unused)
            scheduler = result[0] if return_unused_kwargs else result
            where = cls._find_tensors(pretrained_model_name_or_path, subfolder, kwargs)
            if where is not None:
                scheduler._load_tensors(where)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
        finally:
            _is_loading.reset(token)
        return result

    @classmethod
    def load_config(cls, pretrained_model_name_or_path, **kwargs):
        """The configuration in `scheduler_config.json`."""
        check_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
        try:
            result = super().load_config(pretrained_model_name_or_path, **kwargs)
        except (ValueError, RecursionError) as error:
            raise OSError(f"{cls.config_name} of {pretrained_model_name_or_path} is no JSON ({error})") from error
        if not isinstance(result[0] if isinstance(result, tuple) else result, dict):
            raise OSError(f"{cls.config_name} of {pretrained_model_name_or_path} holds no settings")
        return result

    @staticmethod
    def _find_tensors(name_or_path, subfolder, kwargs) -> str | None:
        if os.path.isdir(name_or_path):
            path = os.path.join(name_or_path, subfolder or "", TENSORS_NAME)
            return path if os.path.isfile(path) else None
        names = ("revision", "cache_dir", "token", "local_files_only", "force_download")
        hub = {name: kwargs[name] for name in names if name in kwargs}
        try:
            return hf_hub_download(str(name_or_path), TENSORS_NAME, subfolder=subfolder, **hub)
        except EntryNotFoundError:
            return None

    def _load_tensors(self, path: str) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise OSError(
                f"{path} is truncated or no safetensors file ({error}): save or download it again"
            ) from error
        of = metadata.get("transition"), metadata.get("num_classes")
        mine = self.config.transition, str(self.config.num_classes)
        if of != mine:
            raise ValueError(
                f"the tensors were written for a {of[0]!r} process over {of[1]} classes, and the configuration beside it is "
                f"{mine[0]!r} over {mine[1]}: the two files are not from the same checkpoint"
            )
        if "unigram_probs" in tensors and "schedule" in tensors and tensors["schedule"].shape != (len(self),):
            del tensors["schedule"]  # loaded with another number of timesteps: solve for it again
        if {"rate_matrix.indices", "rate_matrix.values"} <= tensors.keys():
            states = self.config.num_classes - (self.config.transition == "absorbing_nearest_neighbor")
            tensors["rate_matrix"] = torch.sparse_coo_tensor(
                tensors.pop("rate_matrix.indices"),
                tensors.pop("rate_matrix.values"),
                (states, states),
                check_invariants=True,
            ).coalesce()
        if "rate_matrix" in tensors:
            check_rates(tensors["rate_matrix"])
        for name in ("stationary_probs", "transition_matrices"):
            check_distributions(name, tensors.get(name))
        self._set_tensors(**tensors)
