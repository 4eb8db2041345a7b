"""From the events of a trace to what its backward costs, and why.

The rooms work in this order:

1. ``attribution`` takes ``trace.Events`` and finds the owner of all work: ``Ownership``.
2. ``accounting`` takes the ownership and deals out clock time: rows, passes, steps and phases.
   ``recording`` holds the trace, its owners and these times, each computed once; it also leaves
   out what was recorded in part.
3. ``findings`` takes all of these and looks for reasons why a step is slow.
4. ``replay`` predicts what a step takes without the profiler, and what it saves if a part of its
   work takes less time.
5. ``memory`` finds what is in memory, and what holds too much of it.
6. ``host`` says where the host waits for a device and what it does at each line of Python, and
   draws one step.

``parts`` lists what a report gets from these rooms, and ``backspot.pipeline`` goes through the
list. A new capability is a room of its own with one function, and an entry in this list.

``timeline`` has the arithmetic of intervals that all rooms use, and ``typical`` the mean over the
steps that count. ``caveats`` has the warnings that a reader of the numbers needs, and ``recorded``
where and how a trace was recorded. ``rare`` has what recurs in some steps only, ``training`` sums
up all steps of a training, and ``slowdowns`` compares them with those before.

The terms are those of the glossary in ``CONTRIBUTING.md``.
"""
