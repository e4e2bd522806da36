# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Networks of transformers by themselves, from the Hub or from a folder, with the checks of a checkpoint."""

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..hub.download import HUB_ARGUMENTS, download_network
from .integrity import check_missing, check_network


def load_network(
    auto_class: Any, name: str, trust_remote_code: bool = False, use_safetensors: bool = True, **kwargs: Any
) -> tuple[PreTrainedModel, Path]:
    """Loads a network of transformers and returns it with the folder of its files.

    Args:
        auto_class (`type`): Class of transformers that loads the network, such as `AutoModelForMaskedLM`.
        name (`str`): Id of a repository on the Hub, or a folder.
        trust_remote_code (`bool`, defaults to `False`): Whether transformers may run code of the repository.
        use_safetensors (`bool`, defaults to `True`): Whether weights are read from safetensors. `False` reads pickles.
        kwargs: Arguments of `from_pretrained` of the network.
    """
    hub = {key: kwargs.pop(key) for key in HUB_ARGUMENTS if key in kwargs}
    subfolder, variant = kwargs.pop("subfolder", None) or "", kwargs.get("variant")
    folder = name
    if not os.path.isdir(name):
        folder = download_network(name, subfolder, variant, trust_remote_code, not use_safetensors, **hub)
    part = Path(folder, subfolder)
    check_network(part, auto_class, variant, use_safetensors, trust_remote_code, config=kwargs.get("config"))
    network, report = auto_class.from_pretrained(
        part,
        use_safetensors=use_safetensors,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        output_loading_info=True,
        **kwargs,
    )
    check_missing(part, type(network), report, auto_class)
    network.config._name_or_path = name  # the repository, which a card names as its base model
    return network, part
