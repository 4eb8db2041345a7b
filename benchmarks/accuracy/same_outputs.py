"""Are the outputs on recorded traces, to the byte, what they were before a change?

Before the change, ``-o FILE`` keeps a digest of each trace's report as JSON, text and CSV and of
its summary as one rank of a job, or of its error. After it, ``--before FILE`` names every output
that differs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import backspot
from backspot.job.reduce import summarize
from backspot.render.formats import format_for
from backspot.results.report import Report
from benchmarks.common import command_line, parse, script, write_results

_TESTS = Path(__file__).parents[2] / "tests" / "data"
_FORMATS = (".json", ".txt", ".csv")


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "same_outputs", device=False, cases=False)
    parser.add_argument("--before", type=Path, help="compare with this result")
    parser.add_argument("traces", type=Path, nargs="*", help="default: all of the tests")
    options = parse(parser, argv)
    traces = options.traces or sorted(_TESTS.rglob("*.json.gz"))[: 3 if options.small else None]
    digests = {name: digest for trace in traces for name, digest in _outputs(trace).items()}
    write_results(options, {"digests": digests})
    if not options.before:
        return 0
    before = json.loads(options.before.read_text(encoding="utf-8"))["digests"]
    different = [name for name, digest in digests.items() if before.get(name) != digest]
    print("\n".join([*different, f"{len(different)} of {len(digests)} outputs differ"]))
    return int(bool(different))


def _outputs(trace: Path) -> dict[str, str]:
    try:
        report = backspot.locate(trace)
    except backspot.BackspotError as error:
        outputs = {".error": str(error).encode()}
    else:
        outputs = {to: format_for(f"_{to}", Report).renderer(Report)(report) for to in _FORMATS}
        outputs[".summary"] = repr(summarize(trace)).encode()
    name = f"{trace.parent.name}/{trace.name}"
    return {f"{name}{suffix}": sha256(of).hexdigest() for suffix, of in outputs.items()}
