# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Pictures of real rows beside drawn ones."""

import numpy as np

from .schema import TableSchema, import_pandas


# Number of pictures beside each other.
WIDTH = 4


def plot_states(schema: TableSchema, real: np.ndarray, drawn: np.ndarray, max_columns: int):
    """A figure of the frequencies of the states of each column, and of the rank correlations of all pairs of columns.

    Args:
        schema: The columns.
        real, drawn: States `[n, N]`, -1 where a value is missing.
        max_columns: Number of columns that are shown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: install it with `pip install matplotlib`") from error
    columns = schema.modeled[:max_columns]
    num_rows = -(-(len(columns) + 2) // WIDTH)
    figure = Figure(figsize=(3.2 * WIDTH, 2.6 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, WIDTH, squeeze=False).flatten()
    for number, column in enumerate(columns):
        for name, states, style in (("real", real, "-"), ("drawn", drawn, "--")):
            own = states[:, number]
            shares = np.bincount(own[own >= 0], minlength=column.size) / max((own >= 0).sum(), 1)
            axes[number].step(np.arange(column.size), shares, style, where="mid", label=name)
        axes[number].set_title(column.name, fontsize=9)
        axes[number].set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    for place, (name, states) in enumerate((("real", real), ("drawn", drawn)), len(columns)):
        image = axes[place].imshow(correlations(states[:, : len(columns)]), vmin=-1, vmax=1, cmap="coolwarm")
        axes[place].set_title(f"rank correlations, {name}", fontsize=9)
        figure.colorbar(image, ax=axes[place])
    for unused in axes[len(columns) + 2 :]:
        unused.set_axis_off()
    return figure


def correlations(states: np.ndarray) -> np.ndarray:
    """Spearman's rank correlations of all pairs of columns `[N, N]`, over the rows that have both values; 0 if one is constant there."""
    pandas = import_pandas()
    result = pandas.DataFrame(states).where(states >= 0).corr(method="spearman").fillna(0).to_numpy(copy=True)
    np.fill_diagonal(result, 1)
    return result
