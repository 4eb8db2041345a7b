"""Trim an exported trace to what a reader of traces needs, and take out what tells whose it is.

    python -m benchmarks.traces.trim big.json.gz small.json.gz

Kept: operators, annotations, runtime calls, device work, the arrows from forward to backward,
``nn.Module`` calls, and all that is said about them. Dropped: other Python frames, Kineto's own
projection of annotations onto the GPU, arrows from launches to kernels (the correlation number says
the same), the profiler's overhead, names of threads, host, run and paths.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

__all__ = ["read_trace", "trim", "write_trace"]

_DROPPED = (
    "gpu_user_annotation",
    "ac2g",
    "async_cpu_to_gpu",
    "overhead",
    "Trace",
    "cpu_instant_event",
)
_DROPPED_ARGS = ("Record function id", "Ev Idx", "context", "queued", "kernel_file", "Call stack")
_DROPPED_KEYS = ("traceName", "host_name", "trace_id")


def read_trace(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    document: dict[str, Any] = json.loads(data.decode("utf-8", "replace"), strict=False)
    return document


def trim(document: dict[str, Any]) -> dict[str, Any]:
    """The same trace with fewer events and nobody's name in it."""
    kept = {key: _plain(value) for key, value in document.items() if key not in _DROPPED_KEYS}
    kept["traceEvents"] = [
        _trim_event(event) for event in document.get("traceEvents", []) if _is_wanted(event)
    ]
    return kept


def write_trace(document: dict[str, Any], path: Path) -> int:
    """Write compressed; returns the number of bytes."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=True)
    # One event a line, as Kineto writes them: a diff and a glance stay possible.
    text = text.replace('},{"ph"', '},\n{"ph"')
    data = gzip.compress(text.encode(), 9, mtime=0)
    path.write_bytes(data)
    return len(data)


def _is_wanted(event: dict[str, Any]) -> bool:
    category = event.get("cat")
    if category == "python_function":
        return str(event.get("name", "")).startswith("nn.Module: ")
    if event.get("ph") in ("M", "i", "I", "C") or category in _DROPPED:
        return False
    return category is not None


def _trim_event(event: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(event.get("args"), dict):
        return event
    args = {k: _plain(v) for k, v in event["args"].items() if k not in _DROPPED_ARGS}
    return {**event, "args": args}


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Paths become names."""
    if isinstance(value, str) and value.startswith("/"):
        return value.rpartition("/")[2]
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    before = read_trace(arguments.source)
    after = trim(before)
    size = write_trace(after, arguments.target)
    print(
        f"{len(before['traceEvents'])} events -> {len(after['traceEvents'])}, {size / 1e3:.0f} kB"
    )


if __name__ == "__main__":
    main()
