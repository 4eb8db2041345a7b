"""The report: frozen data that people read, compare, render and save.

In: nothing but numbers and names. Analysis builds these objects, and ``load`` reads them from JSON.
Out: the classes that users import from ``backspot``. All times are integer nanoseconds of a
typical step: the mean over the recorded steps but those that something held up. What ends in
``_by_step`` has one entry a recorded step, and ``recorded_*`` are sums over all of them.

- ``report.py``: ``Report``, with the methods that rank, look up, save, load and draw.
- ``costs.py``: what a ``Report`` holds: ``Row`` for each module, with its nodes, kernels and source
  lines; passes, devices and phases.
- ``findings.py``: ``Finding``, a cause with its places and its remedy.
- ``memory.py``: what is in memory: the peak of each device, and what each module keeps.
- ``limits.py``: how far modules are from what the device can do.
- ``work.py``: floating point operations and bytes of each module.
- ``counters.py``: what hardware counters say of each module.
- ``job.py``: ``JobReport``, many ranks of one job.
- ``savings.py``: what a step would save, as ``Row``, ``Finding`` and ``Report.what_if`` have it.
- ``subtrees.py``: ``Subtree``, a module with the modules inside it.
- ``grouping.py``: sums of rows by depth, class or pattern, and the totals of each module.
- ``hiccups.py``: ``Hiccup``, a step that something held up, and where.
- ``matching.py``: modules chosen by patterns of their paths.
- ``tracks.py``: the spans that a labelled copy of a trace adds.
- ``presented.py``: how results print and save themselves although they cannot import renderers.
- ``public.py``: how a class becomes one that users import from ``backspot``.

Terms: a *row* is one module, or one group of modules, or time that no module owns. The rows of a
report are a *partition* of the backward: in each step, and in the typical one, they sum to it
exactly. *Own* time excludes the modules inside, *total* time includes them. A
*node* is an autograd node. A *step* is what ``Report.step_unit`` says.
"""
