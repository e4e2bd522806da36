# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Loading, saving and pushing pipelines, on top of the methods of diffusers."""

import inspect
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin, UNet2DModel
from huggingface_hub import CommitInfo, ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..hub.cards import create_model_card
from ..hub.layout import (
    ADAPTER_NAME,
    CARD_NAME,
    INDEX_NAME,
    PACKAGE,
    TRUSTED_LIBRARIES,
    check_report,
    list_components,
    read_json,
)
from ..hub.staging import check_can_be_saved, staged
from ..hub.transfers import (
    HUB_ARGUMENTS,
    PUSH_ARGUMENTS,
    create_repository,
    download_components,
    download_index,
    push_folder,
)
from ..utils.checks import describe
from ..utils.modules import copy_module, tie, tied_names
from ..utils.subclasses import find_subclass, subclasses
from .networks import (
    CONFIG_NAME,
    TRY_AGAIN,
    explain_failure,
    load_network,
    load_pretrained,
    read_settings,
    read_shapes,
    reads_safetensors,
    try_unet,
)
from .tokenizer_files import TOKENIZER_NAME, load_tokenizer
from .trust import NAMESPACE, check_index, find_component, find_imported, find_own


# The configuration that every component of a kind has, and files of which a tokenizer has one.
CONFIG_NAMES = {SchedulerMixin: "scheduler_config.json", PreTrainedTokenizerBase: "tokenizer_config.json"}
TOKENIZER_PATTERNS = (TOKENIZER_NAME, "*.model", "vocab.*")


