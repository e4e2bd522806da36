# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""LoRA of pipelines, with the methods of diffusers."""

import os
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.pipeline_loading_utils import _fetch_class_library_tuple
from huggingface_hub import CommitInfo, ModelCard

from ..hub.adapters import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS_NAME,
    adapter_configs,
    adapter_layers,
    bare_network,
    check_adapter_place,
    check_not_fused,
    choose_adapter,
    is_fused,
    load_adapter,
    remember_base,
    remove_adapters,
    save_adapter,
)
from ..hub.cards import base_of, create_model_card
from ..hub.layout import CARD_NAME
from ..hub.staging import staged
from ..hub.transfers import HUB_ARGUMENTS, PUSH_ARGUMENTS, create_repository, download, push_folder
from ..utils.checks import check_choice, check_path, check_positive, check_str, check_type
from .loading import CheckpointPipeline


class LoraMixin(CheckpointPipeline):
    """Gives a pipeline the LoRA methods of diffusers. They need the package peft (`pip install d3pm-hf[lora]`)."""

    _lora_scale = 1.0

    def load_lora_weights(
        self,
        pretrained_model_name_or_path: str | os.PathLike,
        adapter_name: str | None = None,
        check_base: bool = True,
        **kwargs: Any,
    ) -> None:
        """Adds a LoRA to the network. It becomes the active one, and the one that `train` goes on to train.

            W x  becomes  W x + (lora_alpha / r) B A x

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Folder that [`save_lora_weights`], `train` or PEFT has
                written, or the id of such a repository on the Hub.
            adapter_name (`str`, *optional*): Name of the LoRA in this pipeline. Defaults to `default_0`, `default_1`, ...
            check_base (`bool`, defaults to `True`): Whether the weights of the network must be those that the LoRA was trained
                on. A file of another program does not tell them; only names and shapes are compared then.
            kwargs: `revision`, `token`, `cache_dir`, `force_download` and `local_files_only`, for the download.
        """
        check_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
        check_type("check_base", check_base, bool, "True or False")
        for name in kwargs:
            check_choice("an argument of the download", name, HUB_ARGUMENTS)
        network = self._plain_network()
        configs = adapter_configs(network)
        if adapter_name is None:
            number = next(i for i in range(len(configs) + 1) if f"default_{i}" not in configs)
            adapter_name = f"default_{number}"
        check_str("adapter_name", adapter_name)
        if adapter_name in configs:
            raise ValueError(f"adapter_name is {adapter_name!r}, which the pipeline has already: choose another name")
        check_not_fused(network)
        folder = source = os.fspath(pretrained_model_name_or_path)
        if not os.path.isdir(source):
            folder = download(source, [ADAPTER_NAME, ADAPTER_WEIGHTS_NAME], **kwargs)
        load_adapter(network, Path(folder), adapter_name, check_base)

    def save_lora_weights(
        self,
        save_directory: str | os.PathLike,
        adapter_name: str | None = None,
        push_to_hub: bool = False,
        card: ModelCard | None = None,
        **kwargs: Any,
    ) -> CommitInfo | None:
        """Saves a LoRA without the network, in the layout of PEFT, and beside it the scheduler and the tokenizer.

        The folder names the checkpoint that the network was loaded from, its base: [`D3PMPipeline.from_pretrained`] loads both.
        `PeftModel.from_pretrained` and `load_adapter` of transformers read it as well.

        Args:
            save_directory (`str` or `os.PathLike`): Folder of the LoRA.
            adapter_name (`str`, *optional*): Name of the LoRA. Defaults to the active one.
            push_to_hub (`bool`, defaults to `False`): Whether to push the folder to the repository `repo_id` as well.
            card (`ModelCard`, *optional*): README. By default an existing one is kept, and otherwise [`create_model_card`]
                writes one.
            kwargs: `repo_id`, `commit_message`, `private`, `token` and `create_pr`, for the upload.
        """
        check_path("save_directory", save_directory)
        network = self.bare_network
        adapter_name = choose_adapter(network, adapter_name)
        target = Path(save_directory)
        for name in kwargs:
            check_choice("an argument of the upload", name, PUSH_ARGUMENTS)
        check_adapter_place(target, self.network_name, kwargs.get("repo_id") if push_to_hub else None, base_of(self))
        name, private = kwargs.pop("repo_id", None) or target.name, kwargs.pop("private", None)
        repo_id = create_repository(name, private, kwargs.get("token")) if push_to_hub else None
        with staged(target) as staging:
            save_adapter(network, adapter_name, base_of(self), staging)
            self.register_to_config(**{self.network_name: _fetch_class_library_tuple(network)})
            self.save_config(staging)
            for part_name, part in self.components.items():
                if part_name != self.network_name and part is not None:
                    part.save_pretrained(staging / part_name)
            if card is not None or not (target / CARD_NAME).exists():
                (card or create_model_card(self, repo_id)).save(staging / CARD_NAME)
        return push_folder(target, repo_id, **kwargs, new_card=card is not None) if repo_id is not None else None

    def set_adapters(self, adapter_names: str | list[str], adapter_weights: float | list[float] | None = None) -> None:
        """Chooses the LoRA that the network computes with, or several, whose changes are added.

        Args:
            adapter_names (`str` or `list[str]`): Their names.
            adapter_weights (`float` or `list[float]`, *optional*): Factor of each. Defaults to 1.
        """
        network = self._plain_network()
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        check_type("adapter_names", names, (list, tuple), "a name or a list of names")
        weights: Any = adapter_weights
        if not isinstance(adapter_weights, (list, tuple)):
            weights = [1.0 if adapter_weights is None else adapter_weights] * len(names)
        configs = adapter_configs(network)
        for name in names or [""]:
            if name not in configs:
                raise ValueError(
                    f"adapter_names has {name!r}, and the pipeline has {sorted(configs)}: choose among them"
                )
        if len(weights) != len(names):
            raise ValueError(f"got {len(weights)} adapter_weights for {len(names)} adapter_names: pass one for each")
        for weight in weights:
            check_type("adapter_weights", weight, (int, float), "numbers")
        check_not_fused(network)
        from peft.functional import set_adapter

        set_adapter(network, list(names))
        for _, layer in adapter_layers(network):
            for name, weight in zip(names, weights):
                if hasattr(layer, "set_scale"):
                    layer.set_scale(name, weight)

    def fuse_lora(self, lora_scale: float = 1.0, adapter_names: list[str] | None = None) -> None:
        """Adds the active LoRA to the weights of the network, which is then as fast as without it.

            W  becomes  W + lora_scale (lora_alpha / r) B A

        `unload_lora_weights` then leaves a network without layers of PEFT, which `save_pretrained` saves whole.

        Args:
            lora_scale (`float`, defaults to 1.0): Factor of the change.
            adapter_names (`list[str]`, *optional*): LoRA to choose first, as by `set_adapters`. Defaults to the active ones.
        """
        check_positive("lora_scale", lora_scale)
        network = self._plain_network()
        if not adapter_configs(network):
            raise ValueError("the pipeline has no LoRA: call `load_lora_weights` first")
        check_not_fused(network)
        if adapter_names is not None:
            self.set_adapters(adapter_names)
        remember_base(network)
        with torch.no_grad():
            for _, layer in adapter_layers(network):
                if hasattr(layer, "merge"):
                    layer.scale_layer(lora_scale)
                    layer.merge()
        self._lora_scale = lora_scale

    def unfuse_lora(self) -> None:
        """Subtracts what `fuse_lora` has added. The weights are as before but for rounding."""
        network = self._plain_network()
        if not adapter_configs(network) or not is_fused(network):
            raise ValueError("no LoRA is fused with the network: call `fuse_lora` first")
        with torch.no_grad():
            for _, layer in adapter_layers(network):
                if hasattr(layer, "unmerge"):
                    layer.unmerge()
                    layer.unscale_layer(self._lora_scale)
        self._lora_scale = 1.0

    def unload_lora_weights(self) -> None:
        """Removes all LoRA. What `fuse_lora` has added stays in the weights, all of which are trained again."""
        network = self._plain_network()
        if adapter_configs(network):
            remove_adapters(network)
        self._lora_scale = 1.0

    def _plain_network(self) -> Any:
        """The network, in place of the `PeftModel` around it if there is one."""
        component = getattr(self, self.network_name)
        network = bare_network(component)
        if network is not component:
            setattr(self, self.network_name, network)
        return network
