"""Hostile traces: one bad event costs one event, and never much time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backspot
from backspot.commands import main
from backspot.errors import BackspotError, NoBackwardError, NotATraceError, UsageError
from backspot.trace import Events, read_events
from backspot.trace.chrome import ChromeDecoder
from support.choice import slow_except
from support.sums import assert_adds_up
from support.synthetic import Trace

TICK = 10_000
MIB = 1 << 20


def training_step(steps: int = 1) -> Trace:
    trace = Trace()
    for step in range(steps):
        at = 1_000 * TICK * step
        trace.forward("a", "A", at, at + 10 * TICK)
        trace.operator("aten::mul", at + TICK, at + 2 * TICK, seq=step)
        trace.annotation("Optimizer.zero_grad#SGD.zero_grad", at + 11 * TICK, at + 12 * TICK)
        trace.node("MulBackward0", at + 20 * TICK, at + 23 * TICK, seq=step)
        trace.kernel(at + 21 * TICK, at + 25 * TICK, launch=at + 21 * TICK)
    return trace


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> backspot.Report:
    return backspot.locate(training_step(3).save(tmp_path_factory.mktemp("clean") / "t.json"))


def with_event(text: str, at: int = 3) -> bytes:
    """A trace with one more event, of any text."""
    document = training_step(3).document()
    document["traceEvents"].insert(at, "@")
    return json.dumps(document).replace('"@"', text).encode()


def event(args: str = "{}", **fields: str) -> str:
    """An event's text, its fields given as JSON."""
    known = {"cat": '"cpu_op"', "name": '"odd"', "pid": "1", "tid": "1", "ts": "1", "dur": "1"}
    items = ", ".join(f'"{key}": {value}' for key, value in {**known, **fields}.items())
    return f'{{"ph": "X", {items}, "args": {args}}}'


