# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The columns of a table as states: categories as they are, numbers by bins of about equally many values."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..utils.checks import check_choice, check_int, check_type, describe, shorten


# Number of points, both ends included, between which a number is interpolated inside its bin.
NUM_KNOTS = 9
# Share of the range of a column, beside the share of its rows, in what all its bins have equally much of.
RANGE_SHARE = 0.25
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
        decimals (`int`, *optional*): Number of decimals that numbers are rounded to, 0 for integers.
        dtype (`str`, defaults to `"object"`): The pandas dtype of the column.
        categories (`list`): All categories of the dtype `"category"`; those that are no `values` are never drawn.
    """

    name: str
    kind: str
    values: list = field(default_factory=list)
    knots: list[list[float]] = field(default_factory=list)
    is_ordered: bool = False
    decimals: int | None = None
    dtype: str = "object"
    categories: list = field(default_factory=list)

    def __post_init__(self):
        check_type("the name of a column", self.name, str, "a string")
        of_column = f"of column {self.name!r}"
        check_choice(f"kind {of_column}", self.kind, KINDS)
        for name in ("values", "knots", "categories"):
            check_type(f"{name} {of_column}", getattr(self, name), list, "a list")
        check_type(f"is_ordered {of_column}", self.is_ordered, bool, "True or False")
        check_type(f"dtype {of_column}", self.dtype, str, "the name of a pandas dtype")
        if self.decimals is not None:
            check_int(f"decimals {of_column}", self.decimals, 0)
        if self.kind == "number":
            is_right = all(isinstance(bin, list) and bin and all(map(_is_finite, bin)) for bin in self.knots)
            flat = [value for bin in self.knots for value in bin] if is_right else []
            if not is_right or len(self.knots) < 2 or flat != sorted(flat):
                raise ValueError(f"knots {of_column} must be two or more lists of ascending numbers")
            self.is_ordered = True
            return
        for values in (self.values, self.categories):
            _check_values(self.name, values)
            if len(set(map(_key, values))) != len(values):
                raise ValueError(f"column {self.name!r} has a category twice: each must be there once")
        least = 2 if self.kind == "category" else 1
        if len(self.values) < least:
            raise ValueError(f"column {self.name!r} has {len(self.values)} values: a {self.kind} has at least {least}")
        if self.categories and not set(map(_key, self.values)) <= set(map(_key, self.categories)):
            raise ValueError(f"categories {of_column} must hold all of its values")

    @property
    def size(self) -> int:
        """Number of states."""
        return len(self.knots) if self.kind == "number" else len(self.values)

    def encode(self, series) -> np.ndarray:
        """States `[n]` of a pandas series; -1 where a value is missing."""
        if self.kind == "number":
            numbers = _as_numbers(series)
            edges = [(low[-1] + high[0]) / 2 for low, high in zip(self.knots, self.knots[1:])]
            return np.where(np.isnan(numbers), MISSING, np.searchsorted(edges, numbers))
        codes, found = _factorize(series)
        state_of = {_key(value): state for state, value in enumerate(self.values)}
        states = [state_of.get(_key(value)) for value in found]
        if None in states:
            known = ", ".join(map(repr, self.values[:6])) + (", ..." if len(self.values) > 6 else "")
            raise ValueError(
                f"column {self.name!r} holds {describe(found[states.index(None)])}, which the training data never had: it is one of "
                f"{known}"
            )
        return np.array([*states, MISSING], dtype=int)[codes]  # the code of a value that is missing is -1

    def decode(self, states: np.ndarray, rng: np.random.Generator):
        """A pandas series of the values of states `[n]`. A number is drawn inside its bin."""
        pandas = import_pandas()
        if self.kind != "number":
            values = [self.values[state] for state in states]
            if self.dtype == "category":
                values = pandas.Categorical(values, self.categories or self.values, ordered=self.is_ordered)
            return with_dtype(pandas.Series(values, name=self.name), self.dtype)
        grid = np.linspace(0, 1, NUM_KNOTS)
        knots = np.array([np.interp(grid, np.linspace(0, 1, len(bin)), bin) for bin in self.knots])
        place = rng.random(len(states)) * (NUM_KNOTS - 1)
        left = place.astype(int)
        low, high = knots[states, left], knots[states, left + 1]
        numbers = low + (place - left) * (high - low)
        if self.decimals == 0:
            first, last = knots[states, 0], knots[states, -1]
            width = np.where(last > first, last - first, 1)  # both ends are as likely as the integers between them
            numbers = np.where(last > first, first - 0.5 + (numbers - first) * (width + 1) / width, numbers)
            numbers = np.clip(np.round(numbers), first, last)
        elif self.decimals is not None:
            numbers = np.round(numbers, self.decimals)
        return with_dtype(pandas.Series(numbers, name=self.name), self.dtype)

    def describe(self) -> str:
        """A few words on the values of the column."""
        if self.kind == "number":
            what = "integers" if self.decimals == 0 else "numbers"
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
        self.columns = [column if isinstance(column, Column) else self.read_column(column) for column in columns]
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"the columns are {names}: each name must be there once")
        if not self.modeled:
            raise ValueError("no column has two different values: there is nothing to model")

    @staticmethod
    def read_column(values: Any) -> Column:
        """The column of a dictionary of its fields."""
        check_type("an entry of columns", values, dict, "a dictionary of a name, a kind and what the column holds")
        unknown = [name for name in values if name not in Column.__dataclass_fields__]
        if unknown or not {"name", "kind"} <= values.keys():
            raise ValueError(
                f"a column has the fields {', '.join(map(str, values))}: it needs name and kind, and may have "
                f"{', '.join(Column.__dataclass_fields__)}"
            )
        return Column(**values)

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
        return {"columns": [asdict(column) for column in self.columns]}

    @classmethod
    def from_dict(cls, values: dict) -> "TableSchema":
        """The schema that [`TableSchema.to_dict`] has returned."""
        check_type("schema", values, dict, "a dictionary with the key 'columns'")
        return cls(values.get("columns"))

    @classmethod
    def infer(cls, frame, num_bins: int | None = None, categorical: list[str] | None = None) -> "TableSchema":
        """The schema of a table.

        Strings, booleans and pandas categories are categories. Numbers with at most `num_bins` different values have a state for each;
        others have bins of about equally many values, but no wide ones, and a value that is as frequent as a bin has its own. A column with one
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
        }  # constants are checked, too
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
        if name.startswith("__index_level_"):
            raise ValueError(f"the data set has the index of a frame as the column {name!r}: rename it, or drop it")
    if frame.columns.has_duplicates:
        raise ValueError(
            f"the frame has the column {frame.columns[frame.columns.duplicated()][0]!r} twice: rename one of them"
        )
    index_names = [name for name in frame.index.names if name is not None]
    if index_names:
        raise ValueError(
            f"the frame has the index {index_names[0]!r}, and an index is no data: call `frame.reset_index()` to make it a column, "
            "or `frame.reset_index(drop=True)` to leave it out"
        )
    return frame


