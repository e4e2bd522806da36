# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Text pipelines as a model of lm-eval, on tasks that need no network: words, spelling, infilling, whole passages, and what comes next."""

import json
import runpy
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import setuptools
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import Registry, get_model
from lm_eval.tasks import TaskManager
from peft import LoraConfig

from d3pm_hf import (
    D3PMPipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    evaluate_likelihood,
    log_likelihood,
)
from d3pm_hf.evaluation import lm_harness


READY = "examples/checkpoints/text8-absorbing"
WORDS = [("the history of the united ", ["states", "stutes"]), ("in the nineteenth ", ["century", "zvqxkjw"])]
SPELLING = [
    ("", ["the people of the country", "teh poeple fo hte conutry"]),
    ("", ["one of the most", "eno fo hte tsom"]),
]
# The place of each choice is a mask, and what decides between the choices stands behind it.
INFILLING = [
    ("the united [MASK] of america", ["states", "nation"]),
    ("the united [MASK]dom and ireland", ["king", "stat"]),
    ("one nine [MASK] nine eight", ["nine", "zxqj"]),
]
PASSAGES = [
    "anarchism originated as a term of abuse first used against early working class radicals including the diggers"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline that sees 24 characters at once, and tasks beside it."""
    folder = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    network = create_text_model("tiny", 28, max_position_embeddings=24)
    pipeline = D3PMTextPipeline(network, D3PMScheduler(28, 200), character_tokenizer(), sequence_length=24)
    pipeline.save_pretrained(folder / "tiny")
    write_task(folder, "words", WORDS)
    write_task(folder, "spelling", SPELLING)
    write_task(folder, "infilling", INFILLING)
    write_lines(folder / "passages.jsonl", [{"text": text} for text in PASSAGES])
    write_yaml(
        folder / "passages.yaml",
        {
            **{
                "task": "passages",
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{text}}",
            },
            **data_of(folder / "passages.jsonl"),
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    )
    rest = [("the united states gove", "rnment"), ("in the nineteenth cent", "ury")]
    write_lines(folder / "next.jsonl", [{"text": text, "target": target} for text, target in rest])
    write_yaml(
        folder / "next.yaml",
        {
            **{
                "task": "next",
                "output_type": "generate_until",
                "doc_to_text": "{{text}}",
                "doc_to_target": "{{target}}",
            },
            **data_of(folder / "next.jsonl"),
            "generation_kwargs": {"until": [" "], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    )
    return folder


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_yaml(path, task):
    path.write_text(yaml.safe_dump(task))


def data_of(path):
    return {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}


def write_task(folder, name, rows):
    """A task of multiple choice, whose first choice is right."""
    write_lines(folder / f"{name}.jsonl", [{"text": text, "choices": choices} for text, choices in rows])
    task = {"task": name, "output_type": "multiple_choice", "doc_to_text": "{{text}}", "doc_to_target": 0}
    task |= {"doc_to_choice": "{{choices}}", "target_delimiter": "", "metric_list": [{"metric": "acc"}]}
    write_yaml(folder / f"{name}.yaml", {**task, **data_of(folder / f"{name}.jsonl")})


def create(folder, **options):
    return get_model("d3pm")(pretrained=str(folder / "tiny"), **options)


def ask(model, method, *arguments):
    requests = [Instance(method, {}, args, i) for i, args in enumerate(arguments)]
    return getattr(model, method)(requests, disable_tqdm=True)


@pytest.mark.parametrize("order", ["margin", pytest.param("left_to_right", marks=pytest.mark.slow)])
def test_tasks_of_words(folder, order):
    """The checkpoint of the project knows how words are spelled."""
    results = simple_evaluate(
        "d3pm",
        model_args={"pretrained": READY, "order": order},
        tasks=["words", "spelling", "infilling", "passages", "next"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=8,
        bootstrap_iters=0,
    )["results"]
    assert all(results[task]["acc,none"] == 1 for task in ("words", "spelling", "infilling"))
    assert 1 < results["passages"]["bits_per_byte,none"] < 4
    assert results["next"]["exact_match,none"] == 1


@pytest.mark.parametrize("order", ["left_to_right", "confidence", "margin", "entropy"])
def test_likelihoods_are_those_of_the_package(folder, order):
    model = create(folder, order=order, batch_size=2)
    pairs = [("the quick ", "brown"), ("a", "fox"), ("", "dog jumps")]
    found = ask(model, "loglikelihood", *pairs)
    for (context, continuation), (score, _) in zip(pairs, found):
        assert score == pytest.approx(
            log_likelihood(model.pipeline, context, continuation, order=order).item(), abs=1e-4
        )
    (whole,) = ask(model, "loglikelihood_rolling", ("twenty four characters",))
    expected = evaluate_likelihood(model.pipeline, ["twenty four characters"], order=order, progress_bar=False)
    assert whole == pytest.approx(-expected.nats_per_example.item(), abs=1e-4)


def test_infilling_is_given_both_sides(folder):
    """A mask of the context is the place of the continuation."""
    model = create(folder, order="margin")
    rows = [("the qu", "ick", " fox"), ("", "a", "n ox"), ("an o", "xen", "")]
    found = ask(model, "loglikelihood", *((f"{before}[MASK]{after}", text) for before, text, after in rows))
    for (before, text, after), (score, _) in zip(rows, found):
        x_0 = model.pipeline.encode(before + text + after)
        is_scored = torch.zeros_like(x_0, dtype=torch.bool)
        is_scored[:, len(before) : len(before + text)] = True
        expected = evaluate_likelihood(model.pipeline, [(x_0, is_scored)], order="margin", progress_bar=False)
        assert score == pytest.approx(-expected.nats_per_example.item(), abs=2e-5)
    (without, _), (behind, _) = ask(model, "loglikelihood", ("an o", "xen"), ("an o[MASK] a", "xen"))
    assert without == pytest.approx(found[2][0], abs=2e-5) != pytest.approx(behind, abs=1e-4)
    with pytest.raises(ValueError, match="a context has 2 mask tokens"):
        ask(model, "loglikelihood", ("a[MASK]b[MASK]", "c"))


def test_a_lora_is_added(folder):
    """By `peft`, as for the model `hf` of lm-eval."""
    pipeline = D3PMPipeline.from_pretrained(folder / "tiny")
    pipeline.text_model.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    pipeline.save_lora_weights(folder / "lora")
    base, lora = create(folder), create(folder, peft=str(folder / "lora"))
    (expected,), (other,) = (ask(model, "loglikelihood", ("the quick ", "brown")) for model in (lora, base))
    score = log_likelihood(pipeline, "the quick ", "brown", order="left_to_right").item()
    assert expected[0] == pytest.approx(score, abs=1e-4) != pytest.approx(other[0], abs=1e-2)


def test_what_is_greedy(folder):
    """A continuation is greedy if it is what the model writes, whatever the order."""
    for order in ("left_to_right", "margin"):
        model = create(folder, order=order)
        (text,) = ask(model, "generate_until", ("the ", {"max_gen_toks": 5}))
        assert len(text) == 5
        other = "zzzzz" if text != "zzzzz" else "yyyyy"
        (_, is_greedy), (_, is_other) = ask(model, "loglikelihood", ("the ", text), ("the ", other))
        assert is_greedy and not is_other


def test_long_texts_are_read_in_windows(folder):
    """Each token is scored once; a window sees the tokens before it that there is room for."""
    model, text = create(folder), "the quick brown fox jumps over the lazy dog and runs away"
    pairs = []
    model._score = lambda given, disable: pairs.extend(given) or [(-1.0, False)] * len(given)
    assert ask(model, "loglikelihood_rolling", (text,), ("fox",)) == [-float(len(pairs) - 1), -1.0]
    tokens = model.pipeline.tokenize([text])[0]
    assert sum((scored for _, scored, _ in pairs[:-1]), []) == tokens
    assert all(len(context) + len(scored) <= 24 for context, scored, _ in pairs)
    assert all(context for context, _, _ in pairs[1:-1])
    pairs.clear()
    ask(model, "loglikelihood", (text, "cat"))
    cat = model.pipeline.tokenize(["cat"])[0]
    assert pairs == [(tokens[-21:], cat, [])]
    pairs.clear()
    contexts = (f"{text}[MASK]{text}", f"{text}[MASK]ab", f"ab[MASK]{text}")
    ask(model, "loglikelihood", *((context, "cat") for context in contexts))
    assert pairs == [(tokens[-11:], cat, tokens[:10]), (tokens[-19:], cat, [0, 1]), ([0, 1], cat, tokens[:19])]


def test_texts_end_where_they_are_told_to(folder):
    model = create(folder, batch_size=2)
    settings = [{"max_gen_toks": 6}, {"max_gen_toks": 6, "until": ["e", " "]}, {"max_gen_toks": 3, "until": "a"}]
    settings += [{"max_gen_toks": 6, "do_sample": True, "temperature": 1.0}, {"max_gen_toks": 500}]
    whole, cut, short, _, most = ask(model, "generate_until", *(("the ", each) for each in settings))
    assert len(whole) == 6 and len(most) == 23
    assert cut == min(whole.split("e")[0], whole.split(" ")[0], key=len) and len(short) <= 3 and "a" not in short


def test_empty_texts_and_arguments_as_strings(folder):
    model = create(folder, batch_size="2", block_length="3", max_length="20")
    assert (model.batch_size, model.block_length, model.max_length) == (2, 3, 20)
    assert ask(model, "loglikelihood_rolling", ("",)) == [0]
    whole, nothing = ask(model, "loglikelihood_rolling", ("the fox",), ("",))
    assert whole < 0 == nothing and ask(model, "loglikelihood", ("the ", ""))[0] == (0, True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"order": "random"}, "order is 'random'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "auto"}, "batch_size is 'auto'"),
        ({"block_length": "two"}, "block_length is 'two'"),
        ({"max_length": 1}, "max_length is 1"),
    ],
)
def test_bad_arguments(folder, options, message):
    with pytest.raises(ValueError, match=message):
        create(folder, **options)


def test_a_process_without_an_order(folder):
    pipeline = D3PMPipeline.from_pretrained(folder / "tiny")
    scheduler = D3PMScheduler(28, 200, transition="uniform", beta_schedule="cosine")
    D3PMTextPipeline(pipeline.text_model, scheduler, pipeline.tokenizer).save_pretrained(folder / "uniform")
    with pytest.raises(ValueError, match="the process is 'uniform', which has no order"):
        get_model("d3pm")(pretrained=str(folder / "uniform"))


def test_a_continuation_that_is_too_long(folder):
    with pytest.raises(ValueError, match="a continuation has 25 tokens, and the network sees 24 at once"):
        ask(create(folder), "loglikelihood", ("", "a" * 25))


def test_the_entry_point_is_the_model(monkeypatch):
    """`setup.py` declares it in the group that lm-eval reads after 0.4.13, and the registry of lm-eval loads it."""
    declared = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: declared.update(arguments))
    runpy.run_path("setup.py")
    ((group, (line,)),) = declared["entry_points"].items()
    name, value = line.split(" = ")
    registry = Registry("model")
    registry.register(name, target=EntryPoint(name, value, group))
    assert (group, name) == ("lm_eval.models", "d3pm") and registry.get("d3pm") is lm_harness.D3PMHarnessModel


@pytest.mark.slow
def test_command_line(folder):
    """`lm_eval` itself, with the model `d3pm`."""
    command = [sys.executable, "-m", lm_harness.__name__, "run", "--model", "d3pm", "--tasks", "words"]
    command += ["--model_args", f"pretrained={folder / 'tiny'},order=margin", "--include_path", str(folder)]
    done = subprocess.run([*command, "--output_path", str(folder / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|words" in done.stdout and "d3pm" in done.stdout
