"""Group-relative policy optimisation: generate, score with the old and a frozen model, update."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens).cumsum(1)))

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            following = self(tokens)[:, -1].softmax(-1).multinomial(1)
            tokens = torch.cat([tokens, following], 1)
        return tokens


def scored(model, tokens):
    return model(tokens)[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


policy = Language()
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), 1e-4)
for _ in range(12):
    tokens = policy.generate(torch.randint(0, 64, (4, 2)), 8)
    with torch.no_grad():
        old, frozen = scored(policy, tokens), scored(reference, tokens)
    reward = (tokens % 7 == 0).float().mean(1)
    advantage = (reward - reward.mean())[:, None]
    for _ in range(2):
        new = scored(policy, tokens)
        loss = -((new - old).exp() * advantage - 0.04 * (frozen - new)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
