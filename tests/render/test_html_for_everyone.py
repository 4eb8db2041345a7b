"""The page for everyone: on any screen, in any light, on paper, and by ear."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from backspot.job.answer import answer
from support.plans import PLAN
from support.sample_reports import SAMPLES, detailed, diagnosed, vit
from support.summaries import many, recorded

SCHEMES = ("light", "dark")
JOBS = {
    "two ranks": lambda: answer(recorded("fsdp_kernel")),
    "even ranks": lambda: answer(recorded("ddp_even")),
    "sixteen ranks": lambda: answer(many(16)),
    "many ranks": lambda: answer([*many(64)[1:], planted()]),
}
PAGES = {**SAMPLES, **JOBS, "planned": lambda: replace(vit(), plan=PLAN)}


def planted():
    """The first of 64 even ranks, but one module takes 10 ms more there."""
    first = many(64)[0]
    modules = [
        msgspec.structs.replace(one, forward_gpu=tuple(ns + 10_000_000 for ns in one.forward_gpu))
        if one.path == "model.layers.2.mlp.down_proj"
        else one
        for one in first.modules
    ]
    return msgspec.structs.replace(first, modules=tuple(modules))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["even_vit", "two ranks"])
def test_a_choice_of_light_or_dark_lasts(opened, name):
    page = opened(PAGES[name](), alone=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(ground) != light
    for _ in range(100):  # Chromium hands what is stored to other processes a moment later
        page.wait_for_timeout(100)
        page.reload()
        if page.evaluate(ground) != light:
            break
    assert page.evaluate(ground) != light


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagnosed", "detailed", "odd", "unlabelled", "planned", *JOBS])
def test_nothing_sticks_out_of_the_page(opened, name):
    # Details are closed on a page that opens on a narrow screen, and stay open on one that shrinks.
    for widths in ([400], [2000, 1280, 820, 400]):
        page = opened(PAGES[name](), viewport=screen(widths[0]))
        for width in widths:
            page.set_viewport_size(screen(width))
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CUT) == []


def screen(width: int) -> dict[str, int]:
    return {"width": width, "height": 800}


CUT = """() => [...document.querySelectorAll('.table-box, .plot-box')]
  .filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText.slice(0, 80))"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagnosed", *JOBS])
def test_tables_and_lanes_use_the_room_that_there_is(opened, name):
    page = opened(PAGES[name]())
    for width in (1280, 2000):
        page.set_viewport_size(screen(width))
        widths = page.evaluate(
            """() => [...document.querySelectorAll(
                '.table-box > table, .lanes, .split, .bar, .top'
            )].map(one => one.clientWidth / one.closest('body > *').clientWidth)"""
        )
        assert widths
        beside = 0.6 if name == "diagnosed" else 0.99  # details stand beside the table
        assert min(widths) > beside


@pytest.mark.slow
def test_a_table_of_ranks_stays_a_table_to_the_ear_where_its_rows_are_blocks(opened):
    page = opened(PAGES["two ranks"]())
    for width in (400, 1280):
        page.set_viewport_size(screen(width))
        table = page.get_by_role("region", name="Modules over the ranks").get_by_role("table")
        row = table.get_by_role("row", name="model.layers.2.mlp.down_proj")
        assert row.get_by_role("cell").filter(has_text="10.44").count() == 1
        label = row.get_by_role("cell").last.evaluate(
            "one => getComputedStyle(one, '::before').content"
        )
        assert ("rank 1" in label) == (width == 400)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detailed", "diagnosed", "unlabelled"])
def test_no_choice_of_what_to_measure_stands_alone(opened, name):
    page = opened(SAMPLES[name](), viewport=screen(400))
    right = page.evaluate(
        """() => [...document.querySelectorAll('#measure')].filter(one => one.checkVisibility())
        .flatMap(all => [...Map.groupBy(all.querySelectorAll('label'), one => one.offsetTop)]
            .map(([_, row]) => [row.length, row.at(-1).getBoundingClientRect().right
                - all.getBoundingClientRect().right]))"""
    )
    assert all(count > 1 and abs(gap) <= 1.5 for count, gap in right)


@pytest.mark.slow
def test_on_a_narrow_screen_details_open_on_demand_and_close(opened):
    page = opened(vit(), viewport=screen(400))
    details = page.locator("#details")
    assert not details.is_visible()
    page.get_by_role("button", name="patch_embed.proj", exact=True).click()
    assert details.is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert not details.is_visible()
    assert page.evaluate("document.activeElement.innerText") == "patch_embed.proj"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagnosed", "odd", "even_vit", "unlabelled", "two ranks"])
def test_every_control_has_a_name_and_no_id_stands_twice(opened, name):
    page = opened(PAGES[name]())
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, a, [role=tree], [role=treeitem]')]
        .filter(one => one.checkVisibility() && !(one.ariaLabel || one.innerText.trim()
            || (one.labels && one.labels.length && one.labels[0].innerText.trim())))
        .map(one => one.outerHTML)"""
    )
    assert unnamed == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map(one => Number(one.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["Wall", "Backward ÷ forward"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_from_its_ground(opened, scheme, measure):
    page = opened(replace(diagnosed(), warnings=("Look out.",)), color_scheme=scheme)
    page.get_by_role("radio", name=measure).check()
    page.wait_for_timeout(300)
    faint = page.evaluate(CONTRAST)
    assert faint == []


CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const faint = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest('.unseen, script')) continue;
    const [front, back] = [light(rgb(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < 4.5) faint.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return faint;
}"""


AXE = """() => axe.run(document, { resultTypes: ['violations'] }).then((found) =>
  found.violations.map((one) => [one.id, one.help, one.nodes.map((node) => node.html)]))"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        ("detailed", "light", 1280),
        ("odd", "dark", 400),
        ("two ranks", "dark", 1280),
        ("many ranks", "light", 400),
    ],
)
def test_axe_finds_nothing_that_keeps_people_from_using_the_page(opened, name, scheme, width):
    axe = pytest.importorskip("axe_playwright_python")
    page = opened(PAGES[name](), color_scheme=scheme, viewport=screen(width))
    page.wait_for_timeout(300)  # until blocks have their places
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    assert page.evaluate(AXE) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagnosed", *JOBS])
def test_printed_the_page_is_light_and_without_controls(opened, name):
    page = opened(PAGES[name](), color_scheme="dark", viewport=screen(690))
    page.emulate_media(media="print")
    assert not page.locator(".controls, #theme").filter(visible=True).count()
    assert page.locator(".table-box table").first.is_visible()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(252, 252, 251)"
    assert page.evaluate(CUT) == []


@pytest.mark.slow
def test_a_printed_table_has_its_labels_on_each_sheet(opened):
    page = opened(detailed())
    page.emulate_media(media="print")
    shown = page.evaluate(
        """() => [...document.querySelectorAll('.ranked thead button')]
        .filter(one => one.offsetParent && getComputedStyle(one).display !== 'contents')"""
    )
    assert shown == []  # a browser repeats text on each sheet, and no controls
    assert "wall" in page.locator(".ranked thead").inner_text()
