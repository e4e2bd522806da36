# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The forward process of a scheduler, its tensors, and its files `scheduler_config.json` and `transition.safetensors`."""

import os
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from diffusers import ConfigMixin
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open

from ..transitions.base import Transition
from ..transitions.family import TransitionFamily, TransitionSettings
from ..transitions.registry import get_family, transition_families
from ..utils.checks import check_path, check_type, shorten
from ..utils.files import write_safetensors_atomically
from ..utils.subclasses import find_subclass
from .arguments import DEFAULT_NUM_TIMESTEPS, check_config, named_options


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


def known_shapes(family: type[TransitionFamily], num_classes: int, num_steps: int) -> dict[str, list[tuple[int, ...]]]:
    """The shapes of all tensors that a scheduler with this family takes."""
    common: dict[str, list[tuple[int, ...]]] = {"unigram_probs": [(num_classes,)], "schedule": [(num_steps,)]}
    return {**common, **family.tensor_shapes(num_classes, num_steps)}


class ForwardProcessMixin(ConfigMixin):
    """The transition of [`D3PMScheduler`], created from its configuration and its tensors, on disk and in memory."""

    config: Any
    config_name: str
    ignore_for_config: list[str]
    _tensors: dict[str, torch.Tensor]
    _transition: Transition | None

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
        if self.config.transition not in transition_families():
            self.register_to_config(beta_schedule=None)  # it is not known to be any of ours
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
        is_registered = self.config.transition in transition_families()
        return get_family(self.config.transition) if is_registered else type(self._transition or self.transition)

    @property
    def mask_token_id(self) -> int:
        """The absorbing state."""
        given = self.config.mask_token_id
        return self.config.num_classes - 1 if given is None else given

    @property
    def never_data(self) -> tuple[int, ...]:
        """The states that x_0 never takes: `suppress_tokens`, and the mask of a process that has one, unless `mask_in_data`."""
        return self._settings.never_data if self._transition is None else self._transition.never_data

    @property
    def gap_token_id(self) -> int | None:
        """The mask, if the process has one that data never hold: it stands for what is not known. Else `None`."""
        return self.mask_token_id if self.family.has_mask and self.mask_token_id in self.never_data else None

    @property
    def transition_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the transition by name, float64 on the CPU, as `transition.safetensors` holds them."""
        return dict(self._tensors)

    @property
    def _settings(self) -> TransitionSettings:
        """What the transition is created from."""
        return TransitionSettings(get_family(self.config.transition), self.config, self._tensors)

    def _set_tensors(self, given: dict[str, torch.Tensor | None]) -> None:
        """Checks and keeps the tensors of the transition, and builds it unless the scheduler is being loaded."""
        settings = self._settings
        family, shapes = settings.family, known_shapes(settings.family, settings.num_classes, settings.num_steps)
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
        if not _is_loading.get() and not self._settings.missing_tensors():
            self._transition = self._settings.create()

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
        bases = [base.__name__ for base in cls.__mro__ if issubclass(base, ForwardProcessMixin)]
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
                path = cls._find_tensors(pretrained_model_name_or_path, subfolder, kwargs)
                if path is not None:
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

    @staticmethod
    def _find_tensors(name_or_path, subfolder: str | None, kwargs: dict) -> str | None:
        """The path of `transition.safetensors`, downloaded if need be; `None` if there is none."""
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
        family, sizes = get_family(self.config.transition), (self.config.num_classes, self.config.num_train_timesteps)
        shapes = known_shapes(family, *sizes)
        for name in [name.removesuffix(".indices") for name in tensors if name.endswith(".indices")]:
            if f"{name}.values" in tensors and name in shapes:
                parts = tensors.pop(f"{name}.indices"), tensors.pop(f"{name}.values")
                tensors[name] = torch.sparse_coo_tensor(*parts, shapes[name][0], check_invariants=True).coalesce()
        if "unigram_probs" in tensors and "schedule" in tensors and tensors["schedule"].shape != sizes[1:]:
            del tensors["schedule"]  # loaded with another number of timesteps: solve for it again
        # Earlier versions kept tensors of other families too, if they were passed.
        others = {name for other in transition_families().values() for name in other.tensor_shapes(*sizes)}
        tensors = {name: tensor for name, tensor in tensors.items() if name in shapes or name not in others}
        for name in tensors:
            if name not in shapes:
                raise ValueError(f"unexpected tensor {name!r} in {TENSORS_NAME}: expected one of {', '.join(shapes)}")
        family.check_tensors(tensors)
        self._set_tensors(tensors)


def _normalized(unigram: torch.Tensor, settings: TransitionSettings) -> torch.Tensor:
    """Frequencies of the states, `[K]`, checked and divided by their sum."""
    if not (unigram >= 0).all() or not 0 < unigram.sum() < torch.inf:
        raise ValueError(
            f"unigram_probs has the minimum {unigram.min().item():.4g} and the sum {unigram.sum().item():.4g}: "
            "pass non-negative frequencies with a positive sum"
        )
    for state in settings.never_data:
        if unigram[state] > 0:
            is_suppressed = state in settings.suppressed
            kind, change = (
                ("suppressed", "leave it out of suppress_tokens")
                if is_suppressed
                else ("mask", "set mask_in_data=True")
            )
            raise ValueError(
                f"unigram_probs gives the {kind} token {state} the frequency {unigram[state].item():.4g}: data must not hold "
                f"it, or {change}"
            )
    # What was saved comes back bit for bit.
    return unigram / unigram.sum() if abs(unigram.sum() - 1) > 1e-12 else unigram
