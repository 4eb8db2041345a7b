"""A pytest plugin: a test fails if a training step's backward takes more than its budget.

pytest imports this file at each start, so everything that takes time is imported by the fixture.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from backspot.results.comparison import Change, Comparison
    from backspot.results.report import Report

_LARGE = 0.05
"""Share of the backward from which a warning is due if the noise of a module hides a slowdown."""
_NAMED = 3
"""How many modules a warning names."""
_RECORDINGS = 3
"""Recordings of each of two steps that tell whether the code is slower."""


class TooNoisyWarning(UserWarning):
    """The noise of a recording is larger than a budget, so the budget could not be checked."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("backspot", "budgets of the backward pass")
    group.addoption(
        "--backspot-update",
        action="store_true",
        help="write the reports that backward_budget(against=...) compares with",
    )
    group.addoption(
        "--backspot-markdown",
        metavar="FILE",
        help="append each comparison of backward_budget to FILE, in Markdown",
    )
    group.addoption(
        "--backspot-strict",
        action="store_true",
        help="fail, not only warn, if the noise is too large to check a backward_budget",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check where the Markdown goes, before tests run."""
    markdown: str | None = config.getoption("--backspot-markdown")
    if markdown is not None and (Path(markdown).is_dir() or not Path(markdown).parent.is_dir()):
        raise pytest.UsageError(
            f"--backspot-markdown {markdown}: name a file, in a folder that is there"
        )


@pytest.fixture
def backward_budget(request: pytest.FixtureRequest) -> BackwardBudget:
    """Record a training step, and fail if its backward takes more than its budget."""
    return BackwardBudget(request)


class BackwardBudget:
    """What the fixture ``backward_budget`` gives: call it once for each step to check.

    Args:
        request: the test that asks.
    """

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._folder = request.path.parent
        self._test = request.node.name
        self._update = bool(request.config.getoption("--backspot-update"))
        self._strict = bool(request.config.getoption("--backspot-strict"))
        self._markdown: str | None = request.config.getoption("--backspot-markdown")

    def __call__(
        self,
        step: Callable[..., Any],
        model: Any,
        *,
        share: Mapping[str, float] | None = None,
        against: str | os.PathLike[str] | tuple[Callable[..., Any], Any] | None = None,
        slower_by: float = 0.10,
        data: Iterable[Any] | None = None,
        steps: int = 10,
        warmup: int = 3,
    ) -> Report:
        """Record a step, and fail the test if its backward takes more than its budget.

        A test that would fail or warn records again. Two steps are recorded three times each, in
        turns, and the test fails if the code is slower. Otherwise it records once more, and fails
        only if the second recording says the same. Times are GPU times if the step uses a GPU, and
        clock times otherwise. If the noise is larger than ``slower_by``, the test passes with a
        ``TooNoisyWarning``; with ``pytest --backspot-strict`` it fails.

        Args:
            step: a training step, as for ``profile``.
            model: the model, or several by name, as for ``profile``.
            share: for patterns of paths, the largest share of the backward, from 0 to 1, that the
                modules that match take together, with what is inside them.
            against: what to compare with. A path names a report in JSON, relative to the folder of
                the test; ``pytest --backspot-update`` writes it. It may come from another machine:
                a module fails that got slower in comparison with others of the same work, and the
                backward if it has more work. A pair of a step and its model is recorded in the same
                run, and compared in full.
            slower_by: the largest slowdown against that, as a share. Default 0.1.
            data: the source of batches, as for ``profile``.
            steps: how many steps to record. Default 10.
            warmup: how many steps to run before that. Default 3.

        Returns:
            The report of the step.

        Raises:
            UsageError: If an argument is invalid, or a pattern matches no module.
        """
        __tracebackhide__ = True  # an error is about the test's own line

        from backspot.checks import is_number
        from backspot.errors import UsageError
        from backspot.formatting import quoted
        from backspot.live import profile
        from backspot.paths import path_text

        if share is not None and not isinstance(share, Mapping):
            raise UsageError(
                f"share={quoted(share)}: give a dict of patterns and shares, such as "
                '{"blocks.*": 0.3}'
            )
        if isinstance(against, tuple) and len(against) != 2:
            raise UsageError(
                f"against has {len(against)} parts: give the path of a report, or a step and its "
                "model, (step, model)"
            )
        if against is not None and not isinstance(against, tuple):
            path_text(against, "against=")
        for name, value in {**(share or {}), "slower_by": slower_by}.items():
            if not is_number(value):
                raise UsageError(f"{quoted(name)}: {quoted(value)} is not a share of at least 0")

        def record(what: Callable[..., Any], trains: Any) -> Report:
            return profile(what, trains, data=data, steps=steps, warmup=warmup, unprofiled=0)

        others: list[Report] = []
        reports: list[Report] = []

        def judged() -> tuple[Comparison | None, list[_Excess], list[Change]]:
            if isinstance(against, tuple):
                others.append(record(*against))
            report = record(step, model)
            reports.append(report)
            comparison: Comparison | None
            if others:
                comparison = _compared(others, reports)
            elif against is not None and not isinstance(against, tuple):
                comparison = self._with_saved(self._folder / against, report)
            else:
                comparison = None
            excesses, unknown = [*_over(report, share or {})], []
            if comparison is not None:
                # The phases of a step do not scale from machine to machine as the modules do.
                whole_changes = [comparison.step] if others else []
                whole_changes.append(comparison.whole)
                excesses += _slower(comparison, whole_changes, slower_by)
                unknown = _unknown(comparison, whole_changes, slower_by)
            return comparison, excesses, unknown

        comparison, excesses, unknown = judged()
        if excesses or unknown:
            first = {excess.key for excess in excesses}
            maybe = first | {(change.kind, change.path) for change in unknown}
            comparison, excesses, unknown = judged()
            while others and len(others) < _RECORDINGS:
                comparison, excesses, unknown = judged()
            if comparison is None or comparison.about == "recordings":
                # What one recording claims and the other cannot tell is not known.
                doubted = [
                    excess.change
                    for excess in excesses
                    if excess.key not in first and excess.key in maybe
                ]
                unknown = [change for change in unknown if (change.kind, change.path) in maybe]
                unknown += [change for change in doubted if change is not None]
                excesses = [excess for excess in excesses if excess.key in first]
        if comparison is not None:
            self._write(comparison)
        if excesses:
            shown = dict.fromkeys(excess.shown for excess in excesses)
            lines = [*(excess.sentence for excess in excesses), "", *shown]
            pytest.fail("\n".join(lines), pytrace=False)
        if unknown and comparison is not None:
            message = _told(unknown, slower_by)
            if self._strict:
                pytest.fail(f"{message}\n\n{comparison}", pytrace=False)
            warnings.warn(TooNoisyWarning(message), stacklevel=2)
        return reports[-1]

    def _with_saved(self, path: Path, report: Report) -> Comparison | None:
        """Compare with a saved report, or write it."""
        from backspot.comparison.clocks import as_recorded
        from backspot.comparison.compare import scaled_to
        from backspot.results.report import Report

        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            report.save(path, force=True)
            return None
        if not path.exists():
            pytest.fail(f"{path} is missing: pytest --backspot-update writes it", pytrace=False)
        before, note = scaled_to(as_recorded(report), as_recorded(Report.load(path)))
        return _compared([before], [report], note)

    def _write(self, comparison: Comparison) -> None:
        if self._markdown is not None:
            from backspot.render.markdown import comparison_to_markdown

            text = comparison_to_markdown(comparison).decode()
            try:
                with Path(self._markdown).open("a", encoding="utf-8") as file:
                    file.write(f"### {self._test}\n\n{text}\n")
            except OSError as error:
                reason = error.strerror or error
                pytest.fail(f"--backspot-markdown {self._markdown}: {reason}", pytrace=False)


class _Excess(NamedTuple):
    """Something that takes more than its budget.

    Attributes:
        key: what it is; the same in each recording.
        sentence: one line about it.
        shown: the numbers behind it.
        change: the change that is too large, ``None`` for a share.
    """

    key: tuple[str, str]
    sentence: str
    shown: str
    change: Change | None = None


def _over(report: Report, share: Mapping[str, float]) -> Iterator[_Excess]:
    """Yield the patterns whose modules take more than their share."""
    from backspot.results.grouping import patterns_of

    time: Any = "gpu" if report.gpu_ns else "wall"
    for pattern, most in share.items():
        matches = patterns_of(pattern).matches
        rows = [row for row in report.top(match=pattern) if row.is_module and matches(row.path)]
        share_taken = sum(report.share(row, time) for row in rows)
        if share_taken > most:
            measured = "backward's GPU time" if time == "gpu" else "backward"
            sentence = (
                f"{pattern} takes {share_taken:.0%} of the {measured}; its budget is {most:.0%}"
            )
            yield _Excess(("share", pattern), sentence, str(report))


def _compared(before: Sequence[Report], after: Sequence[Report], *notes: str) -> Comparison:
    from dataclasses import replace

    from backspot.comparison.clocks import as_recorded
    from backspot.comparison.compare import compare

    # So few real steps are known that recorded times say more.
    sides = [[as_recorded(report) for report in side] for side in (before, after)]
    comparison = compare(sides[0], sides[1], names=("before", "now"))
    return replace(comparison, notes=(*notes, *comparison.notes))


def _slower(
    comparison: Comparison, whole_changes: list[Change], slower_by: float
) -> Iterator[_Excess]:
    """Yield what takes longer beyond the noise and by more than ``slower_by``, a share."""
    modules = [change for change in comparison.changes if change.kind == "module"]
    for change in (*whole_changes, *modules):
        if change.exceeds(100 * slower_by):
            key = (change.kind, change.path)
            yield _Excess(key, _sentence(change, slower_by), str(comparison), change)


def _unknown(comparison: Comparison, whole_changes: list[Change], slower_by: float) -> list[Change]:
    """Return what may have got slower by too much, of what takes much of the backward."""
    backward = comparison.whole
    longest = {
        "wall": max(backward.before_ms, backward.after_ms),
        "gpu": max(backward.before_gpu_ms or 0.0, backward.after_gpu_ms or 0.0),
    }
    large = [
        change
        for change in comparison.changes
        if change.kind == "module"
        and max(change.judged_ms[:2]) >= _LARGE * longest[change.judged_by]
    ]
    return [
        change
        for change in (*whole_changes, *large)
        if change.verdict not in ("new", "gone") and change.too_noisy_for(100 * slower_by)
    ]


def _told(unknown: list[Change], slower_by: float) -> str:
    """Return the message about budgets that could not be checked."""
    from backspot.comparison.judge import measured
    from backspot.formatting import counted

    lines = [f"Too noisy to tell whether this got more than {100 * slower_by:g}% slower:"]
    lines += [f"  {change.title}: {measured(change)}" for change in unknown[:_NAMED]]
    if len(unknown) > _NAMED:
        lines.append(f"  and {counted(len(unknown) - _NAMED, 'more module')}")
    return "\n".join(
        [
            *lines,
            "Run on an idle machine and, on a CPU, with OMP_NUM_THREADS=1, or allow more with "
            "slower_by=.",
            "pytest --backspot-strict makes this a failure.",
        ]
    )


def _sentence(change: Change, slower_by: float) -> str:
    from backspot.formatting import times_as_long

    before, after, _ = change.judged_ms
    measured = "GPU time" if change.judged_by == "gpu" else "time"
    by = "" if change.judged_percent is None else f" by {change.judged_percent:.0f}%"
    if times := times_as_long(change.judged_percent or 0):
        by = f", {times} as long,"
    return (
        f"{change.title} got slower{by} in {measured} "
        f"({before:.2f} ms, then {after:.2f} ms); its budget is {slower_by:.0%}"
    )
