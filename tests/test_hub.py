# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Pushing and pulling pipelines over HTTP, between processes that share nothing but a loopback Hub.

huggingface_hub reads where the Hub is when it is imported, so what talks to it runs in processes of its own. Importing
costs seconds: one process pushes everything, another pulls everything, and the tests look at what they report.
"""

import contextlib
import io
import itertools
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comparison import MAX_FLIPPED, assert_same_draws
from hub_server import WRONG_TOKEN, LoopbackHub
from huggingface_hub import ModelCard


NO_ERROR = ["", "there was no error"]
TESTS = str(Path(__file__).parent)
PLAIN, EMA = "text_model/model.safetensors", "text_model/model.ema.safetensors"
EXPORTED = ("text", "image", "neighbors")
RESHARDED = ("text-to-shards", "text-to-one-file", "image-to-shards", "image-to-one-file")
# Repositories whose card is edited between two pushes, one for each way to push.
EDITED = ("org/text", "user/unnamed", "org/saved", "org/exported-image")
CARDS = (*EDITED, "org/neighbors", "org/image", "org/table")


def outside(index_name):
    """An index of shards that leads out of its folder."""
    index = {"metadata": {"total_size": 0}, "weight_map": {"lm_head.bias": "../../x.safetensors"}}
    return {f"text_model/{index_name}": json.dumps(index)}


# Repositories that must not be loaded, as changes to a valid text checkpoint; None removes a file.
UNSOUND = {
    "component": {"model_index.json": {"text_model": ["subprocess", "Popen"]}},
    "pipeline": {"model_index.json": {"_class_name": "StableDiffusionPipeline"}},
    "shards": outside("model.safetensors.index.json"),
    "variant-shards": {
        **outside("model.safetensors.index.ema.json"),
        EMA: None,
        "text_model/model.ema-00001-of-00001.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    },
    "tokenizer": {"tokenizer/tokenizer_config.json": json.dumps({"vocab_file": "/etc/passwd"})},
    "truncated": {PLAIN: b"\x00\x01"},
    "unfinished": {"scheduler/scheduler_config.json": None},
    "no-index": {"model_index.json": None},
}


# Functions of the processes. Each of the functions without a leading underscore runs in one of its own, and returns a report
# that JSON can hold.


def _sample(pipeline):
    """Returns states drawn with a fixed seed."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    size = {pipeline.batch_argument: 2}
    return pipeline(**size, num_inference_steps=8, generator=generator, output_type="latent")[0].tolist()


def _randomize(pipeline, seed):
    """Gives the network weights that are large enough for samples to depend on them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    network = getattr(pipeline, pipeline.network_name)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.2, generator=generator)


def _error(call):
    """Returns the class and the message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return NO_ERROR


def _edit_card(repo_id):
    """Adds a line to a card on the Hub."""
    from huggingface_hub import HfApi

    api = HfApi()
    card = Path(api.hf_hub_download(repo_id, "README.md")).read_text(encoding="utf-8") + "\nWritten by hand.\n"
    return api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo_id).oid


def _own_pipeline():
    """A pipeline of the user's own, with a second network."""
    from d3pm_hf import D3PMTextPipeline

    class OwnPipeline(D3PMTextPipeline):
        _optional_components = ["tokenizer", "critic"]

        def __init__(self, text_model, scheduler, tokenizer=None, critic=None, sequence_length: int = 256):
            super().__init__(text_model, scheduler, tokenizer, sequence_length)
            self.register_modules(critic=critic)

    return OwnPipeline


