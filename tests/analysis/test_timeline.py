"""Timelines against a plain count, moment by moment."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from backspot.analysis.timeline import (
    EMPTY,
    NOTHING,
    Timeline,
    _nested,
    _unwound,
    enclosing,
    first_started,
    grouped,
    innermost,
    is_among,
    is_in,
    layered,
    median,
    numbered,
    pieces,
    quantile,
    take,
)
from backspot.trace import Category, read_events
from support.synthetic import Trace

LENGTH = 40
spans = st.lists(
    st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(
        lambda pair: (min(pair), max(pair))
    ),
    max_size=12,
)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def sampled(timeline: Timeline) -> list[int]:
    return timeline.at(np.arange(-1, LENGTH + 2)).tolist()


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Properly nested spans, as a call stack makes them, in any order."""
    result: list[tuple[int, int]] = []

    def grow(low: int, high: int, depth: int) -> None:
        at = low
        while at < high and depth < 4 and len(result) < 14 and draw(st.booleans()):
            start = draw(st.integers(at, high))
            end = draw(st.integers(start, high))
            result.append((start, end))
            grow(start, end, depth + 1)
            at = end
            if end == start:
                break

    grow(0, LENGTH, 0)
    return draw(st.permutations(result))


@given(trees())
@example([(0, 4), (0, 9)])
def test_nesting_gives_each_moment_to_the_innermost_span(tree: list[tuple[int, int]]) -> None:
    start, end = columns(tree)
    nesting = innermost(start, end)
    for moment, value in zip(range(-1, LENGTH + 2), sampled(nesting.timeline), strict=True):
        running = [i for i, (s, e) in enumerate(tree) if s <= moment < e]
        if not running:
            assert value == NOTHING
        else:
            shortest = min(tree[i][1] - tree[i][0] for i in running)
            assert value in running
            assert tree[value][1] - tree[value][0] == shortest


@given(trees())
def test_nesting_all_at_once_gives_the_same_as_one_by_one(tree: list[tuple[int, int]]) -> None:
    start, end = columns(tree)
    order = np.lexsort((-end, start))
    at_once = _nested(start, end, order)
    one_by_one = _unwound(start.tolist(), end.tolist(), order.tolist(), 0)
    assert at_once is not None
    assert at_once.parent.tolist() == one_by_one.parent.tolist()
    assert sampled(at_once.timeline) == sampled(one_by_one.timeline)


@given(st.lists(st.integers(0, 30)), st.data())
def test_grouping_splits_indices_by_value(column: list[int], data: st.DataObject) -> None:
    places = st.lists(st.sampled_from(range(len(column)))) if column else st.just([])
    index = data.draw(places)
    groups = list(grouped(np.array(column, np.int64), np.array(index, np.int64)))
    assert [value for value, _ in groups] == sorted({column[at] for at in index})
    for value, mine in groups:
        assert mine.tolist() == [at for at in index if column[at] == value]


@given(st.lists(st.integers(0, 9)), st.data())
def test_taking_gives_the_default_for_indices_below_zero(
    column: list[int], data: st.DataObject
) -> None:
    index = data.draw(st.lists(st.integers(-3, len(column) - 1)))
    found = take(np.array(column, np.int64), np.array(index, np.int64), 77)
    assert found.tolist() == [column[at] if at >= 0 else 77 for at in index]


@given(trees())
def test_a_parent_contains_its_child(tree: list[tuple[int, int]]) -> None:
    start, end = columns(tree)
    for child, parent in enumerate(innermost(start, end).parent.tolist()):
        if parent != NOTHING:
            assert start[parent] <= start[child]
            assert end[child] <= end[parent]


@given(spans)
def test_nesting_covers_every_span_even_where_spans_overlap(pairs: list[tuple[int, int]]) -> None:
    timeline = innermost(*columns(pairs)).timeline
    covered = {m for s, e in pairs for m in range(s, e)}
    held = {m for m, v in zip(range(-1, LENGTH + 2), sampled(timeline), strict=True) if v >= 0}
    assert held == covered
    assert (np.diff(timeline.edges) > 0).all()


def test_rounded_clocks_do_not_make_siblings_nest() -> None:
    start, end = columns([(0, 11_000), (10_000, 20_000)])
    nesting = innermost(start, end, tolerance=2_000)
    assert nesting.parent.tolist() == [NOTHING, NOTHING]
    assert nesting.timeline.at(np.array([9_999, 10_000])).tolist() == [0, 1]


def test_a_child_that_sticks_out_by_rounding_stays_a_child() -> None:
    start, end = columns([(0, 10_000), (5_000, 11_000)])
    nesting = innermost(start, end, tolerance=2_000)
    assert nesting.parent.tolist() == [NOTHING, 0]
    assert nesting.timeline.at(np.array([10_500])).tolist() == [NOTHING]


@given(spans)
def test_of_overlapping_spans_the_first_started_holds(pairs: list[tuple[int, int]]) -> None:
    timeline = first_started(*columns(pairs), np.arange(len(pairs)))
    for moment, value in zip(range(-1, LENGTH + 2), sampled(timeline), strict=True):
        running = [i for i, (s, e) in enumerate(pairs) if s <= moment < e]
        if not running:
            assert value == NOTHING
        else:
            assert value in running
            assert pairs[value][0] == min(pairs[i][0] for i in running)


