# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The signature of every network that predicts x_0 from x_t."""

from typing import Any

import torch
from diffusers import ConfigMixin
from diffusers.models.modeling_utils import get_parameter_device, get_parameter_dtype
from transformers import PreTrainedModel

from ..utils.checks import check_int, check_type


class Denoiser(torch.nn.Module):
    """A network with the signature that training, evaluation and sampling call.

        model_output = denoiser(x_t, timestep, **condition)

    [`ImageDenoiser`] and [`TextDenoiser`] wrap networks of diffusers and transformers. Subclass `Denoiser` to use any other
    network as the `unet` or the `text_model` of a pipeline. To save the pipeline, derive it from a class of
    diffusers or transformers too: `class Mine(Denoiser, ModelMixin, ConfigMixin)` or `class Mine(PreTrainedModel, Denoiser)`.

    A denoiser may take two more arguments, and is then asked for no more logits than are needed. `logits_to_keep` `[n]` are indices
    into the flattened elements of x_t: the output is that of these elements, `[n, K]`. If `apply_head` is given,
    `apply_head(rows, output_layer)` is returned in place of logits, where `rows` are the input of the `torch.nn.Linear` that gives
    them.

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
        grid_columns (`int`, *optional*): Number of columns of a text that is a grid, row by row. The demo app shows it as one.

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
    grid_columns: int | None = None

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
