"""Chains of element-wise operators, what stands between them, and what is no chain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import backspot
from backspot import Finding, Report
from support.synthetic import Trace

TICK = 200_000  # nanoseconds: an operator of this length leaves the cache of a core
BEFORE = ("Mul", "Add", "Sigmoid")
AFTER = ("Mul", "Sub", "Exp")


def report_of(folder: Path, operations: Sequence[str], steps: int = 3) -> Report:
    """The report of a model that runs these operations in its forward, and their nodes."""
    trace, now = Trace(), 0
    for step in range(steps):
        begin = now
        for number, _ in enumerate(operations):
            trace.operator(f"aten::{number}", now, now + TICK, seq=step * 100 + number)
            now += TICK
        trace.forward("", "Model", begin, now)
        for number, operation in reversed([*enumerate(operations)]):
            node = operation if "Backward" in operation else f"{operation}Backward0"
            trace.node(node, now, now + TICK, seq=step * 100 + number)
            now += TICK
        trace.annotation(f"ProfilerStep#{step}", begin, now)
        now += TICK
    return backspot.locate(trace.save(folder / "trace.json"))


def is_chain(report: Report) -> bool:
    return report.rules["pointwise-chain"] == "found"


@pytest.mark.parametrize(
    "between",
    [
        ("Transpose",),
        ("T",),
        ("ReshapeAlias",),
        ("Clone",),
        ("AsStrided",),
        ("T", "Clone", "ReshapeAlias", "ToCopy"),
    ],
    ids="+".join,
)
def test_what_lies_between_two_halves_of_a_chain_and_computes_nothing_is_part_of_it(
    tmp_path, between
) -> None:
    assert is_chain(report_of(tmp_path, (*BEFORE, *between, *AFTER)))


@pytest.mark.parametrize("between", ["Mm", "Sort", "Embedding", "TransposedBackward"])
def test_what_computes_something_else_between_them_ends_the_chain(tmp_path, between) -> None:
    """The last one is a Function of a program, whatever it is called."""
    assert not is_chain(report_of(tmp_path, (*BEFORE, between, *AFTER)))


@pytest.mark.parametrize("name", ["Mean", "Sum"])
def test_what_is_made_of_all_elements_is_the_last_of_its_chain(tmp_path, name) -> None:
    """The sum has to be whole before anything reads it; over a dimension, a row has to be."""
    for of, is_one in (("Backward1", True), ("Backward0", False)):
        folder = tmp_path / of
        folder.mkdir()
        assert is_chain(report_of(folder, ("Mul", "Add", f"{name}{of}", "Sub", "Exp"))) is is_one
    assert is_chain(report_of(tmp_path, ("Mul", "Add", "Exp", f"{name}Backward0")))


def test_copies_of_repeat_are_read_within_a_chain_and_are_none_of_its_operators(tmp_path) -> None:
    assert is_chain(report_of(tmp_path, ("Mul", "Add", "Repeat", "Sub", "Exp")))
    assert not is_chain(report_of(tmp_path, ("Mul", "Add", "Repeat", "Exp")))


def test_views_and_copies_alone_are_no_chain(tmp_path) -> None:
    assert not is_chain(report_of(tmp_path, ("T", "Clone", "ReshapeAlias", "ToCopy") * 3))


@pytest.mark.parametrize("views", [("T",), ("ReshapeAlias", "Unsqueeze"), ("Slice", "Permute")])
def test_copies_there_and_back_around_an_operator_are_found_through_all_views(
    tmp_path, views
) -> None:
    there = ("Permute", *views, "Clone", "NativeLayerNorm", *views, "Permute", "Clone")
    assert report_of(tmp_path, there).rules["layout-copies"] == "found"


def test_copies_around_views_alone_are_not_around_an_operator(tmp_path) -> None:
    there = ("Permute", "Clone", "Slice", "Permute", "Clone")
    assert report_of(tmp_path, there).rules["layout-copies"] == "nothing"


def copied_there_and_back(
    folder: Path, between: str, *backward_us: int, last: str = "mm", **host_us: int
) -> Finding:
    """What is found of copies there and back on a GPU around an operator.

    Args:
        folder: for the trace.
        between: the operator.
        backward_us: how long each kernel of its node takes.
        last: the last operator of the forward.
        host_us: how long the host takes for an operator, 10 by default.
    """
    folder.mkdir()
    trace, us = Trace(), 1_000
    forward = (("permute", 0), ("clone", 100), (between, 100), ("permute", 0), ("clone", 100))
    lengths = {"clone": (), "permute": (), between: backward_us}
    for step in range(3):
        begin = now = step * 20_000 * us
        device = begin + 1_000 * us
        trace.forward("", "Model", begin, begin + 200 * us)
        made = [("mm", 900), *forward, (last, 900)]
        for number, (name, length) in enumerate(made):
            host = host_us.get(name, 10) * us
            trace.operator(f"aten::{name}", now, now + host, seq=step * 10 + number)
            if length:
                end = device + length * us
                trace.kernel(device, end, launch=now + 5 * us, launch_thread=1, name=name)
                device = end
            now += host + 10 * us
            device = max(device, now)
        for number, (name, _) in reversed([*enumerate(made)]):
            node = name.title().replace("_", "")
            trace.node(f"{node}Backward0", now, now + 10 * us, seq=step * 10 + number, thread=1)
            for length in lengths.get(name, (900,)):
                end = device + length * us
                trace.kernel(device, end, launch=now + 5 * us, launch_thread=1, name=name)
                device = end
            now += 20 * us
        trace.annotation(f"ProfilerStep#{step}", begin, now)
    found = backspot.locate(trace.save(folder / "trace.json")).findings
    (copies,) = (finding for finding in found if finding.rule == "layout-copies")
    return copies


def price_between_layouts(folder: Path, between: str, *backward_us: int) -> int:
    """The price of copies there and back, as of ``copied_there_and_back``."""
    copies = copied_there_and_back(folder, between, *backward_us)
    assert copies.saves is not None
    assert copies.saves.ns <= copies.wall_ns
    return copies.saves.ns


def test_an_element_wise_gradient_that_is_read_across_the_memory_is_of_the_copies_price(
    tmp_path,
) -> None:
    """It moves half as many bytes again as its forward: these are left, and other backwards are."""
    prices = {
        (name, us): price_between_layouts(tmp_path / f"{name}{us}", name, us)
        for name in ("sigmoid", "native_layer_norm")
        for us in (150, 400)
    }
    longer = prices["sigmoid", 400] - prices["sigmoid", 150]
    assert longer == pytest.approx(250_000, rel=0.02)
    assert prices["native_layer_norm", 400] == prices["native_layer_norm", 150]


def test_the_gradients_of_several_inputs_move_more_and_are_not_read_across_for_that(
    tmp_path,
) -> None:
    """A product of two tensors has a kernel for the gradient of each."""
    prices = {
        us: price_between_layouts(tmp_path / f"{us}", "mul", us, us) for us in (75, 100, 150, 300)
    }
    assert prices[75] == prices[100] == prices[150]
    assert prices[300] - prices[150] == pytest.approx(300_000, rel=0.02)


def test_where_norms_know_nchw_alone_the_one_layout_is_not_channels_last(tmp_path) -> None:
    for name, other in (("native_layer_norm", True), ("native_group_norm", False)):
        copies = copied_there_and_back(tmp_path / name, name, 150)
        assert "Stay in one layout" in copies.remedy
        assert ("channels_last" in copies.remedy) is other


def test_what_the_host_launches_for_copies_there_and_back_goes_with_them(tmp_path) -> None:
    """The operator between them is launched as before, however long that takes."""
    saves = {}
    for name, long in (("copies", "clone"), ("between", "native_layer_norm")):
        copies = copied_there_and_back(
            tmp_path / name, "native_layer_norm", 150, **{long: 4_000, "mm": 1_500}
        )
        saves[name] = copies.saves.ns if copies.saves else 0
    assert saves["copies"] > 7_500_000
    assert saves["between"] < 1_000_000


def test_copies_there_and_back_say_that_convolutions_have_faster_kernels_too(tmp_path) -> None:
    for last, says in (("convolution", True), ("mm", False)):
        copies = copied_there_and_back(tmp_path / last, "sigmoid", 150, last=last)
        assert ("faster kernels for channels_last" in copies.seen) is says
        assert copies.saves is not None
        assert copies.saves.at_least
