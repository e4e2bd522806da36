# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Model cards: the forward process, the training, what was measured, and code to load the checkpoint."""

import json
import math
import os
import re
from collections.abc import Iterable
from functools import partial
from typing import Any
from urllib.parse import quote

from diffusers import DiffusionPipeline
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from ..likelihood.bound import Likelihood
from ..models.text_denoisers import is_causal_lm, reads_both_sides
from ..schedules import beta_schedules
from ..utils.checks import check_choice, check_str, check_type, describe
from ..utils.modules import without_compilation
from .adapters import adapter_configs, bare_network, base_parameters, has_adapters
from .layout import PACKAGE, TRUSTED_LIBRARIES


# Values of `pipeline.task`, which are pipeline tags of the Hub, but for that of tables.
TASKS = ("text-generation", "unconditional-image-generation", "tabular-generation")
RESULTS_HEADING, NO_RESULTS = "## Results", "None measured."
LOADING_NOTE = "The package d3pm_hf must be installed: this class of pipeline is not part of diffusers."
EXPORT_NOTE = (
    "The package d3pm_hf must be installed (`pip install d3pm-hf`). "
    "`DiffusionPipeline.from_pretrained(..., trust_remote_code=True)` of diffusers then loads the checkpoint as well."
)


def create_model_card(
    pipeline,
    repo_id: str | None = None,
    *,
    training: dict | None = None,
    eval_results: list[EvalResult] | None = None,
    sample: str | None = None,
    datasets: str | list[str] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
    base_model: str | list[str] | None = None,
) -> ModelCard:
    """Creates the model card (README) of a pipeline.

    Args:
        pipeline ([`D3PMPipeline`]): Pipeline that the card describes.
        repo_id (`str`, *optional*): Id of the repository that the checkpoint is pushed to. Without it, the code on the card
            loads the folder that the card is in.
        training (`dict`, *optional*): Settings of the training by name.
        eval_results (`list[EvalResult]`, *optional*): Measured results, such as those of [`bound_results`].
        sample (`str`, *optional*): A generated text, or the file name of a generated image beside the card.
        datasets (`str` or `list[str]`, *optional*): Ids of the training data on the Hub.
        license (`str`, *optional*): License of the weights.
        language (`str` or `list[str]`, *optional*): Language of the generated text, as codes such as `"en"`.
        base_model (`str` or `list[str]`, *optional*): Ids of the checkpoints that training started from. Defaults to the
            repository that the network was loaded from, if any. With `training`, the card says that it was fine-tuned.
    """
    check_pipeline(pipeline)
    for argument, value in (("repo_id", repo_id), ("sample", sample), ("license", license)):
        if value is not None:
            check_type(argument, value, str, "a string")
    if training is not None:
        check_type("training", training, dict, "a dictionary")
    _check_entries("eval_results", eval_results, EvalResult)
    for argument, values in (("datasets", datasets), ("language", language), ("base_model", base_model)):
        _check_entries(argument, values, str)
    is_text, is_table = pipeline.task == "text-generation", pipeline.task == "tabular-generation"
    name = repo_id or "this checkpoint"
    network = pipeline.bare_network
    is_adapter = has_adapters(network)
    if is_adapter:
        base_model = base_model or repository_name(base_of(pipeline))
    source = getattr(getattr(network, "config", None), "_name_or_path", None)
    if source and os.path.basename(source) != pipeline.network_name:  # it was loaded by itself
        base_model = base_model or repository_name(source)
    relation: dict[str, Any] = {}
    if base_model and (is_adapter or training):
        relation["base_model_relation"] = "adapter" if is_adapter else "finetune"
    data = ModelCardData(
        language=language,
        license=license,
        library_name="d3pm_hf",
        tags=["d3pm", "discrete-diffusion", "diffusers", *["lora"] * is_adapter, *["tabular"] * is_table],
        pipeline_tag=None if is_table else pipeline.task,
        datasets=datasets,
        base_model=base_model,
        model_name=name,
        eval_results=eval_results,
        **relation,
    )
    sections = [
        f"# {name}",
        _process(pipeline),
        "## Use\n\n" + _usage(pipeline, repo_id),
        "## The network\n\n" + _network(pipeline, network, is_adapter),
        "## Training\n\n" + (_table(("setting", "value"), training.items()) if training else "Not recorded."),
        f"{RESULTS_HEADING}\n\n" + (_results(eval_results) if eval_results else NO_RESULTS),
    ]
    if is_table:
        columns = [(column.name, column.describe()) for column in pipeline.schema.columns]
        sections.insert(2, "## Columns\n\n" + _table(("column", "values"), columns))
    if sample is not None:
        sections.append(
            "## A sample\n\n" + (_fenced(sample) if is_text or is_table else f"![samples]({quote(sample)})")
        )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n")


def _check_entries(name: str, values, kind: type) -> None:
    """Checks that `values` is `None`, a `kind` or a list of them."""
    if values is not None:
        for value in values if isinstance(values, (list, tuple)) else [values]:
            check_type(name, value, kind, f"a list of `{kind.__name__}`")


