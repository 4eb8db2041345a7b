"""Are the answers on recorded traces, to the byte, what they were before a change?

``--write`` keeps each trace's report as JSON, text and CSV in a folder, or its error. After the
change, the same command without ``--write`` names every output that differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import backspot
from backspot.render.formats import format_for
from backspot.results.report import Report

_TESTS = Path(__file__).parents[2] / "tests" / "data"
_FORMATS = (".json", ".txt", ".csv")


def main(argv: list[str]) -> int:
    """Write the outputs, or compare them with those that were written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks same_outputs")
    parser.add_argument("folder", type=Path, help="where the outputs are kept")
    parser.add_argument("traces", type=Path, nargs="*", help="default: all of the tests")
    parser.add_argument("--write", action="store_true", help="keep the outputs, compare nothing")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    traces = args.traces or sorted(_TESTS.rglob("*.json.gz"))
    different = 0
    for trace in traces:
        for suffix, output in _outputs(trace).items():
            kept = args.folder / f"{trace.parent.name}-{trace.name}{suffix}"
            if args.write:
                kept.write_bytes(output)
            elif not kept.is_file() or kept.read_bytes() != output:
                different += 1
                print(f"different: {kept.name}")
    print(f"{len(traces)} traces, {different} outputs differ")
    return int(different > 0)


def _outputs(trace: Path) -> dict[str, bytes]:
    try:
        report = backspot.locate(trace)
    except backspot.BackspotError as error:
        return {".error": str(error).encode()}
    kind = Report
    return {suffix: format_for(f"_{suffix}", kind).renderer(kind)(report) for suffix in _FORMATS}
