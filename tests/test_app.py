# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The page to play with, without a browser: limits, escaping, runs that are watched, and processes. Gradio is not needed."""

import asyncio
import html
import json
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMPipeline,
    D3PMScheduler,
    D3PMTablePipeline,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
    register_sampler,
    register_transition,
)
from d3pm_hf.app import actions, command_line, guard, limits, noise, opening
from d3pm_hf.app import work as work_module
from d3pm_hf.app.actions import EACH_CLASS, Run, Settings, fit_picture, painted_mask, spread_frames
from d3pm_hf.app.checkpoints import (
    create_checkpoint,
    find_checkpoints,
    load_checkpoints,
    most_convincing_first,
    read_card,
    short_names,
)
from d3pm_hf.app.guard import Guard, Uploads
from d3pm_hf.app.limits import Limits
from d3pm_hf.app.noise import from_levels, matrix_picture, to_levels
from d3pm_hf.app.player import TextPanel, find_words, histories, render_error, render_player, render_ticks
from d3pm_hf.app.work import Work, watch_network
from d3pm_hf.samplers import ancestral
from d3pm_hf.samplers import sampler as samplers_base
from d3pm_hf.transitions import family as transition_registry
from d3pm_hf.transitions.rank_one import UniformTransition
from d3pm_hf.utils.registry import is_built_in


pytestmark = pytest.mark.filterwarnings("ignore:after .* steps q")
ALPHABET = "abcdef<&>'\" "
SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
ATTACK = "<img src=x onerror=alert(1)>\"'&"
LIMITS = Limits(max_characters=60, max_steps=12, max_samples=4, max_particles=3, max_pixels=10_000)


def text_pipeline(transition="absorbing", **kwargs):
    torch.manual_seed(0)
    has_mask = transition == "absorbing"
    scheduler = D3PMScheduler(len(ALPHABET) + has_mask, 20, transition, beta_schedule="cosine", **kwargs)
    model = create_text_model("tiny", len(ALPHABET) + has_mask).eval()
    return D3PMTextPipeline(model, scheduler, character_tokenizer(ALPHABET), sequence_length=16)


@pytest.fixture(scope="module")
def text():
    return create_checkpoint("text", text_pipeline())


@pytest.fixture(scope="module")
def images():
    torch.manual_seed(0)
    scheduler = D3PMScheduler(17, 20, "gaussian", beta_schedule="cosine", prediction_type="logistic")
    unet = create_unet("tiny", 17, (8, 4), 1, "logistic", num_class_labels=3).eval()
    return create_checkpoint("images", D3PMImagePipeline(unet, scheduler, num_class_labels=3))


def last(moments):
    """The last of the moments of an action, which are all strings."""
    moments = list(moments)
    assert moments and all(isinstance(moment, str) for moment in moments)
    return moments[-1]


def error_of(moments):
    found = re.fullmatch(r'<p class="d3pm-error" role="alert">(.*)</p>', last(moments))
    assert found, "there is no error"
    return html.unescape(found[1])


def shown_texts(page):
    """The texts of the last frame."""
    panels = re.findall(r'<p class="d3pm-text">(.*?)</p>', page)
    return ["".join(map(html.unescape, re.findall(r"<span [^>]*>(.*?)</span>", panel))) for panel in panels]


def test_generated_texts_are_those_of_the_pipeline(text):
    moments = list(actions.generate(text, Settings(steps=5, samples=2, seed=3), LIMITS))
    assert len(moments) > 1 and "of 5" in moments[0]  # it was watched before it was finished
    expected = text.pipeline(
        num_inference_steps=5,
        num_return_sequences=2,
        sampler="ancestral",
        generator=torch.Generator().manual_seed(3),
    )
    assert shown_texts(moments[-1]) == expected.texts
    assert "5 steps, 5 calls of the network" in moments[-1]
    labels = json.loads(html.unescape(re.search(r'data-labels="([^"]*)"', moments[-1])[1]))
    assert labels == [f"t = {t}" for t in text.pipeline.scheduler.spaced_timesteps(5)] + ["data"]


