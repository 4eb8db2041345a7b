"""Explain a finding: what it means, how it is found, and what to do.

RULE is the name that a finding has in a report, such as host-waits.
Without RULE, all rules are listed.

Example:
  backspot explain
  backspot explain sorted-indexing
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from difflib import get_close_matches
from pathlib import Path

from backspot.errors import UsageError

EXIT_CODES = ()

_INSTALLED = Path(__file__).parents[1] / "findings.md"
_NARROWEST, _WIDEST = 40, 100  # cells
_IN_A_CHECKOUT = Path(__file__).parents[3] / "docs" / "findings.md"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the argument."""
    rule = parser.add_argument(
        "rule", metavar="RULE", nargs="?", help="the name of a rule (default: list all)"
    )
    # argcomplete looks for it.
    rule.completer = lambda **_: list(_sections())  # type: ignore[attr-defined]


def run(args: argparse.Namespace) -> int:
    """Print a section of the page of findings."""
    from backspot.commands._console import write_text

    if args.rule is None:
        rows = re.findall(r"^\| \[([^]]+)\]\(\S+\) \| ([^|]+?) \|", _page()[0], re.MULTILINE)
        width = max(len(name) for name, _ in rows)
        write_text("\n".join(f"{name:{width}}  {short}" for name, short in rows))
        return 0
    sections = _sections()
    if args.rule not in sections:
        near = get_close_matches(args.rule, sections, n=1)
        hint = f"did you mean {near[0]}?" if near else "backspot explain lists them"
        raise UsageError(f"there is no rule {args.rule!r}: {hint}")
    write_text(f"{args.rule}\n\n{_as_text(sections[args.rule])}")
    return 0


def _page() -> list[str]:
    """Return the page of findings, cut before the heading of each section.

    The wheel has a copy of the page that the build makes; a checkout has the page itself.
    """
    path = _INSTALLED if _INSTALLED.exists() else _IN_A_CHECKOUT
    return path.read_text(encoding="utf-8").split("\n## ")


def _sections() -> dict[str, str]:
    parts = (section.partition("\n") for section in _page()[1:])
    return {name.strip(): text.strip() for name, _, text in parts}


def _as_text(markdown: str) -> str:
    """Return Markdown without its emphasis and the targets of links, as wide as the terminal."""
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown.replace("**", ""))
    width = max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))
    return "\n\n".join(_filled(block, width) for block in plain.split("\n\n"))


def _filled(block: str, width: int) -> str:
    """Return a paragraph or a list with lines of this width; anything else as it is."""
    if block.startswith(("```", "|", " ")):
        return block
    items = re.split(r"\n(?=- )", block)
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()),
            width,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in items
    )
