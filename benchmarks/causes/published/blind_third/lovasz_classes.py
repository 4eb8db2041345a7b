"""The Lovasz-softmax loss of a segmentation, which sorts the pixels class by class."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, Unet, made

CASE = Published(
    source="kornia/kornia#2884",
    because="Errors are sorted, summed and weighted in a loop over the classes.",
    cause=("loop", "each class", "one by one", "launch", "small kernels"),
    half=("sort", "python", "host"),
    place=("loss", "lovasz()", "loss.*"),
    fix="Sort and sum the errors of all classes at once",
    gain="93.8 to 36.8 ms in the loss (15 classes of 2 images of 256 pixels, CPU)",
)


def slopes(truth: torch.Tensor) -> torch.Tensor:
    """Return the slope of the loss at each of the sorted errors, along the last dimension."""
    total = truth.sum(-1, keepdim=True)
    common = total - truth.cumsum(-1)
    either = total + (1 - truth).cumsum(-1)
    jaccard = 1 - common / either
    return torch.cat((jaccard[..., :1], jaccard[..., 1:] - jaccard[..., :-1]), -1)


class Lovasz(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def lovasz(self, chances: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            classes = torch.arange(len(chances), device=labels.device)[:, None]
            truth = (labels == classes).float()
            errors, order = (truth - chances).abs().sort(-1, descending=True)
            return (errors * slopes(truth.gather(-1, order))).sum(-1).mean()
        losses = []
        for number, chance in enumerate(chances):
            truth = (labels == number).float()
            errors, order = (truth - chance).abs().sort(descending=True)
            losses.append((errors * slopes(truth[order])).sum())
        return torch.stack(losses).mean()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chances = logits.float().softmax(1).transpose(0, 1).flatten(1)
        return self.lovasz(chances, labels.flatten())


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, side = sized(context, 32, 8, 4), sized(context, 256, 64, 16)
    batch, classes = sized(context, 4, 2, 2), 19
    model = made(context, lambda: Unet(width, classes)).to(half(context))
    model, loss = model.to(memory_format=torch.channels_last), Lovasz(fixed)
    images = context.randn(batch, 3, side, side).to(half(context))
    labels = context.randint(classes, batch, side, side)

    def segmented() -> torch.Tensor:
        value: torch.Tensor = loss(model(images), labels)
        return value

    return stepping(model, segmented), {"": model, "loss": loss}
