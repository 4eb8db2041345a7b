"""The notebooks run from top to bottom and say what their text says they do."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch")

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def test_the_slow_module_is_found_and_mended() -> None:
    left = runpy.run_path(str(NOTEBOOKS / "01_find_the_slow_module.py"))
    first = next(row for row in left["report"].top() if row.is_module)
    assert first.path == "2.1"
    assert left["after"]["2.1"].row.class_name == "ReLU"