def test_generated_images_are_those_of_the_pipeline(images):
    run = Run(images, Settings(steps=4, samples=3, class_label="1", guidance_scale=2.0).arguments(images, LIMITS))
    states, timesteps = run.draw(lambda *step: None)
    expected = images.pipeline(
        num_inference_steps=4,
        num_images_per_prompt=3,
        class_labels=1,
        guidance_scale=2.0,
        sampler="ancestral",
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).images
    assert torch.equal(states[-1], expected) and len(states) == 5 and timesteps[-1] == -1
    page = last(actions.generate(images, Settings(steps=4, samples=3), LIMITS))
    assert 'data-number="5"' in page and "data:image/png;base64," in page


def test_gaps_are_filled_in_and_the_rest_stays(text):
    page = last(actions.infill_text(text, "ab<_>&__e", Settings(steps=4), LIMITS))
    (filled,) = shown_texts(page)
    assert re.fullmatch(r"ab<.>&..e", filled, re.DOTALL) and "_" not in filled
    assert "no gaps" in error_of(actions.infill_text(text, "abc", Settings(), LIMITS))


def test_only_the_painted_part_of_a_picture_changes(images):
    picture = Image.linear_gradient("L").resize((40, 80))
    paint = Image.new("RGBA", picture.size)
    paint.paste((99, 99, 255, 255), (0, 0, 40, 40))
    drawing = {"background": picture, "layers": [paint]}
    page = last(actions.infill_image(images, drawing, Settings(steps=4, particles=2), LIMITS))
    assert 'data-number="5"' in page
    mask = painted_mask(paint, (1, 8, 4))
    assert [mask.getpixel((0, y)) for y in range(8)] == [255] * 4 + [0] * 4
    nothing = {"background": picture, "layers": [Image.new("RGBA", picture.size)]}
    assert "nothing is painted" in error_of(actions.infill_image(images, nothing, Settings(), LIMITS)).lower()
    for wrong in (None, {}, "x", {"background": None}):
        assert "no picture" in error_of(actions.infill_image(images, wrong, Settings(), LIMITS))


def test_reconstruction_starts_from_the_noise_that_was_asked_for(text, images):
    page = last(actions.reconstruct(text, "abc<&>", 0.5, Settings(steps=12), LIMITS))
    assert shown_texts(page)[0] == "abc<&>" and "10 steps" in page and "of the tokens as they were" in page
    page = last(actions.reconstruct(images, Image.new("RGB", (9, 30), "red"), 0.2, Settings(steps=2), LIMITS))
    assert "2 steps" in page and "t = 3" in page
    assert "the share of noise is 7" in error_of(actions.reconstruct(text, "a", 7, Settings(), LIMITS)).lower()


def test_even_and_optimal_timesteps_stand_side_by_side():
    pipeline = text_pipeline()
    pipeline.scheduler.register_inference_timesteps({3: [19, 4, 1]})
    checkpoint = create_checkpoint("stored", pipeline)
    assert checkpoint.chosen_numbers == [3]
    page = last(actions.compare(checkpoint, "3", Settings(), LIMITS))
    assert "even" in page and "optimal" in page and page.count("<i style") == 6
    labels = [json.loads(html.unescape(one)) for one in re.findall(r'd3pm-label" data-labels="([^"]*)"', page)]
    assert labels == [["t = 19", "t = 12", "t = 5", "data"], ["t = 19", "t = 4", "t = 1", "data"]]
    assert "number of steps" in error_of(actions.compare(checkpoint, "4", Settings(), LIMITS))


def test_a_checkpoint_without_timesteps_of_its_own_says_so(text):
    assert "optimize_timesteps" in error_of(actions.compare(text, "3", Settings(), LIMITS))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"steps": 13}, "the number of steps is 13"),
        ({"steps": 0}, "number of steps"),
        ({"steps": "20; rm"}, "number of steps"),
        ({"steps": None}, "number of steps"),
        ({"steps": float("nan")}, "number of steps"),
        ({"samples": 5}, "number of samples"),
        ({"particles": 4}, "number of particles"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**40}, "seed"),
        ({"sampler": "../../etc/passwd"}, "sampler"),
        ({"sampler": ["ancestral"]}, "sampler"),
        ({"sampler": None}, "sampler"),
        ({"sampler": "positions_first", "particles": 2}, "num_particles"),
    ],
)
def test_settings_beyond_the_limits_get_one_sentence(text, settings, words):
    message = error_of(actions.generate(text, Settings(**{"steps": 3, **settings}), LIMITS))
    assert words.lower() in message.lower() and "\n" not in message and len(message) < 400


