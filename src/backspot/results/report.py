"""The report: frozen data, with methods that rank, look up, save, load and draw.

All times are integer nanoseconds of a typical step: the mean over the recorded steps without those
that something held up. Where steps without a profiler were timed, parts are made as long as they
are in such a step, and ``clock`` is ``"real"``. What ends in ``_by_step`` has one entry a recorded
step. Both sum exactly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from backspot import presented
from backspot.checks import check_choice, is_number, is_whole
from backspot.errors import UsageError
from backspot.formatting import quoted, visible
from backspot.paths import path_text
from backspot.presented import Beside, Presented, beside, known_beside, public, with_beside
from backspot.results import host, job, limits, memory, out_of_memory, plan, rare, training
from backspot.results.costs import (
    Coverage,
    DeviceCost,
    FusedKernel,
    Hiccup,
    LineOfStep,
    OperatorCost,
    Pass,
    Phase,
    Row,
    Sort,
    time_of,
)
from backspot.results.findings import (
    Finding,
    FirstRemedy,
    Predictor,
    ReplayedStep,
    Saving,
    WhatIf,
)
from backspot.results.grouping import (
    Patterns,
    Subtree,
    fold,
    group,
    is_pattern,
    near_names,
    pattern_of,
    patterns_of,
    subtree_of,
)
from backspot.results.quantities import SELDOM, Count, Ranking, Ratio

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "backspot.report/3"
"""Version of the JSON form. A reader of version 3 reads every ``backspot.report/3``."""

_NOISY = 0.1
"""``Report.noise`` from which the module in the first row is often another one in truth."""

Order = Literal[Sort, memory.Order, limits.Order]
"""What rows are ranked by: a time, what a step would save without them, or one of ``RANKINGS``."""

RANKINGS: Mapping[str, Ranking] = {"memory": memory.RANKING, "headroom": limits.RANKING}
"""What parts rank rows by."""

By = Literal["path", "class", "pattern"]
LabelSource = Literal["backspot", "lightning", "python", "none"]
StepUnit = Literal["profiler step", "optimizer step", "backward pass"]
ClockName = Literal["real", "recorded"]


@public
@dataclass(frozen=True, slots=True)
class Answer:
    """What costs most in a typical step, wherever it is.

    Attributes:
        kind: ``module`` (or repeated layers, or communication of ranks), a ``phase`` without
            modules, ``waits`` of the host for a device, another ``cause``, or ``nothing`` if
            nothing stands out.
        path: Path or pattern of the modules, ``(data)`` and the like for a phase, or the first
            place of a cause; ``""`` for waits and for nothing.
        class_name: Class of the modules, or ``""``.
        line: Line of Python that takes most of it, ``file:line``, or ``""``.
        wall_ns: Its clock time, in nanoseconds of a real step where such were timed
            (``unprofiled_step_ns``): of a module in forward and backward together; of waits, what a
            step would take less. If nothing stands out, that of the longest.
        share: Its share (0 to 1) of the step.
        saves: How much less a step would take without it; ``None`` if not known.
        rule: Rule of the finding about it, or ``""``.
        remedy: What to do first, there or elsewhere; ``None`` where nothing is known to save 2% of
            a step.

    Example:
        >>> report.answer.kind, report.answer.path, round(report.answer.share, 2)
        ('module', 'patch_drop', 0.2)
    """

    kind: Literal["module", "phase", host.Costly, "cause", "nothing"]
    path: str
    class_name: str
    line: str
    wall_ns: Count
    share: Ratio
    saves: Saving | None
    rule: str
    remedy: FirstRemedy | None = None


class _Ranked(Beside):
    """What a report has worked out so far: the rankings that were asked for."""

    __slots__ = ("_rankings",)


@dataclass(frozen=True)
class _Costs:
    """What each report has whatever was recorded.

    Attributes:
        modules: Rows that partition the backward, most wall time first, with those for time that no
            module owns.
        operators: Autograd nodes by name, most wall time first.
        passes: Backward passes, in their order.
        devices: Each device's part; empty without device work.
        step_unit: What counts as one step.
        clock: Whose time it is. ``real``: all clock times and times of the host are those of a step
            that nothing records, and ``step_ns`` is ``unprofiled_step_ns``. ``recorded``: they are
            as they were recorded, because no such step was timed. Times of devices (``gpu_ns``) are
            always those that were recorded.
        step_ns: Clock time of the step, until all work that it launched is done.
        recorded_step_ns: This time as it was recorded.
        wall_ns: Clock time of the backward.
        recorded_wall_ns: This time as it was recorded.
        gpu_ns: Device time of the backward, which can exceed ``wall_ns`` with several streams.
        step_gpu_ns: Device time of the whole step: all kernels, copies and memsets, added up.
        cpu_ns: Time of the host in the nodes of the backward.
        step_ns_by_step: This time in each recorded step.
        wall_ns_by_step: This time in each recorded step.
        gpu_ns_by_step: This time in each recorded step.
        cpu_ns_by_step: This time in each recorded step.
        coverage: Share of the backward's times that modules own.
        source: Whose labels named the modules; ``python`` are the profiler's own module events.
        has_gpu: Whether the trace has device work.
        warnings: What to know before trusting the numbers.
        trace: What was read: a file name, ``the live profile``, …
        phases: Where the time of a step goes, in its order; empty if the trace has only backward
            passes.
        findings: Why the step is slow, the largest known gain first (``saves``); those of preview
            rules last (``tier``).
        fused: Kernels in which ``torch.compile`` fused the work of several modules, most time
            first.
        unprofiled_step_ns: Clock time of a step without profiler and labels: the mean of those that
            were timed; ``None`` where none was.
        unprofiled_step_ns_by_step: Each of those steps.
        replayed_step: The step without the profiler's cost, by replay; savings are of this step.
            ``None`` if the recording cannot be replayed.
        not_replayed: Why not, in one sentence, or ``""``.
        layers: What a step saves without all of some repeated layers, by their label, such as
            ``blocks.*.attn (Attention)``: those with the most wall time. The rows of
            ``top(by="pattern")`` have it.
        rules: What each rule did that is for this device: ``found``, ``nothing``, or why it could
            not look: ``needs stacks``, ``needs memory``, ``needs a GPU``, …
        hiccups: Steps that something held up and that do not count, longest first.
        noise: Share (0 to 1) of the backward that may belong to other rows. Above 0.1, the ranking
            cannot be trusted.
        recorded: Where and how, as far as known: ``device``, ``time`` (UTC), ``torch``,
            ``command``, and how busy the ``host`` was. Not compared by ``==``.
    """

    __slots__ = ()

    modules: tuple[Row, ...]
    operators: tuple[OperatorCost, ...]
    passes: tuple[Pass, ...]
    devices: tuple[DeviceCost, ...]
    step_unit: StepUnit
    clock: ClockName
    step_ns: Count
    recorded_step_ns: Count
    wall_ns: Count
    recorded_wall_ns: Count
    gpu_ns: Count
    cpu_ns: Count
    step_ns_by_step: tuple[Count, ...]
    wall_ns_by_step: tuple[Count, ...]
    gpu_ns_by_step: tuple[Count, ...]
    cpu_ns_by_step: tuple[Count, ...]
    coverage: Coverage
    source: LabelSource
    has_gpu: bool
    warnings: tuple[str, ...]
    step_gpu_ns: Count = 0
    trace: str = ""
    phases: tuple[Phase, ...] = ()
    findings: tuple[Finding, ...] = ()
    fused: tuple[FusedKernel, ...] = ()
    unprofiled_step_ns: Count | None = None
    unprofiled_step_ns_by_step: tuple[Count, ...] = ()
    replayed_step: ReplayedStep | None = None
    not_replayed: str = ""
    layers: dict[str, Saving] = field(default_factory=dict, metadata=SELDOM)
    rules: dict[str, str] = field(default_factory=dict)
    hiccups: tuple[Hiccup, ...] = ()
    noise: Ratio = 0.0
    recorded: dict[str, str] = field(default_factory=dict, compare=False, metadata=SELDOM)

    def _lines(self) -> Sequence[LineOfStep]:
        return ()


@public
@dataclass(frozen=True, slots=True)
class Report(
    Presented,
    _Ranked,
    job.InReport,
    out_of_memory.InReport,
    plan.InReport,
    training.InReport,
    host.InReport,
    rare.InReport,
    limits.InReport,
    memory.InReport,
    _Costs,
):
    """A ranking of modules by what they cost in the backward.

    ``print(report)`` shows it, a notebook displays it, ``report[path]`` returns one module with the
    modules inside it. Times are nanoseconds of a typical step: the mean over the recorded steps but
    ``hiccups``. They add up exactly: rows to the backward, phases to the step.

    Attributes:
        schema: Version of the JSON form.

    Example:
        >>> report = backspot.locate("trace.json.gz")
        >>> report
        <Report of trace.json.gz: 77 rows, backward 20.906 ms per step>
        >>> print(report)
        patch_drop (PatchDropout) takes 28% of the backward: 5.9 ms, mostly
        GatherBackward0; without it, a step would take 4.0 ms less (uncertain, 1.2 ms to
        6.4 ms)
        ...
        >>> [step_ns / 1e6 for step_ns in report.step_ns_by_step]
        [28.916678, 31.928339]
    """

    schema: str = SCHEMA

    def _made_of(self) -> list[str]:
        return [self.trace]

    def __repr__(self) -> str:
        return (
            f"<Report of {visible(self.trace) or 'a trace'}: {len(self.modules)} rows, backward "
            f"{self.wall_ms:.3f} ms per {self.per}>"
        )

    @property
    def nodes(self) -> tuple[OperatorCost, ...]:
        """The same as ``operators``."""
        return self.operators

    @property
    def labels(self) -> LabelSource:
        """The same as ``source``."""
        return self.source

    @property
    def steps(self) -> int:
        """Number of recorded steps, at least 1."""
        return max(1, len(self.step_ns_by_step))

    @property
    def per(self) -> Literal["pass", "step"]:
        """``"pass"`` if each backward pass counts as a step, else ``"step"``."""
        return "pass" if self.step_unit == "backward pass" else "step"

    @property
    def wall_ms(self) -> float:
        """``wall_ns`` in milliseconds."""
        return self.wall_ns / 1e6

    @property
    def whole_ns(self) -> int:
        """``step_ns``, and at least ``wall_ns``."""
        return max(self.step_ns, self.wall_ns)

    @property
    def typical_steps(self) -> tuple[int, ...]:
        """Indices of the recorded steps but ``hiccups``."""
        left_out = {hiccup.step for hiccup in self.hiccups}
        return tuple(step for step in range(len(self.step_ns_by_step)) if step not in left_out)

    @property
    def is_noisy(self) -> bool:
        """Whether the typical steps disagree too much to rank modules by them."""
        return self.noise > _NOISY

    @property
    def has_work(self) -> bool:
        """Whether rows have ``work``."""
        return any(row.work is not None for row in self.modules)

    @property
    def answer(self) -> Answer:
        """What costs most in the step, wherever it is, and what to do first: how outputs begin."""
        answer: Answer = presented.forms().find_answer(self)
        return answer

    @property
    def utilisation(self) -> float:
        """Share (0 to 1) of the steps in which a device was running something."""
        step_ns = sum(phase.wall_ns for phase in self.phases)
        return sum(phase.busy_ns for phase in self.phases) / step_ns if step_ns else 0.0

    def share(self, row: Row, sort: Sort = "wall") -> float:
        """Return a row's share of the backward, or the share of the step that it saves.

        Args:
            row: A row of this report.
            sort: ``"wall"`` (default), ``"gpu"`` or ``"cpu"`` of the backward, or ``"saves"`` of
                the replayed step.

        Returns:
            From 0 to 1; 0 if the report has none of that time.

        Raises:
            UsageError: If ``row`` is not a row or ``sort`` is unknown.

        Example:
            >>> row = report.modules[0]
            >>> f"{report.share(row):.0%} of wall, {report.share(row, 'gpu'):.0%} of GPU time"
            '28% of wall, 46% of GPU time'
        """
        check_choice("sort", sort, get_args(Sort))
        if not isinstance(row, Row):
            raise UsageError(f"share({quoted(row)}): give a row; report.modules has them")
        if sort == "saves":
            whole_ns = self.replayed_step.ns if self.replayed_step else 0
        else:
            whole_ns = time_of(self, sort)
        return time_of(row, sort) / whole_ns if whole_ns else 0.0

    def top(
        self,
        n: int | None = None,
        *,
        depth: int | None = None,
        sort: Order = "wall",
        by: By = "path",
        match: str | Sequence[str] | None = None,
    ) -> tuple[Row, ...]:
        """Return the ``n`` most expensive rows.

        Args:
            n: How many; ``None`` (default) for all.
            depth: Fold every module deeper than this into its ancestor; 0 is the root. Modules
                without calls, such as ``ModuleList``, are no level. ``None`` (default) folds none.
            sort: ``"wall"`` (default), ``"gpu"``, ``"cpu"``, ``"saves"``, ``"memory"`` (at the
                peak) or ``"headroom"`` (device time that good kernels would save). Unknown values
                come last.
            by: One row per ``"path"`` (default), ``"class"``, or ``"pattern"``: a repeated layer,
                ``blocks.*.mlp.fc1``.
            match: Pattern of the paths to keep, or a list. ``*`` matches any part of a name, ``**``
                any number of names. Other modules are folded into the nearest one around them that
                matches, or into the root.

        Returns:
            The rows, most expensive first.

        Raises:
            UsageError: If an argument is invalid, or a pattern matches no module.

        Example:
            >>> for row in report.top(2, by="pattern"):
            ...     print(row.label, round(row.wall_ms, 2))
            patch_drop (PatchDropout) 5.87
            blocks.*.attn (Attention) 2.06
        """
        if n is not None and not is_whole(n):
            raise UsageError(
                f"top({quoted(n)}): give a number of rows of at least 0, or None for all"
            )
        if depth is not None and not is_whole(depth):
            raise UsageError(f"depth={quoted(depth)}: give a depth of at least 0, or None for all")
        check_choice("sort", sort, get_args(Order))
        check_choice("by", by, get_args(By))
        patterns = None
        if match is not None:
            patterns = patterns_of(match)
            patterns.check([row.path for row in self.modules if row.is_module])
        return self._ranked(depth, sort, by, patterns)[:n]

    def _ranked(
        self, depth: int | None, sort: Order, by: By, patterns: Patterns | None
    ) -> tuple[Row, ...]:
        rankings: dict[object, tuple[Row, ...]] | None = getattr(self, "_rankings", None)
        if rankings is None:
            object.__setattr__(self, "_rankings", rankings := {})
        ranking = depth, sort, by, patterns
        if ranking in rankings:
            return rankings[ranking]
        rows: Sequence[Row] = self.modules
        if depth is not None or patterns is not None:
            rows = fold(rows, depth, patterns.matches if patterns else None)
        if by == "class":
            rows = group(rows, lambda row: row.class_name or row.name)
        elif by == "pattern":
            saves = self.layers if rows is self.modules else {}
            rows = group(rows, pattern_of(rows), saves)
        ranked = sorted(rows, key=lambda row: (-self._weight(row, sort), -row.wall_ns, row.path))
        rankings[ranking] = tuple(ranked)
        return rankings[ranking]

    def _weight(self, row: Row, order: Order) -> int:
        ranking = RANKINGS.get(order)
        return time_of(row, cast(Sort, order)) if ranking is None else ranking.weight(self, row)

    def __getitem__(self, path: str) -> Subtree:
        """Return the module at ``path`` with the modules inside it.

        Args:
            path: Path of a module; ``""`` or its class for the root; or the name of another row.

        Returns:
            The row and its children.

        Raises:
            KeyError: If there is no such module; the message suggests near names.
            UsageError: If ``path`` is not a string. Iterating over the report raises this too.

        Example:
            >>> report["blocks.0.attn"].row.total_wall_ns
            1741993
        """
        if not isinstance(path, str):
            raise UsageError(
                f"report[{quoted(path)}]: give a module's path; report.top() has the rows"
            )
        rows = self._rows_by_name()
        if path not in rows:
            raise self._unknown(path)
        modules = {row.path: row for row in self.modules if row.is_module}
        return subtree_of(rows[path], modules)

    def what_if(
        self,
        factors: Mapping[str, float] | None = None,
        *,
        no_waits: bool = False,
        graph: bool = False,
        fuse: Sequence[str] = (),
        optimizer: Literal["fused"] | None = None,
        dtype: Literal["bf16", "fp16", "tf32"] | None = None,
        buckets: int | None = None,
    ) -> WhatIf:
        """Return what a step would take with some changes, all of them together.

        The recording is replayed without the profiler's cost, with other times for what the changes
        are about. What they do not change keeps its order and its time.

        Args:
            factors: The part of its time that remains for each module, from 0 (free) to 1 (as it
                is): of its forward, its backward, what runs again, and its share of the update. A
                key is a path or a pattern, as in ``top(match=...)``, and holds for the modules
                inside it. If several keys name one module, the last one counts.
            no_waits: Whether the host waits for no device.
            graph: Whether the host launches forward, backward and update at once, as a CUDA graph
                does.
            fuse: Modules, by path or pattern, whose chains of operators run as one kernel each: one
                that takes as long as the usual one of the chain.
            optimizer: ``"fused"`` for an update that reads and writes all parameters once.
            dtype: The type in which matrix products run that now run in fp32 without tensor cores.
            buckets: In how many equal buckets gradients are exchanged.

        Returns:
            The step and what it saves, with a range.

        Raises:
            KeyError: If a key names no module; the message suggests near names.
            UsageError: If an argument is invalid, a change cannot be predicted, or the report
                cannot be replayed: it was read from JSON, or ``not_replayed`` says why.

        Example:
            >>> report.what_if({"patch_drop": 0.5}).saves_ns
            2162047
            >>> report.what_if(graph=True).step_ns  # the host launches all at once
            14480320
        """
        for name, flag in (("no_waits", no_waits), ("graph", graph)):
            if not isinstance(flag, bool):
                raise UsageError(f"what_if({name}={quoted(flag)}): give True or False")
        if buckets is not None and not (is_whole(buckets) and buckets):
            raise UsageError(f"what_if(buckets={quoted(buckets)}): give a number of at least 1")
        if isinstance(fuse, str) or not all(isinstance(name, str) for name in fuse):
            raise UsageError(f"what_if(fuse={quoted(fuse)}): give a list of modules")
        changes = {
            "factors": {} if factors is None else self._factors_by_path(factors),
            "no_waits": no_waits,
            "graph": graph,
            "fuse": [path for name in fuse for path in self._paths_of(name)],
            "optimizer": optimizer,
            "dtype": dtype,
            "buckets": buckets,
        }
        changes = {name: value for name, value in changes.items() if value}
        if not changes:
            raise UsageError("what_if() needs a change, such as {'layers.0': 0.5} or graph=True")
        predictor = predictor_of(self)
        if predictor is None:
            reason = self.not_replayed or (
                "the report holds no recording, because it was read from JSON or copied: "
                "locate the trace again"
            )
            raise UsageError(f"what_if() cannot replay the step: {reason}")
        return predictor.what_if(changes)

    def _factors_by_path(self, factors: Mapping[str, float]) -> dict[str, float]:
        if not isinstance(factors, Mapping):
            raise UsageError(
                f"what_if({quoted(factors)}): give a dict of modules and the part of their time "
                "that remains, such as {'layers.0': 0.5}"
            )
        paths = {}
        for name, factor in factors.items():
            if not is_number(factor, 0, 1):
                raise UsageError(
                    f"what_if({quoted(name)}: {quoted(factor)}): give the part of its time that "
                    "remains, from 0 (free) to 1 (as it is)"
                )
            paths.update(dict.fromkeys(self._paths_of(name), float(factor)))
        return paths

    def _paths_of(self, name: str) -> list[str]:
        """Return the paths of the rows that a name or a pattern stands for; at least one."""
        rows = self._rows_by_name()
        if name in rows:
            return [rows[name].path]
        paths = []
        if isinstance(name, str) and is_pattern(name):
            matches = patterns_of(name).matches
            paths = [row.path for row in self.modules if row.is_module and matches(row.path)]
        if not paths:
            raise self._unknown(name)
        return paths

    def _unknown(self, path: object) -> KeyError:
        near = near_names(path, self._rows_by_name()) if isinstance(path, str) else ""
        return KeyError(f"no module {path!r} in this report{near}")

    def _rows_by_name(self) -> dict[str, Row]:
        # Of several rows with one name, a module's path comes first, then the root's class.
        modules = {row.path: row for row in self.modules if row.is_module}
        rows = {row.path: row for row in self.modules if not row.is_module}
        rows.update((row.name, row) for row in modules.values() if not row.path)
        rows.update(modules)
        return rows

    def save(
        self, path: str | os.PathLike[str], *, force: bool = False, preview: bool = False
    ) -> Path:
        """Write the report in the format that the suffix of ``path`` names.

        Of a live profile, ``profile(trace=)`` or ``locate(trace=)`` write the labelled copy of the
        trace. The file is written completely or not at all.

        Args:
            path: Where to write: ``.html`` (a self-contained page), ``.json`` (what ``load``
                reads), ``.txt``, ``.csv`` and ``.md`` (text and tables), ``.speedscope.json`` (a
                flame graph), or ``.trace.json`` and ``.json.gz`` (the trace file again, with tracks
                of ``backward: …`` spans).
            force: Whether to overwrite a file. Default false.
            preview: Whether a page or a text shows the findings of preview rules too. Default
                false.

        Returns:
            The path of the file.

        Raises:
            OutputExistsError: If the file exists, without ``force``.
            UsageError: If the suffix names no format, ``path`` is the trace itself, or the trace to
                copy is missing or has changed.

        Example:
            >>> report.save("report.html")
            PosixPath('report.html')
        """
        if path_text(path, "save").lower().endswith(presented.LABELLED):
            return presented.save_labelled(self, path, force=force)

        return presented.forms().write(self, path, force=force, preview=preview)

    def show(self, *, height: int = 720, preview: bool = False) -> None:
        """Display the page that ``save("report.html")`` writes, in the output of a notebook's cell.

        Args:
            height: Of the frame, in pixels. Default 720.
            preview: Whether it shows the findings of preview rules too. Default false.

        Raises:
            UsageError: If this runs in no notebook and no IPython, or ``height`` is invalid.
        """
        presented.forms().show(self, height, preview=preview)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that ``save`` wrote as JSON.

        Args:
            path: The ``.json`` file.

        Returns:
            A report equal to the one that was saved.

        Raises:
            SourceNotFoundError: If the file is missing or cannot be read.
            NotATraceError: If it is not a report, contradicts itself, or has another schema.
            UsageError: If ``path`` is not a path.

        Example:
            >>> backspot.Report.load(report.save("report.json")) == report
            True
        """
        report: Report = presented.forms().read(path, cls)
        return report

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows as a ``pandas.DataFrame``.

        Returns:
            The rows of ``modules``, with the columns of the CSV form, in nanoseconds.

        Raises:
            MissingDependencyError: If pandas is not installed.

        Example:
            >>> frame = report.to_pandas()
            >>> frame.path[0], frame.shape
            ('patch_drop', (77, 44))
        """
        return presented.forms().as_frame(self)


def lines_of(report: Report) -> Sequence[LineOfStep]:
    """Return the lines of the user's Python in the step; none without stacks."""
    return report._lines()


def predictor_of(report: Report) -> Predictor | None:
    """Return what replays the report's recording; ``None`` where nothing can."""
    predictor_found: Predictor | None = beside(report, "predictor")
    return predictor_found


def changed(report: Report, predictor: Predictor | None = None, **fields: Any) -> Report:
    """Return a report with other values in some fields, which can still be replayed.

    ``None`` keeps the report's own predictor. What it knows besides its data is kept, too.
    """
    extras = {} if predictor is None else {"predictor": predictor}
    return with_beside(replace(report, **fields), {**known_beside(report), **extras})
