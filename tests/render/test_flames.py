"""Flame graphs in speedscope's form."""

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from backspot.render import renderer_for
from support.h200 import EACH_WITH_BACKWARD, report_of as recorded
from support.sample_reports import (
    ODD_NAMES,
    SAMPLES,
    node,
    report as report_of,
    reports,
    row,
    vit,
    vit_on_a_cpu,
    vit_with_lines,
)

COSTS = {"wall": "wall_ns", "GPU": "gpu_ns", "CPU": "cpu_ns"}
PROFILE = re.compile(r"(wall|GPU|CPU) time of the backward, per (step|pass)(?:, as recorded)?")


def speedscope(report):
    """The file, held against the structure that speedscope publishes as its schema."""
    file = json.loads(renderer_for("x.speedscope.json")(report))
    assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert set(file) <= {"$schema", "name", "exporter", "activeProfileIndex", "shared", "profiles"}
    assert isinstance(file["name"], str)
    assert file["exporter"].startswith("backspot@")
    assert set(file["shared"]) == {"frames"}
    frames = file["shared"]["frames"]
    assert all(set(frame) in ({"name"}, {"name", "file", "line"}) for frame in frames)
    assert all(isinstance(frame["name"], str) and frame.get("line", 1) > 0 for frame in frames)
    assert 0 <= file["activeProfileIndex"] < len(file["profiles"])
    for profile in file["profiles"]:
        assert set(profile) == {
            *("type", "name", "unit", "startValue", "endValue", "samples", "weights"),
        }
        assert (profile["type"], profile["unit"]) == ("sampled", "nanoseconds")
        assert profile["startValue"] == 0
        assert profile["endValue"] == sum(profile["weights"])
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(type(weight) is int and weight > 0 for weight in profile["weights"])
        for stack in profile["samples"]:
            assert stack
            assert all(type(index) is int and 0 <= index < len(frames) for index in stack)
    return file


def measure(profile):
    return PROFILE.fullmatch(profile["name"])[1]


def named(file, profile):
    frames = [frame["name"] for frame in file["shared"]["frames"]]
    found = next(p for p in file["profiles"] if measure(p) == profile)
    stacks = [";".join(frames[index] for index in stack) for stack in found["samples"]]
    assert len(set(stacks)) == len(stacks)
    return dict(zip(stacks, found["weights"], strict=True))


def test_a_stack_is_the_modules_from_the_root_down_and_then_the_node():
    found = named(speedscope(vit()), "wall")
    attention = "VisionTransformer;blocks.3 (Block);blocks.3.attn (Attention)"
    assert found[f"{attention};ScaledDotProductEfficientAttentionBackward0"]
    assert found["VisionTransformer;AddBackward0"]
    # Instrumented on its own: no part of the model.
    assert found["loss (CrossEntropyLoss);NllLossBackward0"]
    assert found["(outside model);MeanBackward0"] == 30_000
    assert found["(autograd engine)"] == 210_000


def check_sums(report):
    file = speedscope(report)
    assert [measure(p) for p in file["profiles"]] == [
        n for n in COSTS if n != "GPU" or report.has_gpu
    ]
    for profile in file["profiles"]:
        rows = report.modules
        total = sum(getattr(row, COSTS[measure(profile)]) for row in rows)
        assert profile["endValue"] == total


@pytest.mark.parametrize("name", SAMPLES)
def test_the_weights_sum_to_the_rows(name):
    check_sums(SAMPLES[name]())


@pytest.mark.parametrize("name", EACH_WITH_BACKWARD)
def test_the_weights_sum_to_the_report_of_a_real_trace(name):
    report = recorded(name)
    check_sums(report)
    file = speedscope(report)
    for profile in file["profiles"]:
        assert profile["endValue"] == getattr(report, COSTS[measure(profile)])


@given(reports())
def test_any_report_can_be_written(report):
    speedscope(report)


def test_without_a_gpu_there_is_no_gpu_profile():
    assert [measure(p) for p in speedscope(vit_on_a_cpu())["profiles"]] == ["wall", "CPU"]


def test_in_the_order_of_time_each_module_is_one_block_and_the_most_expensive_comes_first():
    for profile in speedscope(vit())["profiles"]:
        blocks = [
            tuple(stack[:depth])
            for last, stack in pairwise([[], *profile["samples"]])
            for depth in range(1, len(stack) + 1)
            if stack[:depth] != last[:depth]
        ]
        assert len(set(blocks)) == len(blocks)
        weights = Counter()
        for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
            weights[stack[0]] += weight
        assert list(weights.values()) == sorted(weights.values(), reverse=True)


def test_frames_name_the_line_of_the_forward():
    frames = speedscope(vit_with_lines())["shared"]["frames"]
    gather = next(frame for frame in frames if frame["name"] == "GatherBackward0")
    assert (gather["file"], gather["line"]) == ("timm/layers/patch_dropout.py", 45)


@pytest.mark.parametrize("name", [*ODD_NAMES, "a;b 7", "a\nb 9", "\x1b[2J", "\ud800"])
def test_a_name_cannot_break_a_stack(name):
    path = name.replace(".", "_")
    report = report_of([row(path, "C", wall=21, nodes=(node(name, 21),))])
    file = speedscope(report)
    (stack,) = file["profiles"][0]["samples"]
    assert len(stack) == 2
    assert all(frame["name"].isprintable() for frame in file["shared"]["frames"])
