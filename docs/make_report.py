"""Make images/report.png: the page of a recorded trace in Chromium, as few colours as it needs.

Usage: python docs/make_report.py   (needs playwright, Pillow and a Chromium)
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import backspot

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "tests/data/h200/vit_patch_drop.trace.json.gz"
SIZE = {"width": 1280, "height": 1560}
COLOURS = 192


def main() -> None:
    """Locate, open, photograph."""
    chromium = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        report = backspot.locate(TRACE)
        path = report.save(Path(folder) / "report.html")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(path.as_uri())
        # The name alone: where the file lies on this machine is nobody's business.
        page.evaluate(
            "name => { document.querySelector('.brand .muted').textContent = name }", TRACE.name
        )
        page.wait_for_timeout(400)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        browser.close()
    few = picture.quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(ROOT / "docs/images/report.png", optimize=True)


if __name__ == "__main__":
    main()
