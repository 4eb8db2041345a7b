"""Images that are read and decoded again whenever a step needs them."""

import io
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.causes.published.parts import Models, Published, Step, sizes, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="openvdb/fvdb-reality-capture#320",
    cause=("decode", "keep what is decoded"),
    place=("(data)",),
    fix="Keep all decoded images in the host's memory",
    gain="around 20% less for a step, even with a loader in processes of its own",
    same=False,
)


class Images(Dataset[torch.Tensor]):
    def __init__(self, number: int, side: int, cached: bool) -> None:
        from PIL import Image

        self.files, self.known = [], dict[int, torch.Tensor]()
        for _ in range(number):
            file = io.BytesIO()
            low = torch.randint(256, (side // 8, side // 8, 3), dtype=torch.uint8).numpy()
            Image.fromarray(low).resize((side, side)).save(file, "jpeg")
            self.files.append(file.getvalue())
        if cached:
            self.known = {at: self.decoded(at) for at in range(number)}

    def decoded(self, at: int) -> torch.Tensor:
        import numpy
        from PIL import Image

        with Image.open(io.BytesIO(self.files[at])) as image:
            return torch.from_numpy(numpy.array(image))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.known[at] if self.known else self.decoded(at)


class Splats(nn.Module):
    """Colours at positions: what is fitted to the images."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(1, width, side // 4, side // 4))
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 48, 1)
        )
        self.spread = nn.PixelShuffle(4)

    def forward(self) -> torch.Tensor:
        return self.spread(self.layers(self.features)).sigmoid()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    side, width = sizes(context, (1024, 128), (256, 24))
    data = Images(context.pick(24, 3), side, fixed)
    batches: Iterator[Any] = chain.from_iterable(repeat(DataLoader(data, shuffle=True)))
    model = made(context, lambda: Splats(side, width))

    def loss() -> torch.Tensor:
        image = next(batches).to(context.device).permute(0, 3, 1, 2).float() / 255
        return (model() - image).abs().mean()

    return stepping(model, loss), {"": model}
