# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Tables: schemas, and pipelines that are fitted, saved, loaded, and draw, complete and score rows."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from d3pm_hf import D3PMPipeline, D3PMTableMLP, D3PMTablePipeline, D3PMTableTransformer, evaluate_bound
from d3pm_hf.app.checkpoints import create_checkpoint
from d3pm_hf.evaluation.splits import load_evaluation_data
from d3pm_hf.models.table_denoisers import StateVectors
from d3pm_hf.tables import TableSchema
from d3pm_hf.training import D3PMTrainingArguments, train


pytestmark = pytest.mark.filterwarnings("ignore:the process cannot lose information evenly", "ignore:after .* steps q")
SMALL = {"network": {"name": "mlp", "hidden_size": 32, "num_layers": 1}, "progress_bar": False, "train_batch_size": 64}


def weather(num_rows=400, seed=0):
    """A season decides the sky, and both the temperature."""
    rng = np.random.default_rng(seed)
    season = rng.integers(0, 4, num_rows)
    frame = pd.DataFrame(
        {
            "season": pd.Categorical.from_codes(season, ["winter", "spring", "summer", "fall"]),
            "sky": np.array(["clear", "gray", "rain"])[season % 3],
            "degrees": np.round(10 * season + rng.normal(0, 1, num_rows), 1),
            "days": rng.integers(0, 60, num_rows) + 100 * (season == 2),
            "is_dry": season % 3 != 2,
            "wind": pd.Categorical.from_codes(rng.integers(0, 3, num_rows), ["low", "some", "high"], ordered=True),
            "station": "north",
        }
    )
    return frame


@pytest.fixture(scope="module")
def fitted():
    return D3PMTablePipeline.fit(weather(), max_train_steps=250, learning_rate=5e-3, **SMALL)


# Schemas


def test_kinds_of_columns():
    frame = weather()
    schema = TableSchema.infer(frame, num_bins=20)
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == {
        **dict.fromkeys(("season", "sky", "is_dry", "wind"), "category"),
        **dict.fromkeys(("degrees", "days"), "number"),
        "station": "constant",
    }
    ordered = {column.name for column in schema.columns if column.is_ordered}
    assert ordered == {"degrees", "days", "wind"}
    assert schema.sizes == [4, 3, 20, 20, 2, 3] and len(schema.modeled) == 6
    states = schema.encode(frame)
    assert states.shape == (400, 6) and states.min() == 0
    counts = np.bincount(states[:, 2])
    assert counts.min() > 0 and counts.max() < 40  # bins of about equally many values, and no wide ones
    drawn = schema.decode(states)
    assert (drawn.dtypes == frame.dtypes).all() and (drawn.columns == frame.columns).all()
    for name in ("season", "sky", "is_dry", "wind", "station"):
        assert drawn[name].equals(frame[name])
    assert (schema.encode(drawn) == states).all()  # a number that is drawn inside a bin stays in it
    assert (drawn["degrees"].round(1) == drawn["degrees"]).all() and drawn["days"].dtype == "int64"
    assert abs(drawn["degrees"] - frame["degrees"]).mean() < 1


def test_numbers_are_exact_where_there_are_few_of_them():
    frame = pd.DataFrame({"a": [0.5, 2, 2, 7] * 10, "b": [1, 2, 3, None] * 10})
    schema = TableSchema.infer(frame)
    assert schema.sizes == [3, 3]
    states = schema.encode(frame)
    assert (states[3::4, 1] == -1).all()
    assert schema.decode(states[:3])["a"].tolist() == [0.5, 2, 2]
    assert schema.encode(pd.DataFrame({"b": [99.0], "a": [-4.0]})).tolist() == [
        [0, 2]
    ]  # the nearest; columns by their names


def test_frequent_numbers_have_bins_of_their_own():
    numbers = np.concatenate([np.zeros(500), np.linspace(0.1, 9, 500)])
    schema = TableSchema.infer(pd.DataFrame({"x": numbers}), num_bins=10)
    bins = schema.columns[0].knots
    assert bins[0] == [0.0] and len(bins) <= 10
    drawn = schema.decode(np.zeros((100, 1), dtype=int))["x"]
    assert (drawn == 0).all()
    rows = schema.decode(schema.encode(pd.DataFrame({"x": numbers})))["x"]
    assert abs(rows[500:].mean() - numbers[500:].mean()) < 0.2


