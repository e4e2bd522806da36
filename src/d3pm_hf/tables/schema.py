# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The columns of a table as states: categories as they are, numbers by bins of about equally many values."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..utils.checks import check_int, check_type, describe, shorten


# Number of points, both ends included, between which a number is interpolated inside its bin.
NUM_KNOTS = 9
# Numbers are rounded to as many decimals as all of the training data have, if that is at most this.
MAX_DECIMALS = 6
# Fewest and most bins of a number, unless `num_bins` is given.
BIN_RANGE = (16, 256)
# A column of categories with more of them than this is refused.
MAX_CATEGORIES = 10_000
KINDS = ("number", "category", "constant")
MISSING = -1


def import_pandas():
    """The package pandas, which comes with `datasets`."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("tables need pandas: install it with `pip install pandas`") from error
    return pandas


@dataclass
class Column:
    """A column of a table.

    Args:
        name (`str`): Its name.
        kind (`str`): `"number"`, which has bins; `"category"`, which has values; or `"constant"`, whose only value is no state.
        values (`list`): The categories, or the only value.
        knots (`list[list[float]]`): For each bin of a number, the values between which it is interpolated, ascending; one value if all
            numbers of the bin are equal.
        is_ordered (`bool`, defaults to `False`): Whether categories have an order. Numbers always have.
        is_integer (`bool`, defaults to `False`): Whether numbers are integers.
        decimals (`int`, *optional*): Number of decimals that numbers are rounded to.
        dtype (`str`, defaults to `"object"`): The pandas dtype of the column.
    """

    name: str
    kind: str
    values: list = field(default_factory=list)
    knots: list[list[float]] = field(default_factory=list)
    is_ordered: bool = False
    is_integer: bool = False
    decimals: int | None = None
    dtype: str = "object"

    def __post_init__(self):
        check_type("the name of a column", self.name, str, "a string")
        if self.kind not in KINDS:
            raise ValueError(
                f"column {self.name!r} is of the kind {describe(self.kind)}: it must be one of {', '.join(KINDS)}"
            )
        check_type(f"values of column {self.name!r}", self.values, list, "a list")
        check_type(f"knots of column {self.name!r}", self.knots, list, "a list")
        for field_name in ("is_ordered", "is_integer"):
            check_type(f"{field_name} of column {self.name!r}", getattr(self, field_name), bool, "True or False")
        check_type(f"dtype of column {self.name!r}", self.dtype, str, "the name of a pandas dtype")
        if self.decimals is not None:
            check_int(f"decimals of column {self.name!r}", self.decimals, 0)
        if self.kind == "number":
            is_right = all(isinstance(bin, list) and bin and all(map(_is_finite, bin)) for bin in self.knots)
            flat = [value for bin in self.knots for value in bin] if is_right else []
            if not is_right or len(self.knots) < 2 or flat != sorted(flat):
                raise ValueError(f"knots of column {self.name!r} must be two or more lists of ascending numbers")
            self.is_ordered = True
        elif any(not isinstance(value, (str, int, float, bool)) for value in self.values):
            raise ValueError(f"values of column {self.name!r} must be strings, numbers or booleans")
        elif len(set(map(_key, self.values))) != len(self.values) or len(self.values) < 1 + (self.kind == "category"):
            raise ValueError(
                f"values of column {self.name!r} must be different, and two or more unless it is constant"
            )

    @property
    def size(self) -> int:
        """Number of states."""
        return len(self.knots) if self.kind == "number" else len(self.values)

    def encode(self, series) -> np.ndarray:
        """States `[n]` of a pandas series; -1 where a value is missing."""
        if self.kind == "number":
            numbers = _as_numbers(series, self.name)
            upper = [bin[-1] for bin in self.knots[:-1]]
            lower = [bin[0] for bin in self.knots[1:]]
            edges = (np.array(upper) + np.array(lower)) / 2
            return np.where(np.isnan(numbers), MISSING, np.searchsorted(edges, numbers))
        state_of = {_key(value): state for state, value in enumerate(self.values)}
        is_missing, states = series.isna().to_numpy(), np.full(len(series), MISSING)
        for row, value in enumerate(series.tolist()):
            if not is_missing[row]:
                state = state_of.get(_key(value))
                if state is None:
                    known = ", ".join(map(repr, self.values[:6])) + (", ..." if len(self.values) > 6 else "")
                    raise ValueError(
                        f"column {self.name!r} holds {describe(value)}, which the training data never had: it is one of {known}"
                    )
                states[row] = state
        return states

    def decode(self, states: np.ndarray, rng: np.random.Generator):
        """A pandas series of the values of states `[n]`. A number is drawn inside its bin."""
        pandas = import_pandas()
        if self.kind == "number":
            knots = np.array(
                [np.interp(np.linspace(0, 1, NUM_KNOTS), np.linspace(0, 1, len(bin)), bin) for bin in self.knots]
            )
            place = rng.random(len(states)) * (NUM_KNOTS - 1)
            left = place.astype(int)
            low, high = knots[states, left], knots[states, left + 1]
            values = low + (place - left) * (high - low)
            if self.is_integer:
                first, last = knots[states, 0], knots[states, -1]
                width = np.where(last > first, last - first, 1)  # both ends are as likely as the integers between them
                values = np.where(last > first, first - 0.5 + (values - first) * (width + 1) / width, values)
                values = np.clip(np.round(values), first, last)
            elif self.decimals is not None:
                values = np.round(values, self.decimals)
            return _with_dtype(pandas.Series(values, name=self.name), self.dtype)
        if self.dtype == "category":
            categories = pandas.Categorical.from_codes(states, self.values, ordered=self.is_ordered)
            return pandas.Series(categories, name=self.name)
        return _with_dtype(pandas.Series([self.values[state] for state in states], name=self.name), self.dtype)

    def describe(self) -> str:
        """What the column holds, in a few words."""
        if self.kind == "number":
            what = "integers" if self.is_integer else "numbers"
            return f"{what} from {self.knots[0][0]:g} to {self.knots[-1][-1]:g} in {self.size} bins"
        if self.kind == "constant":
            return f"always {shorten(str(self.values[0]))}"
        return f"{self.size} {'ordered ' if self.is_ordered else ''}categories"


class TableSchema:
    """The columns of a table: which values they have, and which state of the process each stands for.

    Args:
        columns (`list[Column]`): The columns, or dictionaries of their fields.

    Examples:
        ```python
        import pandas as pd
        from d3pm_hf.tables import TableSchema

        frame = pd.DataFrame({"sky": ["clear", "gray", "clear", "gray"], "degrees": [21.5, 8.0, 19.0, None]})
        schema = TableSchema.infer(frame)
        assert schema.sizes == [2, 3] and schema.encode(frame)[3].tolist() == [1, -1]  # -1 is missing
        assert schema.decode(schema.encode(frame)[:3]).equals(frame[:3])
        ```
    """

    def __init__(self, columns: Any):
        check_type("columns", columns, (list, tuple), "a list of columns")
        made = []
        for column in columns:
            if not isinstance(column, Column):
                check_type("an entry of columns", column, dict, "a dictionary of its name, its kind and its values")
                unknown = sorted(set(map(str, column)) - set(Column.__dataclass_fields__))
                if unknown or not {"name", "kind"} <= column.keys():
                    raise ValueError(
                        f"a column has the fields {sorted(map(str, column))}: it needs name and kind, and {unknown} is none"
                    )
                column = Column(**column)
            made.append(column)
        self.columns: list[Column] = made
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"the columns are {names}: each name must be there once")
        if not self.modeled:
            raise ValueError("no column has two different values: there is nothing to model")

    @property
    def names(self) -> list[str]:
        """Names of all columns."""
        return [column.name for column in self.columns]

    @property
    def modeled(self) -> list[Column]:
        """The columns that are elements of the process: all that have more than one value."""
        return [column for column in self.columns if column.kind != "constant"]

    @property
    def sizes(self) -> list[int]:
        """Number of states of each column that is modeled."""
        return [column.size for column in self.modeled]

    def to_dict(self) -> dict:
        """The schema as JSON holds it."""
        return {
            "columns": [
                {name: getattr(column, name) for name in Column.__dataclass_fields__} for column in self.columns
            ]
        }

    @classmethod
    def from_dict(cls, values: dict) -> "TableSchema":
        """The schema that [`TableSchema.to_dict`] has returned."""
        check_type("schema", values, dict, "a dictionary with the key 'columns'")
        return cls(values.get("columns", None))

    @classmethod
    def infer(cls, frame, num_bins: int | None = None, categorical: list[str] | None = None) -> "TableSchema":
        """The schema of a table.

        Strings, booleans and pandas categories are categories. Numbers with at most `num_bins` different values have a state for each;
        others have bins of about equally many values, and a value that is as frequent as a bin has its own. A column with one
        value is a constant, which is not modeled. Values that are missing are no states.

        Args:
            frame (`pandas.DataFrame` or `datasets.Dataset`): The table.
            num_bins (`int`, *optional*): Largest number of bins of a number. Defaults to twice the square root of the number of
                rows, in 16 .. 256.
            categorical (`list[str]`, *optional*): Columns of numbers that are categories without an order.
        """
        frame = as_frame(frame)
        if num_bins is None:
            num_bins = min(max(round(2 * math.sqrt(len(frame))), BIN_RANGE[0]), BIN_RANGE[1])
        check_int("num_bins", num_bins, 2)
        categorical = [] if categorical is None else categorical
        check_type("categorical", categorical, (list, tuple), "a list of names of columns")
        for name in categorical:
            if name not in frame.columns:
                raise ValueError(f"categorical has {describe(name)}, which is no column of the frame")
        return cls([infer_column(frame[name], num_bins, name in categorical) for name in frame.columns])

    def check_names(self, frame) -> None:
        """Checks that a frame has the columns of the table, in any order, and no others."""
        missing = [name for name in self.names if name not in frame.columns]
        unknown = [name for name in frame.columns if name not in self.names]
        if missing:
            raise ValueError(
                f"the frame lacks the column {missing[0]!r}: pass all columns that the model was trained with, NaN where unknown"
            )
        if unknown:
            raise ValueError(f"the frame has the column {unknown[0]!r}, which the model was not trained with: drop it")

    def encode(self, frame) -> np.ndarray:
        """States `[n, N]` of a frame, with -1 where a value is missing."""
        frame = as_frame(frame)
        self.check_names(frame)
        states = {
            column.name: column.encode(frame[column.name]) for column in self.columns
        }  # which checks constants, too
        return np.stack([states[column.name] for column in self.modeled], 1)

    def decode(self, states: np.ndarray, seed: int = 0):
        """A frame of the values of states `[n, N]`. Numbers are drawn inside their bins, by `seed`."""
        pandas, rng, numbers = import_pandas(), np.random.default_rng(seed), iter(np.asarray(states).T)
        series = []
        for column in self.columns:
            own = np.zeros(len(states), dtype=int) if column.kind == "constant" else next(numbers)
            series.append(column.decode(own, rng))
        return pandas.concat(series, axis=1)

    def frequencies(self, states: np.ndarray, num_classes: int) -> np.ndarray:
        """Frequencies of the states of each column, `[N, K]`, after one more of each state, so that none is zero."""
        counts = [np.bincount(own[own >= 0], minlength=num_classes)[:num_classes].astype(float) for own in states.T]
        for row, size in zip(counts, self.sizes):
            row[:size] += 1
        return np.stack([row / row.sum() for row in counts])


def as_frame(frame):
    """A pandas frame, or a `datasets.Dataset` as one, after checks of its names and its size."""
    pandas = import_pandas()
    if not isinstance(frame, pandas.DataFrame) and hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    check_type("frame", frame, pandas.DataFrame, "a pandas DataFrame or a `datasets.Dataset`")
    if not len(frame) or not len(frame.columns):
        raise ValueError(
            f"the frame has {len(frame)} rows and {len(frame.columns)} columns: pass at least one of each"
        )
    for name in frame.columns:
        if not isinstance(name, str):
            raise ValueError(f"the frame has the column name {describe(name)}: rename its columns to strings")
    if frame.columns.has_duplicates:
        raise ValueError(
            f"the frame has the column {frame.columns[frame.columns.duplicated()][0]!r} twice: rename one of them"
        )
    if any(name is not None for name in frame.index.names):
        raise ValueError(
            f"the frame has the index {frame.index.names[0]!r}, and an index is no data: call `frame.reset_index()` to make it a column, "
            "or `frame.reset_index(drop=True)` to leave it out"
        )
    return frame


def infer_column(series, num_bins: int, is_categorical: bool) -> Column:
    """The column of a pandas series."""
    pandas, name = import_pandas(), series.name
    types, present = pandas.api.types, series.dropna()
    if not len(present):
        raise ValueError(f"column {name!r} holds no value at all: drop it")
    if (
        types.is_datetime64_any_dtype(series)
        or types.is_timedelta64_dtype(series)
        or isinstance(series.dtype, pandas.PeriodDtype)
    ):
        raise ValueError(
            f"column {name!r} holds dates or times: make numbers or categories of them, such as `.dt.year` and `.dt.month`"
        )
    is_category = isinstance(series.dtype, pandas.CategoricalDtype)
    is_number = types.is_numeric_dtype(series) and not types.is_bool_dtype(series)
    if is_number and not is_categorical:
        return infer_number(series, num_bins)
    dtype = "category" if is_category else str(series.dtype)
    values = [_plain(value, name) for value in (series.cat.categories if is_category else present.unique())]
    if is_category:
        seen = {_key(_plain(value, name)) for value in present.unique()}
        values = [value for value in values if _key(value) in seen]
    kinds = {str if isinstance(value, str) else bool if isinstance(value, bool) else float for value in values}
    if len(kinds) > 1:
        words = sorted({type(value).__name__ for value in values})
        raise ValueError(f"column {name!r} holds values of the types {' and '.join(words)}: convert them to one")
    if len(values) == 1:
        return Column(name, "constant", values, dtype=dtype)
    if len(values) > max(0.9 * len(present), 10):
        raise ValueError(
            f"column {name!r} has {len(values)} different values in {len(present)} rows, as names and identifiers have: drop it"
        )
    if len(values) > MAX_CATEGORIES:
        raise ValueError(
            f"column {name!r} has {len(values)} categories, more than {MAX_CATEGORIES}: merge the rare ones"
        )
    is_ordered = is_category and bool(series.cat.ordered)
    return Column(name, "category", values if is_category else sorted(values), is_ordered=is_ordered, dtype=dtype)


def infer_number(series, num_bins: int) -> Column:
    """The column of a pandas series of numbers."""
    name, dtype, present = series.name, str(series.dtype), series.dropna()
    numbers = _as_numbers(series, name)
    numbers = np.sort(numbers[~np.isnan(numbers)])
    distinct = np.unique(numbers)
    is_integer = bool((distinct == np.round(distinct)).all())
    if len(distinct) == 1:
        value = int(distinct[0]) if is_integer and "int" in dtype.lower() else float(distinct[0])
        return Column(name, "constant", [value], dtype=dtype)
    # Row numbers ascend from about zero, with few gaps where rows were left out.
    first, last, count = distinct[0], distinct[-1], len(numbers)
    if count > 10 and is_integer and len(distinct) == count and 0 <= first <= 0.1 * count and last < 1.5 * count:
        if present.is_monotonic_increasing:
            raise ValueError(f"column {name!r} counts the rows, from {first:g} to {last:g}: drop it")
    decimals = next((d for d in range(MAX_DECIMALS + 1) if np.array_equal(np.round(distinct, d), distinct)), None)
    knots = [[float(value)] for value in distinct] if len(distinct) <= num_bins else find_bins(numbers, num_bins)
    return Column(name, "number", knots=knots, is_integer=is_integer, decimals=decimals, dtype=dtype)


def find_bins(numbers: np.ndarray, num_bins: int) -> list[list[float]]:
    """At most `num_bins` bins of about equally many of the sorted `numbers`, as the knots of each.

    Equal numbers are in one bin, and a number that is as frequent as a bin should be has its own.
    """
    distinct, counts = np.unique(numbers, return_counts=True)
    share, start = len(numbers) / num_bins, 0
    bins: list[tuple[int, int]] = []
    filled = np.concatenate([[0], counts.cumsum()])
    for index, count in enumerate(counts):
        if count >= share and index > start:  # it has a bin of its own, which begins here
            bins.append((start, index))
            start = index
        if filled[index + 1] - filled[start] >= share:
            bins.append((start, index + 1))
            start = index + 1
            share = (len(numbers) - filled[start]) / max(1, num_bins - len(bins))  # of what is left
    if start < len(distinct):
        bins.append((start, len(distinct)))
    while len(bins) > num_bins:  # frequent numbers cut others into smaller bins
        sizes = [filled[b[1]] - filled[a[0]] for a, b in zip(bins, bins[1:])]
        least = int(np.argmin(sizes))
        bins[least : least + 2] = [(bins[least][0], bins[least + 1][1])]
    knots = []
    for first, end in bins:
        own = numbers[filled[first] : filled[end]]
        points = np.quantile(own, np.linspace(0, 1, NUM_KNOTS)) if end - first > 1 else own[:1]
        knots.append([float(point) for point in points])
    return knots


def _as_numbers(series, name: str) -> np.ndarray:
    """A series of numbers as float64, NaN where one is missing."""
    types = import_pandas().api.types
    if not types.is_numeric_dtype(series) or types.is_complex_dtype(series):
        if series.isna().all():
            return np.full(len(series), np.nan)
        raise ValueError(
            f"column {name!r} has the dtype {series.dtype}: it must hold real numbers, as it did in training"
        )
    numbers = series.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(numbers).any():
        raise ValueError(f"column {name!r} holds an infinite number: replace it by NaN, or drop its row")
    return numbers


def _plain(value: Any, name: str) -> Any:
    """A category as a Python string, number or boolean."""
    value = value.item() if isinstance(value, np.generic) else value
    if not isinstance(value, (str, int, float, bool)):
        raise ValueError(f"column {name!r} holds {describe(value)}: its values must be strings, numbers or booleans")
    return value


def _key(value: Any) -> tuple:
    """What makes a category equal to another: a number is equal to any number of its value, and True is no number."""
    value = value.item() if isinstance(value, np.generic) else value
    return (
        isinstance(value, bool),
        isinstance(value, str),
        value if isinstance(value, (str, int, float, bool)) else str(value),
    )


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _with_dtype(series, dtype: str):
    """A series in a dtype of the training data, or as it is if that cannot hold it."""
    try:
        return series.astype(dtype)
    except (TypeError, ValueError):
        return series
