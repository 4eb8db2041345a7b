"""Returns of a rollout that are added up token by token."""

from __future__ import annotations

import torch

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import half, sized, stepping
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="NVIDIA-NeMo/labs-molt#29",
    title="The recurrence of the returns of REINFORCE as a Python loop over tokens",
    cause=("loop", "launch", "small kernels", "time step", "cumsum", "per token"),
    place=("returns()",),
    fix="flip, cumsum, flip where nothing is discounted",
    gain="1,059.7 to 0.894 ms for 32,768 tokens (CPU); the same in NVIDIA-NeMo/RL#4156",
)


def returns(rewards: torch.Tensor, fixed: bool) -> torch.Tensor:
    if fixed:
        return rewards.flip(1).cumsum(1).flip(1)
    total, found = torch.zeros_like(rewards[:, 0]), []
    for number in reversed(range(rewards.shape[1])):
        total = rewards[:, number] + total
        found.append(total)
    return torch.stack(found[::-1], 1)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 1024, 64, 32), sized(context, 6, 1, 1)
    length, batch = sized(context, 2048, 1024, 8), sized(context, 4, 1, 2)
    words = sized(context, 8192, 256, 64)
    policy = made(context, lambda: Gpt(width, depth, length, words)).to(half(context))
    tokens, rewards = context.randint(words, batch, length), context.randn(batch, length) / length

    def loss() -> torch.Tensor:
        with torch.no_grad():
            weight = returns(rewards, fixed)
        logs = policy(tokens).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        return -(logs * weight).mean()

    return stepping(policy, loss), {"": policy}