def test_integers_in_wide_bins_are_equally_likely():
    schema = TableSchema.infer(pd.DataFrame({"x": np.repeat(np.arange(40), 25)}), num_bins=10)
    drawn = schema.decode(np.repeat(np.arange(10), 4000)[:, None])["x"]
    counts = np.bincount(drawn, minlength=40)
    assert drawn.dtype == "int64" and counts.min() > 700 and counts.max() < 1300


def dtypes(num_rows=60):
    """Columns of many dtypes, each with a few values or with bins."""
    rng = np.random.default_rng(0)
    few, many = rng.integers(0, 3, num_rows), rng.normal(size=num_rows)
    some = pd.Series(few).where(few > 0)
    return pd.DataFrame(
        {
            "unused": pd.Categorical.from_codes(few, ["a", "b", "c", "never", "neither"], ordered=True),
            "numbers": pd.Categorical(few * 1.5),
            "plain strings": np.array(["x", "y", "z"], dtype=object)[few],
            "strings": pd.Series(np.array(["x", "y", "z"])[few], dtype="string"),
            "half": many.astype("float32"),
            "small": few.astype("int8"),
            "maybe integer": some.astype("Int64"),
            "maybe number": pd.Series(many).where(few > 0).astype("Float64"),
            "maybe bool": pd.Series(few > 1, dtype="boolean").where(few > 0),
            "bool or nothing": pd.Series(few > 1).astype(object).where(few > 0, None),
            "one of them": pd.Series([2**60 + 1] * num_rows, dtype="Int64").where(few > 0),
        }
    )


def test_dtypes_come_back():
    frame = dtypes()
    schema = TableSchema.infer(frame, num_bins=8)
    assert list(schema.columns[0].values) == ["a", "b", "c"] and schema.columns[0].size == 3
    again = TableSchema.from_dict(json.loads(json.dumps(schema.to_dict())))
    states = again.encode(frame)
    drawn = again.decode(states.clip(min=0))
    for name in frame.columns:
        assert drawn[name].dtype == frame[name].dtype, name
    assert schema.columns[-1].values == [2**60 + 1]
    known = states >= 0
    assert (again.encode(drawn)[known] == states[known]).all()


def test_what_is_there_stays_in_any_dtype():
    frame = dtypes()
    network = {"hidden_size": 8, "num_layers": 1}
    pipeline = D3PMTablePipeline.create(frame, num_bins=8, network=network)
    pipeline.set_progress_bar_config(disable=True)
    holed = frame.mask(np.random.default_rng(1).random(frame.shape) < 0.3)
    completed = pipeline.impute(holed)
    assert not completed.isna().any().any()
    for name in frame.columns:
        there = holed[name].notna()
        assert completed[name].dtype == frame[name].dtype, name
        assert completed[name][there].tolist() == holed[name][there].tolist(), name


def test_numbers_may_be_objects():
    """Numbers whose column has been mixed with None are numbers, not categories."""
    numbers = [*np.linspace(0, 1, 30), None]
    schema = TableSchema.infer(pd.DataFrame({"a": pd.Series(numbers, dtype=object)}), num_bins=5)
    assert schema.columns[0].kind == "number" and schema.sizes == [5]
    rows = pd.DataFrame({"a": pd.Series([0.0, 1.0, None], dtype=object)})
    assert schema.encode(rows)[:, 0].tolist() == [0, 4, -1]


def test_a_schema_is_json():
    schema = TableSchema.infer(weather(), num_bins=8)
    again = TableSchema.from_dict(json.loads(json.dumps(schema.to_dict())))
    assert again.to_dict() == schema.to_dict()


