"""What a report says about memory, beside the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from backspot.formatting import duration, labelled, percent, size
from backspot.render._sections import Amount, Column, Fields, Lead, Saying, Section, numbers
from backspot.render._words import Part, said
from backspot.render.view import View
from backspot.results.costs import Row
from backspot.results.findings import stable
from backspot.results.grouping import numberless
from backspot.results.memory import (
    MemoryKind,
    MemoryOfDevice,
    MemoryOfModule,
    MemoryTimeline,
)
from backspot.results.quantities import HOST
from backspot.results.report import Report

_SAID: dict[MemoryKind, str] = {
    "before": "from before the recording (parameters, …)",
    "activation": "activations",
    "recomputed": "recomputed activations",
    "gradient": "gradients of parameters",
    "backward": "gradients of activations and workspace",
    "forward": "workspace of the forward",
    "optimizer": "the optimizer's",
    "other": "other",
}
_LEAST = 0.01
"""What has a smaller share of the peak is left out."""
_HOLDERS = 3
"""How many of the modules that hold the most are named."""
_WORTH = 0.1
"""Share of the peak from which checkpointing is worth a sentence."""


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds memory at the peak: a module, or repeated layers.

    Attributes:
        name: its path, or the pattern of the paths.
        members: how many modules these are.
        kinds: the bytes of each kind, the largest first.
    """

    name: str
    class_name: str
    members: int
    kinds: Mapping[MemoryKind, int]

    @property
    def bytes(self) -> int:
        """The bytes of all kinds."""
        return sum(self.kinds.values())

    @property
    def parts(self) -> list[Part]:
        """It by name, with its class and the number of modules."""
        number: list[Part] = [("number", f"{self.members} × ")] if self.members > 1 else []
        return [*number, ("name", labelled(self.name, self.class_name))]


def _answer(report: Report) -> list[Part]:
    """One sentence: who holds most of the memory at the peak of the first device.

    If that is no module, it names the module that holds most, too. Empty without any memory.
    """
    if not report.memory:
        return []
    device = report.memory[0]
    holders = _holders(device, _names(report))
    if not holders:
        return [("text", f"All memory of {device.name} at its peak is from before the recording.")]
    first = holders[0]
    kind = next(iter(first.kinds))
    sentence = first.parts + said(
        f" {_hold(first)} {{}} of the memory at the peak: {{}} of {{}}, mostly {_SAID[kind]}",
        percent(first.bytes / device.peak_bytes),
        size(first.bytes),
        size(device.peak_bytes),
    )
    module = next((holder for holder in holders if holder.class_name), None)
    if module is not None and module is not first:
        sentence += [("text", "; of the modules, "), *module.parts]
        sentence += said(f" {_hold(module)} most, {{}}", size(module.bytes))
    return sentence


def _layers_hold_most(report: Report) -> bool:
    """Whether the modules that hold most at the peak are repeated layers."""
    holders = _holders(report.memory[0], _names(report)) if report.memory else []
    first = next((holder for holder in holders if holder.class_name), None)
    return first is not None and first.members > 1


def _checkpointing(report: Report) -> str:
    """What checkpointing repeated layers would free at most, and its price.

    All but one of the layers are free of their activations while that one runs its backward.
    Checkpointing frees only what is there at the peak: with small activations, the peak may be in
    the optimizer. ``""`` if that is little, or less than what a finding about memory is about.
    """
    if not report.memory:
        return ""
    activations = sum(
        share.bytes
        for device in _limiting(report)
        for share in device.live
        if share.kind == "activation"
    )
    repeated = [
        (
            min(
                row.memory.checkpoint_frees_bytes * (row.members - 1) // row.members,
                row.memory.total_at_peak_bytes,
                activations,
            ),
            row,
        )
        for row in report.top(by="pattern")
        if row.is_module and row.memory is not None and row.members > 1
    ]
    frees, row = max(repeated, key=lambda pair: pair[0], default=(0, None))
    most = max((finding.held_bytes or 0 for finding in stable(report.findings)), default=0)
    if row is None or frees < max(most, _WORTH * _peak_bytes(report)):
        return ""
    return (
        f"Checkpointing the {row.members} × {row.label} would free up to about {size(frees)}, for "
        f"their forward once more: {duration(row.total_forward_ns)} of a {report.per}."
    )


def _peak_bytes(report: Report) -> int:
    """What the memory of a row is a share of: the peaks of all GPUs, or of the host without any.

    A row has its memory on all GPUs together, each at its own peak.
    """
    return sum(device.peak_bytes for device in _limiting(report))


def _limiting(report: Report) -> Sequence[MemoryOfDevice]:
    """The devices with memory that runs out: the GPUs, or the host without any."""
    return [device for device in report.memory if device.device != HOST] or report.memory


def devices_of(report: Report) -> list[MemoryOfDevice]:
    """The devices with recorded memory, without a host that has next to nothing beside the GPUs."""
    most = max((device.peak_bytes for device in report.memory), default=0)
    return [device for device in report.memory if device.peak_bytes >= _LEAST * most]


def layers_over_time(report: Report, line: MemoryTimeline) -> list[tuple[str, list[int]]]:
    """What each name of a timeline has at each moment, and what all others have."""
    names = _names(report)
    layers = [
        (names.get(path, path), list(bytes_held))
        for path, bytes_held in zip(line.paths, line.bytes_by_path, strict=True)
    ]
    shown_bytes = [sum(bytes_held) for bytes_held in zip(*line.bytes_by_path, strict=True)]
    others = [
        max(0, all_ - shown_part)
        for all_, shown_part in zip(line.allocated_bytes, shown_bytes, strict=True)
    ]
    return [*layers, ("all others", others)]


