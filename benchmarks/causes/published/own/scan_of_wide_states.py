"""A loop whose every turn has much to compute."""

from torch import nn

from benchmarks.causes.published.own.scan_by_positions import scan
from benchmarks.causes.published.parts import Models, Published, Step, sizes
from benchmarks.models import Context

CASE = Published(
    source="alxndrTL/mamba.py#57",
    cause=("operator-loop",),
    place=("1",),
    fix="A parallel scan",
    gain="none on a CPU: 10 s by a parallel scan, 2 s by the loop",
    same=False,
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    shape = sizes(context, (512, 64, 16384), (512, 33, 128))
    return scan(context, "doubling" if fixed else "loop", shape, nn.LayerNorm)