BAD = {
    "empty": (pd.DataFrame({"a": []}), "has 0 rows"),
    "no columns": (pd.DataFrame(index=[0, 1]), "0 columns"),
    "all missing": (pd.DataFrame({"a": [None, None], "b": [1, 2]}), "'a' holds no value at all: drop it"),
    "identifiers": (
        pd.DataFrame({"a": [f"id{i}" for i in range(50)], "b": [1, 2] * 25}),
        "as names and identifiers have: drop it",
    ),
    "row numbers": (
        pd.DataFrame({"Unnamed: 0": range(50), "b": [1, 2] * 25}),
        "counts the rows, from 0 to 49: drop it",
    ),
    "infinite": (pd.DataFrame({"a": [1.0, np.inf, 2.0]}), "'a' holds an infinite number"),
    "dates": (pd.DataFrame({"a": pd.date_range("2020-01-01", periods=3)}), "'a' holds dates or times: make numbers"),
    "mixed": (pd.DataFrame({"a": ["x", 1, "x", 1]}), "types int and str: convert them to one"),
    "objects": (pd.DataFrame({"a": [(1, 2), (3,)] * 3}), "must be strings, finite numbers or booleans"),
    "constants": (pd.DataFrame({"a": [1, 1], "b": ["x", "x"]}), "there is nothing to model"),
    "names": (pd.DataFrame(np.eye(3)), "rename its columns to strings"),
    "twice": (pd.DataFrame(np.eye(2), columns=["a", "a"]), "'a' twice"),
    "index": (
        pd.DataFrame({"a": [1, 2]}, index=pd.Index([5, 6], name="id")),
        "an index is no data: call `frame.reset_index()`",
    ),
    "no frame": ([[1, 2]], "must be a pandas DataFrame"),
    "lists": (pd.DataFrame({"a": [[1, 2], [3]] * 3, "b": [1, 2, 3] * 2}), "'a' holds lists or other containers"),
    "objects that are dates": (
        pd.DataFrame({"a": pd.Series(pd.date_range("2020-01-01", periods=3), dtype=object)}),
        "'a' holds dates or times",
    ),
    "infinite objects": (pd.DataFrame({"a": pd.Series([1.0, np.inf, 2.0], dtype=object)}), "holds an infinite number"),
    "large integers": (
        pd.DataFrame({"a": [2**60, 2**60 + 1, 3] * 4}),
        "'a' holds integers beyond 2^53, as identifiers are",
    ),
    "complex": (pd.DataFrame({"a": [1j, 2j]}), "must hold real numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_tables_that_are_refused(name):
    frame, words = BAD[name]
    with pytest.raises(ValueError) as caught:
        D3PMTablePipeline.fit(frame)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_infinite_category_is_refused():
    with pytest.raises(
        ValueError, match="column 'a' holds inf: its values must be strings, finite numbers or booleans"
    ):
        TableSchema.infer(pd.DataFrame({"a": [1.0, np.inf, 2.0]}), categorical=["a"])


def test_the_index_of_a_data_set_is_refused():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_pandas(pd.DataFrame({"a": [1, 2, 3]}, index=[4, 5, 7]))
    with pytest.raises(
        ValueError, match="the index of a frame as the column '__index_level_0__': rename it, or drop it"
    ):
        TableSchema.infer(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_train_steps", None), ("max_train_steps", "ten"), ("train_batch_size", 0), ("lr_warmup_steps", "ten")],
)
def test_settings_of_fit_that_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}: it must be an integer"):
        D3PMTablePipeline.fit(weather(20), **{name: value})


def test_new_rows_that_are_refused(fitted):
    frame = weather(5)

    def error(rows):
        with pytest.raises(ValueError) as caught:
            fitted.log_likelihood(rows)
        return str(caught.value)

    assert "lacks the column 'sky'" in error(frame.drop(columns="sky"))
    assert "'moon', which the model was not trained with: drop it" in error(frame.assign(moon=1))
    assert "'sky' holds 'fog', which the training data never had: it is one of 'clear', 'gray', 'rain'" in error(
        frame.assign(sky="fog")
    )
    assert "'station' holds 'south', which the training data never had" in error(frame.assign(station="south"))
    assert "'degrees' has the dtype" in error(frame.assign(degrees="warm"))
    assert "'sky' holds lists or other containers" in error(frame.assign(sky=[["rain"]] * 5))
    assert "has 0 rows" in error(frame[:0])
    with pytest.raises(ValueError, match="num_eval_timesteps is 0"):
        fitted.log_likelihood(frame, "bound", num_eval_timesteps=0)
    with pytest.raises(ValueError, match="table_model is a Linear: it must be a `Denoiser`"):
        D3PMTablePipeline(torch.nn.Linear(1, 1), fitted.scheduler, fitted.schema.to_dict())
    with pytest.raises(ValueError, match="one `torch.Generator` for all rows"):
        fitted(num_rows=2, generator=[torch.Generator(), torch.Generator()])
    with pytest.raises(ValueError, match="given has 'moon', which is no column"):
        fitted(given={"moon": 1})
    with pytest.raises(ValueError, match="given.'sky'. has 2 values for 3 rows"):
        fitted(num_rows=3, given={"sky": ["gray", "rain"]})
    with pytest.raises(ValueError, match="fit got 'epochs'"):
        D3PMTablePipeline.fit(frame, epochs=3)
    with pytest.raises(ValueError, match="got schema, and num_bins or categorical"):
        D3PMTablePipeline.fit(frame, schema=fitted.schema, num_bins=4)
    with pytest.raises(ValueError, match="network is 'forest'"):
        D3PMTablePipeline.fit(frame, network="forest")
    with pytest.raises(ValueError, match="an option of the network 'mlp' is 'depth': it must be one of hidden_size"):
        D3PMTablePipeline.fit(frame, network={"depth": 3})
    with pytest.raises(ValueError, match="transition has 'moon'"):
        D3PMTablePipeline.fit(frame, transition={"moon": "uniform"})
    with pytest.raises(ValueError, match="pass the sizes of the schema"):
        D3PMTablePipeline(fitted.table_model, fitted.scheduler, TableSchema.infer(weather(), num_bins=3).to_dict())
    with pytest.raises(ValueError, match="which the page does not show"):
        create_checkpoint("mine", fitted)
    with pytest.raises(ValueError, match="pipeline.log_likelihood"):
        load_evaluation_data(fitted, "text", "test", None, None)


# Pipelines


def test_an_untrained_pipeline_draws_without_dropout():
    pipeline = D3PMTablePipeline.create(weather(), network={"name": "mlp", "hidden_size": 32, "dropout": 0.5})
    assert not any(module.training for module in pipeline.table_model.modules())


def test_rows_are_those_of_the_table(fitted):
    generator = torch.Generator().manual_seed(0)
    rows = fitted(num_rows=600, batch_size=250, generator=generator)
    frame = weather()
    assert (rows.dtypes == frame.dtypes).all() and len(rows) == 600
    agree = rows["sky"].to_numpy() == np.array(["clear", "gray", "rain"])[rows["season"].cat.codes % 3]
    assert agree.mean() > 0.9
    assert abs(rows["degrees"] - 10 * rows["season"].cat.codes).median() < 2
    shares = rows["season"].value_counts(normalize=True)
    assert (abs(shares - 0.25) < 0.15).all()
    again = fitted(num_rows=600, batch_size=250, generator=torch.Generator().manual_seed(0))
    assert again.equals(rows)


def test_what_is_given_stays(fitted):
    rows = fitted(num_rows=40, given={"season": "winter", "degrees": 1.2345})
    assert (rows["season"] == "winter").all() and (rows["degrees"] == 1.2345).all()
    assert (rows["sky"] == "clear").mean() > 0.9
    assert (rows.dtypes == weather().dtypes).all()
    for seasons in (["winter", "summer"], pd.Index(["winter", "summer"]), pd.Categorical(["winter", "summer"])):
        rows = fitted(num_rows=2, given={"season": seasons})
        assert rows["season"].tolist() == ["winter", "summer"]


def test_missing_values_are_completed(fitted):
    frame = weather(60, seed=1)
    holed = frame.copy()
    holed["sky"] = holed["sky"].where(np.arange(60) % 2 == 0)
    holed["days"] = holed["days"].where(np.arange(60) % 3 == 0)
    holed["season"] = None
    holed = holed[holed.columns[::-1]].set_index(np.arange(100, 160))
    completed = fitted.impute(holed, generator=torch.Generator().manual_seed(0))
    assert list(completed.columns) == list(holed.columns) and list(completed.index) == list(range(100, 160))
    assert not completed.isna().any().any()
    for name in holed.columns:
        there = holed[name].notna()
        assert (completed[name][there] == holed[name][there]).all()
    assert (completed["sky"].to_numpy() == frame["sky"].to_numpy()).mean() > 0.9
    assert (completed["season"].astype(str).to_numpy() == frame["season"].astype(str).to_numpy()).mean() > 0.75
    assert completed["days"].dtype == "int64"
    several = fitted.impute(holed, num_samples=3)
    assert len(several) == 3 and not several[0].equals(several[1])


def test_the_likelihood_of_rows(fitted):
    """It sums to one over all rows, finds outliers, and leaves out what is missing."""
    frame = weather(50, seed=2)
    scores = fitted.log_likelihood(frame)
    assert scores.index.equals(frame.index) and scores.name == "log_likelihood"
    odd = frame.assign(sky=np.where(frame["sky"] == "rain", "clear", "rain"))
    assert (fitted.log_likelihood(odd) < scores).mean() > 0.95
    for order in ("margin", "confidence"):
        assert abs(fitted.log_likelihood(frame, order).mean() - scores.mean()) < 1
    bound = fitted.log_likelihood(frame, "bound")
    assert abs(bound.mean() - scores.mean()) < 2
    only = frame.copy()
    only[["season", "degrees", "days", "is_dry", "wind"]] = None
    three = pd.concat([only.iloc[:1].assign(sky=sky) for sky in ("clear", "gray", "rain")], ignore_index=True)
    assert abs(np.exp(fitted.log_likelihood(three)).sum() - 1) < 1e-5
    nothing = only.assign(sky=None)
    assert (fitted.log_likelihood(nothing) == 0).all()


def test_a_picture(fitted, tmp_path):
    from scipy.stats import spearmanr

    from d3pm_hf.tables.plots import correlations

    fitted.plot(weather(60), num_rows=20).savefig(tmp_path / "marginals.png")
    fitted.plot(weather(60), weather(30, seed=3).assign(sky=None), max_columns=2).savefig(tmp_path / "two.png")
    states = fitted.schema.encode(weather(60))
    expected = spearmanr(states).statistic
    np.testing.assert_allclose(correlations(states), expected, atol=1e-12)


def test_files(fitted, tmp_path):
    fitted.save_pretrained(tmp_path)
    loaded = D3PMPipeline.from_pretrained(tmp_path)
    assert type(loaded) is D3PMTablePipeline and isinstance(loaded.table_model, D3PMTableMLP)
    frame = weather(20)
    pd.testing.assert_series_equal(loaded.log_likelihood(frame), fitted.log_likelihood(frame))
    card = (tmp_path / "README.md").read_text()
    assert "| season | 4 categories |" in card and "print(pipeline(num_rows=5))" in card
    assert "6 elements have up to" in card and "- tabular" in card
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["schema"]["columns"][0]["values"] = ["winter"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="column 'season' has 1 values: a category has at least 2"):
        D3PMPipeline.from_pretrained(tmp_path)
    index["schema"]["columns"][0] |= {"values": ["a", "b", "c", "d"], "decimals": "3"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="decimals of column 'season' is '3'"):
        D3PMPipeline.from_pretrained(tmp_path)


def test_training_is_that_of_fit(tmp_path):
    """`fit` is `create`, `dataset` and `train`; a run has a log, samples and a card with the bound."""
    frame = weather(100)
    settings = {
        "max_train_steps": 4,
        "train_batch_size": 16,
        "num_samples": 3,
        "num_inference_steps": 5,
        "disable_tqdm": True,
    }
    torch.manual_seed(0)
    pipeline = D3PMTablePipeline.create(frame, network=SMALL["network"])
    arguments = D3PMTrainingArguments(
        output_dir=str(tmp_path / "run"), lr_warmup_steps=1, num_eval_timesteps=5, **settings
    )
    data = pipeline.dataset(frame)
    pipeline = train(arguments, pipeline, data, data)
    samples = pd.read_csv(tmp_path / "run/samples/final.csv")
    assert list(samples.columns) == list(frame.columns) and len(samples) == 3
    assert "bits_per_dim" in (tmp_path / "run/README.md").read_text()
    other = D3PMTablePipeline.fit(
        frame, output_dir=str(tmp_path / "fit"), max_train_steps=4, **{**SMALL, "train_batch_size": 16}
    )
    assert (tmp_path / "fit/log.jsonl").is_file()
    again = D3PMTablePipeline.fit(frame, max_train_steps=4, **{**SMALL, "train_batch_size": 16})
    for mine, theirs in zip(other.table_model.parameters(), again.table_model.parameters()):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "transition", ["uniform", "stationary", "ordinal", "absorbing_uniform", {"sky": "uniform", "degrees": "gaussian"}]
)
def test_other_processes(transition, tmp_path):
    frame = weather(200)
    arguments = {"num_bins": 6, "num_train_timesteps": 10, "max_train_steps": 3, "transition": transition, **SMALL}
    pipeline = D3PMTablePipeline.fit(frame, **arguments)
    pipeline.save_pretrained(tmp_path)
    pipeline = D3PMPipeline.from_pretrained(tmp_path)
    rows = pipeline(num_rows=20, given={"season": "spring"})
    assert (rows["season"] == "spring").all() and not rows.isna().any().any()
    scores = pipeline.log_likelihood(frame.head(30))
    data = pipeline.dataset(frame.head(30))
    bound = evaluate_bound(
        pipeline.scheduler, pipeline.denoiser, [data.states], num_eval_timesteps=10, progress_bar=False
    )
    assert abs(scores.mean() + bound.total * 6) < 1e-4
    completed = pipeline.impute(frame.head(10).assign(sky=None), num_particles=2)
    assert completed["sky"].notna().all()
    if transition != "absorbing_uniform":
        with pytest.raises(ValueError, match="'degrees' has missing values, which this process has no mask for"):
            D3PMTablePipeline.fit(frame.assign(degrees=frame["degrees"].where(frame["degrees"] > 0)), **arguments)


