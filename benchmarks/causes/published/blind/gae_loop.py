"""The recurrence of the returns of REINFORCE as a Python loop over tokens."""

import torch

from benchmarks.causes.published.parts import Models, Published, Step, gpt, stepping
from benchmarks.models import Context

CASE = Published(
    source="NVIDIA-NeMo/labs-molt#29",
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
    policy, tokens, _ = gpt(context, (1024, 6, 2048, 4, 8192), (64, 1, 1024, 1, 256))
    rewards = context.randn(*tokens.shape) / tokens.shape[1]

    def loss() -> torch.Tensor:
        with torch.no_grad():
            weight = returns(rewards, fixed)
        logs = policy(tokens).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        return -(logs * weight).mean()

    return stepping(policy, loss), {"": policy}
