"""The teacher of a self-distilled vision model follows its student parameter by parameter."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Context, Vit, made

CASE = Published(
    source="lightly-ai/lightly#1899",
    because="The moving average starts three operators for each parameter, and makes new tensors.",
    cause=("foreach", "one by one", "each parameter", "loop", "launch", "small kernels"),
    half=("python", "small operators", "allocat"),
    place=("update_teacher()", "(ema)", "(average)"),
    fix="Average all parameters in place by torch._foreach",
    gain="47.6 to 4.1 s in 3,178 steps (15 to 1.3 ms a step)",
)


@torch.no_grad()
def update_teacher(student: nn.Module, teacher: nn.Module, keep: float, fixed: bool) -> None:
    if fixed:
        averages = list(teacher.parameters())
        torch._foreach_mul_(averages, keep)
        torch._foreach_add_(averages, list(student.parameters()), alpha=1 - keep)
        return
    for average, parameter in zip(teacher.parameters(), student.parameters(), strict=True):
        average.data = average.data * keep + parameter.data * (1 - keep)


class Distillation(nn.Module):
    def forward(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        target = (teacher.float() / 0.04).softmax(-1)
        return -(target * (student.float() / 0.1).log_softmax(-1)).sum(-1).mean()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 384, 96, 32), sized(context, 20, 10, 2)
    side, batch = sized(context, 128, 64, 16), sized(context, 32, 4, 2)
    student = made(context, lambda: Vit(width, depth, side, 16 if side > 16 else 8))
    student = student.to(half(context))
    teacher = made(context, lambda: Vit(width, depth, side, 16 if side > 16 else 8))
    teacher = teacher.to(half(context)).requires_grad_(False)
    loss = Distillation()
    views = [context.randn(batch, 3, side, side).to(half(context)) for _ in range(2)]

    def distilled() -> torch.Tensor:
        with torch.no_grad():
            target = teacher(views[1])
        value: torch.Tensor = loss(student(views[0]), target)
        return value

    def after(_: torch.Tensor) -> None:
        update_teacher(student, teacher, 0.99, fixed)

    models = {"student": student, "teacher": teacher, "loss": loss}
    return stepping(student, distilled, after=after), models