def test_missing_values_in_training():
    frame = weather(200)
    frame["sky"] = frame["sky"].where(np.arange(200) % 2 == 0)
    frame = frame.reindex([*range(7), 1000, *range(7, 200)]).reset_index(
        drop=True
    )  # one more row, of which nothing is known
    pipeline = D3PMTablePipeline.fit(frame, max_train_steps=20, **SMALL)
    assert not pipeline(num_rows=30).isna().any().any()
    assert len(frame) == 201 and len(pipeline.dataset(frame)) == 200


def test_a_transformer_and_a_dataset():
    datasets = pytest.importorskip("datasets")
    frame = pd.DataFrame({"a": [1.5, 2.5] * 20, "b": ["x", "y"] * 20})
    network = {"name": "transformer", "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    pipeline = D3PMTablePipeline.fit(
        datasets.Dataset.from_pandas(frame), max_train_steps=2, network=network, progress_bar=False
    )
    assert isinstance(pipeline.table_model, D3PMTableTransformer)
    assert set(pipeline(num_rows=4)["b"]) <= {"x", "y"}


def test_a_thousand_binary_columns():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.integers(0, 2, (64, 1000)), columns=[f"c{i}" for i in range(1000)])
    network = {"name": "mlp", "hidden_size": 16, "num_layers": 1, "embedding_size": 2}
    pipeline = D3PMTablePipeline.fit(frame, max_train_steps=3, network=network, progress_bar=False)
    assert all(parameter.isfinite().all() for parameter in pipeline.table_model.parameters())
    rows = pipeline(num_rows=3, num_inference_steps=10)
    assert rows.isin([0, 1]).all().all()


