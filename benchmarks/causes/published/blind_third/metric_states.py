"""Running means of metrics that look for numbers that are none at each update."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="Lightning-AI/torchmetrics#2943",
    because="Each update reads on the host whether any value is not a number.",
    cause=("synchron", "waits for", "wait gpu", "isnan", "reads value", "stall"),
    half=("small kernels", "launch", "python"),
    place=("update()", "measure()", "(metrics)", "(logging)"),
    fix="No check, and a weight that is not converted in each update",
    gain="several synchronizations a step less (traces in the author's post, no sum)",
    device="cuda",
)


class Mean:
    def __init__(self, device: str, fixed: bool) -> None:
        self.fixed = fixed
        self.total, self.weight = (torch.zeros((), device=device) for _ in range(2))

    def update(self, value: torch.Tensor) -> None:
        value = value.detach().float()
        weight = torch.ones_like(value)
        if not self.fixed:
            missing = torch.isnan(value) | torch.isnan(weight)
            if missing.any():
                value, weight = value[~missing], weight[~missing]
        self.total += (value * weight).sum()
        self.weight += weight.sum()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(y)))


class Classifier(nn.Module):
    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 128, 32, 8), sized(context, 12, 4, 2)
    side, batch, classes = sized(context, 128, 64, 16), sized(context, 32, 4, 2), 100
    model = made(context, lambda: Classifier(width, depth, classes)).to(half(context))
    images = context.randn(batch, 3, side, side).to(half(context))
    labels = context.randint(classes, batch)
    names = ("loss", "top1", "top5", "confidence", "entropy", "margin")
    metrics = {name: Mean(context.device, fixed) for name in names}

    @torch.no_grad()
    def measure(logits: torch.Tensor, loss: torch.Tensor) -> None:
        best = logits.topk(5).indices
        chances = logits.softmax(-1)
        first = chances.topk(2).values
        metrics["loss"].update(loss)
        metrics["top1"].update(best[:, 0] == labels)
        metrics["top5"].update((best == labels[:, None]).any(1))
        metrics["confidence"].update(first[:, 0])
        metrics["entropy"].update(-(chances * chances.log()).sum(-1))
        metrics["margin"].update(first[:, 0] - first[:, 1])

    def loss() -> torch.Tensor:
        logits = model(images).float()
        value = functional.cross_entropy(logits, labels)
        measure(logits, value)
        return value

    return stepping(model, loss), {"": model}
