# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""The page in a real browser, as visitors use it: `make test-browser`."""

import http.server
import json
import re
import secrets
import socketserver
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

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
    visitor.page.locator("#generate-result .d3pm-status", has_text="6 steps, 6 calls").wait_for()
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
        visitor.fix_seed(number)
        visitor.run("generate")
    for visitor, number in steps.items():
        visitor.page.locator("#generate-result .d3pm-status", has_text=f"{number} steps, {number} calls").wait_for()
        together[visitor] = visitor.texts("generate")
    alone = visit()
    for visitor, number in steps.items():
        alone.set("steps", number)
        alone.fix_seed(number)
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
    visitor.set("steps", 5)
    visitor.run("generate")
    visitor.page.locator("#generate-result .d3pm-status", has_text="5 steps, 5 calls").wait_for()
    assert visitor.page.locator("#generate-result .d3pm-frames").get_attribute("data-number") == "6"
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
    assert not visitor.page.locator("#checkpoint").is_visible()
    visitor.open("Generate")
    visitor.page.locator("#checkpoint").wait_for()


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_every_tab_can_be_reached_and_nothing_is_wider_than_the_screen(visit, width):
    visitor = visit(width=width, height=844)
    visitor.choose("checkpoint", "pictures")  # it has all of them
    for tab in ("Fill in", "Reconstruct", "Timesteps", "Noise", "Generate"):
        visitor.open(tab)
        visitor.page.wait_for_timeout(300)
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_opens_with_a_sample(visit):
    """It was drawn once when the server started, with the seed that the page shows."""
    first, second = visit(), visit()
    first.finish("generate")
    second.finish("generate")
    assert len(first.texts("generate")) == 4 and first.texts("generate") == second.texts("generate")
    seed = int(first.page.locator("#seed input").input_value())
    for number in (seed + 1, seed):
        first.fix_seed(number)
        first.run("generate")
        first.page.locator("#generate-result .d3pm-status", has_text=f"seed {number}").wait_for()
    assert first.texts("generate") == second.texts("generate")
    second.choose("checkpoint", "pictures")
    second.page.locator("#generate-result .d3pm-frames").wait_for()


def test_each_press_draws_from_a_new_seed_that_is_shown(visit):
    visitor = visit()
    seed, status = visitor.page.locator("#seed input"), visitor.page.locator("#generate-result .d3pm-status")
    shown, texts = [seed.input_value()], []
    for _ in range(2):
        visitor.run("generate")
        wait_until(lambda: seed.input_value() not in shown)
        shown.append(seed.input_value())
        visitor.page.locator("#generate-result .d3pm-status", has_text=f"seed {shown[-1]}").wait_for()
        texts.append(visitor.texts("generate"))
    assert texts[0] != texts[1]
    visitor.fix_seed(int(shown[1]))
    visitor.run("generate")
    visitor.page.locator("#generate-result .d3pm-status", has_text=f"seed {shown[1]}").wait_for()
    assert visitor.texts("generate") == texts[0] and seed.input_value() == shown[1] and status.count() == 1


def test_the_tab_of_timesteps_is_there_where_there_is_something_to_compare(visit):
    visitor = visit()
    tab = visitor.page.get_by_role("tab", name="Timesteps")
    assert tab.count() == 0  # of a checkpoint with even timesteps alone
    visitor.choose("checkpoint", "pictures")
    tab.click()
    visitor.page.locator("#compare-run").wait_for()
    visitor.choose("checkpoint", "letters")
    wait_until(lambda: tab.count() == 0)
    visitor.page.locator("#generate-run").wait_for()  # and not an empty page


def test_words_are_not_cut_at_the_ends_of_lines(visit):
    visitor = visit(width=390, height=844)
    visitor.open("Reconstruct")
    visitor.write("text", "the quick brown fox jumps over the lazy dog and on")
    visitor.run("text")
    visitor.finish("text")
    rows = """panel => {
        const rows = {};
        for (const span of panel.querySelectorAll("[data-history]")) {
            const top = Math.round(span.getBoundingClientRect().top);
            rows[top] = (rows[top] || "") + span.textContent;
        }
        return Object.entries(rows).sort((a, b) => a[0] - b[0]).map(row => row[1]);
    }"""
    player = visitor.page.locator("#text-result .d3pm-player")
    lines = player.locator(".d3pm-text").first.evaluate(rows)
    assert len(lines) > 1 and all(line.endswith(" ") for line in lines[:-1])
    sample = player.locator(".d3pm-text").nth(1)
    at_end = [len(line) for line in sample.evaluate(rows)]
    player.locator("input[type=range]").fill("0")
    assert [len(line) for line in sample.evaluate(rows)] == at_end  # nothing moves in time


