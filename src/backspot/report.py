"""The result: frozen data, with the few questions that people ask of it.

Times are integer nanoseconds summed over the recorded steps, so that sums are exact; properties give
milliseconds, and milliseconds per step where that is what people compare.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from backspot.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "SCHEMA",
    "Coverage",
    "DeviceCost",
    "NodeCost",
    "OperatorCost",
    "Pass",
    "Report",
    "Row",
    "Subtree",
]

SCHEMA = "backspot.report/1"
"""The version of the JSON form. A reader of version 1 reads every ``backspot.report/1``."""

Sort = Literal["wall", "gpu", "cpu"]
By = Literal["path", "class", "pattern"]
LabelSource = Literal["backspot", "lightning", "python", "none"]
StepUnit = Literal["profiler step", "optimizer step", "backward pass"]


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One kind of autograd node within one module: what it cost there.

    Attributes:
        name: the node's name as autograd gives it (``GatherBackward0``), or ``(recompute)`` for
            forward work that activation checkpointing ran again inside backward.
        count: how many such nodes ran.
        wall_ns: clock time, dealt out as the report's ``wall``.
        gpu_ns: summed durations of the kernels, copies and memsets that they launched.
        cpu_ns: time the host spent in them, less what is nested in others.
    """

    name: str
    count: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one module (or one group of modules) costs in the backward.

    The rows of a report partition it: no nanosecond stands in two rows. ``total_*`` adds the modules
    inside.

    Attributes:
        path: module path, ``""`` for the root; a group's name where rows were grouped; or what no
            module owns, in parentheses: ``(outside model)``, ``(autograd engine)``, …
        class_name: the module's class.
        root: the path of the outermost instrumented module that this one lies in.
        is_module: false for what no module owns.
        calls: forward calls recorded, without those that checkpointing ran again.
        wall_ns: clock time of the backward that this row is the reason for.
        gpu_ns: summed durations of the device work that it launched in backward.
        cpu_ns: time the host spent executing its nodes.
        forward_ns: clock time of its forward, by the same rule as ``wall_ns``.
        recompute_ns: the part of ``wall_ns`` that is forward work run again by checkpointing.
        total_wall_ns: ``wall_ns`` of this module and all inside it; likewise the other totals.
        nodes: its autograd nodes by name, the heaviest first.
        wall_ns_by_step: ``wall_ns`` in each recorded step.
        members: how many modules stand in this row (more than 1 only where rows were grouped).
    """

    path: str
    class_name: str
    root: str
    is_module: bool
    calls: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int
    forward_ns: int
    recompute_ns: int
    total_wall_ns: int
    total_gpu_ns: int
    total_cpu_ns: int
    total_forward_ns: int
    total_recompute_ns: int
    nodes: tuple[NodeCost, ...]
    wall_ns_by_step: tuple[int, ...]
    members: int = 1

    @property
    def name(self) -> str:
        """The path as people say it: the root is called by its class."""
        return self.path or self.class_name or "(root)"

    @property
    def label(self) -> str:
        """Path and class, ``blocks.3.attn (Attention)``: what to search a trace for."""
        if not self.is_module or not self.class_name or self.class_name == self.name:
            return self.name
        return f"{self.name} ({self.class_name})"

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return max(1, len(self.wall_ns_by_step))

    @property
    def wall_us(self) -> float:
        """``wall_ns`` in microseconds."""
        return self.wall_ns / 1e3

    @property
    def gpu_us(self) -> float:
        """``gpu_ns`` in microseconds."""
        return self.gpu_ns / 1e3

    @property
    def cpu_us(self) -> float:
        """``cpu_ns`` in microseconds."""
        return self.cpu_ns / 1e3

    @property
    def wall_ms_per_step(self) -> float:
        """Clock time in milliseconds, per step."""
        return self.wall_ns / 1e6 / self.steps

    @property
    def gpu_ms_per_step(self) -> float:
        """Device time in milliseconds, per step."""
        return self.gpu_ns / 1e6 / self.steps

    @property
    def cpu_ms_per_step(self) -> float:
        """Host time in milliseconds, per step."""
        return self.cpu_ns / 1e6 / self.steps

    @property
    def forward_ms_per_step(self) -> float:
        """Clock time of the forward in milliseconds, per step."""
        return self.forward_ns / 1e6 / self.steps

    @property
    def depth(self) -> int:
        """How far below its root the module lies: 0 for the root itself."""
        return _parts(self.path) - _parts(self.root) if self.is_module else 0


@dataclass(frozen=True, slots=True)
class Subtree:
    """A module with all that is inside it, as ``report[path]`` gives it.

    Attributes:
        row: the module itself; its ``total_*`` include the children.
        children: the modules directly inside, most expensive (in total wall time) first.
    """

    row: Row
    children: tuple[Subtree, ...]

    def __str__(self) -> str:
        from backspot.render.text import render_subtree

        return render_subtree(self)


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One kind of autograd node over all modules; ``path`` is the row that pays most of it."""

    name: str
    count: int
    wall_ns: int
    gpu_ns: int
    cpu_ns: int
    path: str


