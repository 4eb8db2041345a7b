"""Backspot finds the module that makes a PyTorch backward pass slow.

    print(backspot.profile(step, model))   # runs a few training steps

    with backspot.instrument(model):
        ...                                # profile a few steps with torch.profiler yourself
    print(backspot.locate(prof))           # or the path of a trace

Importing ``backspot`` imports neither torch nor numpy: public names are loaded on first use, and
only ``profile``, ``instrument`` and ``Monitor`` need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backspot._version import __version__
from backspot.results import presented

if TYPE_CHECKING:
    from backspot.comparison.changes import Change, Comparison, Move, Side
    from backspot.comparison.compare import compare
    from backspot.errors import (
        AlreadyInstrumentedError,
        BackspotError,
        MissingDependencyError,
        NoBackwardError,
        NotATraceError,
        OutputExistsError,
        SourceNotFoundError,
        UsageError,
    )
    from backspot.job.gather import ranks
    from backspot.live import Alarm, Instrumentation, Monitor, instrument, profile
    from backspot.pipeline import locate
    from backspot.results.costs import (
        Coverage,
        DeviceCost,
        FusedKernel,
        FusedPart,
        KernelCost,
        LineCost,
        NodeCost,
        OperatorCost,
        Pass,
        Phase,
        Row,
        WallKinds,
    )
    from backspot.results.counters import CountersOfModule
    from backspot.results.findings import Finding, Place
    from backspot.results.hiccups import Hiccup
    from backspot.results.job import (
        GroupCost,
        JobFinding,
        JobReport,
        LostRank,
        ModuleSpread,
        RankCost,
        RankLane,
        SlowestRank,
    )
    from backspot.results.limits import LimitOfModule, Peaks
    from backspot.results.memory import (
        MemoryOfDevice,
        MemoryOfModule,
        MemoryShare,
        MemoryTimeline,
    )
    from backspot.results.report import Report
    from backspot.results.savings import ReplayedStep, Saving, WhatIf
    from backspot.results.subtrees import Subtree
    from backspot.results.work import WorkOfModule
    from backspot.trace.source import Source

__all__ = [
    "Alarm",
    "AlreadyInstrumentedError",
    "BackspotError",
    "Change",
    "Comparison",
    "CountersOfModule",
    "Coverage",
    "DeviceCost",
    "Finding",
    "FusedKernel",
    "FusedPart",
    "GroupCost",
    "Hiccup",
    "Instrumentation",
    "JobFinding",
    "JobReport",
    "KernelCost",
    "LimitOfModule",
    "LineCost",
    "LostRank",
    "MemoryOfDevice",
    "MemoryOfModule",
    "MemoryShare",
    "MemoryTimeline",
    "MissingDependencyError",
    "ModuleSpread",
    "Monitor",
    "Move",
    "NoBackwardError",
    "NodeCost",
    "NotATraceError",
    "OperatorCost",
    "OutputExistsError",
    "Pass",
    "Peaks",
    "Phase",
    "Place",
    "RankCost",
    "RankLane",
    "ReplayedStep",
    "Report",
    "Row",
    "Saving",
    "Side",
    "SlowestRank",
    "Source",
    "SourceNotFoundError",
    "Subtree",
    "UsageError",
    "WallKinds",
    "WhatIf",
    "WorkOfModule",
    "__version__",
    "compare",
    "instrument",
    "locate",
    "profile",
    "ranks",
]

_HOMES = {
    "Alarm": "backspot.live",
    "AlreadyInstrumentedError": "backspot.errors",
    "BackspotError": "backspot.errors",
    "Change": "backspot.comparison.changes",
    "Comparison": "backspot.comparison.changes",
    "CountersOfModule": "backspot.results.counters",
    "Coverage": "backspot.results.costs",
    "DeviceCost": "backspot.results.costs",
    "Finding": "backspot.results.findings",
    "FusedKernel": "backspot.results.costs",
    "FusedPart": "backspot.results.costs",
    "GroupCost": "backspot.results.job",
    "Hiccup": "backspot.results.hiccups",
    "Instrumentation": "backspot.live",
    "JobFinding": "backspot.results.job",
    "JobReport": "backspot.results.job",
    "KernelCost": "backspot.results.costs",
    "LimitOfModule": "backspot.results.limits",
    "LineCost": "backspot.results.costs",
    "LostRank": "backspot.results.job",
    "MemoryOfDevice": "backspot.results.memory",
    "MemoryOfModule": "backspot.results.memory",
    "MemoryShare": "backspot.results.memory",
    "MemoryTimeline": "backspot.results.memory",
    "MissingDependencyError": "backspot.errors",
    "ModuleSpread": "backspot.results.job",
    "Monitor": "backspot.live",
    "Move": "backspot.comparison.changes",
    "NoBackwardError": "backspot.errors",
    "NodeCost": "backspot.results.costs",
    "NotATraceError": "backspot.errors",
    "OperatorCost": "backspot.results.costs",
    "OutputExistsError": "backspot.errors",
    "Pass": "backspot.results.costs",
    "Peaks": "backspot.results.limits",
    "Phase": "backspot.results.costs",
    "Place": "backspot.results.findings",
    "RankCost": "backspot.results.job",
    "RankLane": "backspot.results.job",
    "ReplayedStep": "backspot.results.savings",
    "Report": "backspot.results.report",
    "Row": "backspot.results.costs",
    "Saving": "backspot.results.savings",
    "Side": "backspot.comparison.changes",
    "SlowestRank": "backspot.results.job",
    "Source": "backspot.trace.source",
    "SourceNotFoundError": "backspot.errors",
    "Subtree": "backspot.results.subtrees",
    "UsageError": "backspot.errors",
    "WallKinds": "backspot.results.costs",
    "WhatIf": "backspot.results.savings",
    "WorkOfModule": "backspot.results.work",
    "compare": "backspot.comparison.compare",
    "instrument": "backspot.live",
    "locate": "backspot.pipeline",
    "profile": "backspot.live",
    "ranks": "backspot.job.gather",
}


def _forms() -> presented.Forms:
    from backspot import render

    return render


def _labelling() -> presented.Labelling:
    from backspot import pipeline

    return pipeline


# Results print and save themselves through the renderers, which import the results. Only the root
# of the package knows both, and it imports the renderers on first use.
presented.forms, presented.labelling = _forms, _labelling


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'backspot' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """Add the magic command ``%%backspot`` to IPython; called by ``%load_ext backspot``."""
    from backspot.integrations.ipython import CellMagic

    shell.register_magic_function(CellMagic(shell).backspot, "cell")


def __dir__() -> list[str]:
    return [*__all__]