class CheckpointPipeline(DiffusionPipeline):
    """A `DiffusionPipeline` with the `from_pretrained`, `save_pretrained` and `push_to_hub` of this package."""

    network_name: str

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs):
        """Loads a pipeline from a folder or from the Hub. The base class returns the subclass that the index names.

        Weights are read from safetensors files, unless you pass `use_safetensors=False`. Code of the repository is not
        run, unless you pass `trust_remote_code=True`. Of a LoRA, the checkpoint that it names as its base is loaded first.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): A folder, or the id of a repository on the Hub.
            revision, token, cache_dir, force_download, local_files_only (*optional*): Options of the download.
            variant (`str`, *optional*): Variant of the weights: `"ema"` loads `model.ema.safetensors`.
            dtype (`torch.dtype`, *optional*): Data type of the network.
            kwargs: Components that replace the saved ones, and arguments of `DiffusionPipeline.from_pretrained`.
        """
        source = folder = os.fspath(pretrained_model_name_or_path)
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        trust, variant = kwargs.get("trust_remote_code", False), kwargs.get("variant")
        kwargs["use_safetensors"] = use_safetensors = reads_safetensors(kwargs.get("use_safetensors"))
        if not os.path.isdir(source):
            folder = cls.download(source, variant=variant, trust_remote_code=trust, pickled=not use_safetensors, **hub)
        base = None
        if Path(folder, ADAPTER_NAME).is_file():
            hub.pop("revision", None)  # that of the LoRA
            base = find_base(folder)
            if not Path(folder, INDEX_NAME).is_file():  # a folder of PEFT alone
                find_base_folder(base, hub)
                pipeline = cls.from_pretrained(base, **kwargs, **hub)
                pipeline.load_lora_weights(folder)
                return pipeline
        index = cls.load_config(folder)
        target = find_pipeline(cls, index["_class_name"], folder)
        check_index(index, folder, target, kwargs, trust)
        parameters = inspect.signature(target.__init__).parameters
        for name, value in list_components(index).items():
            if name in parameters and name not in kwargs:
                kind = find_component(value)
                if base is not None and name == target.network_name:
                    component = load_base(cls, base, name, kind, kwargs, hub)
                else:
                    component = load_component(Path(folder, name), kind, kwargs)
                if component is not None:
                    kwargs[name] = component
        pipeline = super(CheckpointPipeline, target).from_pretrained(folder, **kwargs)
        pipeline.register_to_config(_name_or_path=base or source)
        if base is not None:
            pipeline.load_lora_weights(folder)
        return pipeline

    def register_to_config(self, **kwargs):
        """Records settings and components. Classes of this package are recorded without their module, which may move."""
        for name, value in kwargs.items():
            if isinstance(value, tuple) and len(value) == 2 and str(value[0]).split(".")[0] == PACKAGE:
                kwargs[name] = (PACKAGE, value[1])
        super().register_to_config(**kwargs)

    @classmethod
    def load_config(cls, pretrained_model_name_or_path, **kwargs):
        """Loads the index of a checkpoint, `model_index.json`.

        An index that `export` wrote names modules beside the weights; classes of this package and classes
        that the program has imported take their place.
        """
        if kwargs:  # the caller asks for unused arguments, the commit or a download
            return super().load_config(pretrained_model_name_or_path, **kwargs)
        path = Path(pretrained_model_name_or_path, INDEX_NAME)
        if not path.is_file():
            raise OSError(
                f"{pretrained_model_name_or_path} has no {INDEX_NAME}, so it is not the folder of a pipeline: pass a folder "
                "that `save_pretrained` has written"
            )
        index = read_json(path)
        class_name = index.get("_class_name")
        if isinstance(class_name, list) and class_name:  # exported: the module beside the weights, and the class
            index["_class_name"] = class_name = class_name[-1]
        if not isinstance(class_name, str):
            raise ValueError(
                f"{path} has _class_name={describe(class_name)}, so it is not the index of a "
                "pipeline: pass a folder that `save_pretrained` has written"
            )
        for name, value in list_components(index).items():
            if find_own(value[1]) is not None:
                index[name] = [PACKAGE, value[1]]
            elif value[0] and value[0] not in TRUSTED_LIBRARIES and find_imported(*value) is not None:
                index[name] = [NAMESPACE, ".".join(value)]
        return index

    @classmethod
    def download(cls, pretrained_model_name, *, variant=None, trust_remote_code=False, pickled=False, **kwargs) -> str:
        """Downloads a checkpoint from the Hub, or finds it in the cache, and returns its folder.

        Only the index, the card, configurations, tokenizer files and safetensors of the variant are downloaded.
        """
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        folder = download_index(pretrained_model_name, **hub)
        names = []
        if Path(folder, INDEX_NAME).is_file() or not Path(folder, ADAPTER_NAME).is_file():
            names = [name for name in list_components(cls.load_config(folder)) if name.isidentifier()]
        return download_components(pretrained_model_name, names, variant, trust_remote_code, pickled, **hub)

    def to(self, *args, **kwargs):
        """Moves the pipeline, as `DiffusionPipeline.to` does. Tied weights stay tied on XLA too."""
        networks = [value for value in self.components.values() if isinstance(value, torch.nn.Module)]
        ties = [tied_names(network) for network in networks]
        moved = super().to(*args, **kwargs)
        for network, groups in zip(networks, ties):
            tie(network, groups)
        return moved

    def save_pretrained(
        self, save_directory: str | os.PathLike, safe_serialization: bool = True, push_to_hub: bool = False, **kwargs
    ):
        """Saves the pipeline and, if the folder has none, a model card.

        The files are written beside the folder and moved there when all are complete: a full disk or a killed run does
        not damage a checkpoint that was saved there before. Its weights of the same variant are replaced, also those of another
        format or number of shards.

        Args:
            save_directory (`str` or `os.PathLike`): Folder of the checkpoint.
            safe_serialization (`bool`, defaults to `True`): Whether to save safetensors; `False` saves networks of diffusers as
                pickles. Networks of transformers are always saved as safetensors.
            push_to_hub (`bool`, defaults to `False`): Whether to push the folder to the repository `repo_id` as well.
            kwargs: `variant` and `max_shard_size`, and arguments of [`push_to_hub`].
        """
        check_can_be_saved(self)
        target = Path(save_directory)
        hub = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs}
        name, private = hub.pop("repo_id", None) or target.name, hub.pop("private", None)
        repo_id = create_repository(name, private, hub.get("token")) if push_to_hub else None
        parts = {name: part for name, part in self.components.items() if part is not None}
        # The index of a component that was `None` for a while says so until the component is registered again.
        self.register_modules(**{name: part for name, part in parts.items() if self.config[name][0] is None})
        with staged(target) as staging, networks_on_cpu(self):
            super().save_pretrained(staging, safe_serialization=safe_serialization, **kwargs)
            if not (target / CARD_NAME).exists():
                create_model_card(self, repo_id).save(staging / CARD_NAME)
        if repo_id is not None:
            return push_folder(target, repo_id, **hub)

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        create_pr: bool = False,
        safe_serialization: bool = True,
        variant: str | None = None,
        card: ModelCard | None = None,
    ) -> CommitInfo:
        """Pushes the pipeline to a repository on the Hub, which is created if it does not exist.

        Args:
            repo_id (`str`): Id of the repository, such as `"your-name/d3pm-text8"`.
            commit_message (`str`, *optional*): Message of the commit.
            private (`bool`, *optional*): Whether a new repository is private.
            token (`str`, *optional*): Token with write access. Defaults to the one you are logged in with.
            create_pr (`bool`, defaults to `False`): Whether to open a pull request in place of a commit.
            safe_serialization (`bool`, defaults to `True`): Whether to save safetensors; `False` saves networks of diffusers as
                pickles. Networks of transformers are always saved as safetensors.
            variant (`str`, *optional*): Variant of the weights: `"ema"` saves `model.ema.safetensors`.
            card (`ModelCard`, *optional*): README of the repository. By default an existing one is kept, and otherwise
                [`create_model_card`] writes one.
        """
        check_can_be_saved(self)
        repo_id = create_repository(repo_id, private, token)
        with tempfile.TemporaryDirectory() as folder:
            (card or create_model_card(self, repo_id)).save(os.path.join(folder, CARD_NAME))
            self.save_pretrained(folder, safe_serialization=safe_serialization, variant=variant)
            return push_folder(folder, repo_id, commit_message, token, create_pr, new_card=card is not None)


