# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Denoisers: one signature for every network that predicts x_0 from x_t."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.models.modeling_utils import get_parameter_device, get_parameter_dtype
from transformers import Cache, DynamicCache, PreTrainedModel

from ..utils.checks import check_choice, check_int, check_type, describe, values_are_known
from ..utils.modules import without_compilation
from .caching import check_prefix, shorten_mask
from .unet import PREDICTION_TYPES, logistic_parameters, normalize, num_output_channels, residual_logits


# The largest height or width of an image.
MAX_SIDE = 1 << 14


class Denoiser(torch.nn.Module):
    """A network with the signature that training, evaluation and sampling call.

        model_output = denoiser(x_t, timestep, **condition)

    [`ImageDenoiser`] and [`TextDenoiser`] wrap networks of diffusers and transformers. Subclass `Denoiser` to use any other
    network as the `unet` or the `text_model` of a pipeline. To save the pipeline, derive it from a class of
    diffusers or transformers too: `class Mine(Denoiser, ModelMixin, ConfigMixin)` or `class Mine(PreTrainedModel, Denoiser)`.

    Args:
        network (`torch.nn.Module`, *optional*): The network to wrap. A denoiser without one is a network itself.

    Attributes:
        is_causal (`bool`): Whether the output at a position depends on the tokens before it alone, its own excluded.
        reads_timestep (`bool`): Whether the output depends on `timestep`.
        num_classes (`int`, *optional*): Number of states K that the network predicts. Pipelines compare it with that of
            the scheduler, unless it is `None`.
        sample_shape (`tuple[int, int, int]`, *optional*): Shape (C, H, W) of the images. Required by image pipelines.
        num_class_labels (`int`, *optional*): Number of class labels, if `class_labels` are an input of the network.
        null_class (`int`, *optional*): The label that stands for "no class", if the network has one.

    Examples:
        ```python
        import torch
        from d3pm_hf import Denoiser


        class Frequencies(Denoiser):
            '''Predicts the same distribution everywhere.'''

            def __init__(self, probs):
                super().__init__()
                self.num_classes, self.logits = len(probs), torch.nn.Parameter(probs.log())

            def forward(self, x_t, timestep):
                return self.logits.expand(*x_t.shape, -1)


        logits = Frequencies(torch.tensor([0.7, 0.2, 0.1]))(torch.zeros(2, 5, dtype=torch.long), 0)  # [2, 5, 3]
        ```
    """

    is_causal: bool = False
    reads_timestep: bool = True
    num_classes: int | None = None
    sample_shape: tuple[int, int, int] | None = None
    num_class_labels: int | None = None
    null_class: int | None = None

    def __init__(self, network: torch.nn.Module | None = None):
        super().__init__()
        if network is not None:
            check_type("network", network, torch.nn.Module, "a network (`torch.nn.Module`)")
            self._modules["network"] = network
            self.training = network.training

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        order = cls.__mro__.index
        # `ConfigMixin.__getattr__` does not look up submodules: it must come after `torch.nn.Module`.
        if issubclass(cls, ConfigMixin) and order(ConfigMixin) < order(torch.nn.Module):
            raise TypeError(f"name `Denoiser` before `ConfigMixin` among the bases of {cls.__name__}")
        # `PreTrainedModel.__init__` takes the configuration.
        if issubclass(cls, PreTrainedModel) and order(Denoiser) < order(PreTrainedModel):
            raise TypeError(f"name `PreTrainedModel` before `Denoiser` among the bases of {cls.__name__}")

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor, **condition) -> torch.Tensor:
        """Predicts the distribution of x_0 (or of x_{t-1}, for `prediction_type="previous"`).

        Args:
            x_t (`torch.LongTensor` of shape `[B, ...]`): States.
            timestep (`torch.LongTensor` of shape `[B]` or `[]`): Timesteps t in 0 .. T-1.
            condition: Further inputs of the network, with one row per sample.

        Returns:
            Logits of shape `[B, ..., K]`, or location and log-scale of shape `[B, ..., 2]` for
            `prediction_type="logistic"`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(x_t, timestep, **condition)")

    def drop_condition(self, condition: dict, rows: torch.Tensor) -> dict:
        """The condition with "no condition" in some rows, for training with dropout and for `guidance_scale`.

        Class labels become the null class, and the attention mask stays. A denoiser with other conditions overrides this.

        Args:
            condition (`dict`): Arguments of the denoiser beside x_t and the timestep.
            rows (`torch.BoolTensor` of shape `[B]`): True for the rows that lose their condition.
        """
        dropped = dict(condition)
        for name, value in condition.items():
            if name == "class_labels" and self.null_class is not None:
                dropped[name] = torch.where(rows, self.null_class, value)
            elif name == "class_labels":
                raise ValueError(
                    "the network has no class for 'no class': train it with num_class_embeds = num_class_labels + 1 and pass "
                    "num_class_labels to the pipeline"
                )
            elif name != "attention_mask":
                raise ValueError(
                    f"there is no value of {name!r} that stands for no condition: define the method drop_condition in your "
                    "Denoiser"
                )
        return dropped

    def start_cache(self, condition: dict) -> Any:
        """An empty cache for [`~Denoiser.next_logits`], or `None` if the network keeps none under this condition.

        Only a causal denoiser that does not read the timestep can have one. Override both methods to offer it; samples of an
        autoregressive process then read each token once (`sampler="left_to_right"`).

        Args:
            condition (`dict`): Arguments of the denoiser beside x_t and the timestep.
        """
        return None

    def next_logits(self, x: torch.Tensor, cache: Any, **condition) -> torch.Tensor:
        """Logits `[B, K]` of the token after `x`, those that the denoiser gives at position n of any x_t that begins with x.

        Only the tokens that the cache does not hold are read, and it holds them afterwards.

        Args:
            x (`torch.LongTensor` of shape `[B, n]`): The first n tokens; at least one more than in the call before.
            cache: What [`~Denoiser.start_cache`] returned, with the tokens of earlier calls.
            condition: As in a call of the denoiser, for N tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must define next_logits(x, cache, **condition)")

    @property
    def network(self) -> torch.nn.Module:
        """The wrapped network, or the denoiser itself if it wraps none."""
        network = self._modules.get("network")
        return self if network is None else network

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return get_parameter_device(self.network)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type that the network computes in."""
        return get_parameter_dtype(self.network)

    def tie_weights(self) -> None:
        """Ties the weights of the wrapped network, as `PreTrainedModel.tie_weights` does.

        Accelerate calls it after it has sharded the network from the weights of the first process. Override it in a denoiser
        of your own with tied weights.
        """
        method = getattr(self.network, "tie_weights", None)
        if self.network is not self and callable(method):
            method()

    def _set_classes(self, num_class_labels: int | None) -> None:
        """Sets the number of classes and the null class from the `num_class_embeds` of the network."""
        num_embeds = getattr(getattr(self.network, "config", None), "num_class_embeds", None)
        if num_class_labels is not None:
            check_int("num_class_labels", num_class_labels, 1)
            if num_embeds not in (num_class_labels, num_class_labels + 1):
                raise ValueError(
                    f"num_class_labels is {num_class_labels}, and the network has num_class_embeds={num_embeds}: it needs "
                    f"{num_class_labels} embeddings, or {num_class_labels + 1} with one for 'no class'"
                )
        self.num_class_labels = num_embeds if num_class_labels is None else num_class_labels
        self.null_class = None if num_embeds == self.num_class_labels else self.num_class_labels

    def _with_class(self, condition: dict, x_t: torch.Tensor) -> dict:
        """The condition, with the null class of a class-conditional network if it holds no `class_labels`."""
        if self.num_class_labels is None or condition.get("class_labels") is not None:
            return condition
        if self.null_class is None:
            raise ValueError(f"the network is conditioned on {self.num_class_labels} classes: pass class_labels")
        return {**condition, "class_labels": torch.full(x_t.shape[:1], self.null_class, device=x_t.device)}


class ImageDenoiser(Denoiser):
    """Wraps a network of diffusers over images, such as an unmodified `UNet2DModel`.

    The network reads x_t scaled to [-1, 1] as `network(sample, timestep, **condition, return_dict=False)`. Its output
    channels become logits, to which the one-hot of x_t is added, or location and log-scale.

    Args:
        network (`torch.nn.Module`): The network, with `in_channels`, `out_channels` and `sample_size` in its configuration.
        num_classes (`int`): Number of levels K of a pixel.
        prediction_type (`str`, defaults to `"x0"`): The scheduler's: `"x0"`, `"logistic"` or `"previous"`.
        num_class_labels (`int`, *optional*): Number of class labels of a network with `num_class_embeds`. By default each
            embedding is that of a class; if there is one more than classes, the last stands for "no class".

    Examples:
        ```python
        import torch
        from d3pm_hf import ImageDenoiser, create_unet

        denoiser = ImageDenoiser(create_unet("tiny", num_classes=16, sample_size=8, in_channels=1), num_classes=16)
        logits = denoiser(torch.randint(0, 16, (2, 1, 8, 8)), torch.tensor([3, 700]))  # [2, 1, 8, 8, 16]
        ```
    """

    num_classes: int

    def __init__(
        self,
        network: torch.nn.Module,
        num_classes: int,
        prediction_type: str = "x0",
        num_class_labels: int | None = None,
    ):
        check_type("network", network, torch.nn.Module, "a network (`torch.nn.Module`), such as a `UNet2DModel`")
        check_int("num_classes", num_classes, 2)
        check_choice("prediction_type", prediction_type, PREDICTION_TYPES)
        super().__init__(network)
        self.num_classes, self.prediction_type = num_classes, prediction_type
        config = getattr(network, "config", None)
        self.num_channels: int | None = getattr(config, "in_channels", None)
        size = getattr(config, "sample_size", None)
        if self.num_channels is not None and size is not None:
            sizes = size if isinstance(size, (list, tuple)) else [size, size]
            for one in sizes:
                check_int("sample_size of the network", one, 1)
                check_int("sample_size of the network", one, high=MAX_SIDE)
            if len(sizes) != 2:
                raise ValueError(f"sample_size of the network is {size}: it must be an integer, or height and width")
            self.sample_shape = (self.num_channels, *sizes)
        self._check_output_channels(getattr(config, "out_channels", None))
        self._set_classes(num_class_labels)

    def _check_output_channels(self, out_channels: int | None) -> None:
        """Checks that the network has as many output channels as the process needs."""
        if self.num_channels is None or out_channels is None:
            return
        needed = num_output_channels(self.num_channels, self.num_classes, self.prediction_type)
        if out_channels != needed:
            raise ValueError(
                f"the network has {out_channels} output channels, and {self.num_channels} channels of {self.num_classes} "
                f"levels with prediction_type={self.prediction_type!r} need {needed}: use a network and a scheduler of the "
                "same checkpoint"
            )

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor | int, **condition) -> torch.Tensor:
        """Predicts `[B, C, H, W, K]`, or `[B, C, H, W, 2]` for `prediction_type="logistic"`, in float32.

        Args:
            x_t (`torch.LongTensor` of shape `[B, C, H, W]`): States.
            timestep (`int`, or `torch.LongTensor` of shape `[B]` or `[]`): Timesteps.
            condition: Further arguments of the network, such as `class_labels`. Without them, a network with a null
                class predicts without a class.
        """
        self._check_states(x_t)
        condition = self._with_class(condition, x_t)
        sample = normalize(x_t, self.num_classes).to(self.dtype)
        output = self.network(sample, self._expand(timestep, x_t), **condition, return_dict=False)[0]
        if self.prediction_type == "logistic":
            return logistic_parameters(output, x_t, self.num_classes)
        return residual_logits(output, x_t)

    def _check_states(self, x_t: torch.Tensor) -> None:
        check_type("x_t", x_t, torch.Tensor, "a `torch.LongTensor` of shape [B, C, H, W]")
        if x_t.dtype != torch.long or x_t.ndim != 4:
            raise ValueError(f"x_t is {describe(x_t)}: it must be a `torch.LongTensor` of shape [B, C, H, W]")
        if self.num_channels not in (None, x_t.shape[1]):
            raise ValueError(f"x_t has {x_t.shape[1]} channels, and the network reads {self.num_channels}")
        if values_are_known(x_t) and not 0 <= x_t.min() <= x_t.max() < self.num_classes:
            raise ValueError(
                f"x_t has states from {x_t.min()} to {x_t.max()}: they must lie in 0 .. {self.num_classes - 1}"
            )

    @staticmethod
    def _expand(timestep: torch.Tensor | int, x_t: torch.Tensor) -> torch.Tensor:
        """`timestep` with one entry per image, `[B]`."""
        if not isinstance(timestep, torch.Tensor) or timestep.is_floating_point():
            check_int("timestep", timestep)
        times = torch.as_tensor(timestep, device=x_t.device)
        if times.ndim and times.shape != x_t.shape[:1]:
            raise ValueError(
                f"timestep is {describe(times)}: pass one integer, or one per image of the batch of {x_t.shape[0]}"
            )
        return times.expand(x_t.shape[:1])  # `len(x_t)` would fix the size of the batch in `torch.export`


class TextDenoiser(Denoiser):
    """Wraps a [`D3PMTextModel`], or any masked language model of transformers.

    The network is called as `network(x_t, timestep=timestep, **condition, return_dict=False)`; without `timestep` unless
    its configuration has `timestep_conditioning`.

    Args:
        network (`torch.nn.Module`): The network, with `vocab_size` in its configuration.
        num_classes (`int`, *optional*): Number of states K. Must equal the `vocab_size` of the network, its default.
        num_class_labels (`int`, *optional*): Number of class labels of a network with `num_class_embeds`. By default each
            embedding is that of a class; if there is one more than classes, the last stands for "no class".

    Examples:
        ```python
        import torch
        from d3pm_hf import TextDenoiser, create_text_model

        denoiser = TextDenoiser(create_text_model("tiny", vocab_size=28))
        logits = denoiser(torch.randint(0, 28, (2, 16)), torch.tensor([3, 700]))  # [2, 16, 28]
        ```
    """

    def __init__(self, network: torch.nn.Module, num_classes: int | None = None, num_class_labels: int | None = None):
        check_type("network", network, torch.nn.Module, "a network (`torch.nn.Module`), such as a `D3PMTextModel`")
        if num_classes is not None:
            check_int("num_classes", num_classes, 2)
        config = getattr(network, "config", None)
        vocab_size = getattr(config, "vocab_size", num_classes)
        if num_classes not in (None, vocab_size):
            raise ValueError(
                f"the network has a vocabulary of {vocab_size} and the scheduler one of {num_classes}: use a network and a "
                "scheduler of the same checkpoint"
            )
        super().__init__(network)
        self.num_classes = vocab_size
        self.is_causal = bool(getattr(network, "is_causal", False))
        self.reads_timestep = bool(getattr(config, "timestep_conditioning", False))
        self._set_classes(num_class_labels)

    def forward(self, x_t: torch.Tensor, timestep: torch.Tensor | int, **condition) -> torch.Tensor:
        """Predicts logits `[B, N, K]`.

        Args:
            x_t (`torch.LongTensor` of shape `[B, N]`): Tokens.
            timestep (`int`, or `torch.LongTensor` of shape `[B]` or `[]`): Timesteps.
            condition: Further arguments of the network, such as `attention_mask` and `class_labels`. Without labels, a
                network with a null class predicts without a class.
        """
        condition = self._with_class(condition, x_t)
        arguments = {"timestep": timestep} if self.reads_timestep else {}
        return self.network(x_t, **arguments, **condition, return_dict=False)[0]

    def start_cache(self, condition: dict) -> Cache | None:
        """An empty cache, or `None`: only a [`D3PMTextModel`] that is causal, not compiled and has `supports_cache` keeps one."""
        is_compiled = without_compilation(self.network) is not self.network  # for shapes that stay the same
        if is_compiled or not getattr(self.network, "supports_cache", False):
            return None
        return DynamicCache() if set(condition) <= {"attention_mask", "class_labels"} else None

    def next_logits(self, x: torch.Tensor, cache: Cache, **condition) -> torch.Tensor:
        """Logits `[B, K]` of the token after `x` `[B, n]`."""
        check_prefix(x, cache)
        condition = shorten_mask(self._with_class(condition, x), x.shape[1] + 1)
        x = F.pad(x, (0, 1))  # whatever stands at position n, its logits do not depend on it
        return self.network(x, past_key_values=cache, **condition, return_dict=False)[0][:, -1]


def predict_image(
    unet: torch.nn.Module, x_t: torch.Tensor, timestep, num_classes: int, prediction_type: str
) -> torch.Tensor:
    """Output of a U-Net as the scheduler and the losses take it: one call of [`ImageDenoiser`].

    Args:
        unet (`torch.nn.Module`): A `UNet2DModel`, or another network with its signature.
        x_t (`torch.LongTensor` of shape `[B, C, H, W]`): States.
        timestep (`int`, or `torch.LongTensor` of shape `[B]` or `[]`): Timesteps.
        num_classes (`int`): Number of levels K of a pixel.
        prediction_type (`str`): The scheduler's: `"x0"`, `"logistic"` or `"previous"`.
    """
    check_type("unet", unet, torch.nn.Module, "a `UNet2DModel`")
    return ImageDenoiser(unet, num_classes, prediction_type)(x_t, timestep)