def push(folder):
    """Fills the Hub; reports the commits, and a sample of what each of them holds."""
    import pandas as pd
    import torch
    from huggingface_hub import HfApi

    import d3pm_hf as d3pm
    from d3pm_hf.hub.transfers import push_folder

    text = d3pm.D3PMTextPipeline(
        d3pm.create_text_model("tiny", 28), d3pm.D3PMScheduler(28), d3pm.character_tokenizer(), sequence_length=32
    )
    process = {
        "transition": "nearest_neighbor",
        "embeddings": torch.randn(27, 4, generator=torch.Generator().manual_seed(0)),
        "num_neighbors": 5,
        "unigram_probs": torch.arange(1.0, 28),
    }
    neighbors = d3pm.D3PMTextPipeline(
        d3pm.create_text_model("tiny", 27), d3pm.D3PMScheduler(27, 50, **process), d3pm.character_tokenizer(), 32
    )
    image = d3pm.D3PMImagePipeline(
        d3pm.create_unet("tiny", 17, 8, 1, "logistic"),
        d3pm.D3PMScheduler(17, transition="gaussian", beta_schedule="cosine", prediction_type="logistic"),
    )
    samples, commits = {}, {}

    # Four states of one repository, with a card that says what was measured.
    _randomize(text, 1)
    data = text.encode(["the quick brown fox jumps over a", "and the lazy dog sleeps under it"])
    bound = d3pm.evaluate_bound(text.scheduler, text.denoiser, [data], num_inference_steps=5, progress_bar=False)
    results = d3pm.bound_results(bound, "text8", split="validation", task="text-generation")
    card = d3pm.create_model_card(text, "org/text", training={"steps": 12}, eval_results=results, license="mit")
    first = text.push_to_hub("org/text", card=card)
    commits["first"], samples["first"] = first.oid, _sample(text)
    HfApi().create_branch("org/text", branch="release/1")
    commits["edited"] = _edit_card("org/text")
    _randomize(text, 2)
    commits["second"], samples["second"] = text.push_to_hub("org/text").oid, _sample(text)
    _randomize(text, 3)
    commits["ema"], samples["ema"] = text.push_to_hub("org/text", variant="ema").oid, _sample(text)
    _randomize(text, 4)
    commits["proposal"], samples["proposal"] = text.push_to_hub("org/text", create_pr=True).pr_revision, _sample(text)

    _randomize(neighbors, 5)
    neighbors.push_to_hub("org/neighbors")
    neighbors.scheduler.push_to_hub("org/scheduler")
    _randomize(image, 6)
    image.push_to_hub("org/image")
    image.push_to_hub("org/image", variant="ema")
    table = d3pm.D3PMTablePipeline.create(pd.DataFrame({f"c{i}": [*range(9)] * 20 for i in range(20)}))
    _randomize(table, 7)
    table.push_to_hub("org/table")
    samples["table"] = _sample(table)
    image.push_to_hub("org/pickled", safe_serialization=False)
    for name, pipeline in {"text": text, "image": image, "neighbors": neighbors}.items():
        samples[name] = _sample(pipeline)
        d3pm.export(pipeline, f"{folder}/{name}", push_to_hub=True, repo_id=f"org/exported-{name}")

    ways = {
        "user/unnamed": lambda: image.push_to_hub("unnamed"),  # the Hub knows whose token it is
        "org/saved": lambda: image.save_pretrained(f"{folder}/saved", push_to_hub=True, repo_id="org/saved"),
        "org/exported-image": lambda: d3pm.export(image, f"{folder}/image", True, "org/exported-image"),
    }
    for repo_id, push_again in ways.items():
        push_again()
        _edit_card(repo_id)
        push_again()

    critic = d3pm.create_text_model("tiny", 28)
    own = _own_pipeline()(text.text_model, text.scheduler, text.tokenizer, critic, sequence_length=32)
    own.push_to_hub("org/own")
    samples["own"], critic_sum = _sample(own), critic.lm_head.weight.double().sum().item()

    # Shards, and weights of another variant in one file.
    text.save_pretrained(f"{folder}/mixed", max_shard_size="20KB", push_to_hub=True, repo_id="org/mixed")
    text.save_pretrained(f"{folder}/mixed-ema", variant="ema", push_to_hub=True, repo_id="org/mixed")
    samples["mixed"] = _sample(text)

    # From one file to shards and back, so that what was pushed before lies beside what is new.
    for name, pipeline in {"text": text, "image": image}.items():
        for end in ("shards", "one-file"):
            name_to = f"{name}-to-{end}"
            for seed, size in enumerate(["5GB", "20KB"] if end == "shards" else ["20KB", "5GB"]):
                _randomize(pipeline, 10 + seed)
                target = f"{folder}/{name_to}-{size}"
                pipeline.save_pretrained(target, max_shard_size=size, push_to_hub=True, repo_id=f"org/{name_to}")
            samples[name_to] = _sample(pipeline)

    refused = {
        "push_to_hub": lambda: image.push_to_hub("org/image", token=WRONG_TOKEN),
        "save_pretrained": lambda: image.save_pretrained(
            f"{folder}/refused", push_to_hub=True, repo_id="org/image", token=WRONG_TOKEN
        ),
        "export": lambda: d3pm.export(image, f"{folder}/refused", True, "org/image", token=WRONG_TOKEN),
        "push_folder": lambda: push_folder(f"{folder}/saved", "org/image", token=WRONG_TOKEN),
    }
    errors = {name: _error(call) for name, call in refused.items()}

    metrics = {"bits_per_dim": bound.bits_per_dim, "perplexity": bound.perplexity, "protocol": bound.protocol}
    metrics["errors"] = {
        "bits_per_dim": bound.bits_per_dim_standard_error,
        "perplexity": bound.perplexity * bound.standard_error,
    }
    return {
        "samples": samples,
        "commits": commits,
        "address": str(first),
        "metrics": metrics,
        "errors": errors,
        "critic": critic_sum,
    }


