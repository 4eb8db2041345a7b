"""A score of each batch from one volume per class, which is first checked for being binary."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="Project-MONAI/MONAI#6163",
    cause=("metric", "one-hot", "one_hot", "synchron", "waits for", "scatter"),
    place=("score", "(metrics)", "dice()", "binary()"),
    fix="No checks, and scores from the class of each voxel",
    gain="'too expensive' before; no figures",
)


def binary(x: torch.Tensor) -> None:
    if not torch.all(x.byte() == x):
        raise ValueError("expected zeros and ones")


def dice(found: torch.Tensor, wanted: torch.Tensor, classes: int, fixed: bool) -> torch.Tensor:
    """Return the score of each image and class."""
    if fixed:
        first = torch.arange(len(found), device=found.device)[:, None] * classes
        ones = torch.ones_like(found)
        both, some, others = (
            torch.zeros(len(found) * classes, device=found.device).index_add(
                0, (one + first).flatten(), counted.flatten().float()
            )
            for one, counted in ((found, found == wanted), (found, ones), (wanted, ones))
        )
        return (2 * both / (some + others).clamp(min=1)).view(-1, classes)
    masks = [nn.functional.one_hot(one, classes).mT.float() for one in (found, wanted)]
    for mask in masks:
        binary(mask)
    both, all_ = (masks[0] * masks[1]).sum(-1), masks[0].sum(-1) + masks[1].sum(-1)
    return 2 * both / all_.clamp(min=1)


class Score(nn.Module):
    def __init__(self, classes: int, fixed: bool) -> None:
        super().__init__()
        self.classes, self.fixed = classes, fixed
        self.register_buffer("total", torch.zeros(classes))

    @torch.no_grad()
    def forward(self, logits: torch.Tensor, wanted: torch.Tensor) -> None:
        found = logits.argmax(1).flatten(1)
        self.total += dice(found, wanted.flatten(1), self.classes, self.fixed).mean(0)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    classes, side = sized(context, 105, 24, 5), sized(context, 64, 14, 8)
    width, batch = sized(context, 64, 8, 4), sized(context, 2, 2, 2)

    def make() -> nn.Sequential:
        layers = [nn.Conv3d(1, width, 3, padding=1), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv3d(width, width, 3, padding=1), nn.InstanceNorm3d(width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv3d(width, classes, 1))

    model, score = made(context, make), made(context, lambda: Score(classes, fixed))
    volume = context.randn(batch, 1, side, side, side)
    wanted = context.randint(classes, batch, side, side, side)
    seen: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        seen[:] = [model(volume)]
        return nn.functional.cross_entropy(seen[0], wanted)

    step = stepping(model, loss, after=lambda _: score(seen[0].detach(), wanted))
    return step, {"": model, "score": score}