@pytest.mark.parametrize(
    "prompt, words",
    [
        ("a" * 61, "61 characters, and at most 60"),
        ("a_" * 25, "positions"),
        ("abc_ XYZ \N{SNOWMAN}", "characters that the tokenizer does not know"),
        ("   ", "no text"),
        (None, "the text is None"),
        (12, "the text is 12"),
        ({"path": "/etc/passwd"}, "the text is"),
    ],
)
def test_wrong_texts_get_one_sentence(prompt, words):
    pipeline = text_pipeline()
    pipeline.text_model.config.max_position_embeddings = 32
    checkpoint = create_checkpoint("short", pipeline)
    assert words.lower() in error_of(actions.infill_text(checkpoint, prompt, Settings(steps=2), LIMITS)).lower()


def test_classes_and_guidance_are_checked(images, text):
    for settings in ({"class_label": "3"}, {"class_label": "x"}, {"class_label": "1", "guidance_scale": 99}):
        assert error_of(actions.generate(images, Settings(steps=2, **settings), LIMITS))
    assert Settings(class_label="2").condition(text, 4) == {}  # it has no classes
    each = Settings(steps=2, samples=4, class_label=EACH_CLASS).arguments(images, LIMITS)
    assert each["class_labels"] == [0, 1, 2, 0] and each["num_images_per_prompt"] == 1
    assert 'data-number="3"' in last(
        actions.generate(images, Settings(steps=2, samples=4, class_label=EACH_CLASS), LIMITS)
    )
    picture = Image.new("RGB", (9, 30), "red")
    settings = Settings(steps=2, samples=3, class_label=EACH_CLASS)
    assert 'data-number="3"' in last(actions.reconstruct(images, picture, 0.5, settings, LIMITS))


def test_a_large_picture_is_refused(images):
    assert "pixels" in error_of(
        actions.reconstruct(images, Image.new("L", (200, 200)), 0.5, Settings(steps=3), LIMITS)
    )


def test_everything_from_outside_is_escaped():
    panel = TextPanel(ATTACK, [["·", ATTACK], [ATTACK, ATTACK]], [ATTACK, ATTACK])
    pages = [
        render_player([panel], [ATTACK, ATTACK], ATTACK),
        render_error(ATTACK),
        render_ticks({ATTACK: [3]}, 10),
        last(noise.show_process("uniform", "cosine", ATTACK, 0, True, LIMITS)),
        last(noise.show_process(ATTACK, "cosine", "a", 0, True, LIMITS)),
    ]
    for page in pages:
        tags = re.findall(r"<(\w+)((?:\s+[\w-]+=\"[^\"<>]*\")*)\s*>", page)
        assert {name for name, _ in tags} <= set(
            "div button input output figure figcaption span p i b sub code".split()
        )
        assert page.count("<") == len(tags) + len(re.findall(r"</\w+>", page)), "there is a bracket outside of tags"
        assert "onerror" not in " ".join(attributes.split("data-")[0] for _, attributes in tags).replace("&", "")


def test_an_error_that_is_not_the_visitors_fault_tells_nothing(text, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(actions, "watch_runs", fail)
    assert "secret" not in error_of(actions.generate(text, Settings(steps=3), LIMITS))
    assert "secret" in caplog.text


def test_histories_are_the_changes_of_each_token():
    frames = [["·", "a", "·"], ["·", "a", "b"], ["c", "a", "d"]]
    assert histories(frames) == [[(0, "·"), (2, "c")], [(0, "a")], [(0, "·"), (1, "b"), (2, "d")]]
    assert spread_frames(3, 60) == [0, 1, 2] and spread_frames(1, 60) == [0]
    assert spread_frames(1001, 3) == [0, 500, 1000]


@pytest.mark.parametrize("reports", [True, False])
def test_a_computation_stops_with_its_watcher(reports, monkeypatch):
    monkeypatch.setattr(work_module, "SILENT_SECONDS", 0.05)
    work, calls, network, ended = Work(60), [], torch.nn.Linear(1, 1), threading.Event()
    watch_network(network)

    def compute(report):
        try:
            for i in range(10_000):
                network(torch.zeros(1))
                calls.append(i)
                if reports:
                    report(i)
                time.sleep(0.001)
        finally:
            ended.set()

    moments = work.run(compute)
    assert next(moment for moment in moments if not reports or moment is not None) is None or reports
    moments.close()
    assert ended.wait(5) and len(calls) < 10_000
    assert work.num_calls in (len(calls), len(calls) + 1)
    network(torch.zeros(1))  # outside of a computation nothing stops it


def test_a_computation_that_takes_too_long_ends_with_a_sentence(text):
    assert "more than 0 seconds" in error_of(actions.generate(text, Settings(steps=5), Limits(max_seconds=0.0)))


def test_two_runs_at_once_draw_what_each_draws_alone(text):
    settings = [Settings(steps=steps, seed=steps, samples=2) for steps in (3, 7, 12)]
    alone = [shown_texts(last(actions.generate(text, one, LIMITS))) for one in settings]
    together: dict[int, list[str]] = {}

    def run(i):
        together[i] = shown_texts(last(actions.generate(text, settings[i], LIMITS)))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(3)] == alone


