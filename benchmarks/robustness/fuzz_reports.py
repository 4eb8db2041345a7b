"""Does anything but Backspot's own errors come out of broken saved reports?

Each case takes a report (of a trace in ``tests/data``, or one made by hand), changes it in a few
random places, by its structure or by its bytes, and reads it. What can be read must also be shown,
compared and written in every form. A case is made again by its number alone::

    python -m benchmarks fuzz_reports --count 2000 --seed 1
    python -m benchmarks fuzz_reports --seed 1 --only 1234
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from backspot import BackspotError, Report, compare, locate
from backspot.testing import (
    View,
    format_for,
    render_comparison,
    render_subtree,
    render_text,
    suffixes,
)
from benchmarks.harness import TEST_DATA, Figures, Run
from benchmarks.robustness.found import (
    Found,
    summary_of_lines as summary_of_lines,
)

SLOW = 10.0
"""Seconds: no report of these sizes takes a tenth of it, however it was changed."""

_NUMBERS = (
    0, 1, -1, 2, 7, 10**9, 10**15, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30,
    0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"), True, False,
)  # fmt: skip
_TEXTS = (
    "", "a", ".", "..", "a.b", "a" * 3_000, "a." * 2_000, "\0", "\ud800", "\x1b[2J", "漢" * 500,
    "</script>", "=1+1", "(outside model)", "backward pass", "profiler step", "none", "idle",
    "backspot.report/2", "backspot.report/3", "e\u0301" * 900,
)  # fmt: skip


_NESTED = "what is nested deeper than Python's own reader follows"


def sources(*, traces: int | None = None) -> list[bytes]:
    """Saved reports to change: of traces, and of numbers that no trace on a shelf has."""
    sys.path.insert(0, str(TEST_DATA.parent))
    from support.sample_reports import SAMPLES

    made = [_bytes_of(sample(), ".json") for sample in SAMPLES.values()]
    found = sorted(TEST_DATA.rglob("*.json.gz"), key=lambda at: at.stat().st_size)
    for path in found[:traces]:
        try:
            made.append(_bytes_of(replace(locate(path), trace=path.name), ".json"))
        except BackspotError:  # a trace without a backward is there on purpose
            continue
    return made


def fuzz(
    originals: Sequence[bytes], seed: int, cases: Sequence[int], *, raising: bool = False
) -> Found:
    """Run cases, each from a random generator of its own.

    Args:
        originals: saved reports.
        seed: of all cases.
        cases: their numbers.
        raising: whether to raise errors that may not happen.
    """
    found = Found()
    with tempfile.TemporaryDirectory(prefix="backspot-fuzz-") as folder:
        path = Path(folder) / "report.json"
        for case in cases:
            chance = random.Random(f"{seed}/{case}")
            original = chance.choice(originals)
            path.write_bytes(_changed(original, chance))
            since, wrong = time.perf_counter(), ""
            try:
                outcome = _use(path, original)
            except BackspotError as error:
                outcome = type(error).__name__
                if not str(error).isprintable():
                    wrong = f"its message is not one line: {error!r:.200}"
            except Exception:
                if raising:
                    raise
                outcome, wrong = "bad", traceback.format_exc(limit=-3)
            took = time.perf_counter() - since
            if not wrong and took > SLOW:
                wrong = f"took {took:.1f} s"
            found.add((case, outcome, wrong, took))
    return found


def _bytes_of(result: Any, suffix: str) -> bytes:
    """A report or a comparison as a file of some kind."""
    kind = type(result)
    found: bytes = format_for(f"x{suffix}", kind).renderer(kind)(result)
    return found


def _use(path: Path, original: bytes) -> str:
    """Use a report in every way that there is; return how it ended."""
    report = Report.load(path)
    rest = path.with_name("original.json")
    rest.write_bytes(original)
    for depth, by in ((None, "path"), (1, "class"), (0, "pattern")):
        assert len(report.top(3, depth=depth, by=by)) <= 3
        render_text(report, View(depth=depth, by=by), width=80)
    rows = report.modules
    for row in (*rows[:3], *rows[-3:]):
        render_subtree(report[row.path], width=60)
        assert 0 <= report.share(row) <= 1
    for suffix in suffixes():
        _bytes_of(report, suffix)
    report._repr_html_()
    assert Report.load(report.save(path, force=True)) == report
    for found in (compare(report, Report.load(rest)), compare(Report.load(rest), report)):
        for width in (40, 120):
            render_comparison(found, width=width)
        for suffix in (".csv", ".md", ".json"):
            _bytes_of(found, suffix)
        found._repr_html_()
        parts = sum(change.change_ms for change in found.changes)
        assert abs(parts - found.whole.change_ms) <= 1e-6 * (
            1 + found.whole.before_ms + found.whole.after_ms
        ), (parts, found.whole.change_ms)
    return "loaded"


def _changed(original: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.25:
        return _changed_bytes(original, chance)
    data = json.loads(original)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        _CHANGES[chance.randrange(len(_CHANGES))](data, chance)
    depth = chance.choice((5, 300, 900, 100_000))
    nested = b"[" * depth + b"]" * depth
    return json.dumps(data).encode().replace(json.dumps(_NESTED).encode(), nested)


def _changed_bytes(original: bytes, chance: random.Random) -> bytes:
    data = bytearray(original)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(data) or 1)
        kind = chance.randrange(5)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + chance.choice((1, 2, 9, 300))]
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.choice((1, 3)))
        elif kind == 3:
            data[at : at + 1] = chance.choice((b"9", b"-", b"0", b"e9", b"null", b'"', b"["))
        else:
            data[at:at] = data[at : at + chance.choice((1, 20, 2_000))]
    return bytes(data)


def _slots(data: Any) -> list[tuple[Any, Any]]:
    """Every place within a document: what holds it, and where."""
    found: list[tuple[Any, Any]] = []
    left = [data]
    while left:
        one = left.pop()
        keys = one.keys() if isinstance(one, dict) else range(len(one))
        for key in keys:
            found.append((one, key))
            if isinstance(one[key], (dict, list)):
                left.append(one[key])
    return found


def _slot(
    data: Any,
    chance: random.Random,
    wanted: Callable[[Any], bool],
) -> tuple[Any, Any] | None:
    # A kind of field first, so that the few at the top are hit as often as those of many rows.
    by_key: dict[Any, list[tuple[Any, Any]]] = {}
    for holder, key in _slots(data):
        if wanted(holder[key]):
            by_key.setdefault(key if isinstance(key, str) else "", []).append((holder, key))
    return chance.choice(by_key[chance.choice(sorted(by_key))]) if by_key else None


def _number(data: Any, chance: random.Random) -> None:
    slot = _slot(data, chance, lambda it: isinstance(it, (int, float)))
    if slot:
        holder, key = slot
        near = (holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 2)
        holder[key] = chance.choice((*_NUMBERS, *near))


def _text(data: Any, chance: random.Random) -> None:
    slot = _slot(data, chance, lambda it: isinstance(it, str))
    if slot:
        slot[0][slot[1]] = chance.choice(_TEXTS)


def _kind(data: Any, chance: random.Random) -> None:
    slot = _slot(data, chance, lambda it: True)
    if slot:
        slot[0][slot[1]] = copy.deepcopy(
            chance.choice((None, [], {}, "text", 3, -1.5, [[]], {"": {}}, [None]))
        )


def _gone(data: Any, chance: random.Random) -> None:
    slot = _slot(data, chance, lambda it: True)
    if slot:
        del slot[0][slot[1]]


def _list(data: Any, chance: random.Random) -> None:
    """Entries that are gone, twice, or in another order."""
    slot = _slot(data, chance, lambda it: isinstance(it, list) and bool(it))
    if not slot:
        return
    entries = slot[0][slot[1]]
    at = chance.randrange(len(entries))
    kind = chance.randrange(4)
    if kind == 0:
        entries.append(copy.deepcopy(entries[at]))
    elif kind == 1:
        del entries[at]
    elif kind == 2:
        chance.shuffle(entries)
    else:
        del entries[at:]


def _swap(data: Any, chance: random.Random) -> None:
    """Two values that change places."""
    wanted = chance.choice((int, str, list))
    one = _slot(data, chance, lambda it: type(it) is wanted)
    other = _slot(data, chance, lambda it: type(it) is wanted)
    if one and other:
        mine, theirs = copy.deepcopy(one[0][one[1]]), copy.deepcopy(other[0][other[1]])
        one[0][one[1]], other[0][other[1]] = theirs, mine


def _deep(data: Any, chance: random.Random) -> None:
    """Put something nested into a field that is read, or into one that is not."""
    if chance.random() < 0.5 and isinstance(data, dict):
        data["later"] = _NESTED
    elif slot := _slot(data, chance, lambda it: True):
        slot[0][slot[1]] = _NESTED


def _scaled(data: Any, chance: random.Random) -> None:
    """All times alike: a report that still adds up."""
    factor = chance.choice((0, 2, 1_000))
    for holder, key in _slots(data):
        is_time = isinstance(key, int) or "_ns" in str(key)
        if is_time and type(holder[key]) is int:
            holder[key] *= factor


def _renamed(data: Any, chance: random.Random) -> None:
    """A name that a row gets, whatever else refers to it."""
    rows = data.get("modules") if isinstance(data, dict) else None
    rows = [row for row in rows or () if isinstance(row, dict)] if isinstance(rows, list) else []
    if rows:
        row = chance.choice(rows)
        row["path"] = chance.choice((*_TEXTS, rows[0].get("path"), f"{row.get('path')}.x"))
        row["is_module"] = chance.choice((True, False))
        row["root"] = chance.choice(("", "loss", row["path"]))


_CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (
    _number, _number, _number, _text, _text, _kind, _gone, _list, _list, _swap, _deep, _scaled,
    _renamed, _renamed,
)  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, help="cases (default: 2000; with --small 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case, by its number; its error is raised")
    parser.add_argument("--traces", type=int, help="how many traces, the smallest first")


def answer(run: Run) -> Figures:
    traces = run.traces or (3 if run.small else None)
    cases = range(run.count or (20 if run.small else 2_000)) if run.only is None else [run.only]
    found = fuzz(sources(traces=traces), run.seed, cases, raising=run.only is not None)
    return found.figures(run.seed)
