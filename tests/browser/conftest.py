# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""A server of the page with tiny checkpoints, and a headless Chromium. Nothing is skipped: what is missing is an error."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from playwright.sync_api import sync_playwright

from d3pm_hf import (
    D3PMImagePipeline,
    D3PMScheduler,
    D3PMTextPipeline,
    character_tokenizer,
    create_text_model,
    create_unet,
)
from d3pm_hf.hub import create_model_card


FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_SECONDS = 180


def save_checkpoints(folder: Path) -> None:
    """An absorbing model of letters and signs, and a class-conditional model of small images with stored timesteps."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz <&>\"'")
    scheduler = D3PMScheduler(len(tokenizer), 200)
    model = create_text_model("tiny", len(tokenizer), max_position_embeddings=64).eval()
    letters = D3PMTextPipeline(model, scheduler, tokenizer, sequence_length=24)
    letters.save_pretrained(folder / "letters")
    training = {"data": "the <b>alphabet</b>"}
    create_model_card(letters, training=training).save(folder / "letters" / "README.md")
    scheduler = D3PMScheduler(17, 40, "gaussian", beta_schedule="cosine", prediction_type="logistic")
    scheduler.register_inference_timesteps({4: [39, 20, 8, 2]})
    unet = create_unet("tiny", 17, (8, 8), 1, "logistic", num_class_labels=3).eval()
    D3PMImagePipeline(unet, scheduler, num_class_labels=3).save_pretrained(folder / "pictures")


class Server:
    """The page in a process of its own."""

    def __init__(self, folder: Path):
        save_checkpoints(folder)
        self.steps_file, self.log = folder / "steps.txt", folder / "log.txt"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        script = str(Path(__file__).with_name("serve.py"))
        options = ["letters", "pictures", "--port", str(port), "--max_characters", "200"]
        command = [sys.executable, script, str(self.steps_file), *options]
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.temporary)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def wait(self) -> None:
        """Returns when the page can be loaded."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(self.address, timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"the page was not served: {self.log.read_text()}")

    def uploads(self) -> list[Path]:
        """The files that the server keeps."""
        return [path for path in self.temporary.rglob("*") if path.is_file()]

    def num_steps(self) -> int:
        """Number of steps that the sampler `slow` has taken since the beginning."""
        return len(self.steps_file.read_text().splitlines()) if self.steps_file.exists() else 0


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("page"))
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)


def chromium_path() -> str:
    """Where Chromium is."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail("there is no Chromium: install it (Debian: `apt-get install chromium`), or name it as CHROMIUM")
    return path


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=FLAGS)
        yield browser
        browser.close()


class Visitor:
    """A visitor of the page with a profile of their own."""

    def __init__(self, browser, server: Server, width: int = 1200, height: int = 900):
        self.context = browser.new_context(viewport={"width": width, "height": height})
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(server.address)
        self.page.locator("#generate-run").wait_for()

    def open(self, tab: str) -> None:
        self.page.get_by_role("tab", name=tab).click()

    def choose(self, name: str, value: str) -> None:
        """Chooses an entry of a list."""
        self.page.locator(f"#{name} input").click()
        self.page.get_by_role("option", name=value, exact=True).click()

    def write(self, name: str, value: str) -> None:
        self.page.locator(f"#{name} textarea, #{name} input").first.fill(value)

    def set(self, name: str, value: int) -> None:
        """Sets the number of a slider."""
        box = self.page.locator(f"#{name} input[type=number]")
        box.fill(str(value))
        box.press("Enter")

    def fix_seed(self, seed: int) -> None:
        """Sets the seed, and keeps it."""
        self.page.locator("#randomize input").uncheck()
        self.page.locator("#seed input").fill(str(seed))
        self.page.locator("#seed input").press("Enter")

    def run(self, name: str) -> None:
        self.page.locator(f"#{name}-run").click()

    def finish(self, name: str) -> None:
        """Waits for the end of a run, which has a slider over time."""
        self.page.locator(f"#{name}-result .d3pm-status", has_text="seconds").wait_for()

    def error(self, name: str) -> str:
        return self.page.locator(f"#{name}-result .d3pm-error").inner_text()

    def texts(self, name: str) -> list[str]:
        return self.page.locator(f"#{name}-result .d3pm-text").evaluate_all("all => all.map(one => one.textContent)")

    def leave(self) -> None:
        self.context.close()


@pytest.fixture
def visit(browser, server):
    """A function that opens the page for another visitor. Every visitor's page must be free of errors in the end."""
    visitors: list[Visitor] = []

    def visit(**options) -> Visitor:
        visitors.append(Visitor(browser, server, **options))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.leave()
        assert visitor.problems == []