def test_samplers_that_apply_are_offered(text, images, monkeypatch):
    assert text.samplers["first_hitting"] is False and text.samplers["confidence"] is True
    assert {"ancestral", "particle_filter", "predictor_corrector"} <= images.samplers.keys()
    assert not {"first_hitting", "remasking", "left_to_right"} & images.samplers.keys()
    page = last(actions.generate(text, Settings(steps=3, sampler="first_hitting"), LIMITS))
    assert "no steps to watch" in page and len(shown_texts(page)) == 1
    monkeypatch.setattr(samplers_base._samplers, "_entries", dict(samplers_base._samplers._entries))
    register_sampler("mine")(lambda *args, **kwargs: ancestral(*args, **kwargs))
    assert create_checkpoint("again", text_pipeline()).samplers["mine"] is True


FAMILIES = sorted(
    name
    for name, one in transition_registry.transition_families().items()
    if is_built_in(one) and not one.needs_elements  # of a table, whose elements differ
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_shows_its_matrix_and_its_noise(name, monkeypatch):
    monkeypatch.setattr(noise, "NUM_TIMESTEPS", 8)
    family = transition_registry.get_family(name)
    schedule = "cosine" if name in ("gaussian", "band_diagonal") else "mutual_information"
    page = last(noise.show_process(name, schedule, "hello, you", 0, True, LIMITS))
    assert "d3pm-error" not in page and family.description in html.unescape(page)
    assert "100% as it was" in html.unescape(page)
    data = noise.text_data("hello, you")
    scheduler, _ = noise.create_process(name, schedule, data)
    rows = scheduler.transition.matrix(0, len(scheduler)).sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_noise_on_a_picture_and_a_family_of_your_own(monkeypatch):
    picture = opening.noise_picture().resize((40, 40))
    assert 'data-number="26"' in last(noise.show_process("uniform", "cosine", picture, 0, False, LIMITS))
    assert "a picture has none" in error_of(noise.show_process("autoregressive", "cosine", picture, 0, False, LIMITS))
    monkeypatch.setattr(
        transition_registry._families, "_entries", dict(transition_registry._families._entries), raising=True
    )
    register_transition("mine", "tokens do as I like")(type("Mine", (UniformTransition,), {}))
    assert "tokens do as I like" in last(noise.show_process("mine", "cosine", "abc", 0, True, LIMITS))
    needy = type("Needy", (UniformTransition,), {"required_tensors": ("graph",)})
    register_transition("needy", "tokens need a graph")(needy)
    assert "graph" in error_of(noise.show_process("needy", "cosine", "abc", 0, True, LIMITS))


def test_a_path_of_noise_has_the_marginals_of_the_process():
    data = noise.text_data("ab" * 100)
    scheduler, _ = noise.create_process("uniform", "cosine", data)
    times = [0, 10, 20, 30]
    path = noise.draw_path(scheduler.transition, data.states.expand(50, -1), times, torch.Generator().manual_seed(0))
    for t, states in zip(times, path):
        expected = scheduler.transition.matrix(0, t)[0, 0].item()
        measured = (states == data.states).double().mean().item()
        assert abs(measured - expected) < 5 * (expected * (1 - expected) / states.numel()) ** 0.5 + 1e-12


def test_texts_of_many_characters_have_no_matrix():
    many = "".join(chr(0x4E00 + i) for i in range(100))
    assert "different characters" in error_of(noise.show_process("uniform", "cosine", many, 0, True, Limits()))
    assert "at most 300" in error_of(noise.show_process("uniform", "cosine", "a" * 301, 0, True, Limits()))


def test_pictures():
    matrix = torch.eye(3, dtype=torch.float64)
    picture = matrix_picture(matrix)
    assert picture.getpixel((0, 0)) == (252, 246, 189) and picture.getpixel((1, 0)) == (13, 8, 35)
    states = torch.randint(0, 16, (3, 5, 4), generator=torch.Generator().manual_seed(0))
    assert torch.equal(to_levels(from_levels(states, 16), 16), states)
    assert fit_picture(Image.new("RGBA", (30, 10)), (1, 8, 4)).size == (4, 8)
    with pytest.raises(ValueError, match="2 channels"):
        fit_picture(Image.new("L", (3, 3)), (2, 8, 4))


def test_checkpoints_are_found_and_named(tmp_path):
    for folder in ("outputs/text", "outputs/broken", "examples/checkpoints/text"):
        (tmp_path / folder).mkdir(parents=True)
    text_pipeline().save_pretrained(tmp_path / "outputs/text")
    text_pipeline().save_pretrained(tmp_path / "examples/checkpoints/text")
    foreign = json.loads((tmp_path / "outputs/text/model_index.json").read_text())
    foreign["text_model"] = ["somewhere", "NotImported"]
    (tmp_path / "outputs/foreign").mkdir()
    (tmp_path / "outputs/foreign/model_index.json").write_text(json.dumps(foreign))
    table = D3PMTablePipeline.create(pandas.DataFrame({"sky": ["clear", "gray"] * 6}))
    table.save_pretrained(tmp_path / "outputs/table")  # which the page does not show
    found = find_checkpoints(tmp_path)
    assert [str(tmp_path / name) for name in ("examples/checkpoints/text", "outputs/text")] == found
    checkpoints = load_checkpoints(found)
    assert list(checkpoints) == ["checkpoints/text", "outputs/text"]
    assert "text of 16" in checkpoints["outputs/text"].description
    assert short_names(["me/model", "you/other", "outputs/text"]) == ["model", "other", "text"]
    assert find_checkpoints(tmp_path / "nothing") == []


def test_the_page_begins_with_a_sample_and_fields_that_are_filled(text, images):
    example = opening.draw_example(text, LIMITS)
    settings = opening.example_settings(text, LIMITS)
    assert shown_texts(example.page) == shown_texts(last(actions.generate(text, settings, LIMITS)))
    assert f"seed {settings.seed}" in example.page
    # Its alphabet does not know the sentence.
    assert example.text == shown_texts(example.page)[0].strip() and actions.GAP_SIGN in example.gaps
    letters = D3PMTextPipeline(create_text_model("tiny", 28).eval(), D3PMScheduler(28, 20), character_tokenizer())
    gapped = opening.known_sentence(create_checkpoint("letters", letters))
    assert gapped == (opening.SENTENCE, opening.SENTENCE.replace("argument", "________"))
    pieces = D3PMPipeline.from_pretrained(Path(__file__).parents[1] / "examples/checkpoints/pieces-absorbing")
    gapped = opening.known_sentence(create_checkpoint("pieces", pieces))
    assert gapped == (opening.SENTENCE, opening.SENTENCE.replace("argument", "_"))
    example = opening.draw_example(images, LIMITS)
    assert 'data-number="13"' in example.page and example.picture.height == opening.CANVAS_SIDE


def test_the_texts_that_the_page_begins_with_fit_the_model():
    """Those of an autoregressive process have one length, and some networks have fewer positions than the sentence."""
    network = create_text_model("tiny", 28, is_decoder=True, timestep_conditioning=False).eval()
    one_length = D3PMTextPipeline(network, D3PMScheduler(28, 12, transition="autoregressive"), character_tokenizer())
    short = create_text_model("tiny", 28, max_position_embeddings=12).eval()
    few_positions = D3PMTextPipeline(short, D3PMScheduler(28, 12), character_tokenizer(), sequence_length=12)
    for pipeline in (one_length, few_positions):
        checkpoint = create_checkpoint("letters", pipeline)
        example = opening.draw_example(checkpoint, LIMITS)
        assert len(example.text) <= 12
        for page in (
            last(actions.reconstruct(checkpoint, example.text, 0.5, Settings(steps=5), LIMITS)),
            last(actions.infill_text(checkpoint, example.gaps, Settings(steps=5), LIMITS)),
        ):
            assert "d3pm-error" not in page, page
    error = error_of(actions.reconstruct(create_checkpoint("letters", one_length), "short", 0.5, Settings(), LIMITS))
    assert "texts of 12 tokens without gaps: make the text longer" in error
    too_long = create_checkpoint("letters", one_length), "a text that is too long"
    assert error_of(actions.reconstruct(*too_long, 0.5, Settings(), LIMITS)).endswith("is 12: pass a shorter prompt")


def test_a_checkpoint_of_many_steps_does_not_hold_up_the_page(text, monkeypatch):
    """All 100,000 steps of a model that may skip none are neither taken to try samplers nor for a first sample."""
    monkeypatch.setattr(opening, "START_SECONDS", 2.0)
    began = time.monotonic()
    torch.manual_seed(0)
    scheduler = D3PMScheduler(17, 100_000, "uniform", beta_schedule="cosine", prediction_type="previous")
    long = create_checkpoint("long", D3PMImagePipeline(create_unet("tiny", 17, (8, 8), 1).eval(), scheduler))
    assert long.takes_all_steps and "ancestral" in long.samplers
    drawn = opening.Examples({"long": long, "text": text}, LIMITS)
    assert drawn.get("long", 30) == opening.Example()
    assert drawn.get("text", 30).page and time.monotonic() - began < 30


def test_a_checkpoint_that_cannot_be_sampled_leaves_the_others(text, monkeypatch, caplog):
    broken = create_checkpoint("broken", text_pipeline())
    monkeypatch.setattr(broken.pipeline.tokenizer, "convert_ids_to_tokens", lambda ids: panic())
    drawn = opening.Examples({"broken": broken, "text": text}, LIMITS)
    assert drawn.get("text", 30).page and drawn.get("broken") == opening.Example()
    assert "broken" in caplog.text


def panic():
    """Panics inside of tokenizers, whose error is no `Exception`."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.pre_tokenizer = Whitespace()
    values = json.loads(tokenizer.to_str())
    values["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 2}
    return Tokenizer.from_str(json.dumps(values)).encode("a a a a")


@pytest.mark.parametrize("in_thread", [True, False])
def test_a_panic_of_tokenizers_is_an_error_of_the_page(in_thread, monkeypatch, caplog):
    with pytest.raises(BaseException) as raised:
        panic()
    assert not isinstance(raised.value, Exception)
    checkpoint = create_checkpoint("text", text_pipeline())
    monkeypatch.setattr(checkpoint.pipeline, "tokenize" if in_thread else "encode", lambda *args, **kwargs: panic())
    action = actions.infill_text(checkpoint, "ab_", Settings(steps=2), LIMITS)
    if not in_thread:
        action = actions.reconstruct(checkpoint, "ab", 0.5, Settings(steps=2), LIMITS)
    assert "could not be computed" in error_of(action)
    assert "stride" in caplog.text


def call(app, path, body=b"", method="POST", query="", chunk=2**16):
    """The status and the body that an ASGI application answers."""
    parts = [body[i : i + chunk] for i in range(0, len(body), chunk)] or [b""]
    sent = []

    async def receive():
        if not parts:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def echo(scope, receive, send):
    """An application that answers with the body of the request."""
    body = b"" if scope["method"] == "GET" else (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def test_requests_that_the_page_never_makes_are_refused(tmp_path):
    app = Guard(echo, Uploads(tmp_path))
    join = "/gradio_api/queue/join"
    good = json.dumps(
        {"data": ["a", {"path": "/tmp/x.png", "url": "http://here/x.png"}], "session_hash": "s"}
    ).encode()
    assert call(app, join, good) == (200, good)
    assert call(app, "/", method="GET")[0] == 200 and call(app, "/root/gradio_api/queue/join", good)[0] == 200
    for scheme in ("http", "https", "HTTP", "ftp", "file"):
        picture = {"path": f"{scheme}://169.254.169.254/", "meta": {"_type": "gradio.FileData"}}
        for values in ([picture], [{"background": picture}], [[["a", picture]]]):
            status, answer = call(app, join, json.dumps({"data": values}).encode())
            assert status == 400 and "upload the picture" in json.loads(answer)["detail"]
    assert call(app, join, b"{")[0] == 400 and call(app, join, b"[" * 100_000)[0] == 400
    assert call(app, join, b"x" * (limits.MAX_REQUEST_BYTES + 1))[0] == 413
    assert call(app, "/gradio_api/upload", b"x" * limits.MAX_FILE_BYTES)[0] == 200
    assert call(app, "/gradio_api/upload", b"x" * (2 * limits.MAX_FILE_BYTES))[0] == 413
    for path in ("file=http://example.com/x", "file=https://example.com/x", "proxy=http://example.com", "deep_link"):
        assert call(app, f"/gradio_api/{path}", method="GET")[0] in (403, 404)
    for path in ("run/generate", "api/generate", "call/generate", "process_recording", "vibe-edit/"):
        assert call(app, f"/gradio_api/{path}", b"{}")[0] == 404


def test_a_request_without_a_listener_ends(tmp_path, monkeypatch):
    visitors = {}

    async def app(scope, receive, send):
        if "state" in scope:
            visitors[scope["state"]["visitor"].session] = scope["state"]["visitor"]
        elif b"heard" in scope["query_string"]:  # while its connection is open
            monkeypatch.setattr(guard, "LISTEN_SECONDS", 0.0)
            assert not visitors["heard"].is_gone and visitors["silent"].is_gone
        await echo(scope, receive, send)

    app = Guard(app, Uploads(tmp_path))
    for session in ("heard", "silent"):
        call(app, "/gradio_api/queue/join", json.dumps({"data": [], "session_hash": session}).encode())
    assert not visitors["silent"].is_gone  # there is time to begin
    call(app, "/gradio_api/queue/data", method="GET", query="session_hash=heard")
    assert visitors["heard"].is_gone and not app.listening  # and now it has left
    ended = []

    def count():
        try:
            yield from range(100)
        finally:
            ended.append(True)

    assert list(visitors["silent"].watch(count())) == []
    monkeypatch.setattr(guard, "LISTEN_SECONDS", 60.0)
    moments = visitors["silent"].watch(count())
    assert next(moments) == 0
    monkeypatch.setattr(guard, "LISTEN_SECONDS", 0.0)
    assert list(moments) == [] and ended == [True]


def test_uploads_are_deleted(tmp_path, monkeypatch):
    uploads = Uploads(tmp_path)
    (tmp_path / "begin").mkdir()
    (tmp_path / "begin/kept.png").touch()
    uploads.keep()
    paths = [tmp_path / f"{i}/x.png" for i in range(6)] + [
        tmp_path / "tmpabc"
    ]  # the last one was not uploaded in full
    for age, path in enumerate(reversed(paths)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (time.time() - 10 * age, time.time() - 10 * age))
    monkeypatch.setattr(guard, "UPLOAD_SECONDS", 45.0)
    uploads.make_room()
    assert set(uploads.files()) == {tmp_path / "begin/kept.png", *paths[2:]}
    assert not (tmp_path / "0").exists()
    monkeypatch.setattr(guard, "MAX_UPLOADS", 3)
    uploads.make_room()  # for one more
    assert set(uploads.files()) == {tmp_path / "begin/kept.png", *paths[-2:]}


def test_lines_end_between_words():
    assert find_words(list("the cat")) == [(0, 4), (4, 7)]
    assert find_words([" the", " c", "at", ".", " "]) == [(0, 1), (1, 5)]
    assert find_words(list("a··b c")) == [(0, 1), (1, 2), (2, 3), (3, 5), (5, 6)]
    page = TextPanel("", [list("·······"), list("the cat")]).render()
    words = [re.sub("<[^>]*>", "", word) for word in re.split("<span>", page)[1:]]
    assert words == ["the ", "cat"]


def test_a_grid_has_a_cell_for_each_token():
    page = TextPanel("", [list("ab·d" * 4), list("abcd" * 4)], columns=4).render()
    cells = re.findall(r'<span class="([a-z ]*)"><span class="(\w*)[^>]*>(.*?)</span></span>', page)
    assert "--columns: 4" in page and "".join(token for *_, token in cells) == "abcd" * 4
    assert [kind for _, kind, _ in cells[:4]] == ["", "", "written", ""]
    # Boxes of 2 x 2 cells have lines around them.
    assert [edges for edges, *_ in cells[:8]] == [
        "",
        "right",
        "",
        "right",
        "below",
        "below right",
        "below",
        "below right",
    ]
    assert "below" not in TextPanel("", [list("abc" * 3)], columns=3).render()


def test_a_puzzle_is_solved_on_the_page():
    import sudoku

    folder = str(Path(__file__).parents[1] / "examples/checkpoints/sudoku")
    assert folder in find_checkpoints(Path(__file__).parents[1])  # now that its class is imported
    (checkpoint,) = load_checkpoints([folder]).values()
    settings = opening.example_settings(checkpoint, Limits())
    assert settings.sampler == "confidence" and settings.steps == 100
    puzzle = checkpoint.card.example
    assert len(puzzle) == 81 and puzzle.count(".") > 40
    few = "".join(digit if i % 9 else "." for i, digit in enumerate(SOLUTION))
    page = last(actions.infill_text(checkpoint, few, replace(settings, steps=10), Limits()))
    (grid,) = re.findall(r'<p class="d3pm-text d3pm-grid".*?</p>', page)
    assert "".join(re.findall(r"data-history=[^>]*>(.*?)</span>", grid)) == SOLUTION
    assert sudoku.find_solutions(sudoku.read_puzzle(puzzle)) == [sudoku.read_puzzle(SOLUTION)]


def test_a_module_is_imported_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command_line, "import_gradio", lambda: None)
    (tmp_path / "one_of_mine.py").write_text("raise RuntimeError('it runs')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="it runs"):
        command_line.main(["--import_module", "one_of_mine"])
    with pytest.raises(SystemExit):
        command_line.main(["--import_module", "none_of_mine"])
    assert "add its folder to PYTHONPATH" in capsys.readouterr().err


def test_the_card_says_what_a_checkpoint_was_trained_on(tmp_path):
    root = Path(__file__).parents[1] / "examples/checkpoints"
    card = read_card(str(root / "mnist"))
    assert card.trained_on.startswith("MNIST, 55,000 images") and card.text.startswith("# d3pm-hf/mnist")
    assert card.address is None
    for content, expected in (
        ("---\ndatasets: [me/a, b]\n---\n# x", "me/a, b"),
        ("---\ndatasets: {broken\n---\n# x", ""),
        ("| data | a \\| b\\_ |\n", "a | b_"),
        ("", ""),
    ):
        (tmp_path / "README.md").write_text(content)
        assert read_card(str(tmp_path)).trained_on == expected
    for content, expected in (
        ("---\nwidget:\n- src: a.png\n- text: a_b\n- text: c\n---\n# x", "a_b"),
        ("---\nwidget: [1, {text: 2}]\n---\n# x", ""),
        ("---\nwidget: text\n---\n# x", ""),
    ):
        (tmp_path / "README.md").write_text(content)
        assert read_card(str(tmp_path)).example == expected
    (tmp_path / "README.md").unlink()
    assert read_card(str(tmp_path)).text == ""
    assert read_card("me/model").address == "https://huggingface.co/me/model"


def test_the_most_convincing_checkpoint_is_first(text, images):
    plain = replace(
        images,
        name="plain",
        pipeline=D3PMImagePipeline(create_unet("tiny", 17, (8, 8), 1).eval(), D3PMScheduler(17, 20, "uniform")),
    )
    ordered = most_convincing_first({"text": text, "plain": plain, "images": images})
    assert list(ordered) == ["images", "plain", "text"]


def test_without_gradio_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ImportError, match=r"pip install \"d3pm-hf\[app\]\""):
        command_line.main([])


def test_uniform_text_is_infilled_by_particles():
    checkpoint = create_checkpoint("uniform", text_pipeline("uniform"))
    page = last(actions.infill_text(checkpoint, "ab__", Settings(steps=3, particles=3), LIMITS))
    assert shown_texts(page)[0].startswith("ab")
