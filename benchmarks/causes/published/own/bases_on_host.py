"""Random bases of a matrix factorization, made on the host in each step."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="open-mmlab/mmsegmentation#3231",
    cause=("on the cpu", "on the device", "device="),
    place=("ham", "ham.*"),
    fix="torch.rand(..., device=device)",
    gain="17.7 to 0.009 ms for 3 million numbers; no figures for a step",
    device="cuda",
    same=False,
)


class Ham(nn.Module):
    """Replaces features by a product of two small matrices that are not negative."""

    def __init__(self, rank: int, rounds: int, fixed: bool) -> None:
        super().__init__()
        self.rank, self.rounds, self.fixed = rank, rounds, fixed

    def bases(self, x: torch.Tensor) -> torch.Tensor:
        shape = len(x), x.shape[1], self.rank
        made = torch.rand(shape, device=x.device) if self.fixed else torch.rand(shape).to(x.device)
        return nn.functional.normalize(made, dim=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.flatten(2)
        bases = self.bases(x)
        codes = (x.mT @ bases).softmax(-1)
        with torch.no_grad():
            for _ in range(self.rounds):
                codes = codes * (x.mT @ bases) / (codes @ (bases.mT @ bases) + 1e-6)
                bases = bases * (x @ codes) / (bases @ (codes.mT @ codes) + 1e-6)
        codes = codes * (x.mT @ bases) / (codes @ (bases.mT @ bases) + 1e-6)
        return (bases @ codes.mT).view_as(image)


class Segmenter(nn.Module):
    def __init__(self, width: int, depth: int, rank: int, fixed: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, stride=8)
        layers = (nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.stages = nn.Sequential(*(nn.Sequential(one, nn.ReLU()) for one in layers))
        self.ham = Ham(rank, 6, fixed)
        self.head = nn.Conv2d(width, 19, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stages(self.stem(x))
        return self.head(y + self.ham(y.relu()))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, batch, side = sizes(context, (512, 6, 16, 512), (32, 2, 2, 64))
    model = made(context, lambda: Segmenter(width, depth, context.pick(64, 8), fixed))
    images = context.randn(batch, 3, side, side)
    labels = context.randint(19, batch, side // 8, side // 8)

    def loss() -> torch.Tensor:
        with context.bf16():
            return nn.functional.cross_entropy(model(images), labels)

    return stepping(model, loss), {"": model}
