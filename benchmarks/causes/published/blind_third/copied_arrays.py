"""Batches of a replay buffer that become tensors on the host before they move to the device."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="DLR-RM/stable-baselines3#1218",
    because="Each array is copied on the host first, and then to the device.",
    cause=(
        "copy host", "copied host", "copies host", "copied twice", "host to the device",
        "pageable", "transfer",
    ),
    half=("numpy", "synchron", "waits for"),
    place=("to_torch()", "sample()", "(data)"),
    fix="Make the tensor on the device: torch.tensor(array, device=device)",
    gain="7.5% of a DQN on Pong, environment included",
    device="cuda",
)  # fmt: skip


class QNetwork(nn.Module):
    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, width, 8, stride=4), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.LazyLinear(512), nn.ReLU(), nn.Linear(512, actions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x.float() / 255))


class Buffer:
    def __init__(self, size: int, device: str, fixed: bool) -> None:
        random = np.random.default_rng(0)
        self.images = random.integers(0, 255, (size, 4, 84, 84), dtype=np.uint8)
        self.actions = random.integers(0, 6, size)
        self.rewards = random.standard_normal(size).astype(np.float32)
        self.random, self.device, self.fixed = random, device, fixed

    def to_torch(self, array: np.ndarray) -> torch.Tensor:
        if self.fixed:
            return torch.tensor(array, device=self.device)
        return torch.tensor(array).to(self.device)

    def sample(self, count: int) -> tuple[torch.Tensor, ...]:
        rows = self.random.integers(0, len(self.images) - 1, count)
        arrays = self.images[rows], self.actions[rows], self.rewards[rows], self.images[rows + 1]
        return tuple(self.to_torch(array) for array in arrays)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch = sized(context, 32, 16, 4), sized(context, 256, 8, 2)
    buffer = Buffer(sized(context, 4000, 500, 20), context.device, fixed)
    networks = []
    for _ in range(2):
        network = made(context, lambda: QNetwork(width, 6))
        network(torch.zeros(1, 4, 84, 84, device=context.device))
        networks.append(network)
    model, target = networks
    target.load_state_dict(model.state_dict())

    def loss() -> torch.Tensor:
        images, actions, rewards, following = buffer.sample(batch)
        with torch.no_grad():
            right = rewards + 0.99 * target(following).amax(1)
        found = model(images).gather(1, actions[:, None])[:, 0]
        return functional.smooth_l1_loss(found, right)

    return stepping(model, loss), {"q": model, "target": target}
