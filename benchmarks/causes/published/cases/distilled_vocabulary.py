"""log_softmax in fp32 over the whole vocabulary, of which 64 columns are then kept."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, gpt, stepping
from benchmarks.models import Context

CASE = Published(
    source="NVIDIA-NeMo/RL#3314",
    cause=("log_softmax", "vocabulary", "logits fp32"),
    place=("loss",),
    fix="Gather the 64 columns of the logits and normalise within them: the rest cancels out",
    gain="the largest intermediate from 2.32 GiB to 1.0 MiB a sample; no times given",
)


class Distillation(nn.Module):
    def __init__(self, best: torch.Tensor, fixed: bool) -> None:
        super().__init__()
        self.best, self.fixed = best, fixed

    def forward(self, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            student = logits.index_select(-1, self.best).float().log_softmax(-1)
        else:
            student = logits.float().log_softmax(-1).index_select(-1, self.best)
            student = student - student.logsumexp(-1, keepdim=True)
        return (teacher.exp() * (teacher - student)).sum(-1).mean()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    model, tokens, _ = gpt(context, (1024, 4, 1024, 12, 65536), (128, 2, 128, 3, 6144))
    best = torch.randperm(model.vocabulary)[:64].to(context.device)
    teacher = context.randn(*tokens.shape, 64).log_softmax(-1)
    criterion = Distillation(best, fixed)
    step = stepping(model, lambda: criterion(model(tokens), teacher))
    return step, {"": model, "loss": criterion}
