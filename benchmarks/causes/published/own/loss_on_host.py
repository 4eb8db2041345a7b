"""A loss of spectra that is computed on the host, for a model on the GPU."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="sdatkinson/neural-amp-modeler#164",
    cause=("to the host", "on the cpu", "between devices"),
    place=("loss", "loss.*", "(loss)"),
    fix="Compute the loss on the model's device",
    gain="up to 6 times less for a step",
    device="cuda",
)


class Spectra(nn.Module):
    """How much the magnitudes of short spectra differ, for several lengths."""

    def __init__(self, lengths: tuple[int, ...], fixed: bool) -> None:
        super().__init__()
        self.lengths, self.fixed = lengths, fixed

    def magnitudes(self, x: torch.Tensor, length: int) -> torch.Tensor:
        window = torch.hann_window(length, device=x.device)
        found = torch.stft(x, length, length // 4, window=window, return_complex=True)
        return (found.real.square() + found.imag.square() + 1e-8).sqrt()

    def forward(self, said: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        device = said.device
        if not self.fixed:
            said, target = said.cpu(), target.cpu()
        total = torch.zeros((), device=said.device)
        for length in self.lengths:
            one, two = self.magnitudes(said, length), self.magnitudes(target, length)
            total = total + (one - two).norm() / two.norm() + (one.log() - two.log()).abs().mean()
        return total.to(device)


class Amplifier(nn.Module):
    """Dilated convolutions over samples."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=2**at, dilation=2**at) for at in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x[:, None])
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        return self.last(y)[:, 0]


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth, batch, samples = sizes(context, (16, 10, 16, 8192), (4, 2, 2, 512))
    lengths = (2048, 1024, 512) if samples > 4096 else (64, 32)
    model, criterion = made(context, lambda: Amplifier(width, depth)), Spectra(lengths, fixed)
    dry, wet = (context.randn(batch, samples) for _ in range(2))
    return stepping(model, lambda: criterion(model(dry), wet)), {"": model, "loss": criterion}
