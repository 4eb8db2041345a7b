"""X-ray images that are decoded and resized again whenever a step needs them."""

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
    source="open-edge-platform/geti#1694",
    cause=("decode", "keep what is decoded"),
    place=("(data)",),
    fix="Keep decoded images in the host's memory (--mem-cache-size)",
    gain="8 GB hold 40% of 5,215 chest X-rays; the gain 'largely depends on the dataset'",
    same=False,
)


class Xrays(Dataset[Any]):
    """Grey JPEG images of about a megapixel, as in the data set of the report."""

    def __init__(self, number: int, size: tuple[int, int], side: int, cached: bool) -> None:
        from PIL import Image

        self.side, self.files, self.known = side, list[bytes](), dict[int, torch.Tensor]()
        for _ in range(number):
            file = io.BytesIO()
            low = torch.randint(256, (size[1] // 16, size[0] // 16), dtype=torch.uint8).numpy()
            Image.fromarray(low).resize(size).save(file, "jpeg")
            self.files.append(file.getvalue())
        if cached:
            self.known = {at: self.decoded(at) for at in range(number)}

    def decoded(self, at: int) -> torch.Tensor:
        import numpy
        from PIL import Image

        with Image.open(io.BytesIO(self.files[at])) as image:
            small = image.resize((self.side, self.side))
        return torch.from_numpy(numpy.array(small))[None]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> Any:
        return (self.known[at] if self.known else self.decoded(at)), at % 2


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    batch, side, width = sizes(context, (32, 224, 64), (4, 96, 12))
    size = (1312, 976) if not context.small else (96, 64)
    data = Xrays(context.pick(8, 2) * batch, size, side, fixed)
    loader: DataLoader[Any] = DataLoader(data, batch_size=batch, shuffle=True)
    batches: Iterator[Any] = chain.from_iterable(repeat(loader))

    def network() -> nn.Module:
        stem = nn.Conv2d(1, width, 4, stride=4)
        layers = (nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(8))
        return nn.Sequential(stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    model = made(context, lambda: nn.Sequential(network(), nn.Linear(width, 2)))

    def loss() -> torch.Tensor:
        images, labels = (one.to(context.device) for one in next(batches))
        return nn.functional.cross_entropy(model(images.float() / 255), labels)

    return stepping(model, loss), {"": model}
