"""A training as tutorials have it, with an option for each setting that could make it faster.

    python benchmarks/accuracy/ladder_training.py FOLDER --device cuda --workers 4

torchvision's ResNet-18 on a folder of images, by default as people begin: batch 32, no workers,
images decoded and normalised as floats one by one, float32, the loss read in each step. It prints
the images a second of each ``--log`` steps by its own clock, and ends after ``--steps``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.models import resnet18

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 10
MANY = 1_000_000  # samples of an epoch, so that none ends


class Images(Dataset[tuple[Tensor, int]]):
    """The images of a folder, again and again, each cut and flipped at random."""

    def __init__(self, folder: Path, side: int, *, uint8: bool, decoded: bool) -> None:
        self._files = sorted(folder.glob("*.jpg"))
        self._decoded = [self._read(one) for one in self._files] if decoded else None
        steps: list[Any] = [transforms.RandomCrop(side), transforms.RandomHorizontalFlip()]
        if not uint8:
            steps += [
                transforms.ConvertImageDtype(torch.float32) if decoded else transforms.ToTensor(),
                transforms.Normalize(MEAN, STD),
            ]
        elif not decoded:
            steps.append(transforms.PILToTensor())
        self._transform = transforms.Compose(steps)

    @staticmethod
    def _read(file: Path) -> Tensor:
        return transforms.functional.pil_to_tensor(Image.open(file).convert("RGB"))

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = index % len(self._files)
        if self._decoded is not None:
            return self._transform(self._decoded[number]), number % CLASSES
        image = Image.open(self._files[number]).convert("RGB")
        return self._transform(image), number % CLASSES


def parsed() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--log", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    for name in ("pinned", "uint8", "decoded", "tf32", "bf16", "channels-last", "compile"):
        parser.add_argument(f"--{name}", action="store_true")
    for name in ("fused", "benchmark", "unread-loss"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = parsed()
    torch.manual_seed(0)
    if args.device == "cpu":
        torch.set_num_threads(1)
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = args.benchmark
    loader = DataLoader(
        Images(args.folder, args.side, uint8=args.uint8, decoded=args.decoded),
        batch_size=args.batch,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=args.pinned,
        persistent_workers=args.workers > 0,
        drop_last=True,
    )
    model: Any = resnet18(num_classes=CLASSES).to(args.device)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)
    if args.compile:
        model = torch.compile(model)
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.fused or None)
    mean, std = (torch.tensor(one, device=args.device).view(3, 1, 1) for one in (MEAN, STD))
    total: Any = 0.0
    begin = time.perf_counter()
    for step, (images, labels) in enumerate(loader, 1):
        images = images.to(args.device, non_blocking=args.pinned)
        labels = labels.to(args.device, non_blocking=args.pinned)
        if args.uint8:
            images = (images / 255 - mean) / std
        images = images.contiguous(memory_format=layout)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            loss = loss_of(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() if args.unread_loss else loss.item()
        if step % args.log == 0:
            mean_loss = float(total) / args.log  # waits for the device
            now = time.perf_counter()
            speed = args.log * args.batch / (now - begin)
            print(f"step {step}: loss {mean_loss:.3f}, {speed:.2f} images/s", flush=True)
            begin, total = time.perf_counter(), 0.0
        if step == args.steps:
            return


if __name__ == "__main__":
    main()
