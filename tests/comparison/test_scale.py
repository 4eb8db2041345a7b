"""A report of another machine, on the scale of this one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from backspot import compare, locate
from backspot.comparison.compare import scaled_to
from support.recorded_steps import recorded

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
    return {one.path for one in comparison.changes if one.verdict == "longer"}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.4, 1, 3])
def test_the_modules_that_got_slower_are_found_whatever_the_machine(factor, before, after):
    rows = tuple(times(row, factor) for row in before.modules)
    elsewhere = replace(times(before, factor), modules=rows)
    scaled, note = scaled_to(after, elsewhere)
    assert slower_modules(compare(scaled, after)) == {"blocks.1.attn", "blocks.2.attn"}
    assert "modules with the same work have in common" in note


def test_the_same_work_on_another_machine_is_no_change(before):
    rows = tuple(times(row, 2) for row in before.modules)
    elsewhere = replace(times(before, 2), modules=rows)
    scaled, note = scaled_to(before, elsewhere)
    assert "multiplied by 0.50 (GPU times: by 0.50)" in note
    assert "A slowdown of everything at once would look the same" in note
    comparison = compare(scaled, before)
    assert comparison.whole.verdict == "within the noise"
    assert not [one for one in comparison.changes if one.claimed]


def called(one, path, calls):
    """A report in which a module is called so often in each step."""
    rows = (replace(row, calls=calls) if row.path == path else row for row in one.modules)
    return replace(one, modules=tuple(rows))


SAME = {f"blocks.{at}": 1_000_000 + 10_000 * at for at in range(12)}


@given(
    same=st.integers(3, 12),
    factor=st.sampled_from((0.25, 0.5, 1, 2, 4)),
    more=st.integers(2, 50),
    new=st.integers(0, 40),
)
def test_more_calls_and_new_modules_are_never_the_speed_of_a_machine(same, factor, more, new):
    kept = {path: SAME[path] for path in [*SAME][:same]}

    def recording(scale, times):
        return recorded({path: [round(scale * one)] * 10 for path, one in times.items()})

    before = called(recording(1, {**kept, "fc": 1_000_000}), "fc", 1.0)
    added = {f"extra.{at}": 1_000_000 for at in range(new)}
    after = called(recording(factor, {**kept, "fc": 1_000_000 * more, **added}), "fc", more)
    scaled, note = scaled_to(after, before)
    assert f"multiplied by {factor:.2f}, which is what {same} modules" in note
    whole = compare(scaled, after).whole
    assert whole.change_ms == pytest.approx(factor * (more - 1 + new), abs=1e-3)
    assert whole.exceeds(5)


def test_without_modules_of_the_same_work_times_stay_as_they_are_and_a_note_says_so():
    before = called(recorded({"fc": [1_000_000] * 10, "head": [9_000] * 10}), "fc", 1.0)
    after = called(recorded({"fc": [7_000_000] * 10, "head": [9_000] * 10}), "fc", 7.0)
    scaled, note = scaled_to(after, before)
    assert scaled == before
    assert "the speed of the machine is not known: the times are compared as they are" in note
