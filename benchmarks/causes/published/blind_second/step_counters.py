"""AdamW's step counters on the GPU, where each is read back to the host in every step."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, half, sized, stepping
from benchmarks.models import Block, Context, made

CASE = Published(
    source="Tencent-Hunyuan/UniRL#441",
    cause=("synchron", "waits for", ".item()", "counter", "capturable"),
    place=("(optimizer)",),
    fix="Leave the counters on the CPU when the other state moves to the GPU",
    gain="34.6 to 28.6 ms for 512 parameters (RTX 4090); 587 waits in PrimeIntellect-ai/"
    "prime-rl#3258",
    device="cuda",
)


class Denoiser(nn.Module):
    """A transformer that predicts the noise in patches."""

    def __init__(self, width: int, depth: int, channels: int) -> None:
        super().__init__()
        self.patches = nn.Linear(channels, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.noise = nn.Linear(width, channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.patches(x) + self.time(time)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.noise(x)


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 512, 64, 32), sized(context, 42, 3, 2)
    batch, patches = sized(context, 32, 2, 2), sized(context, 256, 32, 4)
    model = made(context, lambda: Denoiser(width, depth, 64)).to(half(context))
    clean, noise = (context.randn(batch, patches, 64).to(half(context)) for _ in range(2))
    time = context.randn(batch, 1).sigmoid().to(half(context))
    mixed = time[:, None] * noise + (1 - time[:, None]) * clean
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the state, which then comes back from where it was kept
    for state in optimizer.state.values():
        for name, value in state.items():
            moves = not (fixed and name == "step")
            state[name] = value.to(context.device) if moves else value
    loss = lambda: (model(mixed, time) - (noise - clean)).float().square().mean()  # noqa: E731
    return stepping(model, loss, optimizer=optimizer), {"": model}
