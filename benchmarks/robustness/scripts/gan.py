"""A generative adversarial network of linear layers, with five critic steps to each generator's."""

import torch
from planted import Slow
from torch import nn


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), Slow(), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.model(x)


def main():
    torch.manual_seed(7)
    generator, discriminator = Generator(), Discriminator()
    optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    optimizer_d = torch.optim.RMSprop(discriminator.parameters(), lr=1e-3)
    batches = 0
    for _epoch in range(4):
        for _ in range(15):
            real = torch.randn(8, 64)
            optimizer_d.zero_grad()
            fake = generator(torch.randn(8, 16)).detach()
            loss_d = discriminator(fake).mean() - discriminator(real).mean()
            loss_d.backward()
            optimizer_d.step()
            for p in discriminator.parameters():
                p.data.clamp_(-0.01, 0.01)
            batches += 1
            if batches % 5 == 0:
                optimizer_g.zero_grad()
                loss_g = -discriminator(generator(torch.randn(8, 16))).mean()
                loss_g.backward()
                optimizer_g.step()
                print(batches, loss_d.item().hex(), loss_g.item().hex())


main()
