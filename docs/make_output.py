"""Write what commands print into the documents that show it.

A document asks for it in a comment, which readers do not see, before a block of code:

    <!-- output of: backspot show tests/data/h200/vit_patch_drop.trace.json.gz | head -20 -->

``| head -N`` keeps the first lines, ``| grep -A N TEXT`` a line with that text and N lines after
it.

Usage: python docs/make_output.py
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

from backspot.commands import main as backspot

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"(<!-- output of: (.+?) -->\n```\n)(.*?)(```\n)", re.DOTALL)


def main() -> None:
    """Write all documents that ask for output."""
    for path in documents():
        path.write_text(made(path.read_text("utf-8")), encoding="utf-8")


def documents() -> list[Path]:
    """Return the documents that ask for output."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    return [page for page in pages if _BLOCK.search(page.read_text("utf-8"))]


def made(text: str) -> str:
    """Return a document with the output of today."""
    return _BLOCK.sub(lambda found: found[1] + _output(found[2]) + found[4], text)


def _output(command: str) -> str:
    """Return what a command prints, cut as it asks."""
    command, _, cut = command.partition(" | ")
    words = [str(ROOT / word) if "/" in word else word for word in shlex.split(command)]
    lines = [line.rstrip() for line in _printed(words).rstrip("\n").splitlines()]
    match shlex.split(cut):
        case ["head", count]:
            lines = [*lines[: -int(count)], "…"]
        case ["grep", "-A", count, text]:
            found = [at for at, line in enumerate(lines) if text in line]
            if not found:
                raise SystemExit(f"{command}: no line with {text!r}")
            lines = lines[found[0] :][: int(count) + 1]
    return "\n".join(lines) + "\n"


def _printed(words: list[str]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), patch.dict("os.environ", {"COLUMNS": "80", "NO_COLOR": "1"}):
        code = backspot(words[1:])
    if code:
        raise SystemExit(f"{shlex.join(words)}: exit code {code}")
    return printed.getvalue()


if __name__ == "__main__":
    main()