def test_a_checkpoint_says_what_it_was_trained_on(visit, server):
    visitor = visit()
    about = visitor.page.locator("#about")
    assert "Trained on the <b>alphabet</b>." in about.inner_text()
    with visitor.page.expect_popup() as opened:
        about.get_by_role("link", name="Model card").click()
    assert "## Training" in opened.value.locator("body").inner_text()
    assert opened.value.url.startswith(server.address)
    docs = visitor.page.get_by_role("link", name="Documentation").get_attribute("href")
    assert docs.endswith("/docs/source/en")
    for name in ("../letters", "nothing"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.address}/cards/{name}")


def test_files_of_the_server_are_not_served(server):
    for path in ("/etc/passwd", str(server.log), "letters/model_index.json", "../log.txt"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.address}/gradio_api/file={path}")
        assert refused.value.code in (403, 404)


def join(server, button, values, session):
    """Sends a request for the event of a button, made without the page."""
    with urllib.request.urlopen(f"{server.address}/config") as answer:
        config = json.load(answer)
    numbers = {component["props"].get("elem_id"): component["id"] for component in config["components"]}
    (event,) = (
        one for one in config["dependencies"] if [numbers[button], "click"] in one["targets"] and one["inputs"]
    )
    body = {"data": values, "fn_index": event["id"], "session_hash": session, "trigger_id": numbers[button]}
    request = urllib.request.Request(
        f"{server.address}/gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()


def send(server, button, values):
    """What the server answers to a request for the event of a button."""
    session = f"session-{button}-{time.monotonic_ns()}"
    join(server, button, values, session)
    with urllib.request.urlopen(f"{server.address}/gradio_api/queue/data?session_hash={session}", timeout=60) as lines:
        for line in map(bytes.decode, lines):
            if "process_completed" in line:
                return json.loads(line.removeprefix("data: "))
    pytest.fail("there was no answer")


SETTINGS = [False, 3, "default", 1.0, 0, 1, 1, "any", 1.0]


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


class Listener(http.server.BaseHTTPRequestHandler):
    """Answers every request with a picture, and keeps its path."""

    paths: list[str] = []

    def do_GET(self):
        self.paths.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_picture_by_its_address_is_not_fetched(server):
    with socketserver.TCPServer(("127.0.0.1", 0), Listener) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        for host in (f"localhost:{other.server_address[1]}", "huggingface.co"):
            picture = {"path": f"http://{host}/x.png", "meta": {"_type": "gradio.FileData"}}
            # In place of the picture, or of anything else.
            for values in (["pictures", picture, 0.5], ["pictures", None, picture]):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    send(server, "image-run", [*values, *SETTINGS])
                assert refused.value.code == 400 and "upload the picture" in refused.value.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(f"{server.address}/gradio_api/file=http://{host}/x.png")
        other.shutdown()
    assert Listener.paths == []


def test_requests_that_nobody_listens_to_do_not_block_the_queue(visit, server):
    visitor = visit()
    for i in range(34):
        join(server, "generate-run", ["letters", False, 150, "slow", 1.0, 0, 1, 1, "any", 1.0], f"silent-{i}")
    began = time.monotonic()
    visitor.set("steps", 4)
    while not visitor.page.locator("#generate-result .d3pm-status", has_text="4 steps, 4 calls").count():
        visitor.run("generate")
        visitor.page.wait_for_timeout(2000)
        assert time.monotonic() - began < 30, "the queue is blocked"
        visitor.page.keyboard.press("Escape")


def test_the_upload_of_a_file_is_limited_and_kept_by_the_server_alone(server):
    def upload(size):
        head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        body = head + secrets.token_bytes(size) + b"\r\n--x--\r\n"
        return urllib.request.Request(f"{server.address}/gradio_api/upload", body, headers)

    before = len(server.uploads())
    with urllib.request.urlopen(upload(1000)) as answer:
        (path,) = json.load(answer)
    assert len(server.uploads()) == before + 1 and Path(path) in server.uploads()
    for size in (4 * 2**20 + 1, 2**24):
        with pytest.raises((urllib.error.HTTPError, urllib.error.URLError)):
            urllib.request.urlopen(upload(size))
    assert max(path.stat().st_size for path in server.uploads()) <= 4 * 2**20
