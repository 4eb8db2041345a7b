import gc
import json
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from support.hooks import (  # noqa: E402
    default_hooks,  # noqa: F401
    for_each_kind as pytest_generate_tests,  # noqa: F401
)

KINDS = ("forward: ", "backward: ", "backward end: ", "unmarked: ")


@dataclass(frozen=True)
class Event:
    name: str
    start: float
    end: float

    def contains(self, other):
        # Kineto rounds to nanoseconds and writes microseconds.
        return self.start - 0.002 <= other.start and other.end <= self.end + 0.002


class Recording:
    """What a profiler recorded: every event in order of start, and the labels among them."""

    def __init__(self, path):
        events = [
            Event(event["name"], event["ts"], event["ts"] + event["dur"])
            for event in json.loads(path.read_text())["traceEvents"]
            if event.get("ph") == "X"
        ]
        self.events = sorted(events, key=lambda event: (event.start, -event.end))
        self.labels = [event for event in self.events if event.name.startswith(KINDS)]
        self.names = [event.name for event in self.labels]

    def forward(self):
        return [name for name in self.names if name.startswith("forward: ")]

    def backward(self):
        return [name for name in self.names if name.startswith("backward: ")]

    def parent(self, label):
        """The innermost other label around this one."""
        around = [other for other in self.labels if other is not label and other.contains(label)]
        return max(around, key=lambda other: other.start).name if around else None


@pytest.fixture
def workers_end_soon(monkeypatch):
    """A worker that waits on when its loader is collected ends at once, not after five seconds."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


@pytest.fixture
def record(tmp_path):
    """Run a function under a profiler and hand back what the exported trace holds."""
    count = 0

    def run(function, all_threads=False):
        nonlocal count
        options = {}
        if all_threads:
            config = torch._C._profiler._ExperimentalConfig
            try:
                options["experimental_config"] = config(profile_all_threads=True)
            except TypeError:
                pytest.skip("this PyTorch cannot profile all threads")
        with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
            function()
        count += 1
        path = tmp_path / f"trace{count}.json"
        profiler.export_chrome_trace(str(path))
        return Recording(path)

    return run


@pytest.fixture
def graph_of():
    """The names of a graph's nodes, in the order of a walk from its root."""

    def walk(tensor):
        names, seen, pending = [], set(), [tensor.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            names.append(node.name())
            pending.extend(child for child, _ in node.next_functions)
        return names

    return walk
