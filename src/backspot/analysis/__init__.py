"""From the events of a trace to what its backward costs, and why.

The rooms work in this order, and ``backspot.pipeline`` calls them one after the other. ``whole``
leaves out what was recorded in part, before accounting.

1. ``attribution`` takes ``trace.Events`` and finds the owner of all work: ``Ownership``.
2. ``accounting`` takes the ownership and deals out clock time: rows, passes, steps and phases.
3. ``findings`` takes all of these and looks for reasons why a step is slow.
4. ``replay`` predicts what a step takes without the profiler, and what it saves if a part of its
   work takes less time.

``timeline`` has the arithmetic of intervals that all rooms use, and ``typical`` the mean over the
steps that count. ``caveats`` has the warnings that a reader of the numbers needs, and ``recorded``
where and how a trace was recorded.

Terms:

- *pass*: one run of autograd's engine, such as one ``loss.backward()``; a variable ``run`` holds
  its index, because ``pass`` is a keyword.
- *step*: one iteration of the training loop; it can have several passes.
- *span*: an interval on a host thread that owns work: a module call or a node.
- *node*: one execution of an autograd node, such as ``MmBackward0``, by the engine.
- *owner*: who pays for time: a module or a special owner, such as ``(autograd engine)``.
- *interval*: the time between two moments.
- *piece*: an amount of time of one pass, owner, node and source line.
- *marker*: an event that Backspot's hooks write into a node, with the module that owns the node.
- *label*: the name of such a marker, or of the event around a module's call in forward.
- *window*: the clock time of a pass or a step, until the device work that it launched has ended.
- *track*: nested spans ``backward: …`` in the labelled copy of a trace, for one thread or stream.
- *place*: a module, or another part of the step, where a finding's cost arises.
"""
