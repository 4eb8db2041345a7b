"""Shampoo that takes the roots of the preconditioners of its blocks one after the other."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, TokenLoss, sized, stepping
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="kozistr/pytorch_optimizer#497",
    because="Blocks of one shape are inverted by many small products for each block alone.",
    cause=("one by one", "loop", "launch", "small kernels", "stack", "bmm"),
    half=("small operators", "python", "host", "batch"),
    place=("(optimizer)", "roots()", "step()", "precondition()"),
    fix="Stack the blocks into one tensor and iterate on all by batched products (DASH)",
    gain="the optimizer's step up to 5 times faster",
)


def root(matrix: torch.Tensor, rounds: int) -> torch.Tensor:
    """Return the inverse fourth root of a matrix, or of a stack of them, by Newton's method."""
    size = matrix.shape[-1]
    one = torch.eye(size, device=matrix.device)
    scale = matrix.square().sum((-2, -1), keepdim=True).sqrt()
    power, found = matrix / scale, one.expand_as(matrix)
    for _ in range(rounds):
        change = (5 * one - power) / 4
        found = found @ change
        twice = change @ change
        power = twice @ twice @ power
    return found * scale**-0.25


class Shampoo(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[Any], block: int, rounds: int, fixed: bool) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.block, self.rounds, self.fixed = block, rounds, fixed

    def roots(self, matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.fixed:
            return list(root(torch.stack(matrices), self.rounds).unbind())
        return [root(matrix, self.rounds) for matrix in matrices]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        blocks, statistics = [], []
        rest: list[torch.Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.dim() != 2 or any(n % self.block for n in parameter.shape):
                    rest.append(parameter)
                    continue
                size, state = self.block, self.state[parameter]
                rows, columns = (n // size for n in parameter.shape)
                tiles = parameter.grad.view(rows, size, columns, size).transpose(1, 2)
                if not state:
                    state["sides"] = [torch.zeros_like(tiles) for _ in range(2)]
                left, right = state["sides"]
                left.add_(tiles @ tiles.mT), right.add_(tiles.mT @ tiles)
                blocks.append((parameter, tiles, left))
                eye = 1e-4 * torch.eye(size, device=tiles.device)
                for side in (left, right):
                    mean = side.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
                    statistics += (side + mean * eye + 1e-12 * eye).flatten(0, 1).unbind()
        found = iter(self.roots(statistics))
        for parameter, tiles, left in blocks:
            count = left.shape[0] * left.shape[1]
            sides = [torch.stack([next(found) for _ in range(count)]) for _ in range(2)]
            update = sides[0] @ tiles.flatten(0, 1) @ sides[1]
            update = update.view_as(tiles).transpose(1, 2).reshape(parameter.shape)
            parameter.add_(update, alpha=-self.param_groups[0]["lr"])
        if rest:
            gradients = [parameter.grad for parameter in rest]
            torch._foreach_add_(rest, gradients, alpha=-self.param_groups[0]["lr"])


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, block = sized(context, 512, 128, 32), sized(context, 4, 3, 1), 0
    block = sized(context, 256, 64, 16)
    length, batch, words = sized(context, 512, 64, 8), sized(context, 8, 2, 2), 1000
    model: nn.Module = made(context, lambda: Gpt(width, depth, length, words))
    criterion = TokenLoss()
    tokens, follow = (context.randint(words, batch, length) for _ in range(2))
    optimizer = Shampoo(model.parameters(), block, 8, fixed)

    def loss() -> torch.Tensor:
        value: torch.Tensor = criterion(model(tokens), follow)
        return value

    return stepping(model, loss, optimizer=optimizer), {"": model, "loss": criterion}
