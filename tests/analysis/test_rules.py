"""Which rules judge a trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import backspot
from backspot.analysis.findings import all_rules

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "findings.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run outside of the checkout")
def test_the_page_says_which_rules_need_a_gpu() -> None:
    table = re.findall(r"^\| \[([a-z-]+)\]\(#\1\) \| .* \| (yes|) \|$", PAGE.read_text(), re.M)
    assert dict(table) == {rule.name: "yes" if rule.needs_gpu else "" for rule in all_rules()}


def test_all_rules_look_at_a_trace_of_a_gpu() -> None:
    on_gpu = backspot.locate(DATA / "h200" / "vit_patch_drop.trace.json.gz")
    assert (on_gpu.rules_looked, on_gpu.rules_unable) == (len(all_rules()), 0)
