"""Know from anomaly mode which line of source made each node, and hold the report against it."""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import backspot
from backspot.analysis.attribution.ownership import Ownership, Special, attribute
from backspot.trace import Events, read_events
from support.training import ACCUMULATE, cpu_profile, tells_creation

_FRAME = re.compile(r'  File "(.*)", line (\d+), in ')
_BENEATH = re.compile(r"-packages[/\\](torch|einops)[/\\]|[/\\]backspot[/\\]live[/\\]|^<frozen")

Lines = dict[tuple[int, int], tuple[str, int]]
"""(thread, sequence number) to (file, line)."""


class Tracebacks:
    """The line of each node, from the traceback that anomaly mode leaves in its metadata."""

    def __init__(self) -> None:
        self.lines: Lines = {}

    def add(self, node: Any) -> None:
        stack = node.metadata.get("traceback_")
        if stack is None or ACCUMULATE in node.name():
            return
        for entry in reversed(stack):
            frame = _FRAME.match(entry)
            if frame and not _BENEATH.search(frame[1]):
                key = threading.get_native_id(), node._sequence_nr()
                self.lines[key] = frame[1], int(frame[2])
                return

    def walk(self, node: Any) -> None:
        """All nodes that can be reached: all that PyTorch lets see before 2.14."""
        pending, seen = [node], set()
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.add(node)
                self.add(node)
                pending += [child for child, _ in node.next_functions]


def _places() -> list[str]:
    """Return what a traceback begins with for each frame, and no text of its line.

    Anomaly mode asks for that at each node, and most of the time of a test went into the texts.
    """
    places = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        places.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        frame = frame.f_back
    return places[::-1]


def lines_by_number(events: Events, found: Ownership) -> dict[tuple[int, int], Any]:
    """(thread, sequence number) to the line that the report goes by, ``None`` where it has none."""
    result = {}
    for span in np.flatnonzero(found.spans.is_node & (found.join.sequence >= 0)).tolist():
        builder = int(found.join.builder[span])
        if builder >= 0 and found.owner[span] != Special.OUTSIDE:
            key = int(str(events.threads[builder][1])), int(found.join.sequence[span])
            line = int(found.line[span])
            result[key] = found.lines[line] if line >= 0 else None
    return result


def assert_true_lines(
    model: Any,
    forward: Callable[[], torch.Tensor],
    folder: Path,
    *,
    least: int,
    unknown: int = 0,
) -> Counter[str]:
    """Every line that is told is the one in anomaly mode's traceback of the node.

    Args:
        model: the model.
        forward: one forward; gives the loss.
        folder: where the trace is written.
        least: how many nodes of modules have a line at least.
        unknown: how many may have none, where PyTorch calls back for every node.

    Returns:
        How many nodes each line made.
    """
    truth = Tracebacks()
    with ExitStack() as stack:
        warnings.simplefilter("ignore")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("torch.fx.traceback.format_stack", _places)
        stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
        if tells_creation:
            stack.enter_context(torch.autograd.graph.node_creation_hook(truth.add))
        stack.enter_context(backspot.instrument(model, lines=True))
        profiler = stack.enter_context(cpu_profile())
        loss = forward()
        if not tells_creation:
            truth.walk(loss.grad_fn)
        loss.backward()
    trace = folder / "trace.json"
    live = read_events(profiler)
    profiler.export_chrome_trace(str(trace))
    exported = read_events(trace)
    told = lines_by_number(exported, attribute(exported))
    assert told == lines_by_number(live, attribute(live)), "live and exported must agree"
    known = {key: line for key, line in told.items() if line is not None}
    assert len(known) >= least
    wrong = {
        (key, line, truth.lines.get(key))
        for key, line in known.items()
        if key in truth.lines
        and not (truth.lines[key][0].endswith(line.file) and truth.lines[key][1] == line.line)
    }
    assert wrong == set()
    if tells_creation:
        assert known.keys() <= truth.lines.keys()
        assert len(told) - len(known) <= unknown
        assert exported.lines.exact
    return Counter(f"{line.file}:{line.line}" for line in known.values())
