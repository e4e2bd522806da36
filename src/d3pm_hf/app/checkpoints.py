# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The checkpoints that the operator of the page has named, loaded once. The page chooses among them by name."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml  # type: ignore[import-untyped]  # of huggingface_hub, and without hints
from huggingface_hub import CardData, ModelCard, constants, try_to_load_from_cache

from ..hub.layout import CARD_NAME, INDEX_NAME, list_components
from ..pipelines import D3PMPipeline
from ..pipelines.trust import find_component
from ..samplers import registered_samplers
from .work import watch_network


# Folders whose checkpoints are offered if none is named.
FOLDERS = ("examples/checkpoints", "outputs")
# Characters of a card that are read.
MAX_CARD_CHARACTERS = 100_000
# Tokens of the texts on which samplers are tried, and calls of the network after which a sampler applies.
NUM_TRIED_TOKENS, NUM_TRIED_CALLS = 8, 4


@dataclass(frozen=True)
class Card:
    """A model card.

    Args:
        trained_on (`str`): The training data, or `""` if the card does not name them.
        text (`str`): The card without its metadata, or `""` if there is none.
        address (`str`, *optional*): The page of the checkpoint on the Hub; `None` for a folder.
        example (`str`): The first text of the `widget` in the metadata, which the page fills in, or `""`.
    """

    trained_on: str = ""
    text: str = ""
    address: str | None = None
    example: str = ""


@dataclass(frozen=True)
class Checkpoint:
    """A pipeline, and what the page offers for it.

    Args:
        name (`str`): Its name on the page.
        pipeline ([`D3PMPipeline`]): The pipeline. Requests share it: a call of a pipeline keeps its own state.
        samplers (`dict[str, bool]`): The samplers that apply to its process, and whether their steps can be watched.
        card ([`Card`]): Its model card.
    """

    name: str
    pipeline: D3PMPipeline
    samplers: Mapping[str, bool]
    card: Card = Card()

    @property
    def is_text(self) -> bool:
        return self.pipeline.task == "text-generation"

    @property
    def num_timesteps(self) -> int:
        return len(self.pipeline.scheduler)

    @property
    def has_one_length(self) -> bool:
        """Whether all texts have as many tokens as the process has timesteps."""
        return self.pipeline.scheduler.family.is_autoregressive

    @property
    def takes_all_steps(self) -> bool:
        """Whether no timestep may be left out."""
        return self.pipeline.scheduler.config.prediction_type == "previous" or self.has_one_length

    @property
    def num_class_labels(self) -> int | None:
        return self.pipeline.denoiser.num_class_labels

    @property
    def can_guide(self) -> bool:
        """Whether the network has a class for "no class", which guidance needs."""
        return self.num_class_labels is not None and self.pipeline.denoiser.null_class is not None

    @property
    def chosen_numbers(self) -> list[int]:
        """The numbers of steps for which timesteps are stored."""
        return sorted(map(int, self.pipeline.scheduler.config.get("inference_timesteps") or {}))

    @property
    def description(self) -> str:
        """Description of the model in one line."""
        scheduler, kind = self.pipeline.scheduler, "text" if self.is_text else "images"
        shape = " x ".join(map(str, self.pipeline.sample_shape))
        num_parameters = sum(p.numel() for p in self.pipeline.denoiser.network.parameters())
        return (
            f"{kind} of {shape}, {scheduler.config.num_classes} states, {scheduler.config.transition} process with "
            f"{self.num_timesteps} timesteps, {num_parameters / 1e6:.1f} million parameters"
        )


def find_checkpoints(root: Path) -> list[str]:
    """The folders with a checkpoint in `examples/checkpoints` and in `outputs`, where `make demo` leaves its own.

    Left out is a checkpoint that names a class which this program has not imported, such as the network of `examples/sudoku.py`,
    and a model of a table, which the page does not show.
    """
    folders = [folder for name in FOLDERS for folder in sorted((root / name).glob("*"))]
    indexes = {folder: D3PMPipeline.load_config(folder) for folder in folders if (folder / INDEX_NAME).is_file()}
    return [
        str(folder)
        for folder, index in indexes.items()
        if "table_model" not in index
        and all(find_component(value) is not None for value in list_components(index).values())
    ]


def short_names(sources: Iterable[str]) -> list[str]:
    """A name of each checkpoint for the page: that of its folder, or more of its path where that is not unique."""
    sources = list(dict.fromkeys(sources))
    parts = [Path(source).parts for source in sources]
    names = []
    for i, own in enumerate(parts):
        others = [other for j, other in enumerate(parts) if j != i]
        lengths = range(1, len(own) + 1)
        unique = (n for n in lengths if all(other[-n:] != own[-n:] for other in others))
        names.append("/".join(own[-next(unique, len(own)) :]))
    return names


def load_checkpoints(sources: Iterable[str], device: str | torch.device | None = None) -> dict[str, Checkpoint]:
    """Loads each of the checkpoints, folders or ids on the Hub, by its name on the page."""
    sources = list(dict.fromkeys(sources))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    checkpoints = {}
    for name, source in zip(short_names(sources), sources):
        pipeline = D3PMPipeline.from_pretrained(source).to(device)
        checkpoints[name] = create_checkpoint(name, pipeline, read_card(source))
    return checkpoints


