"""gc.collect() and torch.cuda.empty_cache() after each step."""

import gc

import torch

from benchmarks.causes.published.parts import Models, Published, Step, gpt, learning
from benchmarks.models import Context

CASE = Published(
    source="huggingface/peft#2894",
    cause=("empty_cache", "gc.collect", "garbage", "cudamalloc", "cudafree", "allocator"),
    place=("tidy()", "collect()", "empty_cache()", "(garbage collector)"),
    fix="Leave both out (theirs keeps one empty_cache in ten steps)",
    gain="250 steps from 108 to 65 s without gc.collect, to 45 s without empty_cache too",
)


def tidy(_: torch.Tensor) -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    after = (lambda _: None) if fixed else tidy
    return learning(*gpt(context, (1024, 8, 512, 8, 16384), (128, 3, 64, 4, 1024)), after=after)