def pull(commits, folder):
    """Loads what was pushed, each with a different token, which identifies its requests."""
    import torch
    from huggingface_hub import HfFileSystem
    from transformers import AutoTokenizer

    import d3pm_hf as d3pm

    def load(label, repo_id="org/text", cls=d3pm.D3PMPipeline, **kwargs):
        return cls.from_pretrained(repo_id, **{"token": label, **kwargs})

    pipelines = {
        "second": load("second"),
        "first": load("first", revision=commits["first"]),
        "branch": load("branch", revision="release/1"),
        "proposal": load("proposal", revision=commits["proposal"]),
        "ema": load("ema", variant="ema"),
        "ema-only": load("ema-only", variant="ema", cache_dir=f"{folder}/ema"),
        "subclass": load("subclass", cls=d3pm.D3PMTextPipeline),
        "local": load("local", local_files_only=True),
        "forced": load("forced", force_download=True),
        "neighbors": load("neighbors", "org/neighbors"),
        "image": load("image", "org/image"),
        "table": load("table", "org/table"),
        **{f"exported-{name}": load(f"exported-{name}", f"org/exported-{name}") for name in EXPORTED},
        "trusted": load("trusted", "org/exported-text", trust_remote_code=True),
        **{name: load(name, f"org/{name}") for name in RESHARDED},
        "mixed": load("mixed", "org/mixed", variant="ema"),
    }
    not_imported = _error(lambda: load("own", "org/own"))
    own_pipeline = _own_pipeline()
    pipelines["own"] = load("own", "org/own")
    pipelines["components"] = d3pm.D3PMTextPipeline(
        d3pm.D3PMTextModel.from_pretrained("org/neighbors", subfolder="text_model"),
        d3pm.D3PMScheduler.from_pretrained("org/scheduler"),
        AutoTokenizer.from_pretrained("org/neighbors", subfolder="tokenizer"),
        sequence_length=32,
    )
    half = load("half", dtype=torch.bfloat16)
    converted = load("half").to(torch.bfloat16)
    wanted = {
        "no repository": {"repo_id": "org/nothing"},
        "no namespace": {"repo_id": "nothing"},
        "not an id": {"repo_id": "a//b"},
        "no revision": {"revision": "nothing"},
        "no commit": {"revision": "1" * 40},
        "wrong token": {"token": WRONG_TOKEN, "cache_dir": f"{folder}/empty"},
        "gated": {"repo_id": "org/gated"},
        "not cached": {"local_files_only": True, "cache_dir": f"{folder}/empty"},
        "no variant": {"variant": "fp16", "cache_dir": f"{folder}/fp16"},
        "wrong class": {"cls": d3pm.D3PMImagePipeline},
        "pickled": {"repo_id": "org/pickled"},
        **{name: {"repo_id": f"unsound/{name}"} for name in UNSOUND},
    }
    wanted["variant-shards"]["variant"] = "ema"
    files = HfFileSystem()
    report = {
        "samples": {name: _sample(pipeline) for name, pipeline in pipelines.items()},
        "classes": {name: type(pipeline).__name__ for name, pipeline in pipelines.items()},
        "name": pipelines["second"].config._name_or_path,
        "base_models": {
            name: d3pm.create_model_card(pipelines[name]).data.base_model for name in ("components", "neighbors")
        },
        "own": [type(pipelines["own"]) is own_pipeline, pipelines["own"].critic.lm_head.weight.double().sum().item()],
        "texts": pipelines["second"](batch_size=2, num_inference_steps=2).texts,
        "half": {"dtype": str(half.dtype), "samples": [_sample(half), _sample(converted)]},
        "errors": {
            "not imported": not_imported,
            **{name: _error(lambda: load("errors", **kwargs)) for name, kwargs in wanted.items()},
        },
        "cards": {repo_id: _run_card(repo_id) for repo_id in CARDS},
        "dataset": {
            "files": files.glob("datasets/org/words/**/*.txt"),
            "text": files.cat_file("datasets/org/words/data/train.txt", start=4, end=7).decode(),
        },
    }
    unpickle = {"use_safetensors": False, "cache_dir": f"{folder}/pickled"}
    report["errors"]["unpickled"] = _error(
        lambda: report["samples"].update(unpickled=_sample(load("unpickled", "org/pickled", **unpickle)))
    )
    return report


