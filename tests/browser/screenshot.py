# Copyright 2026 The d3pm-hf authors.
# Licensed under the Apache License, Version 2.0.
"""Takes the picture of the page in the docs: `make app`, and then `python tests/browser/screenshot.py http://127.0.0.1:7860`."""

import sys
from pathlib import Path

from conftest import FLAGS, chromium_path
from playwright.sync_api import sync_playwright


TARGET = Path(__file__).parents[2] / "docs/images/app.png"


def main(address: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 700})
        page.goto(address)
        page.locator("#checkpoint input").click()
        page.get_by_role("option", name="text8-absorbing", exact=True).click()
        page.locator("#generate-result .d3pm-text").first.wait_for()
        page.locator("#generate-result input[type=range]").fill("13")
        page.wait_for_timeout(1000)
        page.screenshot(path=TARGET, full_page=True)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