@dataclass(frozen=True, slots=True)
class Pass:
    """One backward pass.

    ``duration_ns == wall_ns + forward_ns + other_ns``, exactly.

    Attributes:
        start_ns: from the trace's first event.
        duration_ns: from the first node's start on the host to the later of the host's end and the end
            of the last device work that its nodes launched. Time that an earlier pass still holds is
            the earlier one's.
        wall_ns: the part that is backward; the rows' ``wall_ns`` sum to it over all passes.
        forward_ns: device work of the forward that was still running then.
        other_ns: device work of neither (the optimizer's, another stream's prefetch).
        gpu_ns: summed durations of the device work launched by the pass.
        cpu_ns: time the host spent inside its nodes.
        nodes: autograd nodes executed, AccumulateGrad included.
        step: index of the step that it belongs to.
    """

    start_ns: int
    duration_ns: int
    wall_ns: int
    forward_ns: int
    other_ns: int
    gpu_ns: int
    cpu_ns: int
    nodes: int
    step: int


@dataclass(frozen=True, slots=True)
class DeviceCost:
    """One device's part of the backward: its own wall and device time by row path."""

    device: int
    wall_ns: dict[str, int]
    gpu_ns: dict[str, int]


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share (0 to 1) of the backward's wall, gpu and cpu time that has a module as its owner."""

    wall: float
    gpu: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Report:
    """Which modules make the backward slow, ranked.

    Attributes:
        modules: rows that partition the backward, most wall time first; those that no module owns too.
        operators: the autograd nodes by name, over all modules.
        passes: the backward passes in the order in which they ran.
        devices: per-device costs; empty where the trace has no device work.
        step_unit: what counts as one step.
        step_ns: each step's clock time where the trace marks it, else the passes' in it.
        wall_ns: the backward's clock time; the rows sum to it.
        gpu_ns: the backward's device time; the rows sum to it.
        cpu_ns: the host's time in backward; the rows sum to it.
        coverage: the share of these with an owner among the modules.
        source: whose labels named the modules.
        has_gpu: whether the trace holds device work.
        warnings: what a reader must know before trusting the numbers.
        trace: what was read: a file's name, ``live profile``, …
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
    schema: str = SCHEMA

    @property
    def steps(self) -> int:
        """How many steps were recorded."""
        return max(1, len(self.step_ns))

    @property
    def wall_ms_per_step(self) -> float:
        """The backward's clock time in milliseconds, per step."""
        return self.wall_ns / 1e6 / self.steps

    def share(self, row: Row, sort: Sort = "wall") -> float:
        """The row's part (0 to 1) of the backward's wall, gpu or cpu time."""
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
                repeated layers, whose paths differ in numbers only: ``blocks.*.mlp.fc1``.

        Raises:
            UsageError: on a negative number or an unknown word.
        """
        if n is not None and n < 0:
            raise UsageError(f"top({n}): give a number of rows of at least 0, or None for all")
        if depth is not None and depth < 0:
            raise UsageError(f"depth={depth}: give a depth of at least 0, or None for all")
        if sort not in _SORT_KEYS:
            raise UsageError(f"sort={sort!r}: choose one of {', '.join(_SORT_KEYS)}")
        if by not in ("path", "class", "pattern"):
            raise UsageError(f"by={by!r}: choose one of path, class, pattern")
        rows: Sequence[Row] = self.modules
        if depth is not None:
            rows = fold(rows, depth)
        if by == "class":
            rows = _group(rows, lambda row: row.class_name or row.name)
        elif by == "pattern":
            rows = _group(rows, _pattern_of(rows))
        key = _SORT_KEYS[sort]
        ranked = sorted(rows, key=lambda row: (-key(row), -row.wall_ns, row.path))
        return tuple(ranked[:n])

    def __getitem__(self, path: str) -> Subtree:
        """The module at ``path`` with its children.

        Raises:
            KeyError: where the report has no such module; the message names near ones.
        """
        rows = {row.path: row for row in self.modules}
        if path not in rows:
            import difflib

            near = difflib.get_close_matches(path, rows, n=3, cutoff=0.5)
            hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
            raise KeyError(f"no module {path!r} in this report{hint}")
        within: dict[str | None, list[str]] = defaultdict(list)
        for other in rows.values():
            if other.is_module:
                within[_parent(other.path, rows)].append(other.path)

        def build(at: str) -> Subtree:
            children = sorted(
                (build(child) for child in within[at]),
                key=lambda child: (-child.row.total_wall_ns, child.row.path),
            )
            return Subtree(rows[at], tuple(children))

        return build(path)

    def __str__(self) -> str:
        from backspot.render.text import render_text

        return render_text(self)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the report; the suffix decides the form (``.json``, ``.csv``, ``.md``).

        The file appears whole or not at all.

        Args:
            path: where to.
            force: overwrite what is there.

        Raises:
            OutputExistsError: where the file exists and ``force`` is false.
            UsageError: on a suffix that names no form.
        """
        from backspot.render import save

        return save(self, path, force=force)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a report that ``save`` wrote as JSON; equal to the one that was saved.

        Raises:
            SourceNotFoundError: where there is no such file.
            NotATraceError: where it is no report, or of a newer schema.
        """
        from backspot.render.json import load

        return load(path)

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a ``pandas.DataFrame``, one row a module, times in nanoseconds.

        Raises:
            MissingDependencyError: where pandas is not installed.
        """
        from backspot.render.pandas import to_frame

        return to_frame(self)


