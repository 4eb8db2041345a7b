"""A written-out RMSNorm beside far larger products."""

from torch import nn

from benchmarks.causes.published.blind.rms_norm_chain import FusedNorm, WrittenOutNorm
from benchmarks.causes.published.parts import Models, Published, Step, sizes, trained
from benchmarks.models import Context, Mlp

CASE = Published(
    source="kijai/ComfyUI-WanVideoWrapper#642",
    cause=("pointwise-chain",),
    place=("0",),
    fix="A fused norm",
    gain="2:06 to 2:04 minutes; none once compiled",
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, length, width = sizes(context, (4, 512, 4096), (4, 32, 512))
    layers = nn.Sequential(*(Mlp(width, 4 * width) for _ in range(3)))
    model = nn.Sequential((FusedNorm if fixed else WrittenOutNorm)(width), layers)
    return trained(context, model, batch, length, width)