def check_pipeline(pipeline) -> None:
    """Checks that `pipeline` is a [`D3PMPipeline`] with a task that a card can describe."""
    check_type("pipeline", pipeline, DiffusionPipeline, "a `D3PMPipeline`")
    task = getattr(type(pipeline), "task", None)
    if task not in TASKS:
        raise ValueError(
            f"pipeline is a {type(pipeline).__name__} with task={task!r}: it must be a `D3PMPipeline`, and its task one of "
            f"{', '.join(TASKS)}"
        )


def bound_results(
    bound,
    dataset_name: str,
    dataset_type: str | None = None,
    split: str = "test",
    *,
    task: str,
) -> list[EvalResult]:
    """Converts a measured [`Bound`] to results for [`create_model_card`].

    Args:
        bound ([`Bound`]): Result of [`evaluate_bound`].
        dataset_name (`str`): Name of the data set on the card.
        dataset_type (`str`, *optional*): Id of the data set on the Hub. Defaults to `dataset_name`.
        split (`str`, defaults to `"test"`): Split that was measured.
        task (`str`): `pipeline.task`. With `"text-generation"`, the perplexity per token is reported as well.
    """
    if not hasattr(bound, "bits_per_dim"):
        raise ValueError(f"bound is {describe(bound)}: it must be a `Bound`")
    if isinstance(bound, Likelihood):
        raise ValueError(
            f"bound is a `Likelihood` of the order {bound.order!r}, which is no bound: pass the result of `evaluate_bound`, or "
            "measure both with `evaluate_pipeline(likelihood=...)`"
        )
    for name, value in (("dataset_name", dataset_name), ("dataset_type", dataset_type), ("split", split)):
        if value is not None or name != "dataset_type":
            check_str(name, value)
    entry = partial(
        eval_result,
        task=task,
        dataset_name=dataset_name,
        dataset_type=dataset_type,
        split=split,
        protocol=bound.protocol,
    )
    name, error = "Bits per dimension (upper bound)", bound.bits_per_dim_standard_error
    results = [entry("bits_per_dim", name, bound.bits_per_dim, standard_error=error)]
    if task == "text-generation":
        name, error = "Perplexity per token (upper bound)", bound.perplexity_standard_error
        results.append(entry("perplexity", name, bound.perplexity, standard_error=error))
    return results


def eval_result(
    metric_type: str,
    metric_name: str,
    metric_value: float,
    *,
    task: str,
    dataset_name: str,
    dataset_type: str | None = None,
    split: str = "test",
    protocol: str | None = None,
    standard_error: float | None = None,
    **metric_args,
) -> EvalResult:
    """One entry of a card's `model-index`: the value to 4 decimals, its standard error to two digits, and `metric_args`."""
    check_choice("task", task, TASKS)
    if protocol is not None:
        metric_args = {"protocol": protocol, **metric_args}
    if standard_error is not None and not math.isnan(standard_error):
        metric_args["standard_error"] = float(f"{standard_error:.2g}")
    return EvalResult(
        task_type=task,
        dataset_type=single_line(dataset_type or dataset_name),
        dataset_name=single_line(dataset_name),
        dataset_split=single_line(split),
        metric_type=metric_type,
        metric_name=metric_name,
        metric_value=round(metric_value, 4),
        metric_args=metric_args,
    )


def single_line(text: object) -> str:
    """Returns the text of a value with all white space, line breaks included, replaced by single spaces."""
    return " ".join(str(text).split())


def escape_markdown(value) -> str:
    """Returns a value as one line of plain text in Markdown: no markup, no HTML and no further cells of a table."""
    marks = r"[\\`*~&<>|\[\]]|(?<![^\W_])_|_(?![^\W_])"  # an underscore inside a word is plain text
    return re.sub(f"({marks})", r"\\\1", single_line(value))


