"""The live half: label the modules of a model in the trace that ``torch.profiler`` records.

In comes a ``torch.nn.Module`` that trains. Out go labels in the trace and, from ``profile``, a
report. This is the only room that imports torch. It never changes the model: nothing raises, keeps
a tensor alive or changes the autograd graph, and after removal nothing is left.

An instrumentation is set up and removed by:

- ``instrumentation.py``: ``instrument`` and its handle. ``modules.py`` finds the modules under the
  paths that users know. ``hooks.py`` keeps Backspot out of copies of the model.
- ``recording.py``: the *stages* of a measurement: steps that are left alone, timed without a
  profiler, or recorded by one. ``memory_watch.py`` ends a recording before memory runs out, of
  which ``free_memory.py`` says how much is left.
- ``profiling.py``: ``profile`` runs the steps of its stages, shows ``progress.py`` and calls the
  pipeline.
- ``recorder.py``: has a training that somebody else runs, such as a script or a trainer, go
  through the same stages. ``running.py`` observes the steps of a script, ``updates.py`` those that
  no optimizer's hook tells of, and ``discovery.py`` finds its models. ``saving.py`` writes the
  report.
- ``acts.py``: what a part does with a training around its steps and after its report; ``parts.py``
  lists the parts. ``trials/`` tries what the findings of a report advise, beside the training,
  ``plan/`` settings on a copy of the whole model, ``gathering.py`` sends what each rank recorded
  to rank 0, which answers for all, and ``memory.py`` has what is in memory recorded.
- ``monitor.py``: ``Monitor`` watches the steps of a long training, without a profiler.

A module call that a profiler records goes through:

1. ``call_wrapper.py``: the *wrapper* around ``torch.nn.Module.__call__``, installed while a
   profiler records; ``class_calls.py`` puts it on the classes of modules, where compiled code
   depends on that method. Or ``hooks.py``: the *hooks* on the module, which ask first whether a
   profiler records.
2. ``calls.py``: the running *calls* of each thread. A call opens the *range* of its forward label
   and ends the range when the call returns.
3. ``exporting.py``: when the trace is exported, the backward labels are written into it.
4. ``source_lines.py``: the line of source that made each node.

With ``markers=True``, with ``hooks``, and where no trace is exported (``emit_nvtx``), backward
labels are written while the backward runs. Autograd numbers the nodes that a thread makes, and
calls then cut these sequence numbers into *intervals*, so that a node's number gives its owner.
``markers.py`` gives the *boundary nodes*, which made the inputs and outputs of calls, a *marker*: a
prehook that writes the label.

``step_log.py`` notes each step of a training, from its first to its last, without a profiler;
``termination.py`` lets it be written when a job is killed, and
``copies.py`` lets copies of the process end.
``loaders.py`` notes each batch that the program asks for, and whether it was ready.
``host_marks.py`` marks what holds up the host: the garbage collector, and lines that wait.
``out_of_memory.py`` says how a training died of memory, if it did, and ``memory_history.py`` who
had allocated what was in use.
``surroundings.py`` tells what makes the process slow beside its training. ``cgroups.py`` has the
control groups that limit it. ``process_number.py`` knows which process this is.

Of code that ``torch.compile`` generates, ``compiled.py`` records for which modules each launch
works, while the code is compiled: ``frames.py`` writes into the graphs what it later reads from the
code.

``ranks.py`` knows which rank of a job this process is. ``owner.py`` has what all of these share. An
*owner* is a module by its names and labels, a *scope* is one instrumentation; both refer to modules
weakly. ``sessions.py`` counts the profiler's *sessions*, so that no range ends in a later session
than its own. ``optimizers.py`` labels modules with gradients that no optimizer uses.
``torch_internals/`` has every private name of PyTorch.
"""

from __future__ import annotations

from backspot.errors import MissingDependencyError

try:
    import torch as _torch  # noqa: F401 - a torch that is installed but broken raises its own error
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingDependencyError(
        "backspot.profile, instrument and Monitor need torch, which is not installed: "
        "pip install torch (traces are read without it: backspot.locate, backspot show)"
    ) from None

from backspot.analysis.slowdowns import Alarm
from backspot.live.exporting import label_the_export_of
from backspot.live.instrumentation import Instrumentation, instrument
from backspot.live.loaders import mark_batches
from backspot.live.monitor import Monitor
from backspot.live.profiling import profile
from backspot.live.sessions import sessions

sessions.beside.append(mark_batches)
sessions.when_labelled = label_the_export_of

__all__ = ["Alarm", "Instrumentation", "Monitor", "instrument", "profile"]
