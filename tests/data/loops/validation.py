"""A classifier that is validated on six batches after each fourth update."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(800, 16), torch.randint(0, 4, (800,)))
unseen = DataLoader(TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,))), 16)
for number, (batch, wanted) in enumerate(DataLoader(data, 16), 1):
    loss = nn.functional.cross_entropy(model(batch), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number % 4 == 0:
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in unseen)
