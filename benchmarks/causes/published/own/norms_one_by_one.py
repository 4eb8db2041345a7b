"""Clipping goes through the parameters one by one, and reads every norm."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, TokenLoss, adamw, gpt
from benchmarks.models import Context

CASE = Published(
    source="allenai/OLMo#326",
    cause=("clip", ".item()", "norm"),
    place=("(clipping)", "clip_gradients()"),
    fix="Compute all norms at once, clip on the device, and read metrics when they are logged",
    gain="a big speed-up on a test model of two layers (figures as pictures only)",
)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    model, tokens, follow = gpt(context, (256, 24, 16, 8, 8000), (24, 20, 16, 1, 300))
    criterion, optimizer = TokenLoss(), adamw(model.parameters())
    parameters, metrics = list(model.parameters()), dict[str, float]()

    def clip_gradients() -> None:
        if fixed:
            nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True)
            return
        total = 0.0
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            norm = parameter.grad.norm()
            metrics[f"{name}.norm"] = norm.item()
            metrics[f"{name}.largest"] = parameter.grad.abs().max().item()
            total += norm.item() ** 2
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, 0.5 / (total**0.5 + 1e-6)))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = criterion(model(tokens), follow)
        value.backward()
        clip_gradients()
        optimizer.step()
        return value.detach()

    return step, {"": model, "loss": criterion}
