# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tables beside published results: does a model that is trained on drawn rows predict as well as one trained on real rows?

    python benchmarks/tables.py real --data tables/ --table buddy                       # the row "real data", to check the protocol
    python benchmarks/tables.py fit --data tables/ --table buddy --output_dir outputs/buddy
    python benchmarks/tables.py score --data tables/ --table buddy --checkpoint outputs/buddy
    python benchmarks/tables.py impute --data tables/ --table buddy --checkpoint outputs/buddy

`--data` is a folder with `TABLE.npz` (`X_num_train`, `X_cat_train`, `y_train` and so on for val and test) and `published.json`, which has for
each table its task, the settings of CatBoost, the number of drawn rows and the published scores. The protocol is TabDDPM's: the
generator sees the train part; CatBoost (`pip install catboost`) is trained on drawn rows, stops early by a fifth of train and val together, and is
tested on the test part; macro F1 of classes, R2 of numbers, over several drawn sets and seeds.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.metrics import f1_score, r2_score
from sklearn.model_selection import train_test_split

from d3pm_hf import D3PMPipeline, D3PMTablePipeline
from d3pm_hf.utils.scripts import run_script


TARGET = "y"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("command", choices=["real", "fit", "score", "impute"], help="What to do.")
parser.add_argument("--data", required=True, help="Folder of the tables.")
parser.add_argument("--table", required=True, help="Name of the table.")
parser.add_argument("--checkpoint", help="score, impute: folder of the pipeline.")
parser.add_argument("--output_dir", help="fit: folder of the run.")
parser.add_argument("--settings", default="{}", help="fit: arguments of D3PMTablePipeline.fit, as JSON.")
parser.add_argument("--num_seeds", type=int, default=10, help="real, score: number of seeds of CatBoost.")
parser.add_argument("--num_sets", type=int, default=5, help="score: number of drawn sets.")
parser.add_argument("--part", default="test", choices=["test", "val"], help="real, score: part that is predicted.")
parser.add_argument("--num_rows", type=int, help="score: rows of a drawn set; by default as many as TabDDPM drew.")
parser.add_argument("--temperature", type=float, default=1.0, help="score: temperature of the drawn rows.")
parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3, 0.5], help="impute: shares of hidden cells.")
parser.add_argument("--seed", type=int, default=0, help="Seed of the run, of the drawn rows and of the hidden cells.")


