"""The report: frozen data that people read, compare, render and save.

In: nothing but numbers and names. Analysis builds these objects, and ``load`` reads them from JSON.
Out: the classes that users find here, as ``backspot.results.NodeCost``; the root of the package
has the few that they name most. All times are integer nanoseconds of a
typical step: the mean over the recorded steps but those that something held up. What ends in
``_by_step`` has one entry a recorded step. Clock times, and times of the host, are those of a step
that nothing records where such steps were timed, and ``recorded_*`` beside them are as recorded.

- ``report.py``: ``Report``, with the methods that rank, look up, save, load and draw; ``Answer``,
  what costs most in its step.
- ``costs.py``: what a ``Report`` holds: ``Row`` for each module, with its nodes, kernels, source
  lines and work; passes, devices and phases; steps that something held up.
- ``findings.py``: ``Finding``, a cause with its places and its remedy; what a step would save.
- ``trials.py``: ``Tried``, what a trial of a remedy measured.
- ``plan.py``: ``Plan``, the settings that were tried on a copy of the model.
- ``training.py``: ``Training``, all steps of a training, noted without a profiler.
- ``quantities.py``: the numbers that all of these can hold.
- ``rare.py``: ``RareWork``, what recurs in some steps only.
- ``host.py``: where the host waits for a device, what it launches, which lines it runs.
- ``memory.py``: what is in memory: the peak of each device, and what each module keeps.
- ``out_of_memory.py``: ``OutOfMemory``, a training that died of memory, and who held it.
- ``work.py``: how much work modules do; ``limits.py``: how far they are from what the device can
  do.
- ``job.py``: ``JobReport``, many ranks of one job.
- ``comparison.py``: ``Comparison``, two reports side by side.
- ``grouping.py``: sums of rows by depth, class or pattern, the totals of each module, and
  ``Subtree``, a module with the modules inside it.
- ``tracks.py``: the spans that a labelled copy of a trace adds.

What a part adds is in its own file: ``InReport`` and ``InRow`` have the fields, and ``Report`` and
``Row`` are made of them.

Terms: a *row* is one module, or one group of modules, or time that no module owns. The rows of a
report are a *partition* of the backward: in each step, and in the typical one, they sum to it
exactly. *Own* time excludes the modules inside, *total* time includes them. A
*node* is an autograd node. A *step* is what ``Report.step_unit`` says.
"""

from __future__ import annotations

from backspot.results.comparison import Change, Comparison, Move, Side
from backspot.results.costs import (
    Coverage,
    DeviceCost,
    FusedKernel,
    FusedPart,
    Hiccup,
    KernelCost,
    Launches,
    LineCost,
    NodeCost,
    OperatorCost,
    Pass,
    Phase,
    Row,
    WallKinds,
)
from backspot.results.findings import (
    Finding,
    FirstRemedy,
    Place,
    ReplayedStep,
    Saving,
    WhatIf,
)
from backspot.results.grouping import Subtree
from backspot.results.host import HostLine, StepPicture, Wait
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
from backspot.results.memory import MemoryOfDevice, MemoryOfModule, MemoryShare, MemoryTimeline
from backspot.results.out_of_memory import HeldMemory, OutOfMemory
from backspot.results.plan import Difference, Plan, PlannedStep, Rung
from backspot.results.rare import RareWork
from backspot.results.report import Answer, Report
from backspot.results.training import (
    Apart,
    LoaderUse,
    MemoryGrowth,
    Stretch,
    Training,
)
from backspot.results.trials import Tried, Variant
from backspot.results.work import WorkOfModule

__all__ = sorted(name for name, value in vars().copy().items() if isinstance(value, type))
