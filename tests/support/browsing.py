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

_SCREEN: dict[str, int] = {"width": 1280, "height": 900}
_READY = "!document.getElementById('explorer') || document.querySelector('.scripted')"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass
class Browser:
    """A Chromium that opens files, one after another on one page."""

    chromium: Any
    _last: Opened | None = None

    @contextmanager
    def open(
        self,
        path: Path,
        *,
        viewport: dict[str, int] = _SCREEN,
        color_scheme: str = "light",
        alone: bool = False,
        **context: Any,
    ) -> Iterator[Opened]:
        """A page, and what went wrong on it.

        It replaces the page before it and shares what that stored, unless it is ``alone``, as are
        pages with anything else that Playwright's ``new_page`` takes.
        """
        alone = alone or bool(context)
        if alone or self._last is None:
            page = self.chromium.new_page(**context)
            page.set_default_timeout(5_000)
        else:
            self._last.leave()
            page = self._last.page
        opened = Opened(page)
        if not alone:
            self._last = opened
        if page.viewport_size != viewport:  # setting the same size takes as long
            page.set_viewport_size(viewport)
        page.emulate_media(media="null", color_scheme=color_scheme)
        page.goto(path.as_uri())
        if context.get("java_script_enabled", True):
            page.wait_for_function(_READY)
        try:
            yield opened
        finally:
            opened.leave()
            if alone:
                page.close()


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

    def __post_init__(self) -> None:
        self._listeners = {
            "console": lambda message: self.said.append(message.text),
            "pageerror": lambda error: self.said.append(str(error)),
            "request": lambda request: self.asked.append(request.url),
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)

    def leave(self) -> None:
        """Note no more of what happens on the page."""
        while self._listeners:
            self.page.remove_listener(*self._listeners.popitem())


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
