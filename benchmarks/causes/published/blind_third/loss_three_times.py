"""A spectral loss of a speech enhancement that is computed for each of its uses."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, adamw, sized
from benchmarks.models import Context, made

CASE = Published(
    source="Andong-Li-speech/RTNet#4",
    because="The same loss of the same batch is computed three times: to learn, log and add up.",
    cause=(
        "same twice", "same times", "again", "repeated", "three times", "more than once",
        "computed once", "never used", "no gradient flows",
    ),
    half=("item()", "synchron", "waits for", "forward loss"),
    place=("loss", "train_batch()", "loss.*"),
    fix="Compute it once, and keep its value",
    gain="about 8 times faster, with a loader that no longer waits and tensors made on the GPU",
)  # fmt: skip


class Spectra(nn.Module):
    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes

    def spectrum(self, x: torch.Tensor, size: int) -> torch.Tensor:
        window = torch.hann_window(size, device=x.device)
        found = torch.stft(x, size, size // 4, window=window, return_complex=True)
        return (found.real.square() + found.imag.square() + 1e-6).sqrt()

    def forward(self, x: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
        total = (x - clean).abs().mean()
        for size in self.sizes:
            found, right = self.spectrum(x, size), self.spectrum(clean, size)
            total = total + (found - right).abs().mean() + (found.log() - right.log()).abs().mean()
        return total


class Enhancer(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 16, stride=8, padding=4)
        self.blocks = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=2**number, dilation=2**number)
            for number in range(depth)
        )
        self.last = nn.ConvTranspose1d(width, 1, 16, stride=8, padding=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x[:, None])
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.last(x)[:, 0]


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 192, 24, 8), sized(context, 8, 4, 2)
    length, batch = sized(context, 32768, 4096, 1024), sized(context, 16, 2, 2)
    sizes = (1024, 512, 256) if length > 1024 else (128, 64)
    model, loss = made(context, lambda: Enhancer(width, depth)), Spectra(sizes)
    noisy, clean = (context.randn(batch, length) for _ in range(2))
    optimizer, record = adamw(model.parameters()), {"batch": 0.0, "epoch": 0.0}

    def train_batch() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        found = model(noisy)
        value: torch.Tensor = loss(found, clean)
        value.backward()
        optimizer.step()
        if fixed:
            record["batch"] = float(value)
            record["epoch"] += record["batch"] * batch
        else:
            record["batch"] = float(loss(found, clean))
            record["epoch"] += float(loss(found, clean)) * batch
        return value.detach()

    return train_batch, {"": model, "loss": loss}
