"""Trainings whose every part can show that something has changed it."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from backspot.live.trials.trial import Live


class Net(nn.Module):
    """Reads random numbers, writes buffers, counts its calls, and attends by hand."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.table = nn.Embedding(300, 16)
        self.kinds = nn.Parameter(torch.randn(20, 16))
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))
        self.old = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.register_buffer("mask", torch.ones(8, 8).tril())
        self.dropout, self.calls = dropout, 0

    def forward(self, index):
        self.calls += 1
        x = self.table(index) + self.kinds[index % 20] * random.random()
        q, k, v = (
            part.view(*index.shape, 2, 8).transpose(1, 2) for part in self.qkv(x).split(16, 2)
        )
        scores = (q @ k.transpose(-2, -1)) / 8**0.5
        scores = scores.masked_fill(self.mask == 0, float("-inf"))
        weights = functional.dropout(scores.softmax(-1), self.dropout, training=True)
        y = (weights @ v).transpose(1, 2).flatten(2)
        y = self.norm(self.old(y).transpose(1, 2)).transpose(1, 2)
        return self.head(y).mean(1)


class SmallNet(nn.Module):
    """The same without attention and further layers, which take long to compile."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(300, 16)
        self.kinds = nn.Parameter(torch.randn(20, 16))
        self.qkv = nn.utils.spectral_norm(nn.Linear(16, 16))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))
        self.calls = 0

    def forward(self, index):
        self.calls += 1
        x = self.table(index) + self.kinds[index % 20] * random.random()
        x = self.norm(self.qkv(x).transpose(1, 2)).transpose(1, 2)
        return self.head(functional.dropout(x, 0.1, training=True).mean(1))


class Training:
    """A training whose every part can show that something has changed it."""

    def __init__(self, optimizer=torch.optim.AdamW, *, network=Net, **options):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = network()
        kinds = [p for n, p in self.model.named_parameters() if n == "kinds"]
        rest = [p for n, p in self.model.named_parameters() if n != "kinds"]
        groups = [{"params": rest}, {"params": kinds, "lr": 0.02}]
        self.optimizer = optimizer(groups, lr=0.01, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.mean = copy.deepcopy(self.model)
        self.hooked = self.stepped = 0
        self.model.qkv.register_forward_hook(lambda _m, _i, out: out * 1.01)
        self.losses = []

    def step(self):
        index = torch.randint(0, 300, (4, 8))
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(index), index[:, 0] % 4)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        for mine, of_model in zip(self.mean.parameters(), self.model.parameters(), strict=True):
            mine.data.lerp_(of_model.data, float(np.random.rand()))
        self.losses.append(loss.item())

    def live(self, **options):
        return Live({"": self.model}, [self.optimizer], **options)

    def state(self):
        """Everything, as text that is equal only if each bit is."""
        return [
            self.losses,
            [(name, one.tolist()) for name, one in self.model.state_dict().items()],
            [(one.tolist()) for one in self.mean.parameters()],
            repr(self.optimizer.state_dict()),
            [
                [value.tolist() for value in state.values() if torch.is_tensor(value)]
                for state in self.optimizer.state.values()
            ],
            self.model.calls,
            torch.get_rng_state().tolist(),
            random.getstate(),
            [
                part if isinstance(part, (str, int, float)) else part.tolist()
                for part in np.random.get_state()
            ],
            [module.training for module in self.model.modules()],
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        ]


class Scaled(Training):
    """A training in autocast, with scaled and accumulated gradients."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def step(self):
        self.optimizer.zero_grad()
        for _ in range(2):
            index = torch.randint(0, 300, (4, 8))
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(self.model(index).float(), index[:, 0] % 4)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.losses.append(loss.item())

    def state(self):
        return [*super().state(), self.scaler.state_dict()]