@pytest.mark.parametrize("kind", [D3PMTableMLP, D3PMTableTransformer])
def test_networks(kind):
    """Logits of states that a column does not have are minus infinity; a network that reads the timestep depends on it."""
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_layers": 1, "is_ordered": [True, False, True]}
    network = kind([4, 3, 8], **options).eval()
    x = torch.tensor([[3, 8, 0], [8, 2, 7]])
    logits = network(x, torch.tensor(3))
    assert torch.equal(logits == -torch.inf, (torch.arange(9) >= torch.tensor([4, 3, 8])[:, None]).expand(2, -1, -1))
    assert not network.reads_timestep and torch.equal(logits, network(x, torch.tensor(9)))
    timed = kind([4, 3, 8], has_mask=False, num_timesteps=10, **options).eval()
    x = torch.tensor([[3, 2, 0], [0, 2, 7]])
    assert timed.reads_timestep and not torch.allclose(timed(x, torch.tensor(3)), timed(x, torch.tensor([3, 9])))
    frequencies = torch.zeros(3, 9)
    for row, size in enumerate([4, 3, 8]):
        frequencies[row, :size] = torch.arange(1, size + 1) / sum(range(1, size + 1))
    network.set_frequencies(frequencies)
    with torch.no_grad():
        for parameter in network.outputs.parameters():
            parameter.zero_()
    torch.testing.assert_close(network(torch.tensor([[3, 8, 0]]), 0).softmax(-1)[0], frequencies)
    with pytest.raises(ValueError, match="num_categories is empty"):
        kind([])
    with pytest.raises(ValueError, match="one for each"):
        kind([4, 3], is_ordered=[True])
    with pytest.raises(ValueError, match="frequent_states has 1 entries for 2 columns"):
        kind([4, 3], frequent_states=[[0]])
    with pytest.raises(ValueError, match="a state of frequent_states is 4"):
        kind([4, 3], frequent_states=[[4], []])


