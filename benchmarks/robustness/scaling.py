"""Does reading any trace, or writing any form of a report, take more than linear time?

    python -m benchmarks scaling [--cases 'steps with marks,rows'] [--forms text,.html]

Each trace of ``scaling_traces.py``, and each report of ``scaling_forms.py``, is made once and ten
times as large, and the processor times are compared. A growth beyond linear is measured again; if
it remains, the exit code is 1. Times on a busy machine vary: a difference of a half says nothing.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import backspot
from backspot.errors import BackspotError
from benchmarks.common import (
    UsageError,
    choose,
    command_line,
    parse,
    print_table,
    script,
    write_results,
)
from benchmarks.robustness.scaling_forms import FORMS, REPORTS
from benchmarks.robustness.scaling_traces import DIMENSIONS

_TIMES = 10
_BEYOND = 2.0
"""How many times the growth of the size the growth of the time may be: what caches explain."""
_LEAST = 0.02
"""Seconds; a shorter time does not show how it grows."""

Pair = tuple[str, Callable[[], object], Callable[[], object], float]
"""What is done to which form, with the small and with the large one, and the ratio of sizes."""


def _read(text: bytes) -> None:
    with suppress(BackspotError):
        backspot.locate(io.BytesIO(text))


def _pairs(name: str, base: int, forms: Sequence[str]) -> Iterator[Pair]:
    if name in DIMENSIONS:
        one, ten = DIMENSIONS[name](base), DIMENSIONS[name](_TIMES * base)
        yield "read", lambda: _read(one), lambda: _read(ten), len(ten) / len(one)
        return
    make, size = REPORTS[name]
    few, many = make(size // _TIMES), make(size)
    # As many paths of as many more names each.
    larger = _TIMES * (10 if name == "depth of rows" else 1)
    for form in forms:
        write = FORMS[form]
        yield form, lambda w=write: w(few), lambda w=write: w(many), larger  # type: ignore[misc]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _growth(pair: Pair, patience: float) -> tuple[float, float, float]:
    """Seconds of both sizes, and the growth of the time over that of the size."""
    _, one, ten, larger = pair
    for attempt in range(3):
        short = min(_seconds(one) for _ in range(3 if attempt else 2))
        long = min(_seconds(ten) for _ in range(2 if attempt and patience > 10 else 1))
        growth = long / max(short, _LEAST) / larger
        if growth <= _BEYOND or long > patience:
            break
    return short, long, growth


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, "scaling", device=False)
    parser.add_argument("--base", type=int, default=1, help="the smaller of a trace's two sizes")
    parser.add_argument("--forms", help="comma-separated (default: all; with --small text)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for one reading")
    options = parse(parser, argv)
    names = choose(options, {**DIMENSIONS, **REPORTS}, ("steps with marks", "rows"))
    forms = ["text"] if options.small else list(FORMS)
    forms = options.forms.split(",") if options.forms else forms
    if set(forms) - set(FORMS):
        raise UsageError(f"there are only the forms {', '.join(FORMS)}")
    rows = []
    for name in names:
        for pair in _pairs(name, options.base, forms):
            short, long, growth = _growth(pair, options.patience)
            mark = "beyond linear" if growth > _BEYOND else ""
            rows.append((name, pair[0], short, long, growth, mark))
            print(f"{name}, {pair[0]}: {growth:.2f}", file=sys.stderr, flush=True)
    head = ("what grows", "form", "s", "s of ten times", "growth", "")
    print_table(head, rows)
    write_results(options, {"head": head, "rows": rows})
    return 1 if any(row[-1] for row in rows) and not options.small else 0
