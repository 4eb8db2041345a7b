"""What do labels, reading and starting cost?

- ``overhead.py``: a training step with the profiler off and on, by variant of labels; the models
  and variants are in ``overhead_models.py``.
- ``read.py``: seconds and memory for reading traces of 30 MB to 1.2 GB, beside other tools. Each
  tool of ``reading_tools.py`` reads in a process of its own.
- ``startup.py``: how long a command takes before it does anything.
- ``leaks.py``: objects, nodes and memory over thousands of steps.

Variants are measured in turn within one run, and compared round by round, so that other work on the
machine meets all of them. Results hold medians with quartiles, or intervals.
"""