def test_vectors_of_states():
    """Those of an ordered column are the sums of cosines of the docstring; all others, and frequent ones beside these, are free."""
    torch.manual_seed(0)
    vectors = StateVectors([6, 3, 2], [True, False, True], [[4], [], []], width=5, num_frequencies=4)
    assert vectors.coefficients.shape == (1, 4, 5) and vectors.free.shape == (1 + 3 + 2, 5)
    vectors.free.data[0] = 7.0
    j, k = torch.arange(4), torch.arange(6)[:, None]
    expected = torch.einsum("kj,jd->kd", torch.cos(torch.pi * j * (k + 0.5) / 6) / (j + 1), vectors.coefficients[0])
    expected[4] += 7.0
    torch.testing.assert_close(vectors()[:6], expected)
    torch.testing.assert_close(vectors()[6:], vectors.free[1:])
    few = StateVectors([3], [True], [[]], width=2, num_frequencies=8)
    assert torch.linalg.matrix_rank(few.cosines) == 3  # as many cosines as states: any vectors are possible


def test_neighbors_share_what_is_learned():
    """Of two numbers that are nearly equal, each is predicted from values that were never seen together."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=300)
    frame = pd.DataFrame({"a": numbers, "b": numbers + 0.1 * rng.normal(size=300)})
    held_out = pd.DataFrame({"a": np.linspace(-1.5, 1.5, 200), "b": np.linspace(-1.5, 1.5, 200)})
    pipeline = D3PMTablePipeline.fit(frame, max_train_steps=300, **SMALL)
    gain = pipeline.log_likelihood(held_out) + np.log(pipeline.schema.sizes).sum()  # above equally likely states
    assert gain.mean() > 0.7
    completed = pipeline.impute(held_out.assign(b=None), generator=torch.Generator().manual_seed(0))
    assert abs(completed["b"] - held_out["b"]).median() < 0.3


def test_a_long_tail_has_narrow_bins():
    numbers = np.concatenate([np.linspace(0, 1, 2000), np.linspace(1, 50, 40)])
    schema = TableSchema.infer(pd.DataFrame({"x": numbers}), num_bins=64)
    widths = [knots[-1] - knots[0] for knots in schema.columns[0].knots]
    assert schema.sizes[0] <= 64 and max(widths) < 5  # one bin of equally many rows would go from 1 to 40
    counts = np.bincount(schema.encode(pd.DataFrame({"x": numbers}))[:, 0])
    assert counts.max() < 2 * 2040 / 64


def test_frequent_states_of_ordered_columns():
    numbers = np.concatenate([np.zeros(300), np.linspace(1, 2, 300)])
    frame = pd.DataFrame({"x": numbers, "y": ["a"] * 500 + ["b"] * 100})
    pipeline = D3PMTablePipeline.create(frame, network={"hidden_size": 8})
    assert pipeline.table_model.config["frequent_states"] == [[0], []]
