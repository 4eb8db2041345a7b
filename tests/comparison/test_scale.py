"""A report of another machine, on the scale of this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backspot import compare, locate
from backspot.comparison.scale import scaled_to

TRACES = Path(__file__).parents[1] / "data" / "findings"


@pytest.fixture(scope="module")
def before():
    return locate(TRACES / "plain_vit.trace.json.gz")


@pytest.fixture(scope="module")
def after():
    return locate(TRACES / "math_two_blocks_vit.trace.json.gz")


def times(costs, factor):
    """All times of a report or row, on a machine that takes ``factor`` times as long."""
    changed = {}
    for name in ("step_ns", "wall_ns", "gpu_ns"):
        for each in (name, f"{name}_by_step"):
            found = getattr(costs, each, None)
            if isinstance(found, tuple):
                changed[each] = tuple(round(one * factor) for one in found)
            elif found is not None:
                changed[each] = round(found * factor)
    return replace(costs, **changed)


def slower_modules(comparison):
    return {one.path for one in comparison.changes if one.verdict == "slower"}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.4, 1, 3])
def test_the_modules_that_got_slower_are_found_whatever_the_machine(factor, before, after):
    rows = tuple(times(row, factor) for row in before.modules)
    elsewhere = replace(times(before, factor), modules=rows)
    scaled, note = scaled_to(after, elsewhere)
    assert slower_modules(compare(scaled, after)) == {"blocks.1.attn", "blocks.2.attn"}
    assert "what all modules have in common" in note


def test_the_same_work_on_another_machine_is_no_change(before):
    rows = tuple(times(row, 2) for row in before.modules)
    elsewhere = replace(times(before, 2), modules=rows)
    scaled, note = scaled_to(before, elsewhere)
    assert "multiplied by 0.50 (GPU times: by 0.50)" in note
    comparison = compare(scaled, before)
    assert comparison.whole.verdict == "within the noise"
    assert not [one for one in comparison.changes if one.claimed]