def find_base(folder: str) -> str:
    """Returns the checkpoint that the LoRA in a folder names as its base."""
    path = Path(folder, ADAPTER_NAME)
    base = read_json(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{path} has base_model_name_or_path={describe(base)}, so that its base is not known: load the base, and add the LoRA "
            "with `load_lora_weights`"
        )
    return base


def find_base_folder(base: str, hub: dict) -> str:
    """Returns the folder with the index of the base of a LoRA, which must not be a LoRA itself."""
    folder = base if os.path.isdir(base) else download_index(base, **hub)
    if Path(folder, ADAPTER_NAME).is_file():
        raise ValueError(
            f"{base} is a LoRA, and the base of another one: load its own base, and fuse both one after the other"
        )
    return folder


def load_base(
    cls: type["CheckpointPipeline"], base: str, name: str, kind: type | None, options: dict, hub: dict
) -> torch.nn.Module:
    """Loads the network of a LoRA: the component `name` of the pipeline `base`, or the language model `base`."""
    folder = find_base_folder(base, hub)
    if not Path(folder, INDEX_NAME).is_file():
        if kind is None or not issubclass(kind, PreTrainedModel):
            raise OSError(
                f"the base {base!r} has no {INDEX_NAME}: load the pipeline, and add the LoRA with `load_lora_weights`"
            )
        return load_pretrained(kind, base, **network_options(name, options), **hub)[0]
    if not os.path.isdir(base):
        folder = cls.download(base, pickled=not options["use_safetensors"], **hub)
    value = list_components(cls.load_config(folder)).get(name)
    kind = None if value is None else find_component(value)
    network = None if kind is None else load_component(Path(folder, name), kind, {**options, "variant": None})
    if network is None:
        raise ValueError(
            f"the base {base!r} has no {name}: load its pipeline, and add the LoRA with `load_lora_weights`"
        )
    return network


