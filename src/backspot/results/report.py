"""The result: frozen data, with the few questions that people ask of it.

Times are integer nanoseconds summed over the recorded steps, so that sums are exact; properties
give milliseconds, and milliseconds per step where that is what people compare.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from backspot.errors import UsageError
from backspot.formatting import quoted
from backspot.paths import path_text
from backspot.results import presented
from backspot.results.costs import (
    Coverage,
    DeviceCost,
    KernelCost,
    LineCost,
    NodeCost,
    OperatorCost,
    Pass,
    Phase,
    PhaseName,
    Row,
    WallKinds,
    line_of,
)
from backspot.results.findings import Finding, Place
from backspot.results.grouping import (
    add_totals,
    fold,
    group,
    pattern_of,
    ranked_kernels,
    ranked_lines,
    ranked_nodes,
)
from backspot.results.presented import Presented
from backspot.results.subtrees import Subtree, near_names, subtree_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "SCHEMA",
    "By",
    "Coverage",
    "DeviceCost",
    "Finding",
    "KernelCost",
    "LabelSource",
    "LineCost",
    "NodeCost",
    "OperatorCost",
    "Pass",
    "Phase",
    "PhaseName",
    "Place",
    "Report",
    "Row",
    "Sort",
    "StepUnit",
    "Subtree",
    "WallKinds",
    "add_totals",
    "fold",
    "line_of",
    "ranked_kernels",
    "ranked_lines",
    "ranked_nodes",
]

SCHEMA = "backspot.report/1"
"""The version of the JSON form. A reader of version 1 reads every ``backspot.report/1``."""

Sort = Literal["wall", "gpu", "cpu"]
By = Literal["path", "class", "pattern"]
LabelSource = Literal["backspot", "lightning", "python", "none"]
StepUnit = Literal["profiler step", "optimizer step", "backward pass"]


@dataclass(frozen=True, slots=True)
class Report(Presented):
    """Which modules make the backward slow, ranked.

    Attributes:
        modules: rows that partition the backward, most wall time first; those that no module owns
            too.
        operators: the autograd nodes by name, over all modules.
        passes: the backward passes in the order in which they ran.
        devices: per-device costs; empty where the trace has no device work.
        step_unit: what counts as one step.
        step_ns: each step's clock time: from its mark, or the end of the step before, until all
            that it launched is done; where each backward pass counts as a step, from the start of
            its forward. The passes' time where no forward is recorded either.
        wall_ns: the backward's clock time; the rows sum to it.
        gpu_ns: the backward's device time; the rows sum to it.
        cpu_ns: the host's time in backward; the rows sum to it.
        coverage: the share of these with an owner among the modules.
        source: whose labels named the modules.
        has_gpu: whether the trace holds device work.
        warnings: what a reader must know before trusting the numbers.
        trace: what was read: a file's name, ``live profile``, …
        phases: where the steps' clock time goes, in the order of a step. They sum to ``step_ns``
            exactly; empty where the trace tells of nothing but backward passes.
        findings: what makes the step slower than it need be, the most expensive first.
        schema: version of this form.
    """

    modules: tuple[Row, ...]
    operators: tuple[OperatorCost, ...]
    passes: tuple[Pass, ...]
    devices: tuple[DeviceCost, ...]
    step_unit: StepUnit
    step_ns: tuple[int, ...]
    wall_ns: int
    gpu_ns: int
    cpu_ns: int
    coverage: Coverage
    source: LabelSource
    has_gpu: bool
    warnings: tuple[str, ...]
    trace: str = ""
    phases: tuple[Phase, ...] = ()
    findings: tuple[Finding, ...] = ()
    schema: str = SCHEMA

    def __repr__(self) -> str:
        return (
            f"<Report of {self.trace or 'a trace'}: {len(self.modules)} rows, backward "
            f"{self.wall_ms_per_step:.3f} ms per step>"
        )

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return max(1, len(self.step_ns))

    @property
    def wall_ms_per_step(self) -> float:
        """The backward's clock time in milliseconds, per step."""
        return self.wall_ns / 1e6 / self.steps

    @property
    def whole_ns(self) -> int:
        """The clock time of all recorded steps in nanoseconds, as far as the trace tells it."""
        return max(sum(self.step_ns), self.wall_ns)

    @property
    def utilisation(self) -> float:
        """The share (0 to 1) of the steps in which a device was running something."""
        whole = sum(phase.wall_ns for phase in self.phases)
        return sum(phase.busy_ns for phase in self.phases) / whole if whole else 0.0

    def share(self, row: Row, sort: Sort = "wall") -> float:
        """The row's part (0 to 1) of the backward's wall, gpu or cpu time.

        Raises:
            UsageError: on an unknown word, and on what is no row.
        """
        _check("sort", sort, _SORT_KEYS)
        if not isinstance(row, Row):
            raise UsageError(f"share({quoted(row)}): give a row; report.modules has them")
        whole = {"wall": self.wall_ns, "gpu": self.gpu_ns, "cpu": self.cpu_ns}[sort]
        return _SORT_KEYS[sort](row) / whole if whole else 0.0

    def top(
        self,
        n: int | None = None,
        *,
        depth: int | None = None,
        sort: Sort = "wall",
        by: By = "path",
    ) -> tuple[Row, ...]:
        """The ``n`` most expensive rows (all where ``n`` is ``None``).

        Args:
            n: how many rows at most.
            depth: fold everything deeper than this into its ancestor; 0 is the root itself.
            sort: by which time the rows are ranked.
            by: ``"path"`` gives a row a module; ``"class"`` groups by class; ``"pattern"`` groups
                repeated layers, of one class and with paths that differ in numbers only:
                ``blocks.*.mlp.fc1``.

        Raises:
            UsageError: on what is no whole number of at least 0, or an unknown word.
        """
        if not _is_count(n):
            raise UsageError(
                f"top({quoted(n)}): give a number of rows of at least 0, or None for all"
            )
        if not _is_count(depth):
            raise UsageError(f"depth={quoted(depth)}: give a depth of at least 0, or None for all")
        _check("sort", sort, _SORT_KEYS)
        _check("by", by, ("path", "class", "pattern"))
        rows: Sequence[Row] = self.modules
        if depth is not None:
            rows = fold(rows, depth)
        if by == "class":
            rows = group(rows, lambda row: row.class_name or row.name)
        elif by == "pattern":
            rows = group(rows, pattern_of(rows))
        key = _SORT_KEYS[sort]
        ranked = sorted(rows, key=lambda row: (-key(row), -row.wall_ns, row.path))
        return tuple(ranked[:n])

    def __getitem__(self, path: str) -> Subtree:
        """The module at ``path`` with its children.

        Raises:
            KeyError: where the report has no such module; the message names near ones.
            UsageError: where ``path`` is no text. A loop over the report itself ends here too:
                ``modules`` and ``top()`` hold its rows.
        """
        if not isinstance(path, str):
            raise UsageError(
                f"report[{quoted(path)}]: give a module's path; report.top() has the rows"
            )
        # A module may be called what no module owns: then the module is meant.
        rows = {row.path: row for row in self.modules if not row.is_module}
        modules = {row.path: row for row in self.modules if row.is_module}
        rows.update(modules)
        if path not in rows:
            raise KeyError(f"no module {path!r} in this report{near_names(path, rows)}")
        return subtree_of(rows[path], modules)

    # Not in Presented: IPython takes a class's own __repr__ before its base's method.
    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ANN401 - IPython's
        printer.text(str(self))

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the report; the suffix decides the form.

        ``.html`` is a page that needs nothing else; ``.json`` is what ``load`` reads; ``.csv`` and
        ``.md`` are tables; ``.speedscope.json`` and ``.folded`` are flame graphs. ``.trace.json``
        and ``.trace.json.gz`` copy the trace file that the report was made of, with tracks of
        ``backward: …`` spans added; a report of a live profile has none: ``profile`` and
        ``locate`` write the copy there (``trace=``).

        The file appears whole or not at all.

        Args:
            path: where to.
            force: overwrite what is there.

        Raises:
            OutputExistsError: where the file exists and ``force`` is false.
            UsageError: on a suffix that names no form; where ``path`` is the trace that the report
                was made of; where a trace is asked for that is not there or not the same any more.
        """
        if path_text(path, "save").lower().endswith(presented.LABELLED):
            return presented.labelling().save_labelled(self, path, force=force)

        return presented.forms().write(self, path, force=force)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that ``save`` wrote as JSON; equal to the one that was saved.

        Raises:
            SourceNotFoundError: where there is no such file.
            NotATraceError: where it is no report, or of a newer schema.
        """
        report: Report = presented.forms().read(path)
        return report

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a ``pandas.DataFrame``, one row a module, times in nanoseconds.

        Raises:
            MissingDependencyError: where pandas is not installed.
        """
        return presented.forms().as_frame(self)

    def plot(
        self,
        top: int = 15,
        *,
        depth: int | None = None,
        sort: Sort = "wall",
        by: By = "path",
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the most expensive modules as bars, in ms per step.

        Wall time is drawn in the colours of what it is spent on. Without module labels it is the
        autograd nodes that are drawn.

        Args:
            top: how many modules at most.
            depth: as in ``top()``.
            sort: which time, and by which the modules are ranked.
            by: as in ``top()``.
            ax: matplotlib axes to draw into; ``None`` makes a figure.

        Returns:
            The axes.

        Raises:
            MissingDependencyError: where matplotlib is not installed.
            UsageError: on what ``top()`` would not take either.
        """
        return presented.forms().draw(self, top=top, depth=depth, sort=sort, by=by, ax=ax)


_SORT_KEYS: dict[str, Callable[[Row], int]] = {
    "wall": lambda row: row.wall_ns,
    "gpu": lambda row: row.gpu_ns,
    "cpu": lambda row: row.cpu_ns,
}


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _check(argument: str, value: object, known: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{argument}={quoted(value)}: choose one of {', '.join(known)}")
