# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
# /// script
# requires-python = ">=3.11"
# dependencies = ["d3pm-hf[training] @ git+https://github.com/d3pm-hf/d3pm-hf", "scikit-learn"]
# ///
"""Fits a pipeline to a table, and measures it on rows that are held out.

    python examples/train_table.py data.csv --target y --output_dir mine

The table is a CSV file with a header. docs/source/en/tables.md describes what becomes of its columns.
"""

import argparse


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("table", help="CSV file with a header.")
parser.add_argument("--target", help="Column that is predicted from real and from drawn rows by gradient boosting.")
parser.add_argument("--output_dir", default="table-model", help="Folder of the run and of the checkpoint.")
parser.add_argument("--drop", nargs="*", default=[], help="Columns to leave out, such as identifiers.")
parser.add_argument("--categorical", nargs="*", default=[], help="Columns of numbers that are categories.")
parser.add_argument("--num_bins", type=int, help="Largest number of bins of a number. By default the data decide.")
parser.add_argument("--transition", default="absorbing", help="Transition family of all columns, or `ordinal`.")
parser.add_argument("--network", default="mlp", choices=["mlp", "transformer"], help="Network over the columns.")
parser.add_argument("--hidden_size", type=int, help="Width of the network.")
parser.add_argument("--num_layers", type=int, help="Number of layers of the network.")
parser.add_argument("--dropout", type=float, help="Dropout of the network.")
parser.add_argument(
    "--max_train_steps", type=int, help="Number of updates of the weights. By default the data decide."
)
parser.add_argument("--train_batch_size", type=int, default=256, help="Number of rows of a step.")
parser.add_argument("--learning_rate", type=float, default=2e-3, help="Peak learning rate.")
parser.add_argument("--checkpointing_steps", type=int, default=1000, help="Number of steps between two checkpoints.")
parser.add_argument("--resume_from_checkpoint", help="Checkpoint folder to resume from, or `latest`.")
parser.add_argument("--eval_share", type=float, default=0.1, help="Share of the rows that are held out.")
parser.add_argument("--seed", type=int, default=0, help="Seed of the split, the weights, the noise and the samples.")
if __name__ == "__main__":
    parser.parse_args()  # --help and wrong flags are answered before the imports that take seconds

import numpy as np
import pandas as pd
import torch

from d3pm_hf import D3PMTablePipeline
from d3pm_hf.tables import TableSchema
from d3pm_hf.utils.scripts import run_script


def main() -> None:
    options = parser.parse_args()
    frame = pd.read_csv(options.table)
    for flag, names in (("--drop", options.drop), ("--target", [] if options.target is None else [options.target])):
        for name in names:
            if name not in frame.columns:
                raise ValueError(f"{flag} has {name!r}, which is no column of {options.table}")
    frame = frame.drop(columns=options.drop)
    if not 0 < options.eval_share < 1:
        raise ValueError(f"--eval_share is {options.eval_share}: it must lie between 0 and 1")
    is_held_out = np.random.default_rng(options.seed).permutation(len(frame)) < options.eval_share * len(frame)
    train_rows, eval_rows = (frame[rows].reset_index(drop=True) for rows in (~is_held_out, is_held_out))
    sizes = {name: getattr(options, name) for name in ("hidden_size", "num_layers", "dropout")}
    network = {"name": options.network, **{name: size for name, size in sizes.items() if size is not None}}
    steps = {} if options.max_train_steps is None else {"max_train_steps": options.max_train_steps}
    # The columns are those of all rows: a rare category may be among the rows that are held out alone.
    schema = TableSchema.infer(frame, options.num_bins, options.categorical)
    pipeline = D3PMTablePipeline.fit(
        train_rows,
        eval_frame=eval_rows,
        schema=schema,
        transition=options.transition,
        network=network,
        output_dir=options.output_dir,
        seed=options.seed,
        **steps,
        train_batch_size=options.train_batch_size,
        learning_rate=options.learning_rate,
        checkpointing_steps=options.checkpointing_steps,
        checkpoints_total_limit=1,
        resume_from_checkpoint=options.resume_from_checkpoint,
    )
    if options.target is not None:
        generator = torch.Generator().manual_seed(options.seed)
        drawn = pipeline(num_rows=len(train_rows), generator=generator)
        # A target that is drawn given all others is predicted best from them.
        drawn = pipeline.impute(drawn.assign(**{options.target: np.nan}), generator=generator)
        for name, rows in (("real", train_rows), ("drawn", drawn)):
            print(f"{options.target} predicted from {name} rows: {score(rows, eval_rows, options.target)}")


def score(rows: pd.DataFrame, eval_rows: pd.DataFrame, target: str) -> str:
    """Score of gradient boosting on `eval_rows`: macro F1 of categories, and R2 of numbers with many values."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.metrics import f1_score, r2_score

    rows, eval_rows = rows.dropna(subset=[target]), eval_rows.dropna(subset=[target])
    is_number = pd.api.types.is_numeric_dtype(rows[target]) and rows[target].nunique() > 20
    both = pd.get_dummies(pd.concat([rows, eval_rows]).drop(columns=target))
    both.columns = [str(number) for number in range(both.shape[1])]
    kind = HistGradientBoostingRegressor if is_number else HistGradientBoostingClassifier
    model = kind(random_state=0).fit(both[: len(rows)], rows[target])
    predicted = model.predict(both[len(rows) :])
    if is_number:
        return f"R2 {r2_score(eval_rows[target], predicted):.3f}"
    return f"macro F1 {f1_score(eval_rows[target], predicted, average='macro'):.3f}"


if __name__ == "__main__":
    run_script(main)
