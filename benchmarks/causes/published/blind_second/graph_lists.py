"""Batches of molecules whose bonds are listed by Python loops over atoms, in every step."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, Mlp, made

CASE = Published(
    source="deepchem/deepchem#3615",
    cause=("python", "on the host", "waiting for data", "loop"),
    place=("(data)", "components()"),
    fix="List them once, when the molecules are read",
    gain="3.68 to 1.05 s an iteration, 454 to 138 s in all",
)
Bonds = list[list[int]]


def components(molecules: list[Bonds]) -> tuple[list[int], list[int], list[int]]:
    """Return the two atoms of each directed bond of a batch, and the bond that goes back."""
    source, target, number, known = [], [], 0, {}
    for bonds in molecules:
        for atom, others in enumerate(bonds):
            for other in others:
                known[number + atom, number + other] = len(source)
                source.append(number + atom)
                target.append(number + other)
        number += len(bonds)
    return source, target, [known[pair] for pair in zip(target, source, strict=True)]


class Messages(nn.Module):
    """Directed messages along bonds, then a sum over the atoms of a molecule."""

    def __init__(self, width: int, rounds: int, size: int) -> None:
        super().__init__()
        self.atoms, self.size = nn.Embedding(100, width), size
        self.edge = nn.Linear(2 * width, width)
        self.rounds = nn.ModuleList(Mlp(width, 4 * width) for _ in range(rounds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self.head = nn.Linear(width, 1)

    def forward(self, kinds: torch.Tensor, bonds: torch.Tensor) -> torch.Tensor:
        (source, target, back), atoms = bonds, self.atoms(kinds)
        message = self.edge(torch.cat((atoms[source], atoms[target]), -1)).relu()
        for norm, change in zip(self.norms, self.rounds, strict=True):
            arriving = torch.zeros_like(atoms).index_add(0, target, message)
            message = message + change(norm(arriving[source] - message[back]))
        heard = torch.zeros_like(atoms).index_add(0, target, message)
        return self.head(heard.view(-1, self.size, heard.shape[-1]).sum(1)).squeeze(-1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    size, count = sized(context, 24, 24, 6), sized(context, 384, 40, 4)
    width, rounds = sized(context, 384, 48, 8), sized(context, 4, 2, 1)
    model = made(context, lambda: Messages(width, rounds, size))
    ring = [[(atom - 1) % size, (atom + 1) % size] for atom in range(size)]
    molecules = [ring] * count
    kinds, energy = context.randint(100, size * count), context.randn(count)
    once = torch.tensor(components(molecules)) if fixed else None

    def loss() -> torch.Tensor:
        bonds = torch.tensor(components(molecules)) if once is None else once
        return (model(kinds, bonds.to(context.device)) - energy).square().mean()

    return stepping(model, loss), {"": model}
