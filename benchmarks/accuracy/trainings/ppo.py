"""Reinforcement learning as PPO does it: a rollout, then 16 updates on it."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.accuracy.trainings.clock import DEVICE, Clock


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 4))
        self.critic = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 1))

    def forward(self, seen: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.actor(seen)), self.critic(seen).squeeze(-1)


def rollout(agent: Agent, seen: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(length):
        with torch.no_grad():
            policy, value = agent(seen.to(DEVICE))
            action = policy.sample()
        kept.append((seen.to(DEVICE), action, policy.log_prob(action)))
        time.sleep(0.0002)  # the environment
        seen = seen * 0.9 + 0.1 * torch.randn(8, 16) + 0.01 * action.cpu()[:, None]
    observed, actions, probabilities = (torch.cat(column) for column in zip(*kept, strict=True))
    return observed, actions, probabilities, value.repeat(length)


def train() -> None:
    torch.manual_seed(0)
    agent = Agent().to(DEVICE)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4)
    clock = Clock(1280, first=32, period=16)
    while not clock.is_over:
        with clock.part("rollout"):
            observed, actions, before, values = rollout(agent, torch.randn(8, 16), 64)
        for _ in range(4):
            for picked in torch.randperm(512, device=DEVICE).chunk(4):
                policy, value = agent(observed[picked])
                ratio = (policy.log_prob(actions[picked]) - before[picked]).exp()
                surprise = (values[picked] - value).detach()
                loss = -(ratio.clamp(0.8, 1.2) * surprise).mean() + value.square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                with clock.part("optimizer"):
                    optimizer.step()
                clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
