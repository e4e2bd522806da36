# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The contract between a transition, which defines its numbers, and its kernel, which computes them faster."""

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary


@dataclass(frozen=True)
class Options:
    """The choices among the losses of one transition.

    Args:
        denoising (`bool`): Whether the logits are those of the denoising posterior q(x_0 | x_t), not leave-one-out logits.
        raw_reconstruction (`bool`): Whether the step to the data uses the output of the network as p(x_0 | x_1).
        hybrid_coeff (`float`): lambda, the weight of the cross-entropy in the paper's eq. 5.
        convert_auxiliary (`bool`): Whether the cross-entropy is that of the denoising posterior that leave-one-out logits
            stand for.
        logistic (`bool`, defaults to `False`): Whether a fused loss is given location and log-scale of a logistic `[..., 2]`
            in place of logits.

    Examples:
        ```python
        import torch
        from d3pm_hf import D3PMScheduler
        from d3pm_hf.losses import Options, plain_terms

        process, x_0 = D3PMScheduler(5, 10).transition, torch.tensor([[0, 1]])
        options = Options(denoising=False, raw_reconstruction=False, hybrid_coeff=0.0, convert_auxiliary=False)
        vb, cross_entropy = plain_terms(process, torch.randn(1, 2, 5), x_0, process.sample(x_0, 4), None, 4, options)
        ```
    """

    denoising: bool
    raw_reconstruction: bool
    hybrid_coeff: float
    convert_auxiliary: bool
    logistic: bool = False


class Kernel:
    """Faster forms of the methods of a class of transitions, with the same results.

    `transition.kernel()` is an object of a class that has the kernel in front of the class of the transition: the methods of the
    kernel replace those of the definition, and everything that calls these methods uses them. Both objects share their attributes.

    A kernel belongs to the class that [`register_kernel`] names, and to its subclasses that override neither a method which the
    kernel replaces nor one of `derived_from`. Any other subclass has no kernel, and its definitions hold, until one is
    registered for it.

    Attributes:
        derived_from: Names of the methods whose definitions the kernel was derived from, beside those that it replaces.

    Examples:
        ```python
        import torch
        from d3pm_hf.kernels import Kernel, kernels_disabled, register_kernel
        from d3pm_hf.transitions import MatrixTransition


        class Cycle(MatrixTransition):  # each step turns state k into state k + 1
            pass


        @register_kernel(Cycle)
        class CycleKernel(Kernel):
            derived_from = ("log_step_matrices",)

            def sample(self, x_0, t, generator=None):
                return (x_0 + t) % self.num_classes


        process, x_0 = Cycle(torch.eye(5).roll(1, 1), num_steps=10), torch.arange(5)[None]
        assert torch.equal(process.kernel().sample(x_0, 3), process.sample(x_0, 3))
        with kernels_disabled():
            assert process.kernel() is None
        ```
    """

    derived_from: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def applies(cls, transition: Any) -> bool:
        """Whether the kernel is for this object of its class."""
        return True

    def prepare(self) -> None:
        """Sets the attributes that the kernel needs beside those of the transition."""


KernelClass = TypeVar("KernelClass", bound=type[Kernel])

KERNELS = f"{__package__.rpartition('.')[0]}.kernels"
_kernels: dict[type, list[Any]] = {}
_enabled = os.environ.get("D3PM_HF_KERNELS", "1") != "0"
# Threads may share a transition, and `prepare` of a second kernel would reset what the first one has computed.
_creation = threading.RLock()


def register_kernel(transition_class: type) -> Callable[[KernelClass], KernelClass]:
    """Class decorator that registers a [`Kernel`] for a class of transitions.

    Several kernels may be registered for one class: the first one whose `applies` returns True is used. A kernel of a subclass
    comes before those of its bases.

    Args:
        transition_class (`type`): The class of transitions that the kernel was derived for.

    See [`Kernel`] for an example.
    """

    def register(kernel: KernelClass) -> KernelClass:
        _kernels.setdefault(transition_class, []).append(kernel)
        kernel_classes.cache_clear()
        return kernel

    return register


@contextmanager
def kernels_disabled() -> Iterator[None]:
    """Context manager that disables all kernels, as the environment variable `D3PM_HF_KERNELS=0` does for a whole program.

    Inside, every number is computed by its definition, and the loss is the plain KL divergence, which autograd differentiates
    any number of times.

    Examples:
        ```python
        from d3pm_hf import D3PMScheduler
        from d3pm_hf.kernels import kernels_disabled

        scheduler = D3PMScheduler(28)
        with kernels_disabled():
            assert scheduler.transition.fused_loss is None
        assert scheduler.transition.fused_loss == "absorbing"
        ```
    """
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def keeps(transition_class: type, owner: type, names: Iterable[str]) -> bool:
    """Whether a class of transitions leaves these attributes as `owner`, one of its bases, has them. A kernel is no change."""
    for cls in transition_class.__mro__:
        if cls is owner:
            return True
        if not issubclass(cls, Kernel) and not vars(cls).keys().isdisjoint(names):
            return False
    raise ValueError(f"{owner.__name__} is no base of {transition_class.__name__}")


@cache
def kernel_classes(transition_class: Any) -> list[Any]:
    """The kernels of a class of transitions, the most specific one first, each as a subclass of the kernel and of the class."""
    classes = []
    for owner in transition_class.__mro__:
        for kernel in _kernels.get(owner, ()):
            own = kernel.__mro__[: kernel.__mro__.index(Kernel)]
            replaced = [name for cls in own for name in vars(cls) if not name.startswith(("__", "_abc_"))]
            if keeps(transition_class, owner, {*kernel.derived_from, *replaced}):
                names = {
                    "__module__": transition_class.__module__,
                    "__reduce__": _reduce,
                    "_definition_class": transition_class,
                }
                classes.append(type(transition_class)(transition_class.__name__, (kernel, transition_class), names))
    return classes


def find_kernel(transition: Any) -> Any:
    """The transition with its kernel, or `None` if it has none or kernels are disabled."""
    if not _enabled:
        return None
    if "_kernel" in vars(transition):
        return transition._kernel
    import_module(KERNELS)  # registers those of the package, whatever was imported before
    with _creation:
        if "_kernel" not in vars(transition):
            own: Any = type(transition)
            fast = None
            for kernel_class in kernel_classes(own):
                if kernel_class.applies(transition):
                    fast = object.__new__(kernel_class)
                    fast.__dict__ = transition.__dict__
                    fast.prepare()
                    break
            # The kernel has the attributes of the transition, and keeps it alive with them.
            transition._definition, transition._kernel = transition, fast
    return transition._kernel


def _reduce(self):
    """Pickles a transition with its kernel as its definition: the kernel is found again."""
    return _restore, (self._definition_class, self.__getstate__())


def _restore(transition_class: type, state: dict) -> Any:
    transition: Any = object.__new__(transition_class)
    transition.__setstate__(state)
    return transition.kernel() or transition


# Operators of torch take tensors and numbers alone: a transition is passed to them as its handle.
_handles = itertools.count()
_transitions: WeakValueDictionary[int, Any] = WeakValueDictionary()


def create_handle(transition: Any) -> int:
    """A handle for the transition, which lives as long as the transition."""
    handle = next(_handles)
    _transitions[handle] = transition
    return handle


def transition_of(handle: int) -> Any:
    """The transition with this handle."""
    if handle not in _transitions:
        raise ValueError(f"there is no transition with the handle {handle}: it belongs to a scheduler that is gone")
    return _transitions[handle]
