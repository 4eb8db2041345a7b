"""Adam without fused=True in PPO on a walker."""

import math

import numpy
import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized
from benchmarks.models import Context, made

CASE = Published(
    source="DLR-RM/stable-baselines3#1770",
    cause=("fused", "foreach"),
    place=("(optimizer)",),
    fix="fused=True",
    gain="169.5 to 165.6 s: 'not really significant (only 2% faster)'",
)


class Walkers:
    """A few pendulums, stepped one by one in Python as most environments are."""

    def __init__(self, count: int) -> None:
        self.states = [[0.1 * number, 0.0] for number in range(count)]

    def step(self, actions: numpy.ndarray) -> numpy.ndarray:
        for state, action in zip(self.states, actions, strict=True):
            for _ in range(20):  # substeps of the physics
                state[1] += 0.01 * (float(action) - math.sin(state[0]) - 0.1 * state[1])
                state[0] += 0.01 * state[1]
        return numpy.array(self.states, dtype="float32")


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    length, count = sized(context, 192, 96, 4), 8

    def make(outputs: int) -> nn.Sequential:
        inner = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        return nn.Sequential(*inner, nn.Linear(64, outputs))

    model = made(context, lambda: nn.ModuleDict({"policy": make(1), "value": make(1)}))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=fixed)
    walkers = Walkers(count)

    def rollout() -> torch.Tensor:
        seen = []
        with torch.no_grad():
            actions = numpy.zeros(count, "float32")
            for _ in range(length):
                seen.append(torch.from_numpy(walkers.step(actions)).to(context.device))
                actions = model["policy"](seen[-1]).squeeze(-1).cpu().numpy()
        return torch.cat(seen)

    def step() -> torch.Tensor:
        states = rollout()
        for batch in states.chunk(4):
            optimizer.zero_grad()
            wanted = -batch.square().sum(-1)
            value = model["value"](batch).squeeze(-1)
            gain = (wanted - value.detach()) * model["policy"](batch).squeeze(-1)
            loss = (value - wanted).square().mean() - 0.01 * gain.mean()
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step, {"": model}
