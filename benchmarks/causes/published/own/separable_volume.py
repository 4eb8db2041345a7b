"""A volume is filtered channel by channel."""

from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, trained
from benchmarks.models import Context

CASE = Published(
    source="pytorch/pytorch#18631",
    cause=("depthwise", "backward-ratio"),
    place=("1",),
    fix="A dense convolution",
    gain="3-D depthwise backward ten times a dense forward",
    device="cuda",
    same=False,
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, width, side = sizes(context, (8, 64, 48), (1, 8, 12))
    middle = nn.Conv3d(width, width, 3, padding=1, groups=1 if fixed else width)
    model = nn.Sequential(nn.Conv3d(2, width, 3, padding=1), middle, nn.ReLU())
    return trained(context, model.append(nn.Conv3d(width, 4, 1)), batch, 2, side, side, side)