def most_convincing_first(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Orders checkpoints: a small model draws pictures that one recognizes, most of all given a class, before it writes sentences."""
    return dict(sorted(checkpoints.items(), key=lambda item: (item[1].is_text, item[1].num_class_labels is None)))


def create_checkpoint(name: str, pipeline: D3PMPipeline, card: Card = Card()) -> Checkpoint:
    """A pipeline as the page offers it. Its network then stops for visitors who leave."""
    if pipeline.task == "tabular-generation":
        raise ValueError(
            f"{name} is a model of a table, which the page does not show: draw rows with `pipeline(num_rows=5)`"
        )
    pipeline.set_progress_bar_config(disable=True)
    watch_network(getattr(pipeline, pipeline.network_name))
    return Checkpoint(name, pipeline, applicable_samplers(pipeline), card)


class Tried(Exception):
    """Ends a sampler that has been tried long enough."""


class FlatDenoiser:
    """Predicts all states alike, to try samplers on. It raises [`Tried`] after a few calls."""

    def __init__(self, pipeline: D3PMPipeline):
        self.start_cache = pipeline.denoiser.start_cache
        config = pipeline.scheduler.config
        self.size = 2 if config.prediction_type == "logistic" else config.num_classes
        self.num_calls = 0

    def predict(self, *shape: int, device: torch.device) -> torch.Tensor:
        if self.num_calls == NUM_TRIED_CALLS:
            raise Tried
        self.num_calls += 1
        return torch.zeros(*shape, self.size, device=device)

    def __call__(self, x_t: torch.Tensor, timestep, **condition) -> torch.Tensor:
        return self.predict(*x_t.shape, device=x_t.device)

    def next_logits(self, x: torch.Tensor, cache, **condition) -> torch.Tensor:
        return self.predict(len(x), device=x.device)


def applicable_samplers(pipeline: D3PMPipeline) -> dict[str, bool]:
    """The registered samplers that apply to the process of a pipeline, and whether each takes a callback for its steps.

    They are found by trying, so that those of a user are among them. A few steps are enough: T may be large.
    """
    scheduler, shape = pipeline.scheduler, pipeline.sample_shape
    if scheduler.family.is_autoregressive:
        timesteps = scheduler.sampling_timesteps()
    elif scheduler.config.prediction_type == "previous":  # no timestep may be left out: the last ones
        timesteps = scheduler.sampling_timesteps(start_timestep=min(NUM_TRIED_CALLS, len(scheduler)) - 1)
    else:
        timesteps = scheduler.sampling_timesteps(1)
    if len(shape) == 1 and not scheduler.family.is_autoregressive:
        shape = (min(shape[0], NUM_TRIED_TOKENS),)
    x_t = scheduler.sample_prior((1, *shape), torch.Generator().manual_seed(0), pipeline.device)
    found = {}
    for name, sampler in registered_samplers().items():
        for callback in (lambda step: None, None):
            try:
                sampler(scheduler, FlatDenoiser(pipeline), x_t, timesteps, callback=callback)
            except Tried:
                pass
            except Exception:  # a sampler of a user's own may refuse a process in any way
                continue
            found[name] = callback is not None
            break
    return found


def read_card(source: str) -> Card:
    """The card of a checkpoint that has been loaded from a folder or from the Hub."""
    is_folder = Path(source).is_dir()
    path = Path(source) / CARD_NAME if is_folder else try_to_load_from_cache(source, CARD_NAME)
    address = None if is_folder else f"{constants.ENDPOINT}/{source}"
    if not isinstance(path, (str, Path)) or not Path(path).is_file():
        return Card(address=address)
    with open(path, encoding="utf-8", errors="replace") as file:
        content = file.read(MAX_CARD_CHARACTERS)
    text = re.sub(r"\A---\n.*?\n---\n", "", content, flags=re.DOTALL).strip()
    data = read_metadata(content)
    return Card(training_data(content, data), text, address, example_text(data))


def read_metadata(content: str) -> CardData:
    """The metadata of a card, empty if there are none that can be read."""
    try:
        return ModelCard(content, ignore_metadata_errors=True).data if content.startswith("---\n") else CardData()
    except (ValueError, TypeError, AttributeError, yaml.YAMLError):  # metadata that somebody else wrote
        return CardData()


def example_text(data: CardData) -> str:
    """The first text of the `widget`, where cards on the Hub have examples of inputs."""
    widget = data.get("widget")
    texts = [entry.get("text") for entry in widget if isinstance(entry, dict)] if isinstance(widget, list) else []
    return next((text for text in texts if isinstance(text, str)), "")


def training_data(content: str, data: CardData) -> str:
    """The training data that a card names: in its table of settings, or else in its metadata."""
    row = re.search(r"^\| data \| (.*) \|$", content, re.MULTILINE)
    if row:
        return re.sub(r"\\(.)", r"\1", row[1])
    names = data.get("datasets") or [result.dataset_name for result in getattr(data, "eval_results", None) or []][:1]
    return ", ".join([names] if isinstance(names, str) else map(str, names))
