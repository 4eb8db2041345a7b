"""The report: frozen data, with methods that rank, look up, save, load and draw.

All times are integer nanoseconds of a typical step: the mean over the recorded steps but those
that something held up. What ends in ``_by_step`` has one entry a recorded step. Both sum exactly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from backspot import presented
from backspot.checks import check_choice, is_number, is_whole
from backspot.errors import UsageError
from backspot.formatting import quoted, visible
from backspot.paths import path_text
from backspot.presented import Presented, public
from backspot.results.costs import (
    Coverage,
    DeviceCost,
    FusedKernel,
    Hiccup,
    OperatorCost,
    Order,
    Pass,
    Phase,
    Row,
    Sort,
    time_of,
)
from backspot.results.findings import Finding, Predictor, ReplayedStep, Saving, WhatIf
from backspot.results.grouping import (
    Subtree,
    fold,
    group,
    is_pattern,
    near_names,
    pattern_of,
    patterns_of,
    subtree_of,
)
from backspot.results.host import HostLine, Wait
from backspot.results.job import JobReport
from backspot.results.limits import LimitOfModule, Peaks, limit_of
from backspot.results.memory import MemoryOfDevice
from backspot.results.quantities import Count, Measure, Ratio

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "backspot.report/2"
"""Version of the JSON form. A reader of version 2 reads every ``backspot.report/2``."""

_NOISY = 0.1
"""``Report.noise`` from which the module in the first row is often another one in truth."""

By = Literal["path", "class", "pattern"]
LabelSource = Literal["backspot", "lightning", "python", "none"]
StepUnit = Literal["profiler step", "optimizer step", "backward pass"]


class _Predicted:
    """What a report knows besides its data: it is not saved, compared, printed or copied.

    These are no fields, because every field is written as JSON. ``changed`` keeps them.
    """

    __slots__ = ("_job", "_predictor")


@public
@dataclass(frozen=True, slots=True)
class Report(Presented, _Predicted):
    """A ranking of modules by what they cost in the backward.

    ``print(report)`` shows it, a notebook displays it, ``report[path]`` returns one module with the
    modules inside it. All times ending in ``_ns`` are integer nanoseconds of a typical step: the
    mean over the recorded steps but ``hiccups``. So they add up: rows to the backward, a row's
    nodes to what it took in nodes, phases to the step.

    Two names may surprise: ``operators`` are autograd nodes, also available as ``nodes``, and
    ``source`` says whose labels named the modules, also available as ``labels``.

    Attributes:
        modules: Rows that partition the backward, most wall time first, rows for time that no
            module owns included.
        operators: Autograd nodes by name, over all modules, most wall time first.
        passes: Backward passes, in the order in which they ran.
        devices: Cost of each device. Empty if the trace has no device work.
        step_unit: What counts as one step.
        step_ns: Clock time of the step: from its mark, or from the end of the step before, until
            all work that it launched is done. If each backward pass counts as a step: from the
            start of its forward, or the time of the pass if no forward is recorded.
        wall_ns: Clock time of the backward. The rows sum to it.
        gpu_ns: Device time of the backward. The rows sum to it.
        cpu_ns: Host time in the backward. The rows sum to it.
        step_ns_by_step: Clock time of each recorded step.
        wall_ns_by_step: Clock time of the backward in each recorded step.
        gpu_ns_by_step: Device time of the backward in each recorded step.
        cpu_ns_by_step: Host time in the backward in each recorded step.
        coverage: Share of the recorded times that modules own.
        source: Whose labels named the modules: ``backspot``, ``lightning``, ``python`` (the module
            events of the profiler) or ``none``.
        has_gpu: Whether the trace has device work.
        warnings: What to know before trusting the numbers.
        trace: What was read: a file name, ``the live profile``, …
        phases: Where the clock time of the steps goes, in the order of a step. The phases sum to
            ``step_ns`` exactly. Empty if the trace has nothing but backward passes.
        findings: What makes the step slower than necessary, most expensive first.
        fused: Kernels of the backward in which ``torch.compile`` fused the work of several modules,
            most time first. Rows pay for their shares (``Row.split_ns``).
        unprofiled_step_ns: Clock time of a typical step without profiler and labels, ``None`` where
            it was not measured: a trace alone does not tell.
        unprofiled_step_ns_by_step: Clock time of each step that was timed without the profiler.
        replayed_step: The typical step without the profiler's cost, as a replay of the recording
            predicts it; all savings are of this step. ``None`` if the recording cannot be replayed.
        not_replayed: Why the recording cannot be replayed, in one sentence; ``""`` if it can.
        rules_looked: Number of rules that could judge the trace; 0 for a trace that is cut short.
        rules_unable: Number of rules that could not, because the trace has no device work.
        memory: Memory of each device, the one with the highest peak first and the host last. Empty
            unless the trace was recorded with ``profile_memory=True``.
        peaks: What the device can do at best, ``None`` unless the trace was recorded with
            ``record_shapes=True`` on a device that is known.
        mfu: Model FLOPs utilisation: share (0 to 1) of a step's clock time that its operations
            would take at the peak of the devices that are used, without forward work that runs
            again. ``None`` where it is not known.
        hiccups: Recorded steps that something held up, longest first. The typical step is the mean
            over the others, ``typical_steps``.
        noise: Share (0 to 1) of the backward that may belong to other rows than it seems to: by so
            much the typical steps disagree, where they do the same work. Above 0.1, the ranking
            cannot be trusted.
        recorded: Where and how the trace was recorded, as far as that is known: ``device``,
            ``time`` (UTC), and of a live profile ``torch`` (its version), ``command``, and how busy
            the ``host`` was. Two
            reports can be equal in spite of it.
        waits: Places where the host waits for a device, in any phase, the longest waits first.
            Empty if the trace has no device work.
        without_waits: How much less time a step would take if the host waited in none of them,
            ``None`` where that is not known.
        host: Lines of the user's Python, by phase, with what the host does there in a step; those
            in which devices have nothing to do for longest come first. Empty unless steps were
            recorded with stacks.
        schema: Version of the JSON form.

    Example:
        >>> report = backspot.locate("trace.json.gz")
        >>> report
        <Report of trace.json.gz: 77 rows, backward 20.906 ms per step>
        >>> print(report)
        patch_drop (PatchDropout) takes 28% of the backward: 5.9 ms, mostly
        GatherBackward0; without it, a step would take 3.5 ms less (1.9 ms to 5.1 ms)
        ...
        >>> [step_ns / 1e6 for step_ns in report.step_ns_by_step]
        [28.916678, 31.928339]
    """

    modules: tuple[Row, ...]
    operators: tuple[OperatorCost, ...]
    passes: tuple[Pass, ...]
    devices: tuple[DeviceCost, ...]
    step_unit: StepUnit
    step_ns: Count
    wall_ns: Count
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
    trace: str = ""
    phases: tuple[Phase, ...] = ()
    findings: tuple[Finding, ...] = ()
    fused: tuple[FusedKernel, ...] = ()
    unprofiled_step_ns: Count | None = None
    unprofiled_step_ns_by_step: tuple[Count, ...] = ()
    replayed_step: ReplayedStep | None = None
    not_replayed: str = ""
    rules_looked: Count = 0
    rules_unable: Count = 0
    memory: tuple[MemoryOfDevice, ...] = ()
    peaks: Peaks | None = None
    mfu: Measure | None = None
    hiccups: tuple[Hiccup, ...] = ()
    noise: Ratio = 0.0
    recorded: dict[str, str] = field(default_factory=dict, compare=False)
    waits: tuple[Wait, ...] = ()
    without_waits: Saving | None = None
    host: tuple[HostLine, ...] = ()
    schema: str = SCHEMA

    def __repr__(self) -> str:
        return (
            f"<Report of {visible(self.trace) or 'a trace'}: {len(self.modules)} rows, backward "
            f"{self.wall_ms:.3f} ms per {self.per}>"
        )

    @property
    def nodes(self) -> tuple[OperatorCost, ...]:
        """Autograd nodes by name, over all modules. Another name of ``operators``."""
        return self.operators

    @property
    def labels(self) -> LabelSource:
        """Whose labels named the modules. Another name of ``source``."""
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
        """Clock time of the backward in milliseconds."""
        return self.wall_ns / 1e6

    @property
    def recorded_wall_ns(self) -> int:
        """Clock time of the backward in nanoseconds, summed over all recorded steps."""
        return sum(self.wall_ns_by_step)

    @property
    def whole_ns(self) -> int:
        """Clock time of a typical step in nanoseconds, at least that of the backward."""
        return max(self.step_ns, self.wall_ns)

    @property
    def typical_steps(self) -> tuple[int, ...]:
        """Indices of the recorded steps that a typical step is the mean of: all but ``hiccups``."""
        left_out = {hiccup.step for hiccup in self.hiccups}
        return tuple(step for step in range(len(self.step_ns_by_step)) if step not in left_out)

    @property
    def is_noisy(self) -> bool:
        """Whether the typical steps disagree too much to rank modules by them."""
        return self.noise > _NOISY

    @property
    def has_work(self) -> bool:
        """Whether rows have work, because the recording has the shapes of operators' inputs."""
        return any(row.work is not None for row in self.modules)

    @property
    def utilisation(self) -> float:
        """Share (0 to 1) of the steps in which a device was running something."""
        whole = sum(phase.wall_ns for phase in self.phases)
        return sum(phase.busy_ns for phase in self.phases) / whole if whole else 0.0

    def share(self, row: Row, sort: Sort = "wall") -> float:
        """Return a row's share of the backward, or the share of the step that it saves.

        Args:
            row: A row of this report, from ``modules`` or ``top()``.
            sort: Share of which time: ``"wall"`` (default), ``"gpu"`` or ``"cpu"`` of the backward,
                or ``"saves"`` of the replayed step.

        Returns:
            The share, from 0 to 1; 0 if the report has none of that time.

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
            whole = self.replayed_step.ns if self.replayed_step else 0
        else:
            whole = time_of(self, sort)
        return time_of(row, sort) / whole if whole else 0.0

    def limit(self, row: Row) -> LimitOfModule | None:
        """Return how fast the backward of a row runs, and how far it is from the device's limit.

        Args:
            row: A row of this report, from ``modules`` or ``top()``.

        Returns:
            The limit; ``None`` if the work of the row is not known, or takes no device time.

        Raises:
            UsageError: If ``row`` is not a row.

        Example:
            >>> limit = report.limit(report["blocks.0.mlp.fc1"].row)
            >>> f"{limit.tflops:.0f} TFLOP/s, {limit.of_peak:.0%} of {report.peaks.device}"
            '464 TFLOP/s, 47% of NVIDIA H200'
        """
        if not isinstance(row, Row):
            raise UsageError(f"limit({quoted(row)}): give a row; report.modules has them")
        return limit_of(row, self.peaks)

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
            n: Maximum number of rows. ``None`` (default) returns all.
            depth: Add every module deeper than this to its ancestor at this depth; 0 is the root.
                Only modules that were called count, so ``model.layers.3`` is at depth 2 if
                ``layers`` is a ``ModuleList``. ``None`` (default) keeps every module.
            sort: Time to rank by: ``"wall"`` (default), ``"gpu"`` or ``"cpu"``; or ``"saves"``,
                how much less time a step would take without the row; ``"memory"``, what the row has
                in memory at the peak; or ``"headroom"``, the device time that it would save at the
                reachable part of the peak. Rows for which this is not known come last.
            by: ``"path"`` (default) returns one row per module; ``"class"`` one row per class;
                ``"pattern"`` one row per repeated layer: modules of one class whose paths differ
                only in numbers, ``blocks.*.mlp.fc1``.
            match: Pattern of the module paths to keep, or a list of patterns. ``*`` matches any
                part of a name, ``**`` any number of names: ``model.layers.*``, ``**.attn``. Every
                other module is added to the nearest module around it that matches, or to the root.
                With ``depth``, both must hold. ``None`` (default) keeps every module.

        Returns:
            The rows, most expensive first.

        Raises:
            UsageError: If ``n`` or ``depth`` is not a whole number of at least 0, if ``sort`` or
                ``by`` is unknown, or if a pattern of ``match`` matches no module.

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
        rows: Sequence[Row] = self.modules
        patterns = None
        if match is not None:
            patterns = patterns_of(match)
            patterns.check([row.path for row in rows if row.is_module])
        if depth is not None or patterns is not None:
            rows = fold(rows, depth, patterns.matches if patterns else None)
        if by == "class":
            rows = group(rows, lambda row: row.class_name or row.name)
        elif by == "pattern":
            rows = group(rows, pattern_of(rows))
        ranked = sorted(rows, key=lambda row: (-self._weight(row, sort), -row.wall_ns, row.path))
        return tuple(ranked[:n])

    def _weight(self, row: Row, order: Order) -> int:
        if order == "memory":
            return -1 if row.memory is None else row.memory.at_peak_bytes
        if order == "headroom":
            limit = limit_of(row, self.peaks)
            known = limit is not None and limit.headroom_ns is not None
            return limit.headroom_ns if known else -1  # type: ignore[union-attr, return-value]
        return time_of(row, order)

    def __getitem__(self, path: str) -> Subtree:
        """Return the module at ``path`` with the modules inside it.

        Args:
            path: Path of a module; ``""`` or its class for a root without a name; or the name of a
                row that no module owns.

        Returns:
            The module's row and its children.

        Raises:
            KeyError: If the report has no such module. The message suggests near names.
            UsageError: If ``path`` is not a string. Iterating over the report itself raises this
                too: its rows are in ``modules`` and ``top()``.

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

    def what_if(self, factors: Mapping[str, float]) -> WhatIf:
        """Return what a step would take if the backward of some modules took less time.

        The recording is replayed without the profiler's cost. The backward of a module is its
        autograd nodes on the host, and the kernels and copies that they launch; its forward and its
        part of the optimizer stay as they are. The order of all work stays, so time that other work
        needs anyway is not saved.

        Args:
            factors: For each module the part of its time that remains, from 0 (free) to 1 (as it
                is); 0.5 is a module twice as fast. A key is a path as in ``report[path]``, or a
                pattern of paths as in ``top(match=...)``. The modules inside it take the same part
                of their time, unless they have a key of their own. If several keys name one module,
                the last one counts.

        Returns:
            The step, and what it saves, with the range of such predictions.

        Raises:
            KeyError: If a key names no module. The message suggests near names.
            UsageError: If a factor is not a number from 0 to 1, or if the report cannot be
                replayed: it was read from JSON, or ``not_replayed`` has the reason.

        Example:
            >>> report.what_if({"patch_drop": 0.5}).saves_ns
            1922516
            >>> report.what_if({"blocks.*.attn": 0.0}).step_ns  # without all attention
            21894048
        """
        paths = self._factors_by_path(factors)
        predictor: Predictor | None = getattr(self, "_predictor", None)
        if predictor is None:
            reason = self.not_replayed or (
                "the report holds no recording, because it was read from JSON or copied: "
                "locate the trace again"
            )
            raise UsageError(f"what_if() cannot replay the step: {reason}")
        return predictor.what_if(paths)

    @property
    def job(self) -> JobReport | None:
        """The answer for all ranks of the job, on rank 0 after ``profile(..., ranks="all")``.

        It is not saved with the report, but has a ``save`` of its own. ``None`` otherwise.
        """
        return getattr(self, "_job", None)

    def _factors_by_path(self, factors: Mapping[str, float]) -> dict[str, float]:
        if not isinstance(factors, Mapping):
            raise UsageError(
                f"what_if({quoted(factors)}): give a dict of modules and the part of their time "
                "that remains, such as {'layers.0': 0.5}"
            )
        rows, paths = self._rows_by_name(), {}
        for name, factor in factors.items():
            if not is_number(factor, 0, 1):
                raise UsageError(
                    f"what_if({quoted(name)}: {quoted(factor)}): give the part of its time that "
                    "remains, from 0 (free) to 1 (as it is)"
                )
            found = [rows[name].path] if name in rows else []
            if not found and isinstance(name, str) and is_pattern(name):
                matches = patterns_of(name).matches
                found = [row.path for row in self.modules if row.is_module and matches(row.path)]
            if not found:
                raise self._unknown(name)
            paths.update(dict.fromkeys(found, float(factor)))
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

    # Not in Presented: IPython prefers a class's own __repr__ to the _repr_pretty_ of its base.
    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the report in the format that the suffix of ``path`` names.

        ``.html`` is a self-contained page; ``.json`` is what ``load`` reads; ``.csv`` and ``.md``
        are tables; ``.speedscope.json`` is a flame graph. ``.trace.json`` and ``.json.gz`` copy
        the trace file that the report was made from and add tracks of ``backward: …`` spans.
        A report of a live profile has no trace file: pass ``trace=`` to ``profile`` or ``locate``
        to write the copy.

        The file is written completely or not at all.

        Args:
            path: Where to write.
            force: Whether to overwrite an existing file. Default: ``False``.

        Returns:
            The path of the file.

        Raises:
            OutputExistsError: If the file exists and ``force`` is false.
            UsageError: If the suffix names no format, if ``path`` is the trace that the report was
                made from, or if a labelled trace is requested and the trace file is missing or has
                changed.

        Example:
            >>> report.save("report.html")
            PosixPath('report.html')
        """
        if path_text(path, "save").lower().endswith(presented.LABELLED):
            return presented.labelling().save_labelled(self, path, force=force)

        return presented.forms().write(self, path, force=force)

    def show(self, *, height: int = 720) -> None:
        """Display the page that ``save("report.html")`` writes, in the output of a notebook's cell.

        The page is a frame of its own, and the notebook keeps it when it is saved: 100 to 900 kB.

        Args:
            height: Height of the frame in pixels. Default: 720.

        Raises:
            UsageError: If this runs in no notebook and no IPython, or if ``height`` is not a whole
                number of at least 1.
        """
        presented.forms().show(self, height)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that ``save`` wrote as JSON.

        Args:
            path: The ``.json`` file.

        Returns:
            A report equal to the one that was saved.

        Raises:
            SourceNotFoundError: If the file is missing or cannot be read.
            NotATraceError: If the file is not a report, contradicts itself, or has another schema.
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
            One row per row of ``modules``, the columns of the CSV form, times in nanoseconds of a
            typical step.

        Raises:
            MissingDependencyError: If pandas is not installed.

        Example:
            >>> frame = report.to_pandas()
            >>> frame.path[0], frame.shape
            ('patch_drop', (77, 43))
        """
        return presented.forms().as_frame(self)


def changed(
    report: Report,
    predictor: Predictor | None = None,
    job: JobReport | None = None,
    **fields: Any,
) -> Report:
    """Return a report with other values in some fields, which can still be replayed.

    ``None`` keeps the report's own predictor, and its answer for all ranks.
    """
    found = replace(report, **fields)
    for name, given in (("_predictor", predictor), ("_job", job)):
        value = given or getattr(report, name, None)
        if value is not None:
            object.__setattr__(found, name, value)
    return found