def infer_column(series, num_bins: int, is_categorical: bool) -> Column:
    """The column of a pandas series."""
    pandas, name, dtype = import_pandas(), series.name, series.dtype
    types, series = pandas.api.types, series.infer_objects()  # numbers may come as objects
    num_present = int(series.notna().sum())
    if not num_present:
        raise ValueError(f"column {name!r} holds no value at all: drop it")
    is_period = isinstance(series.dtype, pandas.PeriodDtype)
    if is_period or types.is_datetime64_any_dtype(series) or types.is_timedelta64_dtype(series):
        raise ValueError(
            f"column {name!r} holds dates or times: make numbers or categories of them, such as `.dt.year` and `.dt.month`"
        )
    if types.is_numeric_dtype(series) and not types.is_bool_dtype(series) and not is_categorical:
        return infer_number(series, num_bins)
    values = _factorize(series)[1]
    kinds = {str if isinstance(value, str) else bool if isinstance(value, bool) else float for value in values}
    if len(kinds) > 1:
        words = sorted({type(value).__name__ for value in values})
        raise ValueError(f"column {name!r} holds values of the types {' and '.join(words)}: convert them to one")
    if len(values) > max(0.9 * num_present, 10):
        raise ValueError(
            f"column {name!r} has {len(values)} different values in {num_present} rows, as names and identifiers have: drop it"
        )
    if len(values) > MAX_CATEGORIES:
        raise ValueError(
            f"column {name!r} has {len(values)} categories, more than {MAX_CATEGORIES}: merge the rare ones"
        )
    kind, options = "constant" if len(values) == 1 else "category", {}
    if isinstance(dtype, pandas.CategoricalDtype):
        categories = dtype.categories.tolist()
        options = {"categories": categories, "is_ordered": bool(dtype.ordered)}
        values = [value for value in categories if value in set(values)]
    else:
        values = sorted(values)
    return Column(name, kind, values, dtype=str(dtype), **options)


