"""How much: the clock time of the backward by owner, and of the whole step by phase.

What comes in is ``Ownership``; what goes out are the rows, passes and phases of a report. All sums
are exact: each nanosecond of a window belongs to one owner, and each of a step to one phase.

1. ``clock`` decides who holds each moment: a piece of device work that runs or is queued, or else
   a span that the host executes. A ``Clock`` is made once and shared by all that follow.
2. ``payers`` splits the time of a holder among its owners: compiled code can have several. It also
   lists the kernels that are split.
3. ``rows`` cuts the clock along the windows of the passes and sums up the pieces by owner, node
   and source line; ``pieces`` has the pieces and their sums, and the operators that show on a CPU
   what kernels show on a GPU.
4. ``steps`` finds when each step begins and ends on the clock.
5. ``activity`` classifies the host's time into phases such as data loading and forward.
6. ``phases`` deals out the clock time of the steps to the phases, and chooses the steps that a
   typical step is the mean of.

``memory`` counts bytes in place of time: what is live at the peak, and what each module keeps.
``checkpointing`` has what stays of that if a module is checkpointed. ``work`` counts floating point
operations and the bytes that they move, with the formulas of the operators in ``formulas/``;
``peaks`` has what devices can do at best.
"""
