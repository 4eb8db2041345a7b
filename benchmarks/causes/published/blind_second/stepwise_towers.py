"""A ranking model called for each time step of a history, though no step needs the one before."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="facebookresearch/tbsm#1",
    cause=("loop", "launch", "small kernels", "calls in a step", "one by one"),
    place=("ranks", "ranks.**"),
    fix="Give it all time steps at once, as a batch",
    gain="2.2 times as fast as a whole, more than 10 times in that part",
)


class Ranks(nn.Module):
    """Tables for what was seen, and numbers beside them."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.numbers = nn.Linear(13, width)
        self.mix = nn.Sequential(
            nn.Linear((tables + 1) * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self, seen: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        found = [table(seen[..., place]) for place, table in enumerate(self.tables)]
        return self.mix(torch.cat((*found, self.numbers(numbers).relu()), -1))


class Histories(nn.Module):
    def __init__(self, ranks: Ranks, width: int, hidden: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.profile = nn.Sequential(nn.Linear(64, hidden), Mlp(hidden, 4 * hidden))
        self.ranks = ranks
        self.weigh = nn.Linear(width, 1)
        self.top = nn.Sequential(nn.Linear(width + hidden, hidden), Mlp(hidden, 4 * hidden))
        self.head = nn.Linear(hidden, 1)

    def forward(self, user: torch.Tensor, seen: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        profile = self.profile(user)
        if self.fixed:
            x = self.ranks(seen.flatten(0, 1), beside.flatten(0, 1)).view(*seen.shape[:2], -1)
        else:
            steps = range(seen.shape[1])
            x = torch.stack([self.ranks(seen[:, at], beside[:, at]) for at in steps], 1)
        x = (x * self.weigh(x).softmax(1)).sum(1)
        return self.head(self.top(torch.cat((x, profile), -1))).squeeze(-1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    tables, rows = sized(context, 8, 8, 2), sized(context, 20_000, 200, 20)
    width, hidden = sized(context, 64, 16, 4), sized(context, 1536, 128, 8)
    batch, steps = sized(context, 2048, 64, 4), sized(context, 20, 20, 3)
    ranks = lambda: Ranks(tables, rows, width)  # noqa: E731
    model = made(context, lambda: Histories(ranks(), width, hidden, fixed))
    seen, beside = context.randint(rows, batch, steps, tables), context.randn(batch, steps, 13)
    user, clicked = context.randn(batch, 64), context.randint(2, batch).float()
    criterion = nn.functional.binary_cross_entropy_with_logits
    return stepping(model, lambda: criterion(model(user, seen, beside), clicked)), {"": model}
