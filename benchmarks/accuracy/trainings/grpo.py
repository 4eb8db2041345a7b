"""A language model that generates, is scored, and takes two updates on what it has generated."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import Language


def generate(model: nn.Module, ids: Tensor, length: int) -> Tensor:
    for _ in range(length):
        following = torch.multinomial(model(ids)[:, -1].softmax(-1), 1)
        ids = torch.cat([ids, following], 1)
    return ids


def log_probability(model: nn.Module, ids: Tensor) -> Tensor:
    log_p = model(ids[:, :-1]).log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)


def train() -> None:
    torch.manual_seed(0)
    model = Language(sized(64, 256)).to(DEVICE)
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    clock = Clock(240, first=20, period=2)
    while not clock.is_over:
        prompt = torch.randint(512, (8, 8), device=DEVICE)
        with torch.no_grad():
            with clock.part("rollout"):
                ids = generate(model, prompt, 16)
            with clock.part("scoring"):
                frozen = log_probability(reference, ids)
                before = log_probability(model, ids)
                reward = (ids[:, 8:] % 7 == 0).float().mean(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        for _ in range(2):
            now = log_probability(model, ids)
            drift = (frozen - now).exp() - (frozen - now) - 1
            loss = -((now - before).exp() * advantage[:, None] - 0.04 * drift).mean()
            loss.backward()
            with clock.part("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
            clock.step()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
