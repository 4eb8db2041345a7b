"""Self-distillation: a teacher that is an average of the student sees two views."""

import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 16)

    def forward(self, views):
        return self.head(self.backbone(torch.cat(views)))


student = Encoder()
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), 1e-4)
for (batch,) in DataLoader(TensorDataset(torch.randn(480, 16)), 16):
    views = [batch + torch.randn_like(batch) for _ in range(4)]
    with torch.no_grad():
        wanted = teacher(views[:2]).softmax(-1)
    loss = -(wanted.repeat(2, 1) * student(views).log_softmax(-1)).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
