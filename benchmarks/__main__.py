"""Answer one question: ``python -m benchmarks NAME``; without a name, list them all."""

from __future__ import annotations

import importlib
import sys

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
        print(
            f"error: there is no benchmark {name!r}; known: {', '.join(QUESTIONS)}", file=sys.stderr
        )
        return 2
    module, _, function = QUESTIONS[name].where.partition(":")
    answer = getattr(importlib.import_module(f"benchmarks.{module}"), function or "main")
    return int(answer(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
