"""A saved summary that is damaged costs its own rank, whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st

from backspot.errors import NotATraceError, UsageError
from backspot.job.gather import ranks
from backspot.job.summary import OutsideTimes, Summary, from_bytes, from_json, to_bytes, to_json
from support.summaries import many, with_kernels

GOOD = [
    msgspec.structs.replace(
        with_kernels(one, {one.modules[1].path: {"gemm": 90_000, "copy": 9_000}}),
        modules=with_kernels(one, {one.modules[1].path: {"gemm": 99_000}}).modules[:4],
        outside=(
            OutsideTimes("(in backward)", "", (5_000,) * one.steps, (0,) * one.steps),
            OutsideTimes("(in optimizer step)", "aten::add_", (9_000,) * one.steps, (7,) * 3),
            OutsideTimes("(in forward)", "", *((1_000,) * 3,) * 2, "train.py:9", (2_000,) * 3),
        ),
    )
    for one in many(3)
]
PLAIN = msgspec.to_builtins(GOOD[2])
NAMES = ["rank", "step_numbers"]
"""What is damaged there can make a good rank of another name."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value is; of a list, the first and the last entry stand for all."""
    if path:
        yield path
    keys = value if isinstance(value, dict) else ()
    if isinstance(value, (list, tuple)) and value:
        keys = {0, len(value) - 1}
    for key in keys:
        yield from places(value[key], (*path, key))


NUMBERS = [-1, -(2**40), 0, 1, 2**31, 2**50, 2**63 - 1, 2**63, 2**70, 1e300, float("nan"), None]
OTHERS: list[Any] = [*NUMBERS, "", "text", True, [], {}]


def damaged(value: Any, how: int) -> Any:
    """One of the ways to damage a value; lists have more of them."""
    if isinstance(value, (list, tuple)):
        some = list(value)
        ways = [some[:-1], some[1:], some + some[-1:], some[::-1], some[:1] * len(some), some * 2]
        return [*ways, *([each] * len(some) for each in NUMBERS), *OTHERS][how % 35]
    return OTHERS[how % len(OTHERS)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(places(PLAIN), key=str)), st.integers(0, 34))
@example(("groups", 0, "end", -1), 4)  # a wait after all else of its rank
def test_a_damaged_summary_costs_its_own_rank_or_nothing(path: tuple[Any, ...], how: int) -> None:
    plain = deepcopy(PLAIN)
    inside = plain
    *way, last = path
    for key in way:
        if isinstance(inside[key], tuple):
            inside[key] = list(inside[key])
        inside = inside[key]
    inside[last] = damaged(inside[last], how)
    with TemporaryDirectory() as name, ThreadPoolExecutor(1) as executor:
        files = [Path(name) / f"{rank}.json" for rank in range(3)]
        for file, one in zip(files, GOOD, strict=False):
            file.write_bytes(to_json(one))
        files[2].write_text(json.dumps(plain))
        try:
            job = ranks(files, executor)
        except UsageError as error:
            assert path[0] in NAMES
            assert "\n" not in str(error)
            return
        assert len(job.ranks) + len(job.lost) == 3
        assert all(one.source == str(files[2]) and "\n" not in one.reason for one in job.lost)
        assert str(job)


def changed(**fields: Any) -> Summary:
    return msgspec.structs.replace(GOOD[0], **fields)


def of_group(**fields: Any) -> Summary:
    (group,) = GOOD[0].groups
    return changed(groups=(msgspec.structs.replace(group, **fields),))


def of_module(**fields: Any) -> Summary:
    first, *rest = GOOD[0].modules
    return changed(modules=(msgspec.structs.replace(first, **fields), *rest))


def of_outside(**fields: Any) -> Summary:
    first, *rest = GOOD[0].outside
    return changed(outside=(msgspec.structs.replace(first, **fields), *rest))


def of_kernels(**fields: Any) -> Summary:
    (kernels,) = GOOD[0].kernels
    return changed(kernels=(msgspec.structs.replace(kernels, **fields),))


@pytest.mark.parametrize(
    ("summary", "reason"),
    [
        (changed(begin=(), end=()), "it has no step"),
        (changed(stalled=()), "its lists of steps differ in length"),
        (changed(begin=GOOD[0].end, end=GOOD[0].begin), "its steps are in no order of time"),
        (changed(step_numbers=(1, 1, 2)), "two steps have one number"),
        (changed(exposed=(2**50,) * 3), "the collectives and the steps do not fit together"),
        (of_group(exposed=(1,)), "the lists of the process group .* differ in length"),
        (of_group(calls=()), "a collective of no kind or of no step"),
        (of_group(start=GOOD[0].groups[0].end, end=GOOD[0].groups[0].start), "no order of time"),
        (of_module(backward_beside=(1,)), "the module .* and the steps do not fit together"),
        (of_module(forward_beside=(2**50,) * 3), "the module .* and the steps do not fit together"),
        (of_outside(beside=(1,)), "the steps do not fit together"),
        (changed(kernel_names=()), "a kernel without a name"),
        (changed(modules=GOOD[0].modules[:1]), "kernels of no module"),
        (changed(kernel_names=("gemm", "gemm")), "two kernels have one name"),
        (changed(kernels=GOOD[0].kernels * 2), "it has the kernels of a module twice"),
        (of_kernels(kernel=(0, 0)), "it has a kernel of a module twice"),
        (of_kernels(time=((1,) * 3,)), "the lists of its kernels differ in length"),
        (of_kernels(unnamed=(0,)), "its kernels and its steps do not fit together"),
        (of_kernels(time=((1,), (1,))), "its kernels and its steps do not fit together"),
        (
            of_kernels(time=((0, 99_001, 0), (0,) * 3)),
            "the module .* and its kernels do not fit together",
        ),
        (of_kernels(unnamed=(1, 0, 0)), "the module .* and its kernels do not fit together"),
        (changed(origin_ns=-1), "`int` >= 0"),
    ],
)
def test_a_damaged_summary_is_refused_with_its_reason(summary: Summary, reason: str) -> None:
    for write, read in ((to_bytes, from_bytes), (to_json, from_json)):
        with pytest.raises(NotATraceError, match=reason):
            read(write(summary))
