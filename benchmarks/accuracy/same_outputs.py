"""Are the outputs on recorded traces, to the byte, what they were before a change?

Before the change, ``-o FILE`` keeps a digest of each trace's report as JSON, text and CSV and of
its summary as one rank of a job, or of its error. After it, ``--before FILE`` names every output
that differs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from hashlib import sha256
from pathlib import Path

import backspot
from backspot.testing import summarize
from benchmarks.harness import TEST_DATA, Figures, Run

_FORMATS = (".json", ".txt", ".csv")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", type=Path, help="compare with this result")
    parser.add_argument("traces", type=Path, nargs="*", help="default: all of the tests")


def answer(run: Run) -> Figures:
    traces = run.traces or sorted(TEST_DATA.rglob("*.json.gz"))[: 3 if run.small else None]
    digests = {name: digest for trace in traces for name, digest in _outputs(trace).items()}
    if not run.before:
        return {"digests": digests}
    before = json.loads(run.before.read_text(encoding="utf-8"))["digests"]
    different = [name for name, digest in digests.items() if before.get(name) != digest]
    summary = {"outputs": len(digests), "different": len(different)}
    rows = [{"different": name} for name in different]
    return {"digests": digests, "rows": rows, "summary": summary, "wrong": different}


def _outputs(trace: Path) -> dict[str, str]:
    try:
        report = backspot.locate(trace)
    except backspot.BackspotError as error:
        outputs = {".error": str(error).encode()}
    else:
        with tempfile.TemporaryDirectory() as folder:
            outputs = {to: report.save(Path(folder, f"_{to}")).read_bytes() for to in _FORMATS}
        outputs[".summary"] = repr(summarize(trace)).encode()
    name = f"{trace.parent.name}/{trace.name}"
    return {f"{name}{suffix}": sha256(of).hexdigest() for suffix, of in outputs.items()}