def infer_number(series, num_bins: int) -> Column:
    """The column of a pandas series of numbers."""
    name, dtype = series.name, str(series.dtype)
    numbers = _as_numbers(series)
    numbers = numbers[~np.isnan(numbers)]
    distinct, count = np.unique(numbers), len(numbers)
    decimals = next((d for d in range(MAX_DECIMALS + 1) if np.array_equal(np.round(distinct, d), distinct)), None)
    if series.nunique() == 1:
        return Column(name, "constant", _factorize(series)[1], dtype=dtype)
    if import_pandas().api.types.is_integer_dtype(series) and np.abs(distinct).max() > 2**53:
        raise ValueError(
            f"column {name!r} holds integers beyond 2^53, as identifiers are: drop it, or make strings of it"
        )
    # Row numbers ascend from about zero, with few gaps where rows were left out.
    if count > 10 and decimals == 0 and 0 <= numbers[0] <= 0.1 * count and numbers[-1] < 1.5 * count:
        if (np.diff(numbers) > 0).all():
            raise ValueError(f"column {name!r} counts the rows, from {numbers[0]:g} to {numbers[-1]:g}: drop it")
    numbers.sort()
    knots = [[float(value)] for value in distinct] if len(distinct) <= num_bins else find_bins(numbers, num_bins)
    return Column(name, "number", knots=knots, decimals=decimals, dtype=dtype)


def find_bins(numbers: np.ndarray, num_bins: int) -> list[list[float]]:
    """At most `num_bins` bins of the sorted `numbers` of about equal weight, as the knots of each.

    Weighed are the share of the rows and, so that a long tail is not one wide bin, that of the range:

        weight(bin) = 3/4 rows in the bin / rows + 1/4 width of the bin / range of the column

    Equal numbers are in one bin, and a number that weighs as much as a bin should has its own.
    """
    distinct, counts = np.unique(numbers, return_counts=True)
    gaps = np.diff(distinct)
    widths = np.append(gaps[0], gaps) + np.append(
        gaps, gaps[-1]
    )  # half of each gap belongs to the number on either side
    weights = (1 - RANGE_SHARE) * counts / len(numbers) + RANGE_SHARE * widths / widths.sum()
    filled = np.concatenate([[0], weights.cumsum()])
    share, start = 1 / num_bins, 0
    bins: list[tuple[int, int]] = []
    for index, weight in enumerate(weights):
        if weight >= share and index > start:  # it has a bin of its own, which begins here
            bins.append((start, index))
            start = index
        if filled[index + 1] - filled[start] >= share - 1e-9:
            bins.append((start, index + 1))
            start = index + 1
            share = (1 - filled[start]) / max(1, num_bins - len(bins))  # of what is left
    if start < len(distinct):
        bins.append((start, len(distinct)))
    while len(bins) > num_bins:  # heavy numbers cut others into lighter bins
        sizes = [filled[b[1]] - filled[a[0]] for a, b in zip(bins, bins[1:])]
        least = int(np.argmin(sizes))
        bins[least : least + 2] = [(bins[least][0], bins[least + 1][1])]
    ends = np.concatenate([[0], counts.cumsum()])
    knots = []
    for first, end in bins:
        own = numbers[ends[first] : ends[end]]
        points = np.quantile(own, np.linspace(0, 1, NUM_KNOTS)) if end - first > 1 else own[:1]
        knots.append([float(point) for point in points])
    return knots


def with_dtype(series, dtype: Any):
    """A series in a dtype of the training data, or as it is if that cannot hold it."""
    try:
        return series.astype(dtype)
    except (TypeError, ValueError):
        return series


def _as_numbers(series) -> np.ndarray:
    """A series of numbers as float64, NaN where one is missing."""
    types, inferred = import_pandas().api.types, series.infer_objects()
    if series.isna().all():
        return np.full(len(series), np.nan)
    if not types.is_numeric_dtype(inferred) or types.is_complex_dtype(inferred):
        raise ValueError(
            f"column {series.name!r} has the dtype {series.dtype}: it must hold real numbers, as it did in training"
        )
    numbers = inferred.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(numbers).any():
        raise ValueError(f"column {series.name!r} holds an infinite number: replace it by NaN, or drop its row")
    return numbers


def _factorize(series) -> tuple[np.ndarray, list]:
    """Codes `[n]` of the values of a series, -1 where one is missing, and the values as Python strings, numbers and booleans."""
    try:
        codes, values = import_pandas().factorize(series)
    except TypeError as error:  # lists and dictionaries have no hash
        raise ValueError(
            f"column {series.name!r} holds lists or other containers: its values must be strings, numbers or booleans"
        ) from error
    values = [value.item() if isinstance(value, np.generic) else value for value in values.tolist()]
    _check_values(series.name, values)
    return codes, values


def _check_values(name: str, values: list) -> None:
    """Checks that categories are strings, finite numbers or booleans."""
    for value in values:
        if not isinstance(value, (str, bool)) and not _is_finite(value):
            raise ValueError(
                f"column {name!r} holds {describe(value)}: its values must be strings, finite numbers or booleans"
            )


def _key(value: Any) -> tuple:
    """The key by which categories are equal: a number equals any number of its value, and True is no number."""
    return isinstance(value, bool), value


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
