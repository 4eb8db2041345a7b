"""Memory over time and the roofline, on the page."""

from __future__ import annotations

import re

import pytest

from backspot.render.html import to_html
from backspot.results.report import Report
from support.sample_reports import detailed, diagnosed


def without_styles(of: Report) -> str:
    return re.sub(r"(?s)<style>.*?</style>", "", to_html(of).decode())


def test_the_page_draws_memory_and_the_roofline_without_a_script() -> None:
    page = without_styles(detailed())
    assert "<h2>Memory of GPU 0" in page
    assert "peak 5.50 GB" in page
    assert page.count("<polygon") == 10  # before the recording, eight names, all others
    assert "<h2>Roofline of the backward" in page
    assert page.count('<circle class="point"') == 10
    assert "<img" not in page


def test_without_memory_and_shapes_there_is_no_plot() -> None:
    page = without_styles(diagnosed())
    assert "<svg" not in page
    assert 'class="plot"' not in page


def test_all_that_is_drawn_can_be_reached_and_says_what_it_is() -> None:
    groups = re.findall(
        r'<g class="reach" tabindex="0" role="img" aria-label="([^"]*)"', without_styles(detailed())
    )
    assert len(groups) == 20
    assert all(": " in label for label in groups)
    assert sum("at the peak" in label for label in groups) == 10
    assert sum("FLOP/byte" in label for label in groups) == 10


@pytest.mark.slow
def test_the_keyboard_shows_what_a_point_is(opened) -> None:
    page = opened(detailed())
    point = page.locator(".reach").last
    said = point.locator(".said")
    assert said.evaluate("one => getComputedStyle(one).visibility") == "hidden"
    point.focus()
    assert said.evaluate("one => getComputedStyle(one).visibility") == "visible"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"]
