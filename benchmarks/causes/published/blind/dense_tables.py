"""Dense gradients and a dense Adam for large tables, of which a batch reads few rows."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="pytorch/pytorch#5309",
    cause=("sparse", "dense gradient"),
    place=("users", "items", "(optimizer)"),
    fix="sparse=True and SparseAdam for the tables",
    gain="'It does in fact help a lot' (500,000 rows); figures in a gist only",
    same=False,  # SparseAdam leaves the moments of rows alone that a batch does not read
)


class Towers(nn.Module):
    def __init__(self, rows: int, width: int, hidden: int, fixed: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, width, sparse=fixed)
        self.items = nn.Embedding(rows, width, sparse=fixed)
        self.mix = nn.Linear(2 * width, hidden)
        self.tower = nn.Sequential(*(Mlp(hidden, 2 * hidden) for _ in range(3)))
        self.head = nn.Linear(hidden, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self.users(user), self.items(item)), -1)
        return self.head(self.tower(self.mix(x).relu())).squeeze(-1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    rows, width = sized(context, 6_000_000, 200_000, 40), sized(context, 64, 32, 8)
    batch, hidden = sized(context, 16_384, 128, 8), sized(context, 1024, 128, 8)
    model = made(context, lambda: Towers(rows, width, hidden, fixed))
    tables = [model.users.weight, model.items.weight]
    rest = [
        p for name, p in model.named_parameters() if name.split(".")[0] not in ("users", "items")
    ]
    many = torch.optim.SparseAdam(tables) if fixed else torch.optim.Adam(tables, fused=True)
    few = torch.optim.Adam(rest, fused=True)
    user, item = context.randint(rows, batch), context.randint(rows, batch)
    clicked = context.randint(2, batch).float()

    def step() -> torch.Tensor:
        many.zero_grad()
        few.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), clicked)
        loss.backward()
        many.step()
        few.step()
        return loss.detach()

    return step, {"": model}
