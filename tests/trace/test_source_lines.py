"""The table of source lines in a trace: found anywhere in it, and always checked."""

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

import backspot
from backspot.commands import main
from backspot.results.costs import line_of
from backspot.trace.source_lines import KEY, LineTable, Made, SourceLine, find_lines, format_lines
from support.synthetic import Trace

THREAD = 1
LINES = (
    SourceLine("net.py", 7, "Net.forward", "x = x.gather(1, i)", "GatherBackward0"),
    SourceLine("net.py", 9, "Net.forward", "return x * 2", "MulBackward0"),
)


def made(*runs):
    table = np.array(runs, np.int64).reshape(-1, 3)
    return Made(table[:, 0], table[:, 1], table[:, 2])


def table(*runs, lines=LINES, **more):
    return LineTable(lines, {THREAD: made(*runs)}, **more)


def trace():
    """Two gathers and a product in one module, numbers 5 to 7, and a loss outside, number 8."""
    recorded = Trace()
    recorded.forward("net", "Net", 0, 100_000)
    for number, name in enumerate(("gather", "gather", "mul"), start=5):
        recorded.operator(f"aten::{name}", 10_000 * number, 10_000 * number + 5_000, seq=number)
    recorded.operator("aten::sum", 110_000, 115_000, seq=8)
    nodes = ("SumBackward0", "MulBackward0", "GatherBackward0", "GatherBackward0")
    for index, name in enumerate(nodes):
        begin = 200_000 + 10_000 * index
        recorded.node(name, begin, begin + 9_000, seq=8 - index)
    return recorded.document()


def located(document, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return backspot.locate(path)


def lines_of(report):
    return {(line.node, line.place, line.count) for row in report.modules for line in row.lines}


WHOLE = table((5, 2, 0), (7, 1, 1))
ALL = {("GatherBackward0", "net.py:7", 2), ("MulBackward0", "net.py:9", 1)}


def with_table(form, *, before=True):
    value = json.loads(form) if isinstance(form, str) else form
    return {KEY: value, **trace()} if before else {**trace(), KEY: value}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_table_is_found_before_the_events_and_after(before, tmp_path):
    report = located(with_table(format_lines(WHOLE), before=before), tmp_path)
    assert lines_of(report) == ALL
    assert line_of(report["net"].row, "GatherBackward0") == "net.py:7"
    assert line_of(report["net"].row, "AddBackward0") == ""


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_table_is_found_among_much_else(before, tmp_path):
    # More than is read at once, and cut where events are.
    padding = [{"name": "x" * 1000, "ph": "M"} for _ in range(2_000)]
    document = {
        "padding": padding,
        **with_table(format_lines(WHOLE), before=before),
        "more": padding,
    }
    assert lines_of(located(document, tmp_path)) == ALL


def test_a_line_costs_what_its_nodes_do(tmp_path):
    report = located(with_table(format_lines(WHOLE)), tmp_path)
    row = report["net"].row
    for line in row.lines:
        (node,) = (node for node in row.nodes if node.name == line.node)
        assert (line.count, line.wall_ns, line.cpu_ns) == (node.count, node.wall_ns, node.cpu_ns)
    assert [line.text for line in row.lines] == ["x = x.gather(1, i)", "return x * 2"]


def test_lines_of_layers_that_are_folded_or_grouped_add_up(tmp_path):
    report = located(with_table(format_lines(WHOLE)), tmp_path)
    (row,) = (row for row in report.top(by="class") if row.is_module)
    assert row.lines == report["net"].row.lines
    assert located(with_table(format_lines(table((5, 1, 0)))), tmp_path).top(depth=0)[0].lines


def test_a_number_that_the_table_does_not_hold_has_no_line(tmp_path):
    # The loss's number is the next one: the nearest below would be the model's last line.
    assert lines_of(located(with_table(format_lines(table((5, 1, 0)))), tmp_path)) == {
        ("GatherBackward0", "net.py:7", 1)
    }


def test_a_thread_that_the_table_does_not_hold_has_no_line(tmp_path):
    other = LineTable(LINES, {THREAD + 1: WHOLE.threads[THREAD]})
    assert lines_of(located(with_table(format_lines(other)), tmp_path)) == set()


def test_a_line_that_made_another_kind_of_node_is_not_used(tmp_path):
    wrong = table((5, 3, 1))  # all of them by the line of the product
    assert lines_of(located(with_table(format_lines(wrong)), tmp_path)) == {
        ("MulBackward0", "net.py:9", 1)
    }


def test_a_call_site_is_marked_as_such(tmp_path):
    call = SourceLine("net.py", 3, "Net.forward", "y = self.inner(x)")
    report = located(
        with_table(format_lines(table((5, 3, 0), lines=(call,), exact=False))), tmp_path
    )
    assert {line.exact for row in report.modules for line in row.lines} == {False}
    assert len(lines_of(report)) == 2


def broken_forms():
    """What somebody, or a broken disk, might put in the table's place."""
    form = json.loads(format_lines(WHOLE))
    thread = form["threads"][0]
    yield "no object", []
    yield "nothing in it", {}
    yield "newer", {**form, "version": 2}
    yield "lines of another shape", {**form, "lines": [["net.py", "seven"]]}
    yield "no such line", {**form, "lines": form["lines"][:1]}
    yield "not base64", {**form, "threads": [[*thread[:2], "%%%", *thread[3:]]]}
    yield "not packed", {**form, "threads": [[*thread[:2], "AAAA", *thread[3:]]]}
    yield "fewer numbers than it says", {**form, "threads": [[thread[0], 3, *thread[2:]]]}
    yield "more numbers than it says", {**form, "threads": [[thread[0], 1, *thread[2:]]]}
    yield "more than there can be", {**form, "threads": [[thread[0], 1 << 40, *thread[2:]]]}
    yield "less than none", {**form, "threads": [[thread[0], -1, *thread[2:]]]}
    yield "overlapping", json.loads(format_lines(table((5, 2, 0), (6, 1, 1))))
    yield "backwards", json.loads(format_lines(table((7, 1, 0), (5, 1, 1))))
    yield "empty runs", json.loads(format_lines(table((5, 0, 0), (6, 1, 1))))


@pytest.mark.parametrize(("kind", "form"), list(broken_forms()), ids=lambda value: str(value)[:30])
def test_a_broken_table_is_one_warning_and_no_line(kind, form, tmp_path):
    report = located(with_table(form), tmp_path)
    assert lines_of(report) == set()
    assert len([text for text in report.warnings if "table of source lines" in text]) == 1
    assert report["net"].row.nodes


def test_a_table_that_is_cut_short_is_broken():
    text = f'"{KEY}": {format_lines(WHOLE)}'.encode()
    assert find_lines(text[:-10]).broken
    assert find_lines(text[:10]) is None


def test_a_table_without_room_for_all_says_so(tmp_path):
    report = located(with_table(format_lines(table((5, 1, 0), complete=False))), tmp_path)
    assert any("profile fewer steps" in text for text in report.warnings)


def test_a_text_that_quotes_the_key_is_no_table(tmp_path):
    assert (
        lines_of(located({"note": f'"{KEY}": {format_lines(WHOLE)}', **trace()}, tmp_path)) == set()
    )


def test_a_labelled_copy_keeps_the_table(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(with_table(format_lines(WHOLE))))
    assert main(["show", str(path), "-o", str(tmp_path / "out.json.gz")]) == 0
    assert lines_of(backspot.locate(tmp_path / "out.json.gz")) == ALL


NUMBERS = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 40)), max_size=30)
TEXT = st.text(st.characters(exclude_categories=()), max_size=9)


