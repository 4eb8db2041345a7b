"""Gradients of single samples by a backward for each, to clip their norms."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, adamw, sized
from benchmarks.models import Context, made

CASE = Published(
    source="pytorch/pytorch#7786",
    because="Each sample of the batch has a forward and a backward of its own.",
    cause=(
        "each sample", "per sample", "per-sample", "one sample", "vmap", "one by one", "loop",
        "small batch", "launch", "many backward",
    ),
    half=("small kernels", "host", "backward times", "python"),
    place=("clipped()", "layers.*", "layers"),
    fix="Norms from the inputs and the gradients of each layer, then one weighted backward",
    gain="about 10 times faster than a backward for each (50 layers of 300, batch of 100)",
)  # fmt: skip


class Mlp(nn.Module):
    def __init__(self, inner: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        sizes = [inner, *[width] * depth, classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        inputs, outputs = [], []
        for number, layer in enumerate(self.layers):
            if number:
                x = functional.relu(x)
            inputs.append(x)
            x = layer(x)
            outputs.append(x)
        return x, inputs, outputs


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 300, 64, 8), sized(context, 16, 8, 2)
    inner, batch = sized(context, 784, 196, 12), sized(context, 64, 16, 3)
    model = made(context, lambda: Mlp(inner, width, depth, 10))
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    x, labels = context.randn(batch, inner), context.randint(10, batch)

    def clipped() -> torch.Tensor:
        """Leave the mean of the clipped gradients of all samples, and return the loss."""
        if fixed:
            logits, inputs, outputs = model(x)
            losses = functional.cross_entropy(logits, labels, reduction="none")
            changes = torch.autograd.grad(losses.sum(), outputs, retain_graph=True)
            squares = [
                change.square().sum(1) * (value.detach().square().sum(1) + 1)
                for change, value in zip(changes, inputs, strict=True)
            ]
            norms = torch.stack(squares).sum(0).sqrt()
            ((1 / (norms + 1e-6)).clamp(max=1) * losses).mean().backward()
            return losses.mean().detach()
        total = [torch.zeros_like(parameter) for parameter in parameters]
        losses = []
        for number in range(batch):
            logits = model(x[number : number + 1])[0]
            loss = functional.cross_entropy(logits, labels[number : number + 1])
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            scale = (1 / (norm + 1e-6)).clamp(max=1) / batch
            torch._foreach_add_(total, torch._foreach_mul(gradients, scale))
            losses.append(loss.detach())
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        return torch.stack(losses).mean()

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = clipped()
        optimizer.step()
        return loss

    return step, {"": model}
