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
tested on the test part; macro F1 of classes, R2 of numbers, over several drawn sets and seeds. The target of a drawn row is drawn last.
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
from sklearn.neighbors import NearestNeighbors

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

    def known(self, part: str) -> pd.DataFrame:
        """Rows of a part whose categories the train part has: the generator has no state for others."""
        train, rows = self.parts["train"], self.parts[part]
        categories = [column for column in train if not pd.api.types.is_numeric_dtype(train[column])]
        is_known = np.all([rows[column].isin(train[column].unique()) for column in categories], axis=0)
        return rows[is_known | np.zeros(len(rows), bool)].reset_index(drop=True)

    def split(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The real rows that CatBoost is trained on, and those that stop it early."""
        rows = pd.concat([self.parts["train"], self.parts["val"]], ignore_index=True)
        stratify = None if self.is_number else rows[TARGET]
        return train_test_split(rows, test_size=0.2, random_state=777, stratify=stratify)

    def inputs(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Features as CatBoost reads them: its categories as strings, all others as numbers."""
        return rows[self.features].astype({name: str if name in self.categories else float for name in self.features})

    def train(self, rows: pd.DataFrame, seed: int):
        """CatBoost that is trained on `rows`."""
        from catboost import CatBoostClassifier, CatBoostRegressor

        stops = self.split()[1]
        options = {key: value for key, value in self.info["catboost"].items() if key != "cat_features"}
        options |= {"random_seed": seed, "thread_count": 1, "verbose": False, "allow_writing_files": False}
        if self.is_number:
            model = CatBoostRegressor(loss_function="RMSE", eval_metric="RMSE", **options)
        else:
            loss = "MultiClass" if self.info["task"] == "multiclass" else "Logloss"
            model = CatBoostClassifier(loss_function=loss, eval_metric="TotalF1", **options)
        return model.fit(
            self.inputs(rows), rows[TARGET], cat_features=self.categories, eval_set=(self.inputs(stops), stops[TARGET])
        )

    def evaluate(self, model, tested: pd.DataFrame) -> float:
        """Score of CatBoost on rows: macro F1 of classes, R2 of numbers."""
        predicted = model.predict(self.inputs(tested)).ravel()
        if self.is_number:
            return r2_score(tested[TARGET], predicted)
        return f1_score(tested[TARGET], predicted.astype(str), average="macro")

    def predict(self, rows: pd.DataFrame, seed: int, part: str = "test") -> float:
        """Score on a part of CatBoost that is trained on `rows`."""
        return self.evaluate(self.train(rows, seed), self.parts[part])

    def numbers(self, rows: pd.DataFrame) -> list[str]:
        """Columns of numbers, the target included if it is one."""
        return [name for name in rows.columns if pd.api.types.is_numeric_dtype(rows[name])]

    def smote(self, num_rows: int, seed: int = 0) -> pd.DataFrame:
        """Rows between a train row and one of its 5 nearest neighbors of the same class: numbers between both, categories of the first."""
        rng, real = np.random.default_rng(seed), self.parts["train"]
        numbers = self.numbers(real)
        scaled = pd.get_dummies((real.assign(**(real[numbers] - real[numbers].mean()) / real[numbers].std()))).astype(
            float
        )
        if not self.is_number:
            scaled[[name for name in scaled if name.startswith(f"{TARGET}_")]] *= 1e3  # another class is far away
        neighbors = NearestNeighbors(n_neighbors=6).fit(scaled).kneighbors(scaled, return_distance=False)[:, 1:]
        first = rng.integers(0, len(real), num_rows)
        other = neighbors[first, rng.integers(0, 5, num_rows)]
        rows, share = real.iloc[first].reset_index(drop=True), rng.random((num_rows, 1))
        values = real[numbers].to_numpy()
        return rows.assign(**pd.DataFrame(values[first] + share * (values[other] - values[first]), columns=numbers))


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
    numbers = table.numbers(real)
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
    pipeline = D3PMTablePipeline.fit(table.parts["train"], eval_frame=table.known("val"), **settings)
    minutes = (time.process_time() - started) / 60
    nats = -pipeline.log_likelihood(table.known("val")).mean()
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
        rows = pipeline.impute(rows.assign(**{TARGET: np.nan}), generator=generator)  # the target given all others
        if number == 0:
            parts = {"drawn": rows, "SMOTE": table.smote(500), "test": table.parts["test"]}
            medians = {name: np.median(closest_distances(part[:500], table)) for name, part in parts.items()}
            print("distance to the closest train row, median:", ", ".join(f"{k} {v:.4f}" for k, v in medians.items()))
        scores += [table.predict(rows, seed, options.part) for seed in range(options.num_seeds)]
        report(table, f"{number + 1} drawn sets of {num_rows} rows", scores)


def impute(table: Table, options: argparse.Namespace) -> None:
    """Hidden features of the test part, completed by the pipeline and by other imputers.

    Rows with a category that the train part does not have are left out. Measured are the log-loss of a hidden state given all that is
    known of its row, beside that of the frequencies of its column; the share of categories that are right; the mean error of the states
    of ordered columns, as a share of their number; and the score of CatBoost, trained on real rows, on the completed rows.
    """
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer

    pipeline = D3PMPipeline.from_pretrained(options.checkpoint)
    rows, model = table.known("test"), table.train(table.split()[0], 0)
    schema, train = pipeline.schema, pipeline.schema.encode(table.parts["train"])
    truth, columns = schema.encode(rows), [column.name for column in schema.modeled]
    is_ordered, sizes = np.array([column.is_ordered for column in schema.modeled]), np.array(schema.sizes)
    frequencies = np.log(np.maximum(schema.frequencies(train, sizes.max()), 1e-12))
    imputers = {
        "most frequent": SimpleImputer(strategy="most_frequent"),
        "5 neighbors": KNNImputer(),
        "iterative": IterativeImputer(),
    }
    for share in options.shares:
        rng = np.random.default_rng(options.seed)
        hidden, train_hidden = rng.random(truth.shape) < share, rng.random(train.shape) < share
        hidden[:, columns.index(TARGET)] = train_hidden[:, columns.index(TARGET)] = True  # no imputer knows the target
        known = torch.from_numpy(np.where(hidden, -1, truth))
        scored = hidden.copy()
        scored[:, columns.index(TARGET)] = False
        x_t = known.where(known >= 0, pipeline.scheduler.config.num_classes - 1)
        with torch.no_grad():
            log_probs = pipeline.denoiser(x_t, torch.zeros((), dtype=torch.long)).log_softmax(-1).numpy()
        own, column = truth[scored], np.nonzero(scored)[1]
        losses = -log_probs[scored][np.arange(len(own)), own].mean(), -frequencies[column, own].mean()
        print(
            f"{table.name}, {share:.0%} hidden: {losses[0]:.3f} nats per hidden cell, by frequencies {losses[1]:.3f}"
        )
        draws = [pipeline.complete(known, 4096, generator=torch.Generator().manual_seed(i)).numpy() for i in range(10)]
        results = {"one draw": draws[0], "ten draws": np.where(is_ordered, np.median(draws, 0), vote(draws))}
        features = [name != TARGET for name in columns]
        for name, imputer in imputers.items():
            imputer.fit(np.where(train_hidden, np.nan, train)[:, features])
            results[name] = truth.astype(float)
            results[name][:, features] = imputer.transform(np.where(hidden, np.nan, truth)[:, features])
        for name, states in results.items():
            states = np.clip(np.round(states), 0, sizes - 1).astype(int)
            nominal, ordered = scored & ~is_ordered, scored & is_ordered
            right = f"{(states == truth)[nominal].mean():.4f}" if nominal.any() else "none"
            error = np.abs((states - truth) / sizes)[ordered].mean()
            completed = schema.decode(np.where(hidden, states, truth))
            completed = completed.where(pd.DataFrame(hidden, columns=columns), rows)[rows.columns]
            completed[TARGET] = rows[TARGET]
            print(
                f"{table.name}, {share:.0%} hidden, {name}: {right} of categories right, states off by {error:.4f}, "
                f"{table.info['metric']} {table.evaluate(model, completed):.4f}"
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