@given(spans, spans)
def test_the_upper_layer_decides_where_it_holds_anything(
    upper: list[tuple[int, int]], lower: list[tuple[int, int]]
) -> None:
    first = first_started(*columns(upper), np.arange(len(upper)))
    second = first_started(*columns(lower), np.arange(len(lower)) + 100)
    for over, under, both in zip(
        sampled(first), sampled(second), sampled(layered(first, second)), strict=True
    ):
        assert both == (over if over != NOTHING else under)


def test_the_mark_around_a_moment_is_the_one_that_started_first_on_its_thread(
    tmp_path: Path,
) -> None:
    trace = Trace()
    for name, start, end, thread in (
        ("outer", 10, 50, 1),
        ("inner", 20, 30, 1),
        ("later", 40, 60, 1),
        ("elsewhere", 15, 25, 2),
    ):
        trace.event("user_annotation", name, start, end, thread)
    trace.operator("no mark", 0, 100)
    events = read_events(trace.save(tmp_path / "t.json"))
    marks = events.of(Category.ANNOTATION)
    place = {name: at for at, name in enumerate(events.names)}
    threads = [events.thread[events.name == place[name]][0] for name in ("outer", "elsewhere")]
    moments = (
        (threads[0], 5, ""),
        (threads[0], 10, "outer"),
        (threads[0], 25, "outer"),
        (threads[0], 50, "later"),
        (threads[0], 60, ""),
        (threads[1], 20, "elsewhere"),
        (threads[1], 40, ""),
        (NOTHING, 20, ""),
    )
    thread, time, expected = zip(*moments, strict=True)
    asked = np.array(thread), np.array(time)
    found = enclosing(events, marks, *asked)
    assert [events.names[events.name[at]] if at >= 0 else "" for at in found] == list(expected)
    halfway = (events.start[marks] + events.end[marks]) // 2
    late = enclosing(events, marks, *asked, start=halfway)
    assert [events.names[events.name[at]] if at >= 0 else "" for at in late] == [
        *("", "", "inner", "later", "", "elsewhere", "", "")
    ]


def test_without_layers_nothing_holds() -> None:
    assert set(sampled(layered())) == {NOTHING}
    assert set(sampled(layered(EMPTY, EMPTY))) == {NOTHING}


@given(spans, spans)
def test_pieces_of_a_window_sum_to_its_length(
    pairs: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    timeline = first_started(*columns(pairs), np.arange(len(pairs)))
    cut = first_started(*columns(windows), np.arange(len(windows)))
    window, value, length = pieces(timeline, cut)
    assert length.sum() == len({m for s, e in windows for m in range(s, e)})
    for index in np.unique(window).tolist():
        mine = [m for m, v in zip(range(-1, LENGTH + 2), sampled(cut), strict=True) if v == index]
        assert length[window == index].sum() == len(mine)
    held = {m for s, e in pairs for m in range(s, e)} & {m for s, e in windows for m in range(s, e)}
    assert length[value >= 0].sum() == len(held)


@given(spans, st.sets(st.integers(-1, LENGTH + 1)))
def test_a_cut_timeline_says_the_same_and_has_edges_at_the_cuts(
    pairs: list[tuple[int, int]], cuts: set[int]
) -> None:
    start, end = columns(pairs)
    timeline = first_started(start, end, np.arange(len(pairs)))
    cut = timeline.cut(np.array(sorted(cuts), np.int64))
    assert set(cut.edges.tolist()) == cuts | set(timeline.edges.tolist())
    assert (np.diff(cut.edges) > 0).all()
    assert sampled(cut) == sampled(timeline)


@given(st.lists(st.integers(0, 12) | st.integers(0, 1 << 40)))
def test_numbered_values_are_those_that_occur_and_lead_back_to_each(values: list[int]) -> None:
    found, which = numbered(np.array(values, np.int64))
    assert found.tolist() == sorted(set(values))
    assert found[which].tolist() == values


@given(st.lists(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_a_value_is_among_sorted_times_or_not(values: list[int], times: set[int]) -> None:
    found = is_among(np.array(values, np.int64), np.array(sorted(times), np.int64))
    assert found.tolist() == [value in times for value in values]


@given(
    st.lists(st.integers(-9, 99), max_size=20),
    st.lists(st.integers(-9, 99) | st.integers(-9, 10**12), max_size=5),
)
def test_what_is_among_others_is_what_numpy_says(values, wanted):
    of, others = np.array(values, np.int64), np.array(wanted, np.int64)
    assert is_in(of, others).tolist() == np.isin(of, others).tolist()


@given(st.lists(st.integers(-(10**12), 10**12), min_size=1), st.floats(0, 1))
def test_a_quantile_is_what_numpy_says(values, share):
    of = np.array(values, float)
    assert quantile(of, share) == np.quantile(of, share)


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (3, 4), (4, 0), (6, 5)])
def test_a_median_is_numpys_and_leaves_out_what_is_not_a_number(shape):
    values = np.random.default_rng(0).normal(size=shape)
    np.testing.assert_array_equal(median(values), np.median(values, axis=0))
    np.testing.assert_array_equal(median(values.T, -1), np.median(values.T, axis=-1))
    holes = np.concatenate([values, np.full((2, *shape[1:]), np.nan), 2 * values])
    np.testing.assert_array_equal(median(holes), np.nanmedian(holes, axis=0))