def _fenced(text: str) -> str:
    """Returns a block of plain text, whose fence is longer than any row of backticks inside."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def base_of(pipeline) -> str | None:
    """Returns the checkpoint that a pipeline, or its network, was loaded from: an id on the Hub or a folder.

    A causal language model that was made a masked one is not that of the checkpoint any more, until its pipeline is saved.
    """
    if pipeline.config.get("_name_or_path"):
        return pipeline.config["_name_or_path"]
    network = pipeline.bare_network
    is_changed = is_causal_lm(network) and reads_both_sides(network)
    return None if is_changed else getattr(getattr(network, "config", None), "_name_or_path", None) or None


def _network(pipeline, network, is_adapter: bool) -> str:
    """Describes the network: its class, its size, and the LoRA of it."""
    kind, count = network.__class__.__name__, sum(parameter.numel() for parameter in network.parameters())
    if not is_adapter:
        return f"`{kind}`, {count:,} parameters."
    base = sum(parameter.numel() for _, parameter in base_parameters(network))
    source = base_of(pipeline) or "its own checkpoint"
    ranks = ", ".join(str(config.r) for config in adapter_configs(network).values())
    return (
        f"A LoRA of rank {ranks} with {count - base:,} parameters, for a `{kind}` of {base:,} parameters that is loaded from "
        f"{escape_markdown(os.path.basename(source) if os.path.exists(source) else source)}."
    )


def repository_name(name: str | None) -> str | None:
    """Returns `name` if it is the id of a repository, and no folder."""
    if not name or os.path.exists(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _process(pipeline) -> str:
    """Describes the forward process."""
    scheduler, config = pipeline.scheduler, pipeline.scheduler.config
    element = {TASKS[0]: "token", TASKS[1]: "channel of a pixel", TASKS[2]: "column"}[pipeline.task]
    states = f"There are {config.num_classes} states per {element}"
    if config.get("element_classes") is not None:
        states = f"Its {len(config.element_classes)} elements have up to {max(config.element_classes)} states each"
    schedule = f", and the schedule `{config.beta_schedule}`"
    if not scheduler.family.has_schedule or config.beta_schedule is None:
        schedule = ""
    elif config.trained_betas is not None or config.trained_exponents is not None:
        schedule = ", and given betas" if config.trained_exponents is None else ", and given exponents"
    meaning = scheduler.family.description
    return (
        "A discrete denoising diffusion model ([D3PM](https://arxiv.org/abs/2107.03006)). "
        f"Its process is `{config.transition}`{f': {meaning}' if meaning else ''}. {states}, {config.num_train_timesteps} timesteps{schedule}. The network predicts `{config.prediction_type}`"
        f" (`x0_posterior={config.x0_posterior}`)."
    )


def _usage(pipeline, repo_id: str | None) -> str:
    """Returns code that loads the checkpoint and draws a sample, and what must be installed and imported for it."""
    config = pipeline.scheduler.config
    takes_all = config.prediction_type == "previous" or pipeline.scheduler.family.is_autoregressive
    steps = config.num_train_timesteps if takes_all else min(20, config.num_train_timesteps)
    arguments = f"num_inference_steps={steps}"
    if pipeline.denoiser.num_class_labels is not None:
        arguments += ", class_labels=0"
    if pipeline.task == "tabular-generation":
        shown = "print(pipeline(num_rows=5))"
    elif pipeline.task != "text-generation":
        shown = f'pipeline({arguments}).images[0].save("sample.png")'
    elif pipeline.components.get("tokenizer") is None:
        shown = f'print(pipeline({arguments}, output_type="seq").sequences)'
    else:
        shown = f"print(pipeline({arguments}).texts[0])"
    source = repo_id or "."  # from inside the folder of the checkpoint
    own = list(user_definitions(pipeline).values())
    modules = dict.fromkeys(used.__module__ for used in own if used.__module__ != "__main__")
    lines = [
        "from d3pm_hf import D3PMPipeline",
        *(f"import {module}" for module in modules),
        "",
        f"pipeline = D3PMPipeline.from_pretrained({json.dumps(source)})",
        shown,
    ]
    note = LOADING_NOTE
    if own:
        names = ", ".join(f"`{full_name(used)}`" for used in own)
        note += f" Import {names} before you load the checkpoint."
    return "\n".join(["```python", *lines, "```", "", note])


def user_definitions(pipeline: DiffusionPipeline) -> dict[str, Any]:
    """Returns the classes and functions of a pipeline that must be imported before it is loaded, by their role.

    These are the classes of the pipeline and its components, the transition family and the noise schedule, unless they
    come with d3pm_hf, diffusers or transformers.
    """
    roles: dict[str, Any] = {"pipeline": type(pipeline), "transition": pipeline.scheduler.family}
    # A compiled network is saved as the network that it was compiled from.
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    roles = {**{name: type(without_compilation(bare_network(part))) for name, part in parts.items()}, **roles}
    schedule = beta_schedules().get(pipeline.scheduler.config.beta_schedule)
    if schedule is not None:
        roles["beta_schedule"] = schedule
    libraries = (PACKAGE, *TRUSTED_LIBRARIES)
    return {role: used for role, used in roles.items() if used.__module__.split(".")[0] not in libraries}


def full_name(definition: Any) -> str:
    """Returns module and name of a class or function; an object that is called like one goes by its class."""
    return f"{definition.__module__}.{getattr(definition, '__qualname__', type(definition).__qualname__)}"


def _table(header: tuple[str, ...], rows: Iterable[tuple]) -> str:
    """Returns a table with the columns of the header."""
    lines = [header, ["---"] * len(header), *(map(escape_markdown, row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _results(results: list[EvalResult]) -> str:
    """Returns results as a table, each with its standard error and its protocol."""
    rows = []
    for result in results:
        arguments = result.metric_args or {}
        data = ", ".join(str(part) for part in (result.dataset_name, result.dataset_split) if part is not None)
        error = f" ± {arguments['standard_error']}" if "standard_error" in arguments else ""
        metric, value = result.metric_name or result.metric_type, f"{result.metric_value}{error}"
        rows.append((data, metric, value, arguments.get("protocol", "")))
    return _table(("data", "metric", "value", "protocol"), rows)
