"""Proximal policy optimisation of a toy environment: 6 acts of 4 environments, then 3 updates."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def act(self, state, action=None):
        chosen = torch.distributions.Categorical(logits=self.actor(state))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), self.critic(state).flatten()


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), 3e-4)
state = torch.randn(4, 8)
for _ in range(12):
    states, actions, scores, values = [], [], [], []
    for _ in range(6):
        with torch.no_grad():
            action, score, value = agent.act(state)
        for held, new in ((states, state), (actions, action), (scores, score), (values, value)):
            held.append(new)
        moved = state.numpy() * 0.9
        moved[:, 0] += action.numpy()
        state = torch.tensor(moved)
    with torch.no_grad():
        following = agent.critic(state).flatten()
        advantages = [held * 0.99 for held in values[1:]] + [following]
    states, actions, scores = map(torch.cat, (states, actions, scores))
    advantages = torch.cat(advantages) - torch.cat(values)
    for some in torch.randperm(24).split(8):
        _, score, value = agent.act(states[some], actions[some])
        ratio = (score - scores[some]).exp()
        loss = (value - advantages[some]).square().mean() - (ratio * advantages[some]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
