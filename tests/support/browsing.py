"""Pages in a real browser: what a person at the keyboard, and one with the mouse, can do there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass
class Browser:
    """A Chromium that opens files."""

    chromium: Any

    @contextmanager
    def open(self, path: Path, **more: Any) -> Iterator[Opened]:
        """A page, and what went wrong on it."""
        context = self.chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **more})
        context.set_default_timeout(5_000)
        page = context.new_page()
        opened = Opened(page)
        page.on("console", lambda message: opened.said.append(message.text))
        page.on("pageerror", lambda error: opened.said.append(str(error)))
        page.on("request", lambda request: opened.asked.append(request.url))
        page.goto(path.as_uri())
        if more.get("java_script_enabled", True):
            page.wait_for_function(
                "!document.getElementById('explorer') || document.querySelector('.scripted')"
            )
        try:
            yield opened
        finally:
            context.close()


@dataclass
class Opened:
    """An open page.

    Attributes:
        page: Playwright's page.
        said: what stood on the console, and errors that nobody caught.
        asked: what was asked of the network, the page itself included.
    """

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium, or a skip that says why there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if not found:
        pytest.skip("no Chromium on the PATH, and CHROMIUM names none")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield Browser(browser)
        browser.close()
