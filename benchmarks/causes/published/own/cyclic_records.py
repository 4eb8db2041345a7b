"""A data loader keeps records in cycles, and Python's collector walks the heap for them."""

import collections
import gc
from typing import Any

import torch

from benchmarks.causes.published.parts import Models, Published, Step, TokenLoss, gpt, stepping
from benchmarks.models import Context

CASE = Published(
    source="karpathy/nanochat#477",
    cause=("garbage",),
    place=("(garbage collector)", "read_records()"),
    fix="Build records without cycles, freeze what lives long, and collect between steps",
    gain="1,350 to 683 ms in the steps that are hit: a pause of 713 ms for 340,341 objects",
)


class Record:
    def __init__(self, number: int, cyclic: bool) -> None:
        self.number, self.words = number, [number, (number, str(number))]
        self.owner = self if cyclic else None


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    model, tokens, follow = gpt(context, (384, 6, 64, 8, 8000), (64, 6, 64, 1, 500))
    index: list[Any] = [{"shard": i, "rows": [i]} for i in range(context.pick(200_000, 2_000))]
    number, kept = context.pick(60_000, 600), collections.deque[list[Record]](maxlen=4)
    criterion = TokenLoss()
    if fixed:
        gc.collect()
        gc.freeze()

    def read_records() -> torch.Tensor:
        if fixed:
            gc.disable()
        else:
            gc.enable()
        kept.append([Record(i, not fixed) for i in range(number)])
        return tokens if index else follow

    step = stepping(model, lambda: criterion(model(read_records()), follow))
    return step, {"": model, "loss": criterion}