class Table:
    """A table with its parts as frames, and its published settings."""

    def __init__(self, folder: str, name: str):
        self.info = json.loads((Path(folder) / "published.json").read_text())[name]
        self.name, self.is_number = name, self.info["task"] == "regression"
        arrays = np.load(Path(folder) / f"{name}.npz")
        self.parts = {part: self._read(arrays, part) for part in ("train", "val", "test")}
        self.features = [column for column in self.parts["train"].columns if column != TARGET]
        self.categories = [self.features[i] for i in self.info["catboost"]["cat_features"]]

    def _read(self, arrays, part: str) -> pd.DataFrame:
        columns = {}
        for kind in ("num", "cat"):
            values = arrays.get(f"X_{kind}_{part}")
            for i in range(0 if values is None else values.shape[1]):
                columns[f"{kind}{i}"] = values[:, i].astype(str) if kind == "cat" else values[:, i].astype(float)
        target = arrays[f"y_{part}"]
        return pd.DataFrame(
            {**columns, TARGET: target.astype(float) if self.is_number else target.astype(int).astype(str)}
        )

    def split(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The real rows that CatBoost is trained on, and those that stop it early."""
        rows = pd.concat([self.parts["train"], self.parts["val"]], ignore_index=True)
        stratify = None if self.is_number else rows[TARGET]
        return train_test_split(rows, test_size=0.2, random_state=777, stratify=stratify)

    def inputs(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Features as CatBoost reads them: its categories as strings, all others as numbers."""
        return rows[self.features].astype({name: str if name in self.categories else float for name in self.features})

    def predict(self, rows: pd.DataFrame, seed: int, part: str = "test") -> float:
        """Score on a part of CatBoost that is trained on `rows`."""
        from catboost import CatBoostClassifier, CatBoostRegressor

        stops, tested = self.split()[1], self.parts[part]
        options = {key: value for key, value in self.info["catboost"].items() if key != "cat_features"}
        options |= {"random_seed": seed, "thread_count": 1, "verbose": False, "allow_writing_files": False}
        if self.is_number:
            model = CatBoostRegressor(loss_function="RMSE", eval_metric="RMSE", **options)
        else:
            loss = "MultiClass" if self.info["task"] == "multiclass" else "Logloss"
            model = CatBoostClassifier(loss_function=loss, eval_metric="TotalF1", **options)
        model.fit(
            self.inputs(rows), rows[TARGET], cat_features=self.categories, eval_set=(self.inputs(stops), stops[TARGET])
        )
        predicted = model.predict(self.inputs(tested)).ravel()
        if self.is_number:
            return r2_score(tested[TARGET], predicted)
        return f1_score(tested[TARGET], predicted.astype(str), average="macro")


def report(table: Table, name: str, scores: list[float]) -> None:
    published = ", ".join(
        f"{key} {value['mean']:.4f} ± {value['std']:.4f}" for key, value in table.info["published"].items()
    )
    print(
        f"{table.name}, {table.info['metric']}, {name}: {np.mean(scores):.4f} ± {np.std(scores):.4f} ({len(scores)} runs; published: {published})"
    )


def closest_distances(rows: pd.DataFrame, table: Table) -> np.ndarray:
    """Distance of each row to the closest row of the train part: numbers by their ranks, 1 for each category that differs."""
    real = table.parts["train"]
    numbers = [name for name in real.columns if pd.api.types.is_numeric_dtype(real[name])]
    ordered = {name: np.sort(real[name].to_numpy()) for name in numbers}
    ranks = [
        np.stack([np.searchsorted(ordered[name], frame[name].to_numpy()) / len(real) for name in numbers], 1)
        if numbers
        else np.zeros((len(frame), 0))
        for frame in (rows, real)
    ]
    others = [frame.drop(columns=numbers).to_numpy() for frame in (rows, real)]
    distances = []
    for own, kind in zip(ranks[0], others[0]):
        distances.append((np.abs(ranks[1] - own).sum(1) + (others[1] != kind).sum(1)).min())
    return np.array(distances)


def fit(table: Table, options: argparse.Namespace) -> None:
    started, wall = time.process_time(), time.time()
    settings = {"seed": options.seed, "output_dir": options.output_dir, **json.loads(options.settings)}
    pipeline = D3PMTablePipeline.fit(table.parts["train"], eval_frame=table.parts["val"], **settings)
    minutes = (time.process_time() - started) / 60
    nats = -pipeline.log_likelihood(table.parts["val"]).mean()
    print(
        f"{table.name}: {minutes:.1f} processor minutes ({(time.time() - wall) / 60:.1f} by the clock), {nats:.3f} nats per row of val"
    )


def score(table: Table, options: argparse.Namespace) -> None:
    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    num_rows = options.num_rows or table.info["synthetic_rows_of_TabDDPM"]
    scores = []
    for number in range(options.num_sets):
        generator = torch.Generator().manual_seed(options.seed + number)
        rows = pipeline(num_rows=num_rows, generator=generator, temperature=options.temperature)
        if number == 0:
            drawn, held_out = closest_distances(rows[:500], table), closest_distances(table.parts["test"][:500], table)
            print(
                f"distance to the closest train row, median: drawn {np.median(drawn):.4f}, test {np.median(held_out):.4f}"
            )
        scores += [table.predict(rows, seed, options.part) for seed in range(options.num_seeds)]
        report(table, f"{number + 1} drawn sets of {num_rows} rows", scores)


def impute(table: Table, options: argparse.Namespace) -> None:
    """Hidden cells of the test part: the share of categories that are right, and R2 of the ranks of numbers, beside other imputers."""
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    rows = table.parts["test"][:1000].reset_index(drop=True)
    schema, train = pipeline.schema, pipeline.schema.encode(table.parts["train"]).astype(float)
    truth = schema.encode(rows)
    is_ordered = np.array([column.is_ordered for column in schema.modeled])
    sizes = np.array(schema.sizes)
    imputers = {
        "most frequent": SimpleImputer(strategy="most_frequent"),
        "5 neighbors": KNNImputer(),
        "iterative": IterativeImputer(),
    }
    for share in options.shares:
        hidden = np.random.default_rng(options.seed).random(truth.shape) < share
        known = torch.from_numpy(np.where(hidden, -1, truth))
        draws = [pipeline.complete(known, 4096, generator=torch.Generator().manual_seed(i)).numpy() for i in range(5)]
        results = {"one draw": draws[0], "five draws": np.where(is_ordered, np.mean(draws, 0), vote(draws))}
        holed = np.where(hidden, np.nan, truth)
        for name, imputer in imputers.items():
            results[name] = imputer.fit(
                np.where(np.random.default_rng(1).random(train.shape) < share, np.nan, train)
            ).transform(holed)
        for name, states in results.items():
            states = np.clip(np.where(is_ordered, states, np.round(states)), 0, sizes - 1)
            nominal = (states == truth)[hidden & ~is_ordered].mean() if (hidden & ~is_ordered).any() else np.nan
            error = np.abs((states - truth) / sizes)[hidden & is_ordered].mean()
            print(
                f"{table.name}, {share:.0%} hidden, {name}: {nominal:.4f} of categories right, ranks of numbers off by {error:.4f}"
            )


def vote(draws: list[np.ndarray]) -> np.ndarray:
    """The most frequent state of each cell among several draws."""
    stacked = np.stack(draws)
    counts = (stacked[:, None] == stacked[None]).sum(0)
    return np.take_along_axis(stacked, counts.argmax(0)[None], 0)[0]


def main() -> None:
    options = parser.parse_args()
    table = Table(options.data, options.table)
    if options.command == "real":
        rows = table.split()[0]
        report(table, "real data", [table.predict(rows, seed, options.part) for seed in range(options.num_seeds)])
    else:
        {"fit": fit, "score": score, "impute": impute}[options.command](table, options)


if __name__ == "__main__":
    run_script(main)
