"""Two models that take turns: one optimizer steps, then the other one."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import batch_of, perceptron


def train() -> None:
    torch.manual_seed(0)
    width, batch = sized(256, 1024), 64
    generator = perceptron(width, inputs=64, outputs=784)
    critic = perceptron(width, inputs=784, outputs=1, layers=4)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    real = batch_of(batch, 784)
    yes, no = torch.ones(batch, 1, device=DEVICE), torch.zeros(batch, 1, device=DEVICE)
    clock = Clock(800)
    for number in range(clock.steps):
        made = generator(batch_of(batch, 64))
        loss = criterion(critic(real), yes) + criterion(critic(made.detach()), no)
        of_critic.zero_grad()
        loss.backward()
        with clock.part("optimizer"):
            of_critic.step()
        fooled = criterion(critic(made), yes)
        of_generator.zero_grad()
        fooled.backward()
        with clock.part("optimizer"):
            of_generator.step()
        clock.step()
        if number % 200 == 0:
            print(f"losses {loss.item():.4f} {fooled.item():.4f}")


if __name__ == "__main__":
    train()
