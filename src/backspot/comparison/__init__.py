"""Compare two sides: what changed, and which changes are more than noise.

In: one report on each side, or several of the same code, of any traces. Out: a ``Comparison``,
which is in ``results/comparison.py``. It has a ``Change`` for the step, for each of its phases, for
the whole backward and for each of its parts.

``compare.py`` is the way through: it collects the times of both sides and writes the notes. It uses
the other files in this order:

1. ``align.py`` matches modules by path, and finds modules that were renamed or moved.
2. ``judge.py`` decides the verdict of one change, and says why it cannot be told from a limit.
3. ``noise.py`` computes the interval within which a difference may be chance, load or clock, from
   the steps of one recording a side, or from several recordings.
4. ``distributions.py`` has what chance does to variances that few values show.

``clocks.py`` brings reports with real times and those with recorded times to one clock before that.
``plans.py`` says of each setting of the plan before whether it came true: what parts add to a
comparison of reports is in ``ADDING`` of their files.
``jobs.py`` compares jobs of many ranks in the same way, by their typical rank and rank by rank.
``scaled_to`` puts a report of another machine on the scale of this one, before they are compared.

Between equal recordings on an H200 with a busy host, the GPU time of a module varies by 0.1% and
its clock time by 4% to 20%. So modules are compared by GPU time if all reports have device work,
and otherwise with each other: what all modules do alike is the machine, or everything. The method
is described in ``noise.py``, and ``benchmarks/accuracy/compare_runs.py`` evaluates it.

Terms: a *side* is what was recorded before, or after. A *move* is one renaming that explains
several new paths. A change is *claimed* if the code is slower or faster, which takes three
recordings a side; sides *differ* in it if that is told of the recordings only, or if a module with
time beyond the noise is new or gone. The *common shift* is what all modules do alike, and the
*scatter* is how much they deviate from it. If a side has no module labels, autograd nodes are
compared by name, and nothing is claimed about them, because reports do not have the times of nodes
by step.
"""
