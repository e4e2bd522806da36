# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The page in a real browser, as visitors use it: `make test-browser`."""

import json
import re
import time
import urllib.error
import urllib.request

import pytest


ATTACK = '<img src=x onerror="alert(1)">\'&'


def wait_until(condition, seconds=20):
    """Returns when the condition holds; fails after a while."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come to pass"
        time.sleep(0.05)


def test_generate_and_go_back_in_time(visit):
    visitor = visit()
    visitor.set("steps", 6)
    visitor.run("generate")
    visitor.finish("generate")
    written = visitor.texts("generate")
    assert [len(text) for text in written] == [24] * 4 and "·" not in "".join(written)
    player = visitor.page.locator("#generate-result .d3pm-player")
    slider = player.locator("input[type=range]")
    assert slider.get_attribute("max") == "6" and player.locator("output").inner_text() == "data"
    slider.fill("0")
    assert visitor.texts("generate") == ["·" * 24] * 4 and player.locator("output").inner_text() == "t = 199"
    slider.fill("3")
    masks = visitor.texts("generate")[0].count("·")
    assert 0 < masks < 24 and player.locator(".d3pm-text").first.locator("span.written").count() == 24 - masks
    player.locator("button").click()  # it plays on from there
    wait_until(lambda: player.locator("output").inner_text() == "data")
    assert visitor.texts("generate") == written


def test_the_page_asks_no_other_server(visit, server):
    visitor = visit()
    visitor.run("generate")
    visitor.finish("generate")
    visitor.open("Fill in")
    outside = [url for url in visitor.requests if not url.startswith((server.address, "data:", "blob:"))]
    assert visitor.requests and outside == []


def test_fill_in_a_text(visit):
    visitor = visit()
    visitor.open("Fill in")
    visitor.write("gaps", "<b>'&\"___ fox")
    visitor.run("infill-text")
    visitor.finish("infill-text")
    for text in visitor.texts("infill-text"):
        assert re.fullmatch("<b>'&\"[^_·]{3} fox", text)


def test_fill_in_a_picture(visit):
    visitor = visit()
    visitor.choose("checkpoint", "pictures")
    visitor.open("Fill in")
    canvas = visitor.page.locator("#canvas canvas").first
    canvas.wait_for()
    visitor.run("infill-image")
    assert "Nothing is painted" in visitor.error("infill-image")
    time.sleep(1)  # until the editor takes strokes
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    mouse = visitor.page.mouse
    mouse.move(x - 60, y)
    mouse.down()
    for i in range(12):
        mouse.move(x - 60 + 10 * i, y + 5 * (i % 2))
    mouse.up()
    time.sleep(1)
    visitor.run("infill-image")
    visitor.finish("infill-image")
    frames = visitor.page.locator("#infill-image-result .d3pm-frames")
    assert frames.get_attribute("data-number") == "21"


def test_an_input_that_is_too_long(visit):
    visitor = visit()
    visitor.open("Fill in")
    visitor.write("gaps", "_" * 201)
    visitor.run("infill-text")
    assert visitor.error("infill-text") == "The text has 201 characters, and at most 200 are allowed: shorten it"
    visitor.write("gaps", "_" * 70)  # more than the network has positions
    visitor.run("infill-text")
    wait_until(lambda: "positions" in visitor.error("infill-text"))


def test_characters_that_the_tokenizer_does_not_know(visit):
    visitor = visit()
    visitor.open("Fill in")
    visitor.write("gaps", f"{ATTACK} _ \N{SNOWMAN}")
    visitor.run("infill-text")
    assert "characters that the tokenizer does not know" in visitor.error("infill-text")
    visitor.open("Noise")
    text = f"{ATTACK} ${{alert(2)}} {{{{value}}}}"
    visitor.write("noise-text", text)
    slider = visitor.page.locator("#noise-result input[type=range]")
    wait_until(lambda: (slider.fill("0"), visitor.texts("noise"))[1] == [text])
    assert visitor.page.locator("#noise-result img").count() == 0  # a dialog would be a problem of the visitor


def test_two_visitors_at_once_get_what_each_gets_alone(visit):
    first, second = visit(), visit()
    steps = {first: 40, second: 9}
    together = {}
    for visitor, number in steps.items():
        visitor.set("steps", number)
        visitor.run("generate")
    for visitor in steps:
        visitor.finish("generate")
        together[visitor] = visitor.texts("generate")
    alone = visit()
    for visitor, number in steps.items():
        alone.set("steps", number)
        alone.run("generate")
        alone.page.locator("#generate-result .d3pm-status", has_text=f"{number} steps, {number} calls").wait_for()
        assert alone.texts("generate") == together[visitor]


@pytest.mark.parametrize("way", ["leave", "stop"])
def test_a_visitor_who_leaves_in_the_middle(visit, server, way):
    visitor = visit()
    visitor.choose("sampler", "slow")
    visitor.set("steps", 150)
    before = server.num_steps()
    visitor.run("generate")
    wait_until(lambda: server.num_steps() >= before + 3)
    if way == "leave":
        visitor.leave()
    else:
        visitor.page.locator("#generate-stop").click()
    taken = server.num_steps()
    wait_until(lambda: (time.sleep(1.5), taken_since(server))[1] == 0)
    assert before + 3 <= server.num_steps() < before + 150 and server.num_steps() - taken < 60


def taken_since(server, seconds=1.0):
    """Number of steps in the next moment."""
    before = server.num_steps()
    time.sleep(seconds)
    return server.num_steps() - before


def test_classes_guidance_and_timesteps_of_a_checkpoint(visit):
    visitor = visit()
    visitor.choose("checkpoint", "pictures")
    visitor.page.locator("#guidance").wait_for()
    visitor.choose("label", "1")
    visitor.run("generate")
    visitor.finish("generate")
    assert visitor.page.locator("#generate-result .d3pm-frames").get_attribute("data-number") == "21"
    visitor.open("Timesteps")
    visitor.run("compare")
    visitor.finish("compare")
    labels = visitor.page.locator("#compare-result .d3pm-label")
    visitor.page.locator("#compare-result input[type=range]").fill("1")
    assert labels.all_inner_texts() == ["t = 29", "t = 20"]
    assert visitor.page.locator("#compare-result .d3pm-ticks i").count() == 8


def test_corrupt_and_reconstruct(visit):
    visitor = visit()
    visitor.open("Reconstruct")
    visitor.write("text", "the quick brown fox")
    visitor.run("text")
    visitor.finish("text")
    assert visitor.texts("text")[0] == "the quick brown fox" and len(visitor.texts("text")) == 5
    assert "of the tokens as they were" in visitor.page.locator("#text-result .d3pm-status").inner_text()


def test_noise_of_another_process_live(visit):
    visitor = visit()
    visitor.open("Noise")
    about = visitor.page.locator("#noise-result .d3pm-about").first
    visitor.choose("family", "nearest_neighbor")
    wait_until(lambda: "keyboard" in about.inner_text())
    visitor.write("noise-text", "live")
    slider = visitor.page.locator("#noise-result input[type=range]")
    wait_until(lambda: len(visitor.texts("noise")[0]) == 4)
    slider.fill("0")
    assert visitor.texts("noise") == ["live"]
    visitor.page.get_by_label("picture", exact=True).click()
    wait_until(lambda: visitor.page.locator("#noise-result .d3pm-frames").count() == 2)


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_the_screen(visit, width):
    visitor = visit(width=width, height=844)
    for tab in ("Generate", "Fill in", "Noise"):
        if width > 640:
            visitor.open(tab)
        visitor.page.wait_for_timeout(300)
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width


def test_files_of_the_server_are_not_served(server):
    for path in ("/etc/passwd", str(server.log), "letters/model_index.json", "../log.txt"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.address}/gradio_api/file={path}")
        assert refused.value.code in (403, 404)


def send(server, button, values):
    """What the server answers to a request for the event of a button, made without the page."""
    with urllib.request.urlopen(f"{server.address}/config") as answer:
        config = json.load(answer)
    numbers = {component["props"].get("elem_id"): component["id"] for component in config["components"]}
    (event,) = (
        one for one in config["dependencies"] if [numbers[button], "click"] in one["targets"] and one["inputs"]
    )
    session = f"session-{button}-{time.monotonic_ns()}"
    body = {"data": values, "fn_index": event["id"], "session_hash": session, "trigger_id": numbers[button]}
    request = urllib.request.Request(
        f"{server.address}/gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()
    with urllib.request.urlopen(f"{server.address}/gradio_api/queue/data?session_hash={session}", timeout=60) as lines:
        for line in map(bytes.decode, lines):
            if "process_completed" in line:
                return json.loads(line.removeprefix("data: "))
    pytest.fail("there was no answer")


SETTINGS = [3, "default", 1.0, 0, 1, 1, "any", 1.0]


def test_a_request_names_no_file(server):
    """A checkpoint, a picture or a sampler that is the path of a file is refused before it is opened."""
    assert send(server, "generate-run", ["letters", *SETTINGS])["success"]
    folder = str(server.log.parent / "letters")
    for name in (folder, "./letters", "gpt2", None, ["letters"]):
        answer = send(server, "generate-run", [name, *SETTINGS])
        assert not answer["success"] or "d3pm-error" in str(answer)
    picture = {"path": str(server.log), "meta": {"_type": "gradio.FileData"}}
    assert not send(server, "image-run", ["pictures", picture, 0.5, *SETTINGS])["success"]
    assert "Loading" not in server.log.read_text().split("The page is at")[1]
