"""The page for everyone: on any screen, in any light, on paper, and by ear."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from support.sample_reports import SAMPLES, diagnosed, vit

SCHEMES = ("light", "dark")


@pytest.mark.slow
def test_a_choice_of_light_or_dark_lasts(opened):
    page = opened(vit(), color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 820, 1280, 2000])
@pytest.mark.parametrize("name", ["diagnosed", "odd", "unlabelled"])
def test_nothing_sticks_out_of_the_page(opened, name, width):
    page = opened(SAMPLES[name](), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_on_a_narrow_screen_details_open_on_demand_and_close(opened):
    page = opened(vit(), viewport={"width": 400, "height": 800})
    details = page.locator("#details")
    assert not details.is_visible()
    page.get_by_role("button", name="patch_embed.proj", exact=True).click()
    assert details.is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert not details.is_visible()
    assert page.evaluate("document.activeElement.innerText") == "patch_embed.proj"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diagnosed", "odd", "even_vit", "unlabelled"])
def test_every_control_has_a_name_and_no_id_stands_twice(opened, name):
    page = opened(SAMPLES[name]())
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
@pytest.mark.parametrize(("name", "scheme"), [("detailed", "light"), ("odd", "dark")])
def test_axe_finds_nothing_that_keeps_people_from_using_the_page(opened, name, scheme):
    axe = pytest.importorskip("axe_playwright_python")
    page = opened(SAMPLES[name](), color_scheme=scheme)
    page.wait_for_timeout(300)  # until blocks have their places
    page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    assert page.evaluate(AXE) == []


@pytest.mark.slow
def test_printed_the_page_is_light_and_without_controls(opened):
    page = opened(diagnosed(), color_scheme="dark")
    page.emulate_media(media="print")
    assert not page.locator(".controls").is_visible()
    assert page.locator("#table-box table").is_visible()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(252, 252, 251)"