def _facts(report: Report, device: MemoryOfDevice) -> list[str]:
    names = _names(report)
    of_reserved = (
        f" of {size(device.reserved_at_peak_bytes)} reserved"
        if device.reserved_at_peak_bytes
        else ""
    )
    module = names.get(device.peak_path, device.peak_path)
    facts = [
        f"memory of {device.name}: peak {size(device.peak_bytes)}{of_reserved}, "
        f"in the {device.peak_phase} of {module}"
    ]
    least = _LEAST * device.peak_bytes
    facts += [
        f"{size(bytes_held)} {_SAID[kind]}"
        for kind, bytes_held in device.kinds.items()
        if bytes_held > least
    ]
    holders = [holder for holder in _holders(device, names)[:_HOLDERS] if holder.bytes > least]
    if holders:
        most = (
            f"{f'{holder.members} × ' if holder.members > 1 else ''}{holder.name} "
            f"{size(holder.bytes)}"
            for holder in holders
        )
        facts.append(f"most in {', '.join(most)}")
    return facts


def _hold(holder: _Holder) -> str:
    return "hold" if holder.members > 1 else "holds"


def _names(report: Report) -> dict[str, str]:
    return {row.path: row.name for row in report.modules}


def _holders(device: MemoryOfDevice, names: Mapping[str, str]) -> list[_Holder]:
    """Who holds memory at the peak, the most first: modules, repeated layers as one."""
    by_module: dict[tuple[str, str], Counter[MemoryKind]] = {}
    paths: dict[tuple[str, str], set[str]] = {}
    for share in device.live:
        if share.kind != "before":
            key = numberless(share.path), share.class_name
            by_module.setdefault(key, Counter())[share.kind] += share.bytes
            paths.setdefault(key, set()).add(share.path)
    holders = []
    for key, kinds in by_module.items():
        (path, *more) = paths[key]
        name = key[0] if more else names.get(path, path)
        holders.append(_Holder(name, key[1], 1 + len(more), dict(kinds.most_common())))
    return sorted(holders, key=lambda holder: -holder.bytes)


# In the outputs ----------------------------------------------------------------------------------


def _sections(report: Report, _: View) -> list[Section]:
    """For each device: its peak, what is live then, and who holds the most."""
    if not report.memory:
        return []
    terms = [("memory", "what the module has in memory when most is in use, in MB")]
    first, *others = (
        Section("facts", "memory", _facts(report, device)) for device in devices_of(report)
    )
    return [replace(first, units="memory in MB", terms=terms), *others]


def _lead(report: Report) -> Lead | None:
    """What a screen begins with where rows are ranked by memory."""
    if not report.memory:
        return None
    first, *others = (_facts(report, device) for device in devices_of(report))
    peak_bytes = max(1, _peak_bytes(report))

    def share(row: Row) -> float:
        return (0 if row.memory is None else row.memory.at_peak_bytes) / peak_bytes

    return Lead(
        "memory",
        _answer(report),
        [first[:-1], *(facts[:1] for facts in others)],  # the table has the modules
        _checkpointing(report),
        _layers_hold_most(report),
        share,
        report.memory_asked,
    )


def _columns(
    report: Report, rows: Sequence[Row], view: View, _: Callable[[int], str]
) -> list[Column]:
    """What each row has in memory at the peak, and its share of it where that ranks the rows."""
    if not report.memory:
        return []
    at_peak = [None if row.memory is None else row.memory.at_peak_bytes for row in rows]
    cells = numbers("" if bytes_held is None else _megabytes(bytes_held) for bytes_held in at_peak)
    amount = Column("amount", "memory", cells, full_head="memory MB", need=1)
    if view.order != "memory":
        return [amount]
    peak = _peak_bytes(report)
    shares = (
        "" if bytes_held is None or not peak else percent(bytes_held / peak)
        for bytes_held in at_peak
    )
    return [
        replace(amount, need=0, style="bold", leads=True),
        Column("share", "share", numbers(shares), gap=1, leads=True),
    ]


def _megabytes(count: int) -> str:
    megabytes = count / 1e6
    return (
        f"{megabytes:,.{0 if megabytes >= 100 else 1}f}"
        if megabytes >= 0.05 or not megabytes
        else "0.0"
    )


def _fields(report: Report) -> Fields | None:
    """What each row has in memory, for programs."""
    if not report.memory:
        return None
    names = [field.name for field in fields(MemoryOfModule)]
    return Fields(names, lambda row: [getattr(row.memory, name, None) for name in names])


def _amounts(report: Report) -> list[Amount]:
    """What each row has in memory at the peak, for a page."""
    peak = _peak_bytes(report)
    if not peak:
        return []
    details = [
        ("at_peak_bytes", "MB at the peak"),
        ("kept_bytes", "MB kept for the backward"),
        ("checkpoint_frees_bytes", "MB that checkpointing frees"),
    ]
    return [
        Amount(
            "memory",
            name="Memory",
            head="memory",
            title="memory at the peak",
            whole=peak,
            field="memory",
            of="at_peak_bytes",
            details=details,
            summed=("at_peak_bytes", "kept_bytes"),
        )
    ]


SAYING = Saying(
    _sections,
    _columns,
    _fields,
    _lead,
    amounts=_amounts,
    needs={"memory": "the memory (--memory)"},
)
