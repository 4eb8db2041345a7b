"""Reinforcement learning as SAC does it: one step of the environment, one update of two models."""

from __future__ import annotations

import copy
import time

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock
from benchmarks.accuracy.trainings.parts import perceptron


def train() -> None:
    torch.manual_seed(0)
    actor = perceptron(256, inputs=16, outputs=4)
    critic = perceptron(256, inputs=20, outputs=1)
    target = copy.deepcopy(critic)
    of_actor = torch.optim.Adam(actor.parameters(), lr=3e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=3e-4)
    kept = torch.randn(10_000, 37)
    seen = torch.randn(1, 16)
    clock = Clock(800)
    for number in range(clock.steps):
        with clock.part("rollout"), torch.no_grad():
            action = actor(seen.to(DEVICE)).cpu()
            time.sleep(0.0005)  # the environment
            seen = 0.9 * seen + 0.1 * torch.randn(1, 16) + 0.01 * action.mean()
        with clock.part("data"):
            batch = kept[torch.randint(10_000, (256,))].to(DEVICE)
        state, taken, reward, following = batch.split((16, 4, 1, 16), dim=1)
        with torch.no_grad():
            best = target(torch.cat([following, actor(following)], 1))
        loss = functional.mse_loss(critic(torch.cat([state, taken], 1)), reward + 0.99 * best)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        of_actor.zero_grad()
        (-critic(torch.cat([state, actor(state)], 1)).mean()).backward()
        of_actor.step()
        clock.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic.parameters(), strict=True):
                old.lerp_(new, 0.005)
        if number % 100 == 0:
            print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
