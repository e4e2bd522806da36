# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""D3PMTablePipeline: rows of a table, drawn, completed and scored."""

import inspect
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from diffusers import ModelMixin, SchedulerMixin
from torch.utils.data import Dataset

from ..likelihood import evaluate_bound, evaluate_likelihood
from ..models import D3PMTableMLP, D3PMTableTransformer, Denoiser
from ..pipelines import D3PMPipeline
from ..pipelines.drawing import silenced
from ..samplers import Sampler
from ..samplers.positions_first import reveals_once
from ..schedulers import D3PMScheduler
from ..training import D3PMTrainingArguments
from ..transitions import get_family
from ..utils.checks import check_choice, check_int, check_type, describe
from .plots import plot_states
from .schema import TableSchema, as_frame, import_pandas, with_dtype


NETWORKS = {"mlp": D3PMTableMLP, "transformer": D3PMTableTransformer}
TABLE_OUTPUT_TYPES = ("frame", "latent")
# Settings of a run of `fit`; arguments of it replace them.
FIT_SETTINGS: dict[str, Any] = {
    "train_batch_size": 256,
    "learning_rate": 2e-3,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 100,
    "loss": "vb",
    "ema_max_decay": 0.999,
    "logging_steps": 100,
    "validation_steps": 0,
    "checkpointing_steps": 1_000_000,
    "eval_batch_size": 1024,
    "max_eval_samples": 2048,
    "num_samples": 0,
}
# By default a run passes as often as this over the rows, in a number of steps of this range.
NUM_PASSES, STEP_RANGE = 300, (500, 10_000)
# A state of an ordered column is frequent if this many times as many rows have it as an equal share of all.
FREQUENT = 4
# Number of timesteps: a mask needs no network that reads them, and any number of them costs the same.
MASK_TIMESTEPS, OTHER_TIMESTEPS = 1000, 100


class TableRows(Dataset):
    """Rows of states `[n, N]` for training and evaluation. A value that is missing is not scored, and the network sees a mask.

    Args:
        states (`np.ndarray` of shape `[n, N]`): The states, -1 where a value is missing.
        mask (`int`): The state that stands for a value that is missing.
    """

    def __init__(self, states: np.ndarray, mask: int):
        self.states = torch.from_numpy(states).long()
        self.states = self.states[(self.states >= 0).any(1)]  # a row without any value tells nothing
        self.mask, self.has_missing = mask, bool((self.states < 0).any())

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, item):
        row = self.states[item[0] if isinstance(item, tuple) else item]
        if not self.has_missing:
            return row
        is_known = row >= 0
        return {"x_0": torch.where(is_known, row, self.mask), "loss_mask": is_known}


