"""How much: the clock time of the backward by owner, and of the whole step by phase.

What comes in is ``Ownership``; what goes out are the rows, passes and phases of a report. All sums
are exact: each nanosecond of a window belongs to one owner, and each of a step to one phase.

1. ``clock`` decides what runs at each moment: a piece of device work that runs or is queued, or
   else a span that the host executes. A ``Clock`` is made once and shared by all that follow.
2. ``steps`` finds when each step begins and ends on the clock.
3. ``holders`` has what can hold the clock, and its owners: compiled code can have several. It also
   lists the kernels that are split.
4. ``ledger`` cuts the clock into intervals of one step, one pass and one holder, once for all who
   sum up clock time: rows, phases, findings and the summaries of ranks.
5. ``activity`` classifies the host's time into phases such as data loading and forward;
   ``forwards`` tells apart what models run for without gradients, such as a rollout.
6. ``phases`` sums up the ledger by phase, and chooses the steps that a typical step is the mean of.
7. ``unrecorded`` has the pace of the clock: how long each moment takes in a step that is not
   recorded. A ledger with that pace has the times of such a step, and so has all that sums it up.
8. ``rows`` sums it up by owner, node and source line; ``amounts`` has these sums, and the operators
   that show on a CPU what kernels show on a GPU.

Beside the clock, ``waits`` finds the calls in which the host waits for a device, ``batches`` which
batches of worker processes were late, and ``launching`` counts the device work of each phase and
module, and what the device waits for.

``work`` counts floating point operations and the bytes that they move, with the formulas of the
operators in ``formulas/``; ``peaks`` has what devices can do at best.
"""
