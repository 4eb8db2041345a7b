"""Answer a question: ``python -m benchmarks NAME``; ``all`` of them; ``keep`` what one has written.

Without a name, the questions are listed.
"""

from __future__ import annotations

import signal
import sys

from benchmarks import evidence, kept
from benchmarks.harness import answer
from benchmarks.questions import QUESTIONS


def main(argv: list[str]) -> int:
    """Run the benchmark that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m benchmarks NAME [--help]\n")
        print(f"{'all':20} Asks all that this machine can answer")
        print(f"{'keep':20} Puts what a benchmark has written into the results")
        for name, question in QUESTIONS.items():
            print(f"{name:20} {question.asks}")
        return 0
    name, *rest = argv
    if name == "all":
        return evidence.main(rest)
    if name == "keep":
        return kept.main(rest)
    if name not in QUESTIONS:
        known = ", ".join(QUESTIONS)
        print(f"error: there is no benchmark {name!r}; known: {known}", file=sys.stderr)
        return 2
    return answer(name, rest)


if __name__ == "__main__":
    # What a benchmark has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
