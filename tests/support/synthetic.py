"""Kineto traces made by hand, for what real ones cannot show on demand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backspot.trace.labels import Kind, Label, format_label


class Trace:
    """Gathers events; times are nanoseconds, threads are numbers as the system gives them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metadata: dict[str, Any] = {}
        self._ids = 0

    def _id(self) -> int:
        self._ids += 1
        return self._ids

    def event(
        self, cat: str, name: str, start: int, end: int, thread: int = 1, **args: Any
    ) -> dict[str, Any]:
        event = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": thread,
            "ts": start / 1000,
            "dur": (end - start) / 1000,
            "args": {"External id": self._id(), **args},
        }
        self.events.append(event)
        return event

    def forward(self, path: str, class_name: str, start: int, end: int, thread: int = 1) -> None:
        label = format_label(Label(Kind.FORWARD, path, class_name))
        self.event("cpu_op", label, start, end, thread)

    def operator(
        self,
        name: str,
        start: int,
        end: int,
        *,
        seq: int | None = None,
        thread: int = 1,
        shapes: Sequence[Sequence[int]] = (),
    ) -> None:
        numbers = {} if seq is None else {"Sequence number": seq, "Fwd thread id": 0}
        types = ["float"] * len(shapes)
        inputs = {"Input Dims": shapes, "Input type": types} if shapes else {}
        self.event("cpu_op", name, start, end, thread, **numbers, **inputs)

    def node(
        self,
        name: str,
        start: int,
        end: int,
        *,
        seq: int | None = None,
        logical: int = 1,
        thread: int = 2,
        flow_from: tuple[int, int] | None = None,
    ) -> None:
        """A node's execution: the engine's event, and within it the node's own.

        ``flow_from`` is (thread, time) of the forward operator, for an arrow between the two.
        """
        numbers = {} if seq is None else {"Sequence number": seq, "Fwd thread id": logical}
        evaluate = f"autograd::engine::evaluate_function: {name}"
        self.event("cpu_op", evaluate, start, end, thread)
        self.event("cpu_op", name, start, end, thread, **numbers)
        if flow_from is not None:
            identity = self._id()
            common = {"cat": "fwdbwd", "name": "fwdbwd", "id": identity, "pid": 1}
            origin, time = flow_from
            self.events.append({"ph": "s", **common, "tid": origin, "ts": time / 1000})
            self.events.append({"ph": "f", "bp": "e", **common, "tid": thread, "ts": start / 1000})

    def kernel(
        self,
        start: int,
        end: int,
        *,
        launch: int | None,
        launched: int | None = None,
        launch_thread: int = 2,
        name: str = "kernel",
        cat: str = "kernel",
        device: int = 0,
        stream: int = 7,
        blocks: float | None = None,
    ) -> None:
        """Device work, and the call that launched it unless ``launch`` is ``None``.

        ``blocks`` are those for each multiprocessor.

        The call returns when it begins, or at ``launched``.
        """
        correlation = self._id() + 1000
        if launch is not None:
            self.event(
                "cuda_runtime",
                "cudaLaunchKernel",
                launch,
                launched or launch,
                launch_thread,
                correlation=correlation,
            )
        event = self.event(
            cat, name, start, end, stream, correlation=correlation, device=device, stream=stream
        )
        event["pid"] = device
        if blocks is not None:
            event["args"]["blocks per SM"] = blocks

    def annotation(self, name: str, start: int, end: int, thread: int = 1) -> None:
        self.event("user_annotation", name, start, end, thread)

    def memory(
        self,
        address: int,
        size: int,
        at: int,
        *,
        allocated: int,
        reserved: int = 0,
        thread: int = 1,
        device: int = 0,
    ) -> None:
        """A block that comes, or goes if ``size`` is negative; the host is device -1."""
        self.events.append(
            {
                "ph": "i",
                "cat": "cpu_instant_event",
                "s": "t",
                "name": "[memory]",
                "pid": 1,
                "tid": thread,
                "ts": at / 1000,
                "args": {
                    "Total Reserved": reserved,
                    "Total Allocated": allocated,
                    "Bytes": size,
                    "Device Id": device,
                    "Device Type": int(device >= 0),
                    "Addr": address,
                },
            }
        )

    def document(self) -> dict[str, Any]:
        head = {"schemaVersion": 1}
        if any(event["name"] == "[memory]" for event in self.events):
            head["profile_memory"] = 1
        if any("Input Dims" in event.get("args", ()) for event in self.events):
            head["record_shapes"] = 1
        whole = {**head, "traceEvents": self.events, "traceName": "synthetic"}
        return whole | self.metadata

    def save(self, path: Path) -> Path:
        text = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path