BAD = {
    "arguments nested 200,000 deep": event('{"x": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    "objects nested 200,000 deep": event('{"x": ' + '{"y":' * 200_000 + "1" + "}" * 200_000 + "}"),
    "an event nested 5,000 deep": "[" * 5_000 + "]" * 5_000,
    "half a surrogate pair as a time": event(ts='"\\ud800"'),
    "half a surrogate pair as a duration": event(dur='"\\udfff"'),
    "half a surrogate pair as a number": event('{"Sequence number": "\\ud800"}'),
    "a number of 5,000 digits": event(ts="1" * 5_000),
    "a thread's number of 5,000 digits": event(tid="1" * 5_000),
    "a list for a name": event(name="[1, 2]"),
    "an object for a time": event(ts="{}"),
    "arguments that are a list": event("[]"),
    "a bracket too many": event('{"x": [1]]}'),
    "a bracket too few": event('{"x": [1}'),
    "a brace too few": event("{"),
    "a brace too many": event("{}}"),
    "a quote too many": event('{"x": ""y"}'),
    "a comma too few": event('{"x": 1 "y": 2}'),
    "no event": "5",
    "nothing but a word": "word",
    "a comma too many": '{"ph": "X",,}',
}


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at", slow_except([3], [0, 3, -1]))
@pytest.mark.parametrize("case", slow_except([*BAD][::4], BAD))
def test_one_bad_event_costs_one_event(
    case: str, at: int, packed: bool, clean: backspot.Report, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    text = with_event(BAD[case], at)
    # The same over a stream that gives little at a time.
    path.write_bytes(text)
    report = backspot.locate(_Trickle(text) if packed else path)
    assert report.modules == clean.modules
    assert report.warnings == ("1 malformed events were left out.",)


class _Trickle(io.RawIOBase):
    """A stream that gives 700 bytes at most."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, 700))


@pytest.mark.parametrize("depth", [2_000, 200_000])
@pytest.mark.parametrize("where", ["head", "tail", "table"])
def test_deep_nesting_beside_the_events_costs_nothing(
    where: str, depth: int, clean: backspot.Report, tmp_path: Path
) -> None:
    deep = "[" * depth + "]" * depth
    text = json.dumps(training_step(3).document())
    key = "backspot.lines" if where == "table" else "x"
    text = (
        f'{{"{key}": {deep}, {text[1:]}' if where == "head" else f'{text[:-1]}, "{key}": {deep}}}'
    )
    path = tmp_path / "t.json"
    path.write_text(text)
    report = backspot.locate(path)
    assert report.modules == clean.modules
    assert [w for w in report.warnings if "source lines" not in w] == []


def test_a_trace_of_bad_events_alone_ends_with_one_line_and_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + BAD["arguments nested 200,000 deep"] + "]}")
    assert main(["show", str(path)]) == 4
    assert capsys.readouterr().err.count("\n") == 1
    text = with_event(BAD["half a surrogate pair as a time"])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    assert main(["show", "-"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("unit", [b"{x},\n", b'{"ph": x},\n'])
def test_a_long_list_of_what_cannot_be_read_is_refused(unit: bytes) -> None:
    with pytest.raises(NotATraceError, match="broken beyond use"):
        backspot.locate(_Repeated(b'{"traceEvents": [', unit, 2 * MIB, b"]}"))


# Words where numbers belong ----------------------------------------------------------------------


@pytest.mark.parametrize("word", ["inf", "-inf", "nan", "-nan", "NaN", "Infinity", "-nan(ind)"])
@pytest.mark.parametrize("key", ["blocks per SM", "warps per SM", "anything"])
def test_a_wrong_number_in_an_unused_field_costs_nothing(
    word: str, key: str, clean: backspot.Report, tmp_path: Path
) -> None:
    document = training_step(3).document()
    for item in document["traceEvents"]:
        if item["cat"] == "kernel":
            item["args"][key] = "@"
            item["args"]["last"] = ["@", {"x": "@"}]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document).replace('"@"', word))
    report = backspot.locate(path)
    assert report.modules == clean.modules
    assert report.gpu_ns == clean.gpu_ns > 0
    assert report.warnings == ()


@pytest.mark.parametrize("word", ["inf", "nan", "-nan"])
def test_a_wrong_number_for_a_time_costs_the_event(
    word: str, clean: backspot.Report, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(with_event(event(dur=word)))
    report = backspot.locate(path)
    assert report.modules == clean.modules
    assert "1 events with impossible times" in report.warnings[0]


def test_words_within_names_stay_as_they_are(tmp_path: Path) -> None:
    name = 'a\\": nan, "x": inf}, {\\'
    trace = training_step()
    trace.kernel(21 * TICK, 24 * TICK, launch=21 * TICK, name=name)
    trace.events[-1]["args"]["blocks per SM"] = "@"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace.document()).replace('"@"', "inf"))
    events = read_events(path)
    assert name in events.names
    assert events.warnings == ()


# Times that cannot be ----------------------------------------------------------------------------


def located(change: Callable[[Trace], None], tmp_path: Path) -> backspot.Report:
    trace = training_step(3)
    change(trace)
    return backspot.locate(trace.save(tmp_path / "t.json"))


def assert_sound(report: backspot.Report) -> None:
    assert_adds_up(report)
    assert all(0 <= finding.wall_ns <= report.whole_ns for finding in report.findings)


@pytest.mark.parametrize("years", [0.1, 1, 89])
def test_kernels_of_years_are_left_out(
    years: float, clean: backspot.Report, tmp_path: Path
) -> None:
    def change(trace: Trace) -> None:
        for _ in range(4):
            begin = 21 * TICK
            trace.kernel(begin, begin + int(years * 3.15e16), launch=begin)

    report = located(change, tmp_path)
    assert_sound(report)
    # Their launches stay, with what the profiler costs for each: savings are those without that.
    assert [row.wall_ns_by_step for row in report.modules] == [
        row.wall_ns_by_step for row in clean.modules
    ]
    assert "4 events with impossible times" in report.warnings[0]


def test_no_sum_wraps_however_many_events_last_for_weeks(tmp_path: Path) -> None:
    def change(trace: Trace) -> None:
        for stream in range(8_000):
            begin = 21 * TICK
            trace.kernel(begin, begin + 25 * 86_400 * 10**9, launch=begin, stream=stream)

    report = located(change, tmp_path)
    assert_sound(report)
    assert 0 < report.gpu_ns < 1 << 61
    assert "events with impossible times" in report.warnings[0]


@pytest.mark.parametrize("years", [-30, 0.2, 50])
def test_an_event_years_from_all_others_is_left_out(
    years: float, clean: backspot.Report, tmp_path: Path
) -> None:
    def change(trace: Trace) -> None:
        base = 1_700_000_000 * 10**9  # as the system tells the time
        for item in trace.events:
            item["ts"] += base / 1000
        at = base + int(years * 3.15e16)
        trace.operator("aten::odd", at, at + TICK, seq=9)

    report = located(change, tmp_path)
    assert_sound(report)
    assert [(r.path, r.wall_ns) for r in report.modules] == [
        (r.path, r.wall_ns) for r in clean.modules
    ]
    assert "1 events with impossible times" in report.warnings[0]


@pytest.mark.parametrize("number", [1 << 45, 1 << 62, 1 << 80, -(1 << 70)])
def test_no_sum_of_bytes_wraps(number: int, clean: backspot.Report, tmp_path: Path) -> None:
    def change(trace: Trace) -> None:
        for item in trace.events:
            if item["cat"] == "kernel":
                item["args"]["bytes"] = number

    report = located(change, tmp_path)
    assert report.modules == clean.modules
    assert_sound(report)


# Long texts --------------------------------------------------------------------------------------


class _Repeated(io.RawIOBase):
    """A stream of any length that takes no memory."""

    def __init__(self, head: bytes, unit: bytes, size: int, tail: bytes = b"") -> None:
        block = unit * (MIB // len(unit))
        self._blocks = self._made(head, block, size // len(block), tail)
        self._left = b""

    @staticmethod
    def _made(head: bytes, block: bytes, count: int, tail: bytes) -> Iterator[bytes]:
        yield head
        for _ in range(count):
            yield block
        yield tail

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            self._left = next(self._blocks, b"")
        data, self._left = self._left[:size], self._left[size:]
        return data


# At these sizes, a way of reading that looks at all that came before takes hours.
@pytest.mark.slow
@pytest.mark.parametrize("unit", [b"x", b"\\\\", b"}],[{", b"]}", b" "])
def test_a_long_text_that_is_no_trace_is_refused(unit: bytes) -> None:
    with pytest.raises(NotATraceError, match="no traceEvents"):
        backspot.locate(_Repeated(b'{"a":"', unit, 64 * MIB, b'"}'))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "unit", "tail"),
    [
        (b"", b" ", b""),
        (b', {"ph": "X", "name": "', b"x", b'"}'),
        (b', {"ph": "X", "name": "', b'\\"', b'"}'),
        (b', {"ph": "X", "args": {"x": [', b"1,", b"1]}}"),
        (b', {"ph": "X", "args": {"x": "', b"}, ", b'"}}'),
    ],
    ids=["blanks", "a name", "a name of quotes", "a list", "a name of borders"],
)
def test_a_long_stretch_without_a_border_takes_no_more_than_its_time(
    head: bytes, unit: bytes, tail: bytes, clean: backspot.Report
) -> None:
    text = json.dumps(training_step(3).document()).encode()
    middle = text.index(b', {"ph"', len(text) // 2)
    stream = _Repeated(text[:middle] + head, unit, 24 * MIB, tail + text[middle:])
    report = backspot.locate(stream)
    assert report.modules == clean.modules
    bad = ("1 malformed events were left out.",) if head else ()
    assert report.warnings == bad


# Where the text is cut ---------------------------------------------------------------------------


def decoded(text: bytes, piece: int) -> tuple[Events, ChromeDecoder]:
    stream = io.BytesIO(text)
    decoder = ChromeDecoder(lambda size: stream.read(min(size, piece)), "pieces")
    decoder.run()
    return decoder.columns.finish(""), decoder


def listed(trace: Trace) -> list[dict[str, Any]]:
    """Events whose arguments hold lists of what might be events, keys in any order."""
    inner = [{"name": "x"}, {"name": "y", "args": {"id": 1}}, {"ts": 1}]
    return [
        dict(sorted({**item, "args": {**item.get("args", {}), "inner": inner}}.items()))
        for item in trace.events
    ]


@pytest.mark.parametrize(
    "piece", slow_except([1, 2, 17, 300], [*range(1, 40), 97, 300, 1_000, 5_000])
)
def test_no_event_is_cut_within_its_arguments(piece: int) -> None:
    whole, _ = decoded(json.dumps(training_step(20).events).encode(), MIB)
    events, decoder = decoded(json.dumps(listed(training_step(20))).encode(), piece)
    assert events.names == whole.names
    assert np.array_equal(events.start, whole.start)
    assert np.array_equal(events.sequence, whole.sequence)
    assert (decoder.malformed, decoder.truncated) == (0, False)


@pytest.mark.parametrize("piece", [1, 7, 50, 333, 2_000])
def test_a_list_within_an_event_never_ends_the_trace(piece: int) -> None:
    items = listed(training_step(20))
    for item in items:
        item["args"]["then"] = 3  # behind the list, as a key of the trace would be
    items[7]["ts"] = "soon"
    events, decoder = decoded(json.dumps({"traceEvents": items, "z": 1}).encode(), piece)
    assert len(events.start) == len([i for i in items if i["ph"] == "X"]) - 1
    assert decoder.malformed == 1


# Impossible paths --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["a\0b.json", "\ud800.json"])
def test_an_impossible_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="path"):
        backspot.locate(path)
    with pytest.raises(BackspotError):
        backspot.locate(Path(path))


# Arrows ------------------------------------------------------------------------------------------


def test_arrows_of_a_trace_without_nodes_lead_nowhere(tmp_path: Path) -> None:
    trace = Trace()
    trace.operator("aten::mm", TICK, 3 * TICK, seq=1)
    common = {"cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 1}
    trace.events.append({"ph": "s", **common, "tid": 1, "ts": 15})
    trace.events.append({"ph": "f", "bp": "e", **common, "tid": 2, "ts": 90})
    with pytest.raises(NoBackwardError, match="holds no backward pass"):
        backspot.locate(trace.save(tmp_path / "t.json"))
