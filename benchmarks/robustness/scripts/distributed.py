"""Two processes that torchrun starts, each with a replica of the model."""

import os

import torch
import torch.distributed as dist
from planted import Slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
    dist.destroy_process_group()


main()
