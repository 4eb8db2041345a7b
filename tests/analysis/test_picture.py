"""One step as a picture: what the host does by phase and by line, devices, and waits."""

from itertools import pairwise

import pytest

import backspot
from support import h200

DATA = h200.DATA.parent
CLIPPED = DATA / "host" / "clip_each.trace.json.gz"
MOST = 240


@pytest.fixture(scope="module")
def clipped():
    return backspot.locate(CLIPPED)


@pytest.mark.parametrize("name", h200.EACH_WITH_BACKWARD)
def test_pieces_lie_in_the_step_one_after_the_other_and_stay_few(name):
    picture = h200.report_of(name).picture
    for lane in (picture.host, picture.lines, picture.device):
        assert len(lane) <= MOST
        assert all(0 <= start < end <= picture.recorded_wall_ns for start, end, *_ in lane)
        assert all(one[1] <= after[0] for one, after in pairwise(lane))
    assert picture.host[0][0] == 0
    assert picture.host[-1][1] == picture.recorded_wall_ns
    assert all(0 < busy <= 100 for *_, busy in picture.device)


@pytest.mark.parametrize("name", h200.EACH_WITH_BACKWARD)
def test_the_step_is_one_that_counts(name):
    made = h200.report_of(name)
    lengths = [made.step_ns_by_step[step] for step in made.typical_steps]
    nearest = min(lengths, key=lambda length: abs(length - made.step_ns))
    assert made.picture.recorded_wall_ns == nearest


def test_the_waits_of_the_step_end_after_the_work_that_they_wait_for(clipped):
    assert len(clipped.picture.waits) > 20
    for start, end, since, until, line in clipped.picture.waits:
        assert start < end
        assert since < until <= end + 2_000
        assert line in ("train.py:62", "train.py:87")


def test_the_waits_of_each_line_are_those_that_pytorch_warns_of(clipped):
    counts: dict[str, int] = {}
    for wait in clipped.waits:
        counts[wait.line] = counts.get(wait.line, 0) + wait.count
    assert counts == {"train.py:62": 51, "train.py:87": 1}


def test_a_phase_is_at_the_line_that_runs_then(clipped):
    picture = clipped.picture
    ((start, end),) = [piece[:2] for piece in picture.host if piece[2] == "clipping"]
    during = {line for begin, stop, line in picture.lines if begin < end and stop > start}
    assert "train.py:59" in during
    assert not [busy for begin, _, _, busy in picture.device if start <= begin < end and busy > 50]


def test_without_a_device_and_without_lines_there_is_no_picture():
    assert backspot.locate(DATA / "findings" / "adamw_fused.trace.json.gz").picture is None
    on_a_cpu = backspot.locate(DATA / "findings" / "python_loop.trace.json.gz").picture
    assert not on_a_cpu.device
    longest = max(on_a_cpu.lines, key=lambda piece: piece[1] - piece[0])
    assert longest[2].startswith("train.py:")