_SORT_KEYS: dict[str, Callable[[Row], int]] = {
    "wall": lambda row: row.wall_ns,
    "gpu": lambda row: row.gpu_ns,
    "cpu": lambda row: row.cpu_ns,
}


def fold(rows: Iterable[Row], depth: int) -> tuple[Row, ...]:
    """Fold every row deeper than ``depth`` into its ancestor at that depth."""
    known = {row.path: row for row in rows if row.is_module}
    groups: dict[str, list[Row]] = defaultdict(list)
    others: list[Row] = []
    for row in rows:
        if not row.is_module:
            others.append(row)
        elif row.depth <= depth:
            groups[row.path].append(row)
        else:
            groups[".".join(row.path.split(".")[: _parts(row.root) + depth])].append(row)
    folded = [
        _merge(
            members,
            path=path,
            class_name=known[path].class_name if path in known else "",
            calls=known[path].calls if path in known else max(row.calls for row in members),
            members=1,
        )
        for path, members in groups.items()
    ]
    return (*folded, *others)


def _group(rows: Iterable[Row], name_of: Callable[[Row], str]) -> tuple[Row, ...]:
    groups: dict[tuple[bool, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.is_module, name_of(row) if row.is_module else row.path].append(row)
    return tuple(
        members[0]
        if len(members) == 1 and members[0].path == name
        else _merge(
            members,
            path=name,
            class_name=_shared_class(members),
            calls=sum(row.calls for row in members),
            members=len(members),
        )
        for (_, name), members in groups.items()
    )


def _shared_class(rows: Sequence[Row]) -> str:
    names = {row.class_name for row in rows}
    return names.pop() if len(names) == 1 else ""


def _pattern_of(rows: Iterable[Row]) -> Callable[[Row], str]:
    """Names paths by their pattern, but leaves alone what has no sibling of the same pattern."""
    count: dict[str, int] = defaultdict(int)
    for row in rows:
        if row.is_module:
            count[_pattern(row.path)] += 1
    return lambda row: _pattern(row.path) if count[_pattern(row.path)] > 1 else row.path


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def _merge(rows: Sequence[Row], *, path: str, class_name: str, calls: int, members: int) -> Row:
    paths = {row.path for row in rows}
    # A total holds what is inside already: only the outermost of the group count.
    outer = [row for row in rows if _parent(row.path, paths) is None]
    nodes: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        for node in row.nodes:
            sums = nodes[node.name]
            sums[0] += node.count
            sums[1] += node.wall_ns
            sums[2] += node.gpu_ns
            sums[3] += node.cpu_ns
    first = rows[0]
    return replace(
        first,
        path=path,
        class_name=class_name,
        calls=calls,
        members=members,
        wall_ns=sum(row.wall_ns for row in rows),
        gpu_ns=sum(row.gpu_ns for row in rows),
        cpu_ns=sum(row.cpu_ns for row in rows),
        forward_ns=sum(row.forward_ns for row in rows),
        recompute_ns=sum(row.recompute_ns for row in rows),
        total_wall_ns=sum(row.total_wall_ns for row in outer),
        total_gpu_ns=sum(row.total_gpu_ns for row in outer),
        total_cpu_ns=sum(row.total_cpu_ns for row in outer),
        total_forward_ns=sum(row.total_forward_ns for row in outer),
        total_recompute_ns=sum(row.total_recompute_ns for row in outer),
        nodes=ranked_nodes(NodeCost(name, *sums) for name, sums in nodes.items()),
        wall_ns_by_step=tuple(
            sum(column) for column in zip(*(row.wall_ns_by_step for row in rows), strict=True)
        ),
    )


def ranked_nodes(nodes: Iterable[NodeCost]) -> tuple[NodeCost, ...]:
    """The heaviest first; by wall time, then by device and host time."""
    return tuple(
        sorted(nodes, key=lambda node: (-node.wall_ns, -node.gpu_ns, -node.cpu_ns, node.name))
    )


def _parts(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _parent(path: str, among: Iterable[str]) -> str | None:
    """The nearest path in ``among`` that contains ``path``; ``""`` contains all."""
    while path:
        path = path.rpartition(".")[0]
        if path in among:
            return path
    return None


def add_totals(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Set each row's ``total_*`` from its own costs and those of the modules inside it."""
    own = {row.path: row for row in rows if row.is_module}
    fields = ("wall_ns", "gpu_ns", "cpu_ns", "forward_ns", "recompute_ns")
    totals: dict[str, list[int]] = {path: [0] * len(fields) for path in own}
    for path, row in own.items():
        at: str | None = path
        while at is not None:
            if own[at].root == row.root:
                for index, field in enumerate(fields):
                    totals[at][index] += getattr(row, field)
            at = _parent(at, own)
    result = []
    for row in rows:
        sums: Any = totals.get(row.path) if row.is_module else [getattr(row, f) for f in fields]
        result.append(
            replace(row, **{f"total_{field}": sums[index] for index, field in enumerate(fields)})
        )
    return tuple(result)
