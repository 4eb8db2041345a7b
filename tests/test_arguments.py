"""A wrong argument of any kind raises an error with one clear line."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from backspot import BackspotError, Report, compare, locate
from backspot.commands import main
from backspot.errors import UsageError
from backspot.results.costs import line_of
from support.report_parts import row
from support.sample_reports import vit
from support.synthetic import Trace


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError


class NoPath:
    def __fspath__(self) -> int:
        return 5


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"t.json"


VALUES = {
    "nothing": None,
    "a number": 5,
    "a negative number": -1,
    "a huge number": 10**5000,
    "a truth": True,
    "no number": math.nan,
    "no end": math.inf,
    "no text": "",
    "bytes": b"t.json",
    "a list": [],
    "a dict": {},
    "a set": {1},
    "an object": object(),
    "a function": print,
    "a text file": io.StringIO("{}"),
    "an object without a name": NoRepr(),
    "a path that is none": NoPath(),
    "a path of bytes": BytesPath(),
    "a zero byte": "a\0b.json",
    "a path with a zero byte": Path("a\0b.json"),
    "half a pair": "\ud800.json",
    "a name too long": "a" * 5000 + ".json",
}


@pytest.fixture(scope="module")
def located(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return locate(small_trace(tmp_path_factory.mktemp("located")))


def small_trace(folder: Path) -> Path:
    trace = Trace()
    trace.forward("fc", "Linear", 0, 50_000)
    trace.operator("aten::addmm", 1_000, 10_000, seq=1)
    trace.node("AddmmBackward0", 100_000, 130_000, seq=1)
    return trace.save(folder / "t.json")


COUNTS = {"nothing", "a number", "a huge number"}
CALLS: dict[str, tuple[Callable[[Report, object], object], set[str]]] = {
    "locate": (lambda made, it: locate(it), set()),
    "locate depth": (lambda made, it: locate(made.trace, depth=it), COUNTS),
    "locate jobs": (lambda made, it: locate(made.trace, jobs=it), COUNTS),
    "locate progress": (
        lambda made, it: locate(made.trace, progress=it),
        {"nothing", "a function"},
    ),
    "locate trace": (lambda made, it: locate(made.trace, trace=it), {"nothing"}),
    "locate force": (
        lambda made, it: locate(made.trace, trace=f"{made.trace}.json", force=it),
        {"a truth"},
    ),
    "compare before": (lambda made, it: compare(it, made), set()),
    "compare after": (lambda made, it: compare(made, it), set()),
    "compare names": (lambda made, it: compare(made, made, names=it), set()),
    "compare a name": (
        lambda made, it: compare(made, made, names=("a", it)),
        {name for name, value in VALUES.items() if isinstance(value, str)},
    ),
    "load": (lambda made, it: Report.load(it), set()),
    "save": (lambda made, it: made.save(it), set()),
    "save force": (lambda made, it: made.save(f"{made.trace}.md", force=it), {"a truth"}),
    "save comparison": (lambda made, it: compare(made, made).save(it), set()),
    "top": (lambda made, it: made.top(it), COUNTS),
    "top depth": (lambda made, it: made.top(depth=it), COUNTS),
    "top sort": (lambda made, it: made.top(sort=it), set()),
    "top by": (lambda made, it: made.top(by=it), set()),
    "top match": (lambda made, it: made.top(match=it), {"nothing"}),
    "share": (lambda made, it: made.share(it), set()),
    "share sort": (lambda made, it: made.share(made.modules[0], it), set()),
    "line_of": (lambda made, it: line_of(it, "node"), set()),
    "exceeds": (
        lambda made, it: compare(made, made).step.exceeds(it),
        {"a number", "a huge number"},
    ),
    "too_noisy_for": (
        lambda made, it: compare(made, made).step.too_noisy_for(it),
        {"a number", "a huge number"},
    ),
    "slower_than": (
        lambda made, it: compare(made, made).slower_than(it),
        {"a number", "a huge number"},
    ),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_refused_in_one_line(located, tmp_path, call, kind):
    do, fine = CALLS[call]
    made = replace(located, trace=str(small_trace(tmp_path)))
    if kind in fine:
        do(made, VALUES[kind])
        return
    with pytest.raises(BackspotError) as caught:
        do(made, VALUES[kind])
    assert str(caught.value).isprintable(), "a name in it could break the line"
    assert isinstance(caught.value, UsageError) or isinstance(VALUES[kind], str)


@pytest.mark.parametrize("kind", VALUES)
def test_a_report_and_a_comparison_are_looked_up_by_path(kind):
    value = VALUES[kind]
    made = vit()
    for asked in (made, compare(made, made)):
        if value == "":
            assert asked[value]
            continue
        with pytest.raises(KeyError if isinstance(value, str) else UsageError):
            asked[value]


def test_a_comparison_is_no_sequence_and_says_where_its_changes_are():
    with pytest.raises(UsageError, match=r"comparison\.changes"):
        list(compare(vit(), vit()))


@pytest.mark.parametrize("command", ["show", "show -o", "label", "diff"])
@pytest.mark.parametrize("name", ["a\0b.json", "\ud800.json"])
def test_a_command_refuses_a_path_that_no_file_can_have(tmp_path, capsys, command, name):
    good = str(small_trace(tmp_path))
    more = {
        "show": [],
        "show -o": ["-o", str(tmp_path / "x.md")],
        "label": ["-o", str(tmp_path / "x.json.gz")],
        "diff": [good],
    }[command]
    verb = "diff" if command == "diff" else "show"
    assert main([verb, name, *more]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for suffix in {"show -o": ["x.json"], "label": ["x.trace.json", "x.json.gz"]}.get(command, ()):
        assert main([verb, good, "-o", name.replace(".json", suffix)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_numpy_integer_is_refused_and_not_converted():
    with pytest.raises(UsageError, match=r"top\(.*3"):
        vit().top(pytest.importorskip("numpy").int64(3))
    assert vit().share(row("a", wall=3)) > 0
