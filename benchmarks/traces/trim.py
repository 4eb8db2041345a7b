"""Trim an exported trace to what a reader of traces needs, without names of machines and people.

    python -m benchmarks trim big.json.gz -o small.json.gz

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

from benchmarks.harness import TEST_DATA, Run, UsageError

SUFFIX = ".trace.json.gz"
_SAMPLE = TEST_DATA / "h200" / f"launch_bound{SUFFIX}"

_DROPPED = (
    "gpu_user_annotation", "ac2g", "async_cpu_to_gpu", "overhead", "Trace", "cpu_instant_event",
)  # fmt: skip
_DROPPED_ARGS = ("Record function id", "Ev Idx", "context", "queued", "kernel_file", "Call stack")
_DROPPED_KEYS = ("traceName", "host_name", "trace_id")


def read_trace(path: Path) -> dict[str, Any]:
    return parse_trace(path.read_bytes())


def parse_trace(data: bytes) -> dict[str, Any]:
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    document: dict[str, Any] = json.loads(data.decode("utf-8", "replace"), strict=False)
    return document


def trim(document: dict[str, Any]) -> dict[str, Any]:
    """Return the same trace with fewer events, and without names of host, run and paths."""
    kept = {key: _plain(value) for key, value in document.items() if key not in _DROPPED_KEYS}
    kept["traceEvents"] = [
        _trim_event(event) for event in document.get("traceEvents", []) if _is_wanted(event)
    ]
    return kept


def written(document: dict[str, Any]) -> bytes:
    """Return a trace as compressed text, one event a line, as Kineto writes them."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=True)
    return gzip.compress(text.replace('},{"ph"', '},\n{"ph"').encode(), 9, mtime=0)


def write_trace(document: dict[str, Any], path: Path) -> int:
    """Write compressed; returns the number of bytes."""
    return path.write_bytes(written(document))


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


def _plain(value: Any) -> Any:
    """Paths become names."""
    if isinstance(value, str) and value.startswith("/"):
        return value.rpartition("/")[2]
    return value


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, nargs="?", help="default: a trace of the tests")


def answer(run: Run) -> int:
    source = run.source or (_SAMPLE if run.small else None)
    if source is None or run.out is None:
        raise UsageError("name the trace to trim, and the result: -o FILE")
    document = read_trace(source)
    trimmed = trim(document)
    size = write_trace(trimmed, run.out)
    before, after = (len(one["traceEvents"]) for one in (document, trimmed))
    print(f"{before} events -> {after}, {size / 1e3:.0f} kB")
    return 0