class D3PMTablePipeline(D3PMPipeline):
    """A model of the rows of a table: it draws rows, completes rows with missing values, and scores rows.

    Args:
        table_model ([`Denoiser`]): Network over the columns, such as a [`D3PMTableMLP`].
        scheduler ([`D3PMScheduler`]): The process, whose elements are the columns.
        schema (`dict`, *optional*): The columns, `TableSchema.to_dict()`.

    Examples:
        ```python
        import pandas as pd
        from d3pm_hf import D3PMPipeline, D3PMTablePipeline

        frame = pd.DataFrame({"season": ["winter", "summer"] * 50, "degrees": range(100)})
        frame["degrees"] = frame["degrees"] % 20 + 10 * (frame["season"] == "summer")
        small = {"network": {"hidden_size": 32}, "max_train_steps": 5, "train_batch_size": 32}  # too little to learn
        pipeline = D3PMTablePipeline.fit(frame, **small, progress_bar=False)
        rows = pipeline(num_rows=8, given={"season": "winter"})
        completed = pipeline.impute(frame.assign(degrees=float("nan")))
        outliers = pipeline.log_likelihood(frame).nsmallest(3)
        pipeline.save_pretrained("weather")
        pipeline = D3PMPipeline.from_pretrained("weather")
        ```
    """

    task = "tabular-generation"
    network_name = "table_model"
    batch_argument = "num_rows"
    model_cpu_offload_seq = "table_model"

    def __init__(self, table_model: ModelMixin, scheduler: SchedulerMixin, schema: dict | None = None):
        super().__init__()
        self.register_parts(table_model, scheduler)
        self.schema = TableSchema.from_dict({} if schema is None else schema)
        self.register_to_config(schema=self.schema.to_dict())
        self.check_components()

    def check_components(self) -> None:
        """Checks that the network and the scheduler have the states of the columns."""
        super().check_components()
        sizes = self.scheduler.config.get("element_classes")
        if sizes != self.schema.sizes:
            raise ValueError(
                f"the scheduler has elements of {sizes} states, and the columns have {self.schema.sizes}: pass the sizes of the schema as "
                "num_classes of the scheduler"
            )

    def wrap_network(self, network: torch.nn.Module) -> Denoiser:
        raise ValueError(
            f"table_model is a {type(network).__name__}: it must be a `Denoiser`, such as a `D3PMTableMLP`"
        )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return (len(self.schema.sizes),)

    # Training

    @classmethod
    def create(
        cls,
        frame,
        *,
        schema: TableSchema | None = None,
        categorical: list[str] | None = None,
        num_bins: int | None = None,
        transition: str | dict[str, str] = "absorbing",
        num_train_timesteps: int | None = None,
        network: str | dict[str, Any] = "mlp",
    ) -> "D3PMTablePipeline":
        """A pipeline for the columns of a frame, with a network that is not trained yet.

        The arguments are those of `fit`, which is this, and `train(arguments, pipeline, pipeline.dataset(frame))`.
        """
        frame = as_frame(frame)
        if schema is None:
            schema = TableSchema.infer(frame, num_bins, categorical)
        elif num_bins is not None or categorical is not None:
            raise ValueError(
                "got schema, and num_bins or categorical, which a schema is inferred by: pass them to `TableSchema.infer`"
            )
        check_type("schema", schema, TableSchema, "a `TableSchema`")
        check_type("network", network, (str, dict), "a name, or a dictionary of a name and options of the network")
        options: dict[str, Any] = {"name": network} if isinstance(network, str) else dict(network)
        name = options.pop("name", "mlp")
        check_choice("network", name, tuple(NETWORKS))
        known = tuple(inspect.signature(NETWORKS[name]).parameters)[4:]  # without the columns
        for option in options:
            check_choice(f"an option of the network {name!r}", option, known)
        families = find_families(schema, transition)
        states = schema.encode(frame)
        has_mask = any(get_family(family).has_mask for family in families)
        num_classes = max(schema.sizes) + has_mask
        frequencies = torch.from_numpy(schema.frequencies(states, num_classes))
        only_masks = set(families) == {"absorbing"}
        tensors = {} if only_masks else {"unigram_probs": frequencies}
        if "stationary" in families:
            tensors["stationary_probs"] = frequencies
        if num_train_timesteps is None:
            num_train_timesteps = MASK_TIMESTEPS if only_masks else OTHER_TIMESTEPS
        process = families[0] if len(set(families)) == 1 else families
        scheduler = D3PMScheduler(schema.sizes, num_train_timesteps, transition=process, **tensors)
        if not only_masks:
            options.setdefault("num_timesteps", num_train_timesteps)
        is_ordered = [column.is_ordered for column in schema.modeled]
        shares = frequencies[:, : max(schema.sizes)] * torch.tensor(schema.sizes)[:, None]
        frequent = [
            row.nonzero()[:, 0].tolist() if order else [] for row, order in zip(shares >= FREQUENT, is_ordered)
        ]
        model = NETWORKS[name](
            schema.sizes, is_ordered=is_ordered, frequent_states=frequent, has_mask=has_mask, **options
        )
        model.set_frequencies(frequencies)
        return cls(model.eval(), scheduler, schema.to_dict())

    @classmethod
    def fit(
        cls,
        frame,
        *,
        eval_frame=None,
        schema: TableSchema | None = None,
        categorical: list[str] | None = None,
        num_bins: int | None = None,
        transition: str | dict[str, str] = "absorbing",
        num_train_timesteps: int | None = None,
        network: str | dict[str, Any] = "mlp",
        output_dir: str | None = None,
        seed: int = 0,
        progress_bar: bool = True,
        **settings: Any,
    ) -> "D3PMTablePipeline":
        """Fits a model to a table, and returns the pipeline.

        Args:
            frame (`pandas.DataFrame` or `datasets.Dataset`): The rows. A value may be missing: the model learns from the others of
                its row.
            eval_frame (`pandas.DataFrame` or `datasets.Dataset`, *optional*): Rows whose bound is measured, and written on the card.
            schema ([`~tables.TableSchema`], *optional*): The columns. By default they are inferred from `frame`.
            categorical (`list[str]`, *optional*): Columns of numbers that are categories without an order.
            num_bins (`int`, *optional*): Largest number of bins of a number, see [`~tables.TableSchema`].
            transition (`str` or `dict[str, str]`, defaults to `"absorbing"`): Transition family of all columns, or of each by its
                name; those that are not named are absorbing. Also `"ordinal"`: Gaussian noise for ordered columns, and the
                frequencies of the column for all others.
            num_train_timesteps (`int`, *optional*): Number of timesteps. Defaults to 1000 for masks, and 100 for other processes.
            network (`str` or `dict`, defaults to `"mlp"`): `"mlp"`, a [`D3PMTableMLP`], or `"transformer"`, a
                [`D3PMTableTransformer`]; or a dictionary of this `name` and options of the network.
            output_dir (`str`, *optional*): Folder of the run. By default nothing is kept on disk.
            seed (`int`, defaults to 0): Seed of the weights, the order of the rows and the noise.
            progress_bar (`bool`, defaults to `True`): Whether to show a progress bar.
            settings: Further arguments of [`D3PMTrainingArguments`], such as `learning_rate` and `max_train_steps`, which defaults to 300
                passes over the rows, in 500 .. 10,000 steps.
        """
        check_type("progress_bar", progress_bar, bool, "True or False")
        unknown = sorted(set(settings) - set(D3PMTrainingArguments.__dataclass_fields__))
        if unknown:
            raise ValueError(f"fit got {unknown[0]!r}, which is no argument of it nor of D3PMTrainingArguments")
        last = 0 if eval_frame is None else 1_000_000_000  # the bound is measured after the last step
        settings = {**FIT_SETTINGS, "validation_steps": last, "disable_tqdm": not progress_bar, **settings}
        with tempfile.TemporaryDirectory() as folder:
            arguments = D3PMTrainingArguments(output_dir=output_dir or folder, seed=seed, **settings)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                pipeline = cls.create(
                    frame,
                    schema=schema,
                    categorical=categorical,
                    num_bins=num_bins,
                    transition=transition,
                    num_train_timesteps=num_train_timesteps,
                    network=network,
                )
            pipeline.set_progress_bar_config(disable=not progress_bar)
            data = pipeline.dataset(frame)
            eval_data = None if eval_frame is None else pipeline.dataset(eval_frame)
            arguments.train_batch_size = min(arguments.train_batch_size, len(data))
            if "max_train_steps" not in settings:
                steps = NUM_PASSES * len(data) // arguments.train_batch_size
                arguments.max_train_steps = min(max(steps, STEP_RANGE[0]), STEP_RANGE[1])
            arguments.lr_warmup_steps = min(arguments.lr_warmup_steps, arguments.max_train_steps)
            from ..training import train  # which is not needed to load and to sample

            return train(arguments, pipeline, data, eval_data)

    def dataset(self, frame) -> TableRows:
        """Rows of a frame for [`train`], and for [`evaluate_bound`] in batches."""
        states = self.schema.encode(frame)
        if (states < 0).any() and self.scheduler.gap_token_id is None:
            column = self.schema.modeled[int((states < 0).any(0).argmax())].name
            raise ValueError(
                f"column {column!r} has missing values, which this process has no mask for: choose transition='absorbing', or fill them in"
            )
        rows = TableRows(states, self.scheduler.config.num_classes - 1)
        if not len(rows):
            raise ValueError("no row of the frame has a value: pass other data")
        return rows

    # Sampling

    @torch.no_grad()
    def __call__(
        self,
        num_rows: int = 1,
        given: dict[str, Any] | None = None,
        num_inference_steps: int | None = None,
        batch_size: int = 4096,
        generator: torch.Generator | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        sampler: str | Sampler | None = None,
        sampler_kwargs: dict | None = None,
        num_particles: int = 1,
        output_type: str = "frame",
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: list[str] = ["latents"],
    ):
        """Draws rows of the table, as a pandas frame.

        Args:
            num_rows (`int`, defaults to 1): Number of rows.
            given (`dict`, *optional*): Values of some columns, by name: one for all rows, or a list of one for each.
            num_inference_steps (`int`, *optional*): Number of steps. By default all timesteps: a process of masks then draws one
                column at a time, in random order, with one call of the network for each.
            batch_size (`int`, defaults to 4096): Number of rows that are drawn together.
            generator (`torch.Generator`, *optional*): Source of all random numbers.
            temperature, top_k, top_p: As in [`D3PMTextPipeline`].
            sampler (`str` or `Callable`, *optional*): How rows are drawn, as in [`D3PMTextPipeline`].
            sampler_kwargs (`dict`, *optional*): Options of the sampler.
            num_particles (`int`, defaults to 1): Number of particles per row. Processes other than masks need several for rows that are
                exactly distributed given what is `given`.
            output_type (`str`, defaults to `"frame"`): `"frame"`, or `"latent"` for states `[num_rows, N]`.
            return_dict (`bool`, defaults to `True`): Whether to return the result itself, or a tuple of it.
            callback_on_step_end, callback_on_step_end_tensor_inputs: As in [`D3PMTextPipeline`].

        Returns:
            `pandas.DataFrame`, or a `torch.LongTensor` of states.
        """
        check_int("num_rows", num_rows, 1)
        check_choice("output_type", output_type, TABLE_OUTPUT_TYPES)
        values = self.given_frame({} if given is None else given, num_rows)
        known = torch.from_numpy(self.schema.encode(values)).long()
        states = self.complete(
            known,
            batch_size,
            num_inference_steps=num_inference_steps,
            generator=generator,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            sampler=sampler,
            sampler_kwargs=sampler_kwargs,
            num_particles=num_particles,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
        )
        if output_type == "latent":
            return states if return_dict else (states,)
        frame = restore(self.decode(states, generator), values)
        return frame if return_dict else (frame,)

    @torch.no_grad()
    def impute(
        self,
        frame,
        num_samples: int | None = None,
        *,
        num_inference_steps: int | None = None,
        batch_size: int = 4096,
        generator: torch.Generator | None = None,
        temperature: float = 1.0,
        num_particles: int = 1,
    ):
        """Completes rows: each missing value is drawn given all values of its row that are there, which stay as they are.

        Args:
            frame (`pandas.DataFrame` or `datasets.Dataset`): Rows with the columns of the table, NaN where a value is missing.
            num_samples (`int`, *optional*): Number of completions of each row, whose spread tells how certain they are. With it,
                the result is a list of so many frames.
            num_inference_steps, batch_size, generator, temperature, num_particles: As in a call of the pipeline. `temperature=0`
                takes the most likely value at each step.

        Returns:
            `pandas.DataFrame`, or a list of them, with the index of `frame`.
        """
        frame = as_frame(frame)
        if num_samples is not None:
            check_int("num_samples", num_samples, 1)
        known = torch.from_numpy(self.schema.encode(frame)).long()
        states = self.complete(
            known.repeat(num_samples or 1, 1),
            batch_size,
            num_inference_steps=num_inference_steps,
            generator=generator,
            temperature=temperature,
            num_particles=num_particles,
        )
        frames = [restore(self.decode(part, generator), frame) for part in states.split(len(known))]
        return frames[0] if num_samples is None else frames

    def complete(
        self,
        known: torch.Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """States `[n, N]`, given those of `known` `[n, N]` that are not -1. Rows are drawn in batches.

        The arguments are those of a call of the pipeline. The progress bar counts the steps of a single batch, and several batches.
        """
        self.check_components()
        check_int("batch_size", batch_size, 1)
        if generator is not None:
            check_type("generator", generator, torch.Generator, "one `torch.Generator` for all rows")
        batches = known.to(self._execution_device).split(batch_size)
        is_single, states = len(batches) == 1, []
        for rows in batches if is_single else self.progress_bar(batches):
            is_known = rows >= 0
            given = (rows.clamp(min=0), is_known) if is_known.any() else ()
            with nullcontext() if is_single else silenced(self):
                states.append(
                    self.sample_states(len(rows), self.sample_shape, *given, generator=generator, **arguments)
                )
        return torch.cat(states)

    def given_frame(self, given: dict[str, Any], num_rows: int):
        """A frame with the values of some columns, `given` by name, and missing values in all others."""
        pandas = import_pandas()
        is_list = partial(pandas.api.types.is_list_like, allow_sets=False)
        check_type("given", given, dict, "a dictionary of values by the names of columns")
        for name, value in given.items():
            if name not in self.schema.names:
                raise ValueError(
                    f"given has {describe(name)}, which is no column: choose from {', '.join(self.schema.names)}"
                )
            if is_list(value) and len(value) != num_rows:
                raise ValueError(
                    f"given[{name!r}] has {len(value)} values for {num_rows} rows: pass one for all, or one for each"
                )
        values = {name: given.get(name, np.nan) for name in self.schema.names}
        return pandas.DataFrame(
            {name: list(value) if is_list(value) else [value] * num_rows for name, value in values.items()}
        )

    def decode(self, states: torch.Tensor, generator: torch.Generator | None = None):
        """The frame of states `[n, N]`. A number is drawn inside its bin."""
        self.scheduler.check_states(states)
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        return self.schema.decode(states.cpu().numpy(), seed)

    def plot(
        self,
        frame,
        rows=None,
        *,
        num_rows: int = 1000,
        max_columns: int = 24,
        generator: torch.Generator | None = None,
    ):
        """Plots the frequencies of the states of each column, and the rank correlations of all pairs of columns, of real and drawn rows.

        Args:
            frame (`pandas.DataFrame` or `datasets.Dataset`): Real rows.
            rows (`pandas.DataFrame` or `datasets.Dataset`, *optional*): Drawn rows. By default `num_rows` are drawn.
            num_rows (`int`, defaults to 1000): Number of rows to draw.
            max_columns (`int`, defaults to 24): Number of columns that are shown.
            generator (`torch.Generator`, *optional*): Source of the rows.

        Returns:
            `matplotlib.figure.Figure`, which `savefig` writes to a file.
        """
        check_int("max_columns", max_columns, 1)
        drawn = self(num_rows=num_rows, generator=generator) if rows is None else rows
        return plot_states(self.schema, self.schema.encode(frame), self.schema.encode(drawn), max_columns)

    # Likelihood

    def log_likelihood(
        self,
        frame,
        order: str | Callable | None = None,
        *,
        batch_size: int = 1024,
        num_eval_timesteps: int | None = None,
        seed: int = 0,
        progress_bar: bool = False,
    ):
        """log p of each row, in nats, of the states of its columns: a low one is an outlier.

        A process of masks has an exact likelihood, that of drawing the columns in an `order`. For other processes, and with
        `order="bound"`, it is the variational bound, which lies below log p, with noise drawn by `seed`. A missing value is not scored:
        the likelihood is that of the values that are there.

        Args:
            frame (`pandas.DataFrame` or `datasets.Dataset`): The rows.
            order (`str` or `Callable`, *optional*): Order of the columns, as in [`evaluate_likelihood`]: `"left_to_right"`, the
                default of a process of masks, `"confidence"`, `"margin"`, `"entropy"` or a function; or `"bound"`.
            batch_size (`int`, defaults to 1024): Number of rows of a batch.
            num_eval_timesteps (`int`, *optional*): Number of terms of the bound per row. Defaults to at most 50.
            seed (`int`, defaults to 0): Seed of the noise of the bound.
            progress_bar (`bool`, defaults to `False`): Whether to show a progress bar.

        Returns:
            `pandas.Series` with the index of `frame`.
        """
        pandas, frame = import_pandas(), as_frame(frame)
        check_int("batch_size", batch_size, 1)
        if num_eval_timesteps is not None:
            check_int("num_eval_timesteps", num_eval_timesteps, 1)
        self.check_components()
        states = torch.from_numpy(self.schema.encode(frame)).long().to(self.device)
        is_there = states >= 0
        is_scored = is_there.any(1).cpu()
        if not is_there[is_scored].all() and self.scheduler.gap_token_id is None:
            raise ValueError("a row has missing values, which this process has no mask for: impute them first")
        states = torch.where(is_there, states, self.scheduler.config.num_classes - 1)
        batches = [
            {"x_0": states[rows], "loss_mask": is_there[rows]} for rows in is_scored.nonzero()[:, 0].split(batch_size)
        ]
        if order is None:
            order = "left_to_right" if reveals_once(self.scheduler) else "bound"
        if order == "bound":
            terms = min(num_eval_timesteps or 50, len(self.scheduler))
            measure: Callable[..., Any] = partial(
                evaluate_bound, self.scheduler, self.denoiser, num_eval_timesteps=terms
            )
        else:
            measure = partial(evaluate_likelihood, self, order=order)
        nats = torch.zeros(len(states), dtype=torch.float64)
        if is_scored.any():
            nats[is_scored] = measure(batches, seed=seed, progress_bar=progress_bar).nats_per_example
        return pandas.Series((0 - nats).numpy(), index=frame.index, name="log_likelihood")


def find_families(schema: TableSchema, transition: str | dict[str, str]) -> list[str]:
    """The transition family of each column that is modeled."""
    columns = schema.modeled
    if transition == "ordinal":
        return ["gaussian" if column.is_ordered and column.size > 2 else "stationary" for column in columns]
    if isinstance(transition, str):
        return [transition] * len(columns)
    check_type("transition", transition, dict, "the name of a transition, or a dictionary of names by column")
    for name in transition:
        if name not in schema.names:
            raise ValueError(
                f"transition has {describe(name)}, which is no column: choose from {', '.join(schema.names)}"
            )
    return [transition.get(column.name, "absorbing") for column in columns]


def restore(frame, values):
    """A drawn frame with those of `values` that are not missing, and with their index and the order of their columns."""
    frame.index = values.index
    for name in values.columns:
        drawn, own = frame[name], values[name]
        if own.notna().any():
            merged = (
                own.astype(object).where(own.notna(), drawn.astype(object)).infer_objects()
            )  # objects are not rounded
            cast = with_dtype(merged, drawn.dtype)
            frame[name] = cast if (cast == merged).all() else merged
    return frame[list(values.columns)]
