"""Compare two reports: what changed, and which changes are more than noise.

In: two reports, of any two traces. Out: a ``Comparison`` with a ``Change`` for the whole backward
and for each of its parts, in wall time per step.

``compare.py`` is the way through: it collects the times of both sides by step, decides the verdict
of each change, and writes the notes. It uses the other files in this order:

1. ``align.py`` matches modules by path, and finds modules that were renamed or moved.
2. ``noise.py`` computes the interval within which a difference may be chance.
3. ``changes.py`` has the types of the result. It imports nothing else of this room.

Terms: a *side* is one of the two recordings. A *move* is one renaming that explains several new
paths. A change is *claimed* if its verdict is slower or faster. The *spread* is how much the steps
of one recording vary. If a side has no module labels, autograd nodes are compared by name, and
nothing is claimed about them, because reports do not have the times of nodes by step.
"""
