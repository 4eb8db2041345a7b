"""How sparse a Hamiltonian is, counted edge by edge in every step."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="QuantumLab-ZY/HamGNN#78",
    because="A loop over atoms and edges reads a number from the device for each.",
    cause=("loop", "item()", "synchron", "waits for", "one by one", "reads"),
    half=("python", "launch", "small operators", "host"),
    place=("sparsity()", "output", "output.*"),
    fix="Look the orbitals of all edges up in a table, and sum on the device",
    gain="0.2325 to 0.0942 s a step (4,200 edges), 0.477 to 0.082 (13,200)",
)


class Output(nn.Module):
    orbitals: torch.Tensor

    def __init__(self, width: int, size: int, fixed: bool) -> None:
        super().__init__()
        self.size, self.fixed = size, fixed
        self.pairs = nn.Linear(2 * width, size * size)
        self.register_buffer("orbitals", torch.arange(100) % size + 1)

    def sparsity(self, atoms: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return the share of the padded blocks that holds orbitals of both atoms."""
        if self.fixed:
            count = self.orbitals[atoms]
            used = (count[edges[0]] * count[edges[1]]).sum() + count.square().sum()
        else:
            total = 0
            for atom in atoms:
                total += self.orbitals[atom].item() ** 2
            for source, to in edges.T:
                rows, columns = self.orbitals[atoms[source]], self.orbitals[atoms[to]]
                total += rows.item() * columns.item()
            used = torch.tensor(total, device=atoms.device)
        return used / ((len(atoms) + edges.shape[1]) * self.size**2)

    def forward(
        self, x: torch.Tensor, atoms: torch.Tensor, edges: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat((x.index_select(0, edges[0]), x.index_select(0, edges[1])), 1)
        return self.pairs(both), self.sparsity(atoms, edges)


class Hamiltonian(nn.Module):
    def __init__(self, width: int, depth: int, size: int, fixed: bool) -> None:
        super().__init__()
        self.atoms = nn.Embedding(100, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.output = Output(width, size, fixed)

    def forward(
        self, atoms: torch.Tensor, edges: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.atoms(atoms)
        for layer in self.layers:
            both = torch.cat((x.index_select(0, edges[0]), x.index_select(0, edges[1])), 1)
            x = x + torch.zeros_like(x).index_add(0, edges[1], layer(both))
        found: tuple[torch.Tensor, torch.Tensor] = self.output(x, atoms, edges)
        return found


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 256, 48, 8), sized(context, 6, 3, 1)
    count, links, size = sized(context, 300, 60, 6), sized(context, 3000, 600, 12), 13
    model = made(context, lambda: Hamiltonian(width, depth, size, fixed))
    atoms, edges = context.randint(100, count), context.randint(count, 2, links)
    right = context.randn(links, size * size)

    def loss() -> torch.Tensor:
        found, share = model(atoms, edges)
        return functional.l1_loss(found, right) / share

    return stepping(model, loss), {"": model}
