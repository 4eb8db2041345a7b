"""Traces as people have them: every form that exporters write, and every way to break one."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import backspot
from backspot.errors import (
    BackspotError,
    NoBackwardError,
    NotATraceError,
    SourceNotFoundError,
    UsageError,
)
from backspot.trace import Category, read_events
from support.sums import assert_adds_up
from support.synthetic import Trace

TICK = 10_000
DAY = 24 * 3600 * 10**9
NANOSECONDS = st.integers(0, DAY)
DATA = Path(__file__).parent.parent / "data"


def training_step(steps: int = 1) -> Trace:
    trace = Trace()
    for step in range(steps):
        at = 1_000 * TICK * step
        trace.forward("a", "A", at, at + 10 * TICK)
        trace.operator("aten::mul", at + TICK, at + 2 * TICK, seq=step)
        trace.annotation("Optimizer.zero_grad#SGD.zero_grad", at + 11 * TICK, at + 12 * TICK)
        trace.node("MulBackward0", at + 20 * TICK, at + 23 * TICK, seq=step)
    return trace


def forms() -> dict[str, bytes]:
    document = training_step().document()
    events = document["traceEvents"]
    return {
        "pretty object": json.dumps(document, indent=2).encode(),
        "compact object": json.dumps(document, separators=(",", ":")).encode(),
        "pretty array": json.dumps(events, indent=2).encode(),
        "compact array": json.dumps(events, separators=(",", ":")).encode(),
        "byte order mark": b"\xef\xbb\xbf" + json.dumps(document).encode(),
        "keys before and after": json.dumps(
            {"metadata": {"list": [{"name": "x"}, {"name": "y"}]}, **document, "z": [{"ph": "X"}]}
        ).encode(),
    }


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_gives_the_same_report(form: str, packed: bool, tmp_path: Path) -> None:
    expected = backspot.locate(training_step().save(tmp_path / "expected.json"))
    path = tmp_path / ("t.json.gz" if packed else "t.json")
    text = forms()[form]
    path.write_bytes(gzip.compress(text) if packed else text)
    report = backspot.locate(path)
    assert report.modules == expected.modules
    assert report.warnings == ()


def test_streams_and_folders_are_read_too(tmp_path: Path) -> None:
    older = training_step().save(tmp_path / "a.pt.trace.json")
    newer = training_step(3).save(tmp_path / "b.pt.trace.json.gz")
    os.utime(older, (1, 1))
    (tmp_path / "notes.txt").write_text("not a trace")
    (tmp_path / "report.json").write_text("{}")  # newer than both
    report = backspot.locate(tmp_path)
    assert report.trace == str(newer)
    assert report.steps == 3
    with older.open("rb") as file:
        assert backspot.locate(file).modules == backspot.locate(older).modules
    assert backspot.locate(io.BytesIO(older.read_bytes())).steps == 1


def test_progress_reports_the_bytes_read(tmp_path: Path) -> None:
    path = training_step().save(tmp_path / "t.json")
    seen: list[tuple[int, int | None]] = []
    backspot.locate(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


@given(st.lists(st.tuples(NANOSECONDS, NANOSECONDS), min_size=1))
def test_times_are_exact_to_the_nanosecond_months_after_the_base(spans: list[Any]) -> None:
    from backspot.trace import chrome

    def written(nanoseconds: int) -> str:
        return f"{nanoseconds // 1000}.{nanoseconds % 1000:03}"

    events = ",".join(
        f'{{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, '
        f'"ts": {written(90 * DAY + start)}, "dur": {written(duration)}}}'
        for start, duration in spans
    )
    decoder = chrome.ChromeDecoder(io.BytesIO(f'{{"traceEvents": [{events}]}}'.encode()).read, "")
    decoder.run()
    found = decoder.columns.finish("")
    first = min(start for start, _ in spans)
    assert found.start.tolist() == [start - first for start, _ in spans]
    assert found.duration.tolist() == [duration for _, duration in spans]


def test_work_that_names_no_device_is_that_of_its_process(tmp_path: Path) -> None:
    trace = training_step()
    trace.kernel(0, TICK, launch=None, device=3)
    del trace.events[-1]["args"]["device"]
    events = read_events(trace.save(tmp_path / "t.json"))
    assert events.device[events.of(Category.KERNEL)].tolist() == [3]


def test_a_kernel_may_have_less_than_a_block_for_each_multiprocessor(tmp_path: Path) -> None:
    trace = training_step()
    trace.kernel(0, TICK, launch=None)
    trace.events[-1]["args"]["blocks per SM"] = 0.125
    events = read_events(trace.save(tmp_path / "t.json"))
    assert events.size[events.of(Category.KERNEL)].tolist() == [125]


def test_an_arrow_begins_at_the_last_start_with_its_number(tmp_path: Path) -> None:
    trace = training_step()
    for thread, kind in ((3, "s"), (4, "s"), (5, "f")):
        trace.event("cpu_op", "aten::mul", 0, TICK, thread)
        arrow = trace.event("fwdbwd", "fwdbwd", thread, thread, thread)
        arrow |= {"ph": kind, "id": 1}
    events = read_events(trace.save(tmp_path / "t.json"))
    assert [events.threads[thread] for thread in events.flows.forward_thread] == [(1, 4)]


@given(st.integers(2, 60), st.integers(1, 400))
def test_where_a_piece_ends_makes_no_difference(steps: int, piece: int) -> None:
    from backspot.trace import chrome

    text = json.dumps(training_step(steps).document(), indent=1).encode()
    whole = chrome.ChromeDecoder(io.BytesIO(text).read, "whole")
    whole.run()
    stream = io.BytesIO(text)
    pieces = chrome.ChromeDecoder(lambda size: stream.read(min(size, piece)), "pieces")
    pieces.run()
    one, other = whole.columns.finish(""), pieces.columns.finish("")
    assert one.names == other.names
    assert (one.start == other.start).all()
    assert (one.sequence == other.sequence).all()
    assert not pieces.malformed
    assert not pieces.truncated


# What is broken ----------------------------------------------------------------------------------

BROKEN: dict[str, tuple[bytes, type[BackspotError], str]] = {
    "empty": (b"", NotATraceError, "is empty"),
    "blank": (b"  \n ", NotATraceError, "is empty"),
    "html": (b"<!doctype html><html></html>", NotATraceError, "HTML"),
    "text": (b"hello", NotATraceError, "not JSON"),
    "object cut short": (b'{"version": 1, "frames": [{"a": 1},', NotATraceError, "is cut short"),
    "another tool's object": (b'{"version": 1, "frames": []}', NotATraceError, "no traceEvents"),
    "another tool's list": (b'[{"a": 1}, {"b": 2}]', NotATraceError, "none that PyTorch"),
    "no events": (b'{"traceEvents": []}', NotATraceError, "without a single event"),
    "head only": (b'{"schemaVersion": 1, "traceEvents": [', NotATraceError, "cut short"),
    "corrupt gzip": (
        gzip.compress(b"x" * 10_000)[:20] + b"\0" * 50,
        NotATraceError,
        "broken gzip",
    ),
    "gzip that is no trace": (gzip.compress(b"hello"), NotATraceError, "not JSON"),
    "only nonsense": (b'{"traceEvents": [{"ph": 1}, 5, "x"]}', NotATraceError, "broken beyond use"),
    "forward only": (
        json.dumps(
            [
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": "aten::mm",
                    "pid": 1,
                    "tid": 1,
                    "ts": 1,
                    "dur": 1,
                }
            ]
        ).encode(),
        NoBackwardError,
        "no backward",
    ),
    "kernels only": (
        json.dumps(
            [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 1}]
        ).encode(),
        NoBackwardError,
        "no CPU activity",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_source_that_is_no_trace_gets_one_clear_line(case: str, tmp_path: Path) -> None:
    content, kind, words = BROKEN[case]
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(kind) as caught:
        backspot.locate(path)
    message = str(caught.value)
    assert words in message
    assert "broken.json" in message
    assert "\n" not in message


def test_a_missing_source_gets_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="is not there: download it first"):
        backspot.locate("s3://bucket/t.json")
    with pytest.raises(SourceNotFoundError, match=r"nowhere\.json is not there: check the"):
        backspot.locate(tmp_path / "nowhere.json")
    with pytest.raises(SourceNotFoundError, match="has no trace"):
        backspot.locate(tmp_path)
    with pytest.raises(UsageError, match="give a trace's path"):
        backspot.locate(12)
    with pytest.raises(UsageError, match="binary mode"):
        backspot.locate(io.StringIO("{}"))
    with pytest.raises(UsageError, match="depth=-1"):
        backspot.locate(tmp_path, depth=-1)


def broken_events(tmp_path: Path, change: Any) -> backspot.Report:
    document = training_step(3).document()
    change(document["traceEvents"])
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    return backspot.locate(path)


def test_a_truncated_trace_keeps_its_complete_events(tmp_path: Path) -> None:
    text = json.dumps(training_step(3).document(), indent=1).encode()
    path = tmp_path / "t.json"
    for cut in (len(text) // 2, len(text) - 200):
        path.write_bytes(text[:cut])
        report = backspot.locate(path)
        assert report.wall_ns > 0
        assert "cut short" in report.warnings[0]


def test_a_truncated_gzip_keeps_its_complete_events(tmp_path: Path) -> None:
    text = json.dumps(training_step(300).document(), indent=1).encode()
    path = tmp_path / "t.json.gz"
    packed = gzip.compress(text)
    path.write_bytes(packed[: len(packed) // 2])
    report = backspot.locate(path)
    assert 1 < report.steps < 300
    assert "cut short" in report.warnings[0]


def test_one_bad_event_costs_one_event(tmp_path: Path) -> None:
    def change(events: list[dict[str, Any]]) -> None:
        events.insert(3, {**events[0], "ts": "soon"})
        events.insert(5, {**events[0], "dur": float("nan"), "name": "nan"})
        events.insert(7, {**events[0], "dur": -5, "name": "negative"})
        events.insert(9, {**events[0], "args": {"Sequence number": "x"}, "name": "odd"})

    report = broken_events(tmp_path, change)
    clean = backspot.locate(training_step(3).save(tmp_path / "clean.json"))
    assert report.modules == clean.modules
    assert "2 malformed events" in report.warnings[0]
    assert "2 events with impossible times" in report.warnings[1]


def test_null_args_numbers_as_text_and_control_characters_are_read(tmp_path: Path) -> None:
    def change(events: list[dict[str, Any]]) -> None:
        events.append({**events[0], "args": None, "name": "odd"})
        events.append({**events[0], "tid": "seven", "pid": "Spans", "name": "elsewhere"})

    assert broken_events(tmp_path, change).warnings == ()
    text = json.dumps(training_step().document()).replace("Optimizer.zero", "Opt\x01\tim\nizer")
    text = text.replace('"schemaVersion": 1', '"schemaVersion": NaN')
    path = tmp_path / "raw.json"
    path.write_bytes(text.encode() + b"\xff")
    assert backspot.locate(path).wall_ns == 3 * TICK


def test_numbers_in_quotes_are_numbers() -> None:
    # For ROCm, Kineto writes the bytes of a copy as text.
    plain = (DATA / "memory" / "vit.trace.json.gz").read_bytes()
    quoted = re.sub(
        rb'"(bytes|Bytes|correlation|dur|Sequence number|Total Allocated)":\s*(-?[\d.]+)',
        rb'"\1":"\2"',
        gzip.decompress(plain),
    )
    one, other = (read_events(io.BytesIO(text)) for text in (plain, quoted))
    assert quoted.count(b'"bytes":"') > 0
    assert other.warnings == one.warnings == ()
    for column in ("start", "duration", "sequence", "correlation", "size", "signature"):
        assert (getattr(one, column) == getattr(other, column)).all()
    assert (one.allocations.size == other.allocations.size).all()
    assert one.names == other.names


def test_a_syntax_error_in_the_middle_costs_one_event(tmp_path: Path) -> None:
    text = json.dumps(training_step(4).document(), indent=1)
    text = text.replace("Optimizer.zero_grad#SGD", 'an "unescaped" quote', 1)
    path = tmp_path / "t.json"
    path.write_text(text)
    report = backspot.locate(path)
    assert report.steps == 4
    assert "1 malformed" in report.warnings[0]


@given(st.data())
def test_no_mutilated_trace_ends_in_anything_but_a_report_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    text = bytearray(json.dumps(training_step(3).document(), indent=1).encode())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(text) - 1))
        action = data.draw(st.sampled_from(["flip", "drop", "insert"]))
        if action == "flip":
            text[at] = data.draw(st.integers(0, 255))
        elif action == "drop":
            del text[at : at + data.draw(st.integers(1, 200))]
        else:
            text[at:at] = data.draw(
                st.sampled_from([b"NaN", b"null", b'"', b"}", b"]", b"{", b"1e999", b"-", b"\0"])
            )
        if not text:
            break
    path = tmp_path_factory.mktemp("m") / "t.json"
    path.write_bytes(zlib.compress(bytes(text), wbits=31) if len(text) % 2 else bytes(text))
    try:
        report = backspot.locate(path)
    except BackspotError as error:
        assert "\n" not in str(error)
    else:
        assert_adds_up(report)
        str(report)


# What is left out --------------------------------------------------------------------------------


def test_device_work_of_an_unknown_kind_is_left_out_with_a_warning(tmp_path: Path) -> None:
    trace = training_step()
    for number in range(3):
        trace.event("mtia_ccp_events", "matmul", number * TICK, (number + 1) * TICK, 40)
    trace.event("mtia_runtime", "runtimeLaunch", 0, TICK, 2)
    trace.event("overhead", "Activity Buffer Request", 0, TICK, 2)
    (warning,) = backspot.locate(trace.save(tmp_path / "trace.json")).warnings
    assert "mtia_ccp_events (3 events, 30 µs), mtia_runtime (1 event, 10 µs)" in warning
    assert "overhead" not in warning


def test_several_processes_warn_of_an_unknown_kind_once(tmp_path: Path) -> None:
    trace = training_step()
    for number in range(20_000):
        trace.event("hpu_\x1bop", "matmul", number * TICK, (number + 1) * TICK, 40)
    path = trace.save(tmp_path / "trace.json")
    for jobs in (1, 2):
        (warning,) = backspot.locate(path, jobs=jobs).warnings
        assert "hpu_\\x1bop (20,000 events, 200 ms)" in warning


def test_all_columns_of_some_events_are_kept_together() -> None:
    whole = read_events(Path(__file__).parents[1] / "data" / "memory" / "vit.trace.json.gz")
    keep = np.arange(len(whole.start)) % 3 == 1
    some = whole.where(keep)
    columns = (
        *("start", "duration", "end", "category", "name", "thread", "sequence", "forward_thread"),
        *("correlation", "device", "size", "group", "peer", "signature"),
    )
    for column in columns:
        assert getattr(some, column).tolist() == getattr(whole, column)[keep].tolist()
    assert {len(of) for of in vars(some).values() if isinstance(of, np.ndarray)} == {keep.sum()}
    assert some.names == whole.names
    assert len(some.allocations) == len(whole.allocations) > 0


def test_events_are_chosen_by_their_whole_names_or_by_how_these_begin() -> None:
    """``aten::addmm`` begins like ``aten::add``, and is another operator."""
    trace = training_step()
    for number, name in enumerate(("aten::add", "aten::addmm", "aten::add_", "aten::add")):
        trace.operator(name, (12 + number) * TICK, (13 + number) * TICK)
    events = read_events(io.BytesIO(json.dumps(trace.document()).encode()))

    def names_of(index: Any) -> list[str]:
        return [events.names[name] for name in events.name[index]]

    add = ["aten::add", "aten::add"]
    assert names_of(events.named(Category.OPERATOR, "aten::add")) == add
    assert names_of(events.named(Category.OPERATOR, "aten::add_", "aten::no")) == ["aten::add_"]
    assert len(events.prefixed(Category.OPERATOR, "aten::add")) == 4
    assert len(events.named(Category.ANNOTATION, "aten::add")) == 0
