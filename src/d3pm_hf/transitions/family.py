# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Families of transitions: the properties that one declares, the settings that it is created from, and their registry."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch

from ..schedules import MUTUAL_INFORMATION, create_betas, exponents_from_betas, reciprocal_betas
from ..utils.checks import check_str
from ..utils.registry import Registry


# The family of processes whose elements differ.
BY_ELEMENT = "by_element"
# Shapes that a tensor may have.
Shapes = list[tuple[int, ...]]

# A divergence between q(x_T | x_0) and the prior of more nats per element than this is worth a warning.
MAX_PRIOR_DIVERGENCE = 0.01
# It is averaged over this many states x_0, spread evenly over the vocabulary.
NUM_PRIOR_STATES = 32


class TransitionFamily:
    """The properties that a family of forward processes declares. [`register_transition`] registers it under its name.

    A family usually is its [`Transition`] class, which inherits these attributes. One with several implementations, such
    as matrix exponentials with dense and with sparse rates, is a class of its own.

    Attributes:
        name: Name of the family, set by [`register_transition`].
        description: What the process does to a token, as it stands on a model card after "Its process is `name`:".
        formula: Q_t, for the tables of the docs; b is beta_t, a is alpha_t.
        options: Names of the options that `create` reads: arguments of [`D3PMScheduler`] or keys of `transition_kwargs`.
        required_tensors: Names of the tensors without which the process is not defined.
        has_mask: Whether the process has an absorbing state, `mask_token_id`, which data do not hold by default.
        has_schedule: Whether `beta_schedule` decides how fast noise arrives.
        is_exponential: Whether Q_t = exp(alpha_t R) with beta_t = 1 - exp(-alpha_t), so that exponents are accepted.
        loses_by_masking: Whether all that is lost about x_0 is masked: the mutual-information schedule is then
            1 / (T - t + 1) whatever the data are, if they do not hold the mask.
        is_autoregressive: Whether step t masks one position, the t-th from the right, and nothing else.
        needs_elements: Whether the process is that of elements with numbers of states of their own.
        beta_range: Both ends of the linear schedule, unless `beta_start` and `beta_end` are given.
        max_beta: Upper limit of a beta. The beta of a Gaussian process is a variance.

    Examples:
        ```python
        from d3pm_hf.transitions import get_family

        family = get_family("absorbing")
        assert family.has_mask and family.options == ("mask_token_id", "mask_in_data")
        print(family.description, family.formula)
        ```
    """

    name: ClassVar[str] = ""
    description: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()
    required_tensors: ClassVar[tuple[str, ...]] = ()
    has_mask: ClassVar[bool] = False
    has_schedule: ClassVar[bool] = True
    is_exponential: ClassVar[bool] = False
    loses_by_masking: ClassVar[bool] = False
    is_autoregressive: ClassVar[bool] = False
    needs_elements: ClassVar[bool] = False
    beta_range: ClassVar[tuple[float, float]] = (0.02, 1.0)
    max_beta: ClassVar[float] = 1.0

    @classmethod
    def create(cls, settings: "TransitionSettings") -> Any:
        """The transition for the given sizes, options, tensors and schedule.

        Args:
            settings ([`TransitionSettings`]): `num_classes`, `num_steps`, `option(name)`, `tensors`, `betas()`.
        """
        raise ValueError(
            f"{cls.__name__} has no `create(settings)`, which makes a transition for a scheduler: define this class method, "
            "or pass a transition object to D3PMScheduler in place of a name"
        )

    @classmethod
    def input_tensors(cls) -> tuple[str, ...]:
        """Names of the tensors that the user passes, the required ones first."""
        return cls.required_tensors

    @classmethod
    def tensor_shapes(cls, num_classes: int, num_steps: int) -> dict[str, Shapes]:
        """The shapes that each tensor of the family may have. Sparse tensors are saved if they are two-dimensional."""
        return {}

    @classmethod
    def prepare_tensors(
        cls, tensors: dict[str, torch.Tensor | None], settings: "TransitionSettings"
    ) -> dict[str, torch.Tensor | None]:
        """The tensors to keep and to save, computed from those that the user has passed; by default the same ones."""
        return tensors

    @classmethod
    def check_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> None:
        """Checks the values of tensors that were loaded from a file, before anything is computed from them."""

    @classmethod
    def min_bytes(cls, num_classes: int, num_steps: int) -> int:
        """Bytes that the process needs at least, known from its sizes alone.

        By default those of vectors, `[T]` and `[K]` in float64: at most 16 of each while they are built.
        """
        return 16 * 8 * (num_classes + num_steps)


