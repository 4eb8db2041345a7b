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
from typing import TYPE_CHECKING, Any

from backspot.errors import UsageError

if TYPE_CHECKING:
    from backspot.registry import Rule

EXIT_CODES = ()

_NARROWEST, _WIDEST = 40, 100  # cells


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the argument."""
    rule = parser.add_argument(
        "rule", metavar="RULE", nargs="?", help="the name of a rule (default: list all)"
    )
    # argcomplete looks for it.
    rule.completer = lambda **_: list(_rules())  # type: ignore[attr-defined]


def run(args: argparse.Namespace) -> int:
    """Print the page of a rule, or a list of all rules."""
    from backspot.commands._console import write_text

    rules = _rules()
    if args.rule is None:
        width = max(map(len, rules))
        write_text("\n".join(f"{name:{width}}  {rule.short}" for name, rule in rules.items()))
        return 0
    if args.rule not in rules:
        near = get_close_matches(args.rule, rules, n=1)
        hint = f"did you mean {near[0]}?" if near else "backspot explain lists them"
        raise UsageError(f"there is no rule {args.rule!r}: {hint}")
    page = rules[args.rule].page.partition("\n")[2].strip()
    write_text(f"{args.rule}\n\n{_as_text(page)}")
    return 0


def _rules() -> dict[str, Rule[Any, Any, Any]]:
    """Return all rules by name: those of each part, and those of other verbs."""
    # Only this verb needs them, and they import numpy.
    from backspot.analysis.parts import RULES
    from backspot.commands._verbs import other_rules

    rules: list[Rule[Any, Any, Any]] = [
        rule for of_part in (*RULES, other_rules) for rule in of_part()
    ]
    return {rule.name: rule for rule in sorted(rules, key=lambda rule: rule.name)}


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