@given(NUMBERS, st.lists(st.tuples(TEXT, st.integers(0, 1 << 40), TEXT, TEXT, TEXT), min_size=1))
def test_a_table_is_read_as_it_was_written(gaps, found):
    at, runs = 0, []
    for index, (gap, count) in enumerate(gaps):
        runs.append((at + gap, count, index % len(found)))
        at += gap + count
    written = table(*runs, lines=tuple(SourceLine(*line) for line in found))
    text = format_lines(written)
    assert text.isascii()
    assert "\\" not in text  # of which the profiler makes a slash
    read = find_lines(f'{{"x": 1, "{KEY}" : {text}, "y": {{}}}}'.encode())
    assert read.lines == written.lines
    numbers = np.arange(-1, at + 2)
    known = read.at(THREAD, numbers)
    assert np.array_equal(known, written.at(THREAD, numbers))
    assert (known >= 0).sum() == sum(count for _, count, _ in runs)


@pytest.mark.slow
def test_a_thousand_steps_take_little_more_room_than_one():
    step = [(number, 1, number % 100) for number in range(500)]
    lines = tuple(SourceLine("net.py", line, "forward", "x = x + 1") for line in range(100))
    many = [(at + 700 * turn, count, line) for turn in range(1000) for at, count, line in step]
    one, thousand = (len(format_lines(table(*runs, lines=lines))) for runs in (step, many))
    assert thousand < one + 50_000


def test_a_finding_names_the_line_that_it_is_about(tmp_path):
    # The deterministic backward of gather, most of the step.
    recorded = Trace()
    recorded.events = trace()["traceEvents"]
    for index in range(2):
        begin = 220_000 + 10_000 * index
        recorded.event("cpu_op", "aten::index_put_", begin + 1_000, begin + 8_000, 2)
        recorded.kernel(
            begin + 2_000, begin + 9_000, launch=begin + 1_500, name="radixSortKVInPlace"
        )
    report = located({KEY: json.loads(format_lines(WHOLE)), **recorded.document()}, tmp_path)
    placed = {place.line for finding in report.findings for place in finding.places}
    assert "net.py:7" in placed