class TransitionSettings:
    """The settings of a scheduler as a [`TransitionFamily`] reads them in `create`.

    Args:
        family: The registered family.
        config: The configuration of the scheduler: its arguments by name.
        tensors: Tensors by name, float64, on the CPU. A schedule that was solved for is kept among them as `schedule`.

    Attributes:
        num_classes, num_steps: K and T.
        mask_token_id: The absorbing state: the last one unless it is given.
        suppressed: The states besides the mask that x_0 never takes: `suppress_tokens`.
        never_data: The states that x_0 never takes: `suppressed`, and the mask of a process that has one, unless `mask_in_data`.
        element_classes: Number of data states of each element, or `None` if all elements have the same states.
        has_parts: Whether the process is made of parts. One that leads to a shared mask alone has none, unless priors are fitted.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler, register_transition
        from d3pm_hf.transitions import RankOneTransition


        @register_transition("geometric", "tokens are replaced by small ones")
        class Geometric(RankOneTransition):
            options = ("ratio",)

            @staticmethod
            def stationary_of(settings):  # a TransitionSettings
                probs = settings.option("ratio", 0.5) ** torch.arange(settings.num_classes, dtype=torch.float64)
                return probs / probs.sum()


        D3PMScheduler(5, transition="geometric", beta_schedule="cosine", transition_kwargs={"ratio": 0.3})
        ```
    """

    def __init__(self, family: type[TransitionFamily], config: Mapping[str, Any], tensors: dict[str, torch.Tensor]):
        self.family, self.config, self.tensors = family, config, tensors
        self.num_classes: int = config["num_classes"]
        self.num_steps: int = config["num_train_timesteps"]
        given = config.get("mask_token_id")
        self.mask_token_id: int = self.num_classes - 1 if given is None else given
        self.suppressed: tuple[int, ...] = tuple(config.get("suppress_tokens") or ())
        mask = {self.mask_token_id} if family.has_mask and not config.get("mask_in_data") else set()
        self.never_data: tuple[int, ...] = tuple(sorted(mask.union(self.suppressed)))
        self.element_classes: list[int] | None = config.get("element_classes")
        # Whether all information that is lost is masked, so that the schedule is 1 / (T - t + 1) for any data.
        self._loses_by_masking = family.loses_by_masking and self.mask_token_id in self.never_data
        is_shared = family.loses_by_masking and config["prior"] != "fitted"
        self.has_parts = self.element_classes is not None and not is_shared

    @property
    def element_families(self) -> list[str]:
        """Name of the family of each element."""
        names = self.option("transitions") if self.family.needs_elements else None
        return list(names or [self.config["transition"]] * len(self.element_classes or ()))

    @property
    def _groups(self) -> dict[tuple[str, int, int | None], list[int]]:
        """The elements of each part, by its family, its number of data states, and the element that is a part by itself."""
        groups: dict[tuple, list[int]] = {}
        for element, (name, size) in enumerate(zip(self.element_families, self.element_classes or ())):
            is_single = "stationary_probs" in get_family(name).required_tensors
            groups.setdefault((name, size, element if is_single else None), []).append(element)
        return groups

    def parts(self) -> Iterator[tuple[list[int], list[int], "TransitionSettings"]]:
        """The elements, the states and the settings of each part of a process whose elements differ.

        Elements with the same family and the same number of states are one part: they share a schedule, for which mutual
        information is measured by the mean of their frequencies. An element with a stationary distribution of its own is a
        part by itself.
        """
        for number, ((name, size, _), elements) in enumerate(self._groups.items()):
            family = get_family(name)
            states = [*range(size), *([self.num_classes - 1] if family.has_mask else [])]
            own = {"transition": name, "num_classes": len(states), "mask_token_id": None, "element_classes": None}
            if self.family.needs_elements:
                own["transition_kwargs"] = None  # they are those of the whole
            tensors = {}
            is_measured = not family.loses_by_masking or self.config["prior"] == "fitted"
            if "unigram_probs" in self.tensors and is_measured:
                tensors["unigram_probs"] = self.tensors["unigram_probs"][elements][:, states].mean(0)
            if "stationary_probs" in self.tensors and "stationary_probs" in family.required_tensors:
                tensors["stationary_probs"] = self.tensors["stationary_probs"][elements[0]][states]
            if "schedule" in self.tensors:
                tensors["schedule"] = self.tensors["schedule"][number]
            yield elements, states, TransitionSettings(family, {**self.config, **own}, tensors)

    def tensor_shapes(self) -> dict[str, Shapes]:
        """The shapes that each tensor of the scheduler may have."""
        sizes, elements = (self.num_classes, self.num_steps), len(self.element_classes or ())
        own = self.family.tensor_shapes(*sizes)
        if not elements:
            return {"unigram_probs": [sizes[:1]], "schedule": [sizes[1:]], **own}
        if not self.has_parts:
            return own
        names = {name for family in self.element_families for name in get_family(family).required_tensors}
        by_element: dict[str, Shapes] = {name: [(elements, self.num_classes)] for name in {"unigram_probs", *names}}
        return {**by_element, "schedule": [(len(self._groups), self.num_steps)]}

    def option(self, name: str, default: Any = None) -> Any:
        """The value of an option: an entry of `transition_kwargs`, or else an argument of the scheduler."""
        given = self.config.get("transition_kwargs") or {}
        return given.get(name, self.config.get(name, default))

    def betas(self, from_information: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """beta_1 .. beta_T, `[T]`, float64.

        Args:
            from_information: Solves for the mutual-information schedule (section 3.2 and appendix A.7 of the paper), given
                the frequencies of the states, `[K]`. Without it the family has no such schedule.
        """
        config = self.config
        if self._depends_on_data:
            return self._solved(from_information)
        if config.get("trained_betas") is not None:
            betas = torch.tensor(config["trained_betas"], dtype=torch.float64)
        else:
            ends = config.get("beta_start"), config.get("beta_end")
            betas = create_betas(config["beta_schedule"], self.num_steps, ends, self.family.beta_range)
        wrong = ~((betas >= 0) & (betas <= self.family.max_beta))
        if wrong.any():
            step, top = int(wrong.int().argmax()), self.family.max_beta
            raise ValueError(f"beta_{step + 1} is {betas[step].item():.6g}: it must lie between 0 and {top:g}")
        return betas

    def exponents(self, from_information: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """alpha_1 .. alpha_T of Q_t = exp(alpha_t R), `[T]`, float64; infinite where beta_t = 1."""
        given = self.config.get("trained_exponents")
        if given is not None:
            return torch.tensor([float(alpha) for alpha in given], dtype=torch.float64)
        if not self._depends_on_data:
            return exponents_from_betas(self.betas())
        if self._loses_by_masking and "unigram_probs" not in self.tensors:
            return exponents_from_betas(reciprocal_betas(self.num_steps))
        return self._solved(from_information)

    @property
    def _depends_on_data(self) -> bool:
        """Whether the schedule is that of mutual information, which depends on the frequencies of the states."""
        return self.config.get("trained_betas") is None and self.config["beta_schedule"] == MUTUAL_INFORMATION

    def missing_tensors(self) -> list[str]:
        """The tensors without which the process is not defined and which are not there."""
        if self.has_parts:
            return sorted({name for _, _, own in self.parts() for name in own.missing_tensors()})
        config = self.config
        needed = set(self.family.required_tensors)
        solves = self.family.has_schedule and self._depends_on_data and config.get("trained_exponents") is None
        solves = solves and not self._loses_by_masking
        if config["prior"] == "fitted" or (solves and "schedule" not in self.tensors):
            needed.add("unigram_probs")
        return sorted(needed - self.tensors.keys())

    def create(self) -> Any:
        """The transition itself, with the prior of the settings."""
        missing = self.missing_tensors()
        if missing:
            raise ValueError(
                f"a {self.family.name!r} process with beta_schedule={self.config['beta_schedule']!r} and "
                f"prior={self.config['prior']!r} needs {' and '.join(missing)}: pass them to the constructor or to "
                "`from_config`, or load the scheduler with `from_pretrained`"
            )
        if self.has_parts:  # they have their priors
            parts = get_family(BY_ELEMENT).create(self)
            parts.never_data = self.never_data
            return parts
        if self.family.is_autoregressive and self.config["prior"] == "fitted":
            raise ValueError("an autoregressive process always ends in the mask: leave prior='stationary'")
        transition = self.family.create(self)
        transition.never_data = self.never_data
        fast = transition.kernel() or transition
        if self.config["prior"] == "fitted":
            fast.fit_prior(self.tensors["unigram_probs"])
        if not self.family.is_autoregressive:
            self._warn_of_prior(fast)
        return transition

    def _solved(self, from_information: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
        """The mutual-information schedule, solved for once and kept with the tensors."""
        if "schedule" not in self.tensors:
            if from_information is None:
                raise ValueError(
                    f"the transition {self.family.name!r} has no mutual-information schedule: choose another "
                    "beta_schedule, such as 'cosine'"
                )
            unigram = self.tensors["unigram_probs"]
            if unigram.max() == 1:
                raise ValueError(
                    f"all data are in state {int(unigram.argmax())} (unigram_probs), so that there is no mutual information to "
                    "schedule by: pass other data, or another beta_schedule, such as 'cosine'"
                )
            self.tensors["schedule"] = from_information(unigram)
        return self.tensors["schedule"]

    def _warn_of_prior(self, transition: Any) -> None:
        """Warns of a process that does not come near the distribution that sampling starts from."""
        states = torch.linspace(0, self.num_classes - 1, min(self.num_classes, NUM_PRIOR_STATES)).long()
        states = states[~torch.isin(states, torch.tensor(self.never_data, dtype=torch.long))]
        weights = self.tensors.get("unigram_probs", torch.ones(self.num_classes, dtype=torch.float64))[states]
        divergences = transition.prior_divergence(states[None])[0]
        average = (torch.where(weights > 0, weights * divergences, 0).sum() / weights.sum()).item()
        if average > MAX_PRIOR_DIVERGENCE:
            warnings.warn(
                f"after {self.num_steps} steps q(x_T | x_0) is still {average:.3g} nats per element from the prior (L_T): "
                "use more timesteps, a schedule that ends in pure noise, or prior='fitted'",
                stacklevel=6,
            )


# A process that needs more bytes than this is refused: a configuration file is short, whatever it asks for.
MAX_PROCESS_BYTES = int(os.environ.get("D3PM_HF_MAX_PROCESS_BYTES", 4 << 30))


def check_memory(name: str, needed: int, num_classes: int, num_steps: int) -> None:
    """Checks that the process needs no more than `MAX_PROCESS_BYTES`."""
    if needed > MAX_PROCESS_BYTES:
        raise ValueError(
            f"a {name!r} process over {num_classes:,} classes and {num_steps:,} timesteps needs at least "
            f"{needed:,} bytes of memory, more than the limit of {MAX_PROCESS_BYTES:,}: use fewer classes or timesteps, or "
            "raise the limit by the environment variable D3PM_HF_MAX_PROCESS_BYTES"
        )


Family = TypeVar("Family", bound=type[TransitionFamily])

_families: Registry[type[TransitionFamily]] = Registry("transition", "register_transition")


def register_transition(name: str, description: str | None = None) -> Callable[[Family], Family]:
    """Class decorator that makes a family known as `D3PMScheduler(transition=name)`.

    ```python
    @register_transition("noisy_keyboard", "characters turn into those on adjacent keys")
    class KeyboardTransition(DenseTransition): ...
    ```

    Registering a name again replaces the family, as when a cell of a notebook is run a second time; the names of this
    package are reserved for it.

    Args:
        name (`str`): Name of the family, as it stands in `scheduler_config.json`.
        description (`str`, *optional*): What the process does to a token, for model cards and tables.
    """
    check_str("name", name)
    if description is not None:
        check_str("description", description)

    def register(family: Family) -> Family:
        if not (isinstance(family, type) and issubclass(family, TransitionFamily)):
            raise ValueError(
                f"register_transition got {family!r}: it must be a class that derives from `Transition` or "
                "`TransitionFamily`"
            )
        _families.add(name, family)
        family.name = name
        if description is not None:
            family.description = description
        return family

    return register


def transition_families() -> Mapping[str, type[TransitionFamily]]:
    """All registered families by name, in the order of their registration."""
    return _families


def get_family(name: str) -> type[TransitionFamily]:
    """The family registered as `name`."""
    return _families.find("transition", name)