def _run_card(repo_id):
    """Runs the Python of a card on the Hub, as a reader would paste it."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", ModelCard.load(repo_id).text, re.MULTILINE | re.DOTALL))
    picture = Path("sample.png")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        error = _error(lambda: exec(code, {}))
    report = {"error": error, "printed": printed.getvalue(), "picture": picture.exists()}
    picture.unlink(missing_ok=True)
    return report


def pull_from_cache(commits, folder):
    """Loads pipelines that are in the cache, and some that are not, while the Hub cannot be reached."""
    from d3pm_hf import D3PMPipeline

    def load(repo_id="org/text", **kwargs):
        return D3PMPipeline.from_pretrained(repo_id, **kwargs)

    cached = {
        "second": {},
        "first": {"revision": commits["first"]},
        "branch": {"revision": "release/1"},
        "ema": {"variant": "ema"},
        "local": {"local_files_only": True},
        "neighbors": {"repo_id": "org/neighbors"},
        "image": {"repo_id": "org/image"},
    }
    absent = {
        "repository": {"repo_id": "org/nothing"},
        "revision": {"revision": "nothing"},
        "weights": {"cache_dir": f"{folder}/ema"},  # in which there are only those of the variant
    }
    return {
        "samples": {name: _sample(load(**kwargs)) for name, kwargs in cached.items()},
        "errors": {name: _error(lambda: load(**kwargs)) for name, kwargs in absent.items()},
    }


def pull_offline(commits, folder):
    """Does the same, and loads schedulers by themselves, with and without tensors."""
    from d3pm_hf import D3PMScheduler

    schedulers = [
        D3PMScheduler.from_pretrained(f"org/{name}", subfolder="scheduler") for name in ("text", "neighbors")
    ]
    prior = [scheduler.sample_prior((1, 2)).shape[1] for scheduler in schedulers]
    return {**pull_from_cache(commits, folder), "prior": prior}


def pull_with_diffusers():
    """Loads exported checkpoints with diffusers, which knows this package by the file beside the weights only."""
    from diffusers import DiffusionPipeline

    def load(name, **kwargs):
        return DiffusionPipeline.from_pretrained(f"org/exported-{name}", **kwargs)

    report = {"refused": {name: _error(lambda: load(name)) for name in EXPORTED}, "samples": {}, "errors": {}}
    for name in EXPORTED:
        report["errors"][name] = _error(
            lambda: report["samples"].update({name: _sample(load(name, trust_remote_code=True))})
        )
    return report


# Starting the processes


def run(function, environment, folder, *arguments, options=(), paths=sys.path):
    """Calls a function of this file in a new process, and returns its report."""
    folder.mkdir()
    target = folder / "report.json"
    code = (
        "import json, pathlib, sys\n"
        "paths, arguments, target = map(json.loads, sys.argv[1:])\n"
        "sys.path += paths\n"
        "import test_hub\n"
        f"pathlib.Path(target).write_text(json.dumps(test_hub.{function.__name__}(*arguments)))"
    )
    values = [[TESTS, *paths], arguments, str(target)]
    result = subprocess.run(
        [sys.executable, *options, "-c", code, *map(json.dumps, values)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=folder,  # Python also looks for packages here, and finds none
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return SimpleNamespace(**json.loads(target.read_text()))


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub(lfs=(".safetensors", ".bin")) as hub:
        yield hub


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def pushed(hub, home):
    return run(push, hub.environment(home / "author"), home / "push", str(home))


@pytest.fixture(scope="module")
def pulled(hub, home, pushed):
    """Report of a process whose cache was empty."""
    sound = hub.files("org/text")
    hub.put("org/gated", sound)
    hub.repository("org/gated").gated = True
    hub.put("org/words", {"data/train.txt": "one two three", "data/test.txt": "four"}, repo_type="dataset")
    for name, changes in UNSOUND.items():
        files = {**sound, **changes}
        if isinstance(files["model_index.json"], dict):
            files["model_index.json"] = json.dumps(
                {**json.loads(sound["model_index.json"]), **changes["model_index.json"]}
            )
        hub.put(f"unsound/{name}", {path: data for path, data in files.items() if data is not None})
    return run(pull, hub.environment(home / "reader"), home / "pull", pushed.commits, str(home / "pull"))


@pytest.fixture(scope="module")
def offline(hub, home, pushed, pulled):
    """Report of an offline process with the cache of the process that pulled."""
    environment = hub.environment(home / "reader", HF_HUB_OFFLINE="1")
    before = len(hub.requests)
    report = run(pull_offline, environment, home / "offline", pushed.commits, str(home / "pull"))
    report.requests = hub.requests[before:]
    return report


@pytest.fixture(scope="module")
def unreachable(hub, home, pushed, pulled):
    """Report of a process with that cache, for which the Hub does not answer."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environment = hub.environment(home / "reader", HF_ENDPOINT=f"http://127.0.0.1:{closed.getsockname()[1]}")
        return run(pull_from_cache, environment, home / "unreachable", pushed.commits, str(home / "pull"))


