"""Soft actor-critic: one act, then an update of the critic and one of the actor."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, state):
        mean, deviation = self.body(state).chunk(2, -1)
        return torch.distributions.Normal(mean, deviation.exp())


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, state, action):
        return self.body(torch.cat([state, action], -1))


actor, critic = Actor(), Critic()
critic_target = copy.deepcopy(critic).requires_grad_(False)
of_actor = torch.optim.Adam(actor.parameters(), 3e-4)
of_critic = torch.optim.Adam(critic.parameters(), 3e-4)
state, memory = torch.randn(1, 8), torch.randn(500, 8)
for _ in range(24):
    with torch.no_grad():
        action = actor(state).sample()
    state = state * 0.9 + action.mean()
    batch = memory[torch.randint(0, 500, (32,))]
    with torch.no_grad():
        target = 0.99 * critic_target(batch, actor(batch).sample())
    loss = (critic(batch, torch.randn(32, 2)) - target).square().mean()
    of_critic.zero_grad()
    loss.backward()
    of_critic.step()
    chosen = actor(batch).rsample()
    loss = -critic(batch, chosen).mean()
    of_actor.zero_grad()
    loss.backward()
    of_actor.step()
    with torch.no_grad():
        pairs = zip(critic_target.parameters(), critic.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 0.005)
