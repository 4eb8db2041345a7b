"""Two processes that torchrun starts, each with a replica of the model."""

import gc
import os

import torch
import torch.distributed as dist
from planted import Slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), Slow(), nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.MSELoss()
    torch.manual_seed(rank)
    with open(os.environ["LOSSES"] + str(rank), "w") as losses:
        for _ in range(14):
            optimizer.zero_grad()
            loss = criterion(model(torch.randn(16, 32)), torch.randn(16, 8))
            loss.backward()
            optimizer.step()
            losses.write(loss.item().hex() + "\n")


dist.init_process_group("gloo")
train(dist.get_rank())
# The model, which is part of a cycle, holds the process group. Once both are gone, no thread of
# gloo is left that can need Python while it ends, which aborts the process (pytorch#190489).
gc.collect()
dist.destroy_process_group()