@pytest.fixture(scope="module")
def plain(hub, home, pushed):
    """Report of a process that loads with diffusers."""
    return run(pull_with_diffusers, hub.environment(home / "stranger"), home / "plain")


@pytest.fixture(scope="module")
def without_package(hub, home, pushed):
    """Report of such a process without this package: `-S` skips .pth files, by which it may be installed."""
    environment = hub.environment(home / "stranger")
    environment.pop("PYTHONPATH", None)
    paths = [path for path in sys.path if path.endswith("site-packages")]
    return run(pull_with_diffusers, environment, home / "without", options=["-S"], paths=paths)


def by_name(cases):
    """Returns parameters whose ids are their first values."""
    return [pytest.param(*case, id=case[0].replace("/", "-")) for case in cases]


def check_success(error):
    assert error == NO_ERROR, ": ".join(error)


def check_sentence(error, kind, words):
    """Checks class and message of an error, which must be a single line."""
    name, text = error
    assert re.search(words, text), text
    assert name == kind and "\n" not in text, error


# Pushing


COMMON = {".gitattributes", "README.md", "model_index.json", "scheduler/scheduler_config.json"}
TEXT = {*COMMON, "text_model/config.json", PLAIN, "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
IMAGE = {*COMMON, "unet/config.json", "unet/diffusion_pytorch_model.safetensors"}
CODE = {"pipeline.py", "scheduler/scheduler.py"}
TEXT_CODE = {*CODE, "text_model/text_model.py"}


@pytest.mark.parametrize(
    "repo_id, files",
    by_name(
        {
            "org/text": {*TEXT, EMA},
            "org/neighbors": {*TEXT, "scheduler/transition.safetensors"},
            "org/image": {*IMAGE, "unet/diffusion_pytorch_model.ema.safetensors"},
            "org/saved": IMAGE,
            "user/unnamed": IMAGE,
            "org/exported-text": {*TEXT, *TEXT_CODE},
            "org/exported-image": {*IMAGE, *CODE},
            "org/exported-neighbors": {*TEXT, *TEXT_CODE, "scheduler/transition.safetensors"},
        }.items()
    ),
)
def test_what_is_pushed(hub, pushed, repo_id, files):
    assert set(hub.files(repo_id)) == files


def test_every_push_is_a_commit(hub, pushed):
    commits = pushed.commits
    assert pushed.address == f"{hub.url}/org/text/commit/{commits['first']}"
    weights = {name: hub.files("org/text", revision).get(PLAIN) for name, revision in commits.items()}
    assert weights["first"] == weights["edited"] != weights["second"]
    assert weights["ema"] == weights["second"], "a variant has replaced the weights"
    assert hub.files("org/text") == hub.files("org/text", commits["ema"]), "a pull request has changed main"
    assert weights["proposal"] not in (weights["first"], weights["second"])


def test_the_card_tells_what_was_measured(hub, pushed):
    card = ModelCard(hub.files("org/text")["README.md"].decode())
    assert card.data.library_name == "d3pm_hf" and card.data.license == "mit"
    results = {result.metric_type: result for result in card.data.eval_results}
    for name in ("bits_per_dim", "perplexity"):
        assert results[name].metric_value == pytest.approx(pushed.metrics[name], abs=1e-4)
        error = pushed.metrics["errors"][name]
        assert results[name].metric_args == {
            "protocol": pushed.metrics["protocol"],
            "standard_error": pytest.approx(error, rel=0.05),  # two digits
        }
        assert results[name].dataset_name == "text8" and results[name].dataset_split == "validation"
    assert "| steps | 12 |" in card.text and pushed.metrics["protocol"] in card.text


def test_the_card_names_the_checkpoint_that_the_network_was_loaded_from(pulled):
    assert pulled.base_models == {"components": "org/neighbors", "neighbors": None}  # the latter is a whole pipeline


@pytest.mark.parametrize("repo_id", EDITED)
def test_a_card_written_by_hand_is_kept(hub, pushed, repo_id):
    assert b"\nWritten by hand.\n" in hub.files(repo_id)["README.md"]


def test_a_card_is_kept_to_the_byte(hub, pushed):
    assert hub.files("org/text")["README.md"] == hub.files("org/text", pushed.commits["edited"])["README.md"]


@pytest.mark.parametrize("name", ["push_to_hub", "save_pretrained", "export", "push_folder"])
def test_a_token_that_may_not_write(pushed, name):
    words = "^This token does not have write access to 'org/image': pass a `token` .or set HF_TOKEN. with write access, or log in again"
    check_sentence(pushed.errors[name], "OSError", words)


# Pulling


@pytest.mark.parametrize(
    "name, source",
    by_name(
        {
            "second": "second",
            "first": "first",
            "branch": "first",
            "proposal": "proposal",
            "ema": "ema",
            "ema-only": "ema",
            "subclass": "second",
            "local": "second",
            "forced": "second",
            "neighbors": "neighbors",
            "components": "neighbors",
            "image": "image",
            "table": "table",
            "exported-text": "text",
            "exported-image": "image",
            "exported-neighbors": "neighbors",
            "trusted": "text",
            "own": "own",
            "mixed": "mixed",
            **{name: name for name in RESHARDED},
        }.items()
    ),
)
def test_what_is_pulled_samples_as_what_was_pushed(pushed, pulled, name, source):
    assert_same_draws(pulled.samples[name], pushed.samples[source])


def test_the_samples_can_tell_weights_apart(pushed):
    states = [pushed.samples[name] for name in ("first", "second", "ema", "proposal")]
    for one, other in itertools.combinations(map(torch.tensor, states), 2):
        assert (one != other).double().mean() > 4 * MAX_FLIPPED


def test_what_a_pulled_pipeline_is(pulled):
    for name, found in pulled.classes.items():
        expected = {"own": "OwnPipeline", "image": "D3PMImagePipeline", "table": "D3PMTablePipeline"}
        assert found == next((expected[kind] for kind in expected if kind in name), "D3PMTextPipeline"), name
    assert pulled.name == "org/text"
    assert [len(text) for text in pulled.texts] == [32, 32]  # `sequence_length` came along


def test_a_pipeline_of_the_user_s_own_with_a_second_network(hub, pushed, pulled):
    assert "critic/model.safetensors" in hub.downloads(
        "own"
    )  # its config.json may be in the cache: it is text_model's
    is_own, critic = pulled.own
    assert is_own and critic == pytest.approx(pushed.critic, rel=1e-12)
    words = "checkpoint of the pipeline 'OwnPipeline', which this program has not imported: import that class first"
    check_sentence(pulled.errors["not imported"], "ValueError", words)


def test_half_precision(pushed, pulled):
    assert pulled.half["dtype"] == "torch.bfloat16"
    assert_same_draws(*pulled.half["samples"])


def test_only_what_is_wanted_is_fetched(hub, pulled):
    assert hub.downloads("second") == hub.downloads("forced") == TEXT - {".gitattributes"}
    assert hub.downloads("image") == IMAGE - {".gitattributes"}
    assert hub.downloads("ema-only") == {*TEXT, EMA} - {".gitattributes", PLAIN}
    assert hub.downloads("ema") == {EMA}  # the rest was in the cache
    assert hub.downloads("branch") == hub.downloads("subclass") == set()
    assert not [request for request in hub.requests if request.token == "local"]


@pytest.mark.parametrize("name", EXPORTED)
def test_code_is_not_fetched_unless_it_is_trusted(hub, pulled, name):
    assert hub.downloads(f"exported-{name}")
    assert not [path for path in hub.downloads(f"exported-{name}") if path.endswith(".py")]
    assert TEXT_CODE <= hub.downloads("trusted")


@pytest.mark.parametrize("repo_id", CARDS)
def test_the_code_of_a_card_runs_as_it_stands(pulled, repo_id):
    ran = pulled.cards[repo_id]
    check_success(ran["error"])
    if repo_id in ("org/text", "org/neighbors"):
        assert re.fullmatch(r"[a-z ]{32}\n", ran["printed"])
    elif repo_id == "org/table":
        assert "c19" in ran["printed"]
    else:
        assert ran["picture"]


def test_pickles_are_read_when_that_is_asked_for(pushed, pulled):
    check_success(pulled.errors["unpickled"])
    assert_same_draws(pulled.samples["unpickled"], pushed.samples["image"])


def test_data_sets(pulled):
    """The loopback Hub serves data sets too, which other tests read."""
    folder = "datasets/org/words/data"
    assert pulled.dataset == {"files": [f"{folder}/test.txt", f"{folder}/train.txt"], "text": "two"}


@pytest.mark.parametrize(
    "name, kind, words",
    by_name(
        [
            (
                "no repository",
                "OSError",
                "^there is no folder and no repository 'org/nothing': check the name.*`token`",
            ),
            ("no namespace", "OSError", "^there is no folder and no repository 'nothing': check the name"),
            ("not an id", "OSError", "^'a//b' is neither a folder nor a valid repository id"),
            (
                "no revision",
                "OSError",
                "^the repository 'org/text' has no revision 'nothing': pass one of its branches, tags or",
            ),
            (
                "no commit",
                "OSError",
                "^the repository 'org/text' has no revision '1{40}': pass one of its branches, tags or commits",
            ),
            ("wrong token", "OSError", "'org/text'.*token"),
            (
                "gated",
                "OSError",
                "^the repository 'org/gated' is gated: ask for access on its page, then pass `token`",
            ),
            ("not cached", "OSError", "^'org/text' is not in the cache"),
            ("no variant", "OSError", "text_model has no weights of the variant 'fp16': leave out `variant`"),
            (
                "wrong class",
                "ValueError",
                "checkpoint of D3PMTextPipeline, not of D3PMImagePipeline: load it with D3PMText",
            ),
            (
                "pickled",
                "OSError",
                "unet has .*pickled.*, which can run code: pass `use_safetensors=False` if you trust",
            ),
            (
                "component",
                "ValueError",
                "names subprocess.Popen as the text_model, which is not a class of d3pm_hf,.*trust_remote",
            ),
            (
                "pipeline",
                "ValueError",
                "of the pipeline 'StableDiffusionPipeline', not of D3PMImage.*`diffusers.Diffusion",
            ),
            ("shards", "ValueError", r"index.json points to '../../x.safetensors', outside its folder: do not trust"),
            ("variant-shards", "ValueError", r"index.ema.json points to '../../x.safetensors', outside its folder"),
            (
                "tokenizer",
                "ValueError",
                "tokenizer_config.json points to '/etc/passwd', outside its folder: do not trust",
            ),
            ("truncated", "OSError", "model.safetensors is truncated or not a safetensors file.*force_download=True"),
            (
                "unfinished",
                "OSError",
                "scheduler_config.json is missing: the checkpoint is incomplete; download or save",
            ),
            ("no-index", "OSError", "has no model_index.json, so it is not the folder of a pipeline"),
        ]
    ),
)
def test_what_cannot_be_pulled(pulled, name, kind, words):
    check_sentence(pulled.errors[name], kind, words)


# Without the Hub


@pytest.fixture(params=["offline", pytest.param("unreachable", marks=pytest.mark.slow)])
def alone(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    "name, source",
    by_name(
        {
            "second": "second",
            "first": "first",
            "branch": "first",
            "ema": "ema",
            "local": "second",
            "neighbors": "neighbors",
            "image": "image",
        }.items()
    ),
)
def test_the_cache_is_enough(pushed, alone, name, source):
    assert_same_draws(alone.samples[name], pushed.samples[source])


def test_schedulers_from_the_cache(offline):
    assert offline.prior == [2, 2]


@pytest.mark.parametrize(
    "name, repo_id", by_name({"repository": "org/nothing", "revision": "org/text", "weights": "org/text"}.items())
)
def test_what_is_not_in_the_cache(alone, name, repo_id):
    words = f"^'{repo_id}' is not in the cache and the Hub cannot be reached: check the connection.*HF_HUB_OFFLINE"
    check_sentence(alone.errors[name], "OSError", words)


def test_offline_means_offline(offline):
    assert not offline.requests


# Through diffusers


@pytest.mark.parametrize("name", EXPORTED)
def test_diffusers_loads_what_is_exported(pushed, plain, name):
    check_success(plain.errors[name])
    assert_same_draws(plain.samples[name], pushed.samples[name])


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_names_the_package_that_it_needs(without_package, name):
    words = "^this checkpoint needs the package d3pm_hf: install it with `pip install d3pm-hf`$"
    check_sentence(without_package.errors[name], "ImportError", words)


@pytest.mark.parametrize("name", EXPORTED)
def test_diffusers_asks_for_trust(plain, without_package, name):
    for report in (plain, without_package):
        kind, text = report.refused[name]
        assert kind == "ValueError" and "trust_remote_code=True" in text
