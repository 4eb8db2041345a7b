"""Replay a recorded step without the profiler's cost, or with part of its work taking other time.

In: a ``Recording``. Out: what a step takes, and what it saves if modules take less time, or with
other changes.

The files work in this order:

1. ``host`` has what the profiler and labels cost for each event. It puts the points of all threads
   of the program into one line, and shortens the intervals between the points by these costs.
2. ``devices`` finds what each piece of device work waited for: its launch, the work before it in
   its queue, or work of another queue. ``waits`` finds what the host waited for.
3. ``replayable`` compiles these into one graph, or refuses with a reason: ``Refusal``.
4. ``schedule`` divides the graph into batches, and ``simulation`` runs through these once, for
   many variants of the durations at a time.
5. ``replay`` fits the costs to a measured step. ``saving`` replays a recording with many changes at
   a time. ``changes`` has what can be asked for by name: a module
   that is faster, no waits, a fused optimizer.
6. ``predict`` turns these into what reports have: typical savings with their range.

The method is that of replayed training graphs (Daydream, dPRO) with the question of Coz: what if
this part were faster? Each constraint of the graph holds exactly in the recording, so that a replay
without any change returns the recorded times.

Terms: a *line* is the time of the host as intervals between neighbouring points. A *station* is a
moment of the host at which something is launched or waited for. A *constraint* is an event that
another one cannot come before, and the *lag* between both. A *variant* is one set of durations.
"""