def load_component(part: Path, cls: type | None, options: dict) -> Any:
    """Loads a network or a tokenizer from its folder, with `options` of [`CheckpointPipeline.from_pretrained`].

    Returns `None` for what diffusers loads: schedulers, whose files are checked here, and code of the repository.
    """
    variant = options.get("variant")
    settings = read_settings(part, variant)
    cls = cls or object  # code of the repository
    if issubclass(cls, (ModelMixin, PreTrainedModel)) and "quantization_config" not in options:
        network, report = load_network(part, cls, settings, variant, **network_options(part.name, options))
        check_report(report, part, f"a {cls.__name__} with this {CONFIG_NAME}", TRY_AGAIN)
        if cls is UNet2DModel:
            with explain_failure(part, cls):
                try_unet(network)
        return network
    needed = [name for kind, name in CONFIG_NAMES.items() if issubclass(cls, kind)]
    if issubclass(cls, PreTrainedTokenizerBase) and not any([*part.glob(name)] for name in TOKENIZER_PATTERNS):
        needed.append(TOKENIZER_NAME)
    for name in needed:
        if not (part / name).is_file():
            raise OSError(f"{part / name} is missing: the checkpoint is incomplete; download or save it again")
    if issubclass(cls, PreTrainedTokenizerBase):
        return load_tokenizer(part, cls, settings)
    read_shapes(part)
    return None


def network_options(name: str, options: dict) -> dict[str, Any]:
    """Returns the options of `from_pretrained` that the network `name` is loaded with."""
    dtype = options.get("dtype", options.get("torch_dtype"))
    if isinstance(dtype, dict):  # by the names of components
        dtype = dtype.get(name, dtype.get("default", torch.float32))
    return {"dtype": dtype, "device_map": options.get("device_map"), "use_safetensors": options["use_safetensors"]}


@contextmanager
def networks_on_cpu(pipeline: CheckpointPipeline) -> Iterator[None]:
    """A context in which copies on the CPU take the place of networks on XLA, whose memory safetensors cannot read."""
    away = {
        name: value
        for name, value in pipeline.components.items()
        if isinstance(value, torch.nn.Module) and any(p.device.type == "xla" for p in value.parameters())
    }
    for name, network in away.items():
        setattr(pipeline, name, copy_module(network))
    try:
        yield
    finally:
        for name, network in away.items():
            setattr(pipeline, name, network)


def find_pipeline(cls: type[CheckpointPipeline], class_name: str, folder: str) -> type[CheckpointPipeline]:
    """Returns the imported pipeline class of that name if it is a `cls`, and `cls` itself if it derives from that class."""
    found = find_subclass(CheckpointPipeline, class_name)
    if found is None and class_name in getattr(sys.modules.get(PACKAGE), "__all__", ()):
        found = getattr(sys.modules[PACKAGE], class_name)  # of a layer above, which is imported when it is used
        found = found if isinstance(found, type) and issubclass(found, CheckpointPipeline) else None
    if found is None and class_name in dir(diffusers):
        names = " or ".join(one.__name__ for one in subclasses(CheckpointPipeline) if "task" in vars(one))
        raise ValueError(
            f"{folder} is a checkpoint of the pipeline {class_name!r}, not of {names}: load it with "
            "`diffusers.DiffusionPipeline`"
        )
    if found is None:
        raise ValueError(
            f"{folder} is a checkpoint of the pipeline {describe(class_name)}, which this program has not imported: import that "
            "class first, or load it with `diffusers.DiffusionPipeline` and `trust_remote_code=True` if its code is in "
            "the repository and you have read it"
        )
    if issubclass(found, cls):
        return found
    if issubclass(cls, found):
        return cls
    raise ValueError(f"{folder} is a checkpoint of {class_name}, not of {cls.__name__}: load it with {class_name}")
