"""Answer one question: ``python -m benchmarks NAME``; without a name, list them all."""

from __future__ import annotations

import sys

from benchmarks.harness import answer
from benchmarks.questions import QUESTIONS


def main(argv: list[str]) -> int:
    """Run the benchmark that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m benchmarks NAME [--help]\n")
        for name, question in QUESTIONS.items():
            print(f"{name:20} {question.asks}")
        return 0
    name, *rest = argv
    if name not in QUESTIONS:
        known = ", ".join(QUESTIONS)
        print(f"error: there is no benchmark {name!r}; known: {known}", file=sys.stderr)
        return 2
    return answer(name, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
