"""A loop that accelerate prepares, with gradient accumulation."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from planted import Slow
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), Slow(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(120, 16), torch.randint(0, 2, (120,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loss_function = nn.CrossEntropyLoss()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = loss_function(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            accelerator.print(loss.item().hex())


training_function()
