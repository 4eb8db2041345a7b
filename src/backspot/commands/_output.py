"""``--format``: prints a result as a table for the terminal, or in a file's format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from backspot.commands._console import (
    add_width,
    complain,
    use_color,
    write_bytes,
    write_text,
)

if TYPE_CHECKING:
    from backspot.render.view import View
    from backspot.results.comparison import Comparison
    from backspot.results.report import Report


def add_format(parser: argparse.ArgumentParser, kind: Literal["Report", "Comparison"]) -> None:
    """Declare ``--format``, ``--full`` and ``--width`` for a kind of result."""

    def known(name: str) -> str:
        if name == "table":  # the default, which imports no renderer
            return name
        import backspot
        from backspot.render.formats import formats_of

        names = [one.name for one in formats_of(getattr(backspot, kind)) if one.name]
        if name not in names:
            choices = ", ".join(["table", *names])
            raise argparse.ArgumentTypeError(f"{name!r} is not a format; choose from {choices}")
        return name

    parser.add_argument(
        "--format",
        type=known,
        default="table",
        metavar="FORMAT",
        help="table, or a file format such as json, csv or md (default: table)",
    )
    parser.add_argument(
        "--full", action="store_true", help="print everything, not only what fits on one screen"
    )
    add_width(parser)


def print_result(
    result: Report | Comparison,
    args: argparse.Namespace,
    view: View,
    warnings: Sequence[str],
) -> None:
    """Print a result, and on standard error the warnings that its format cannot hold.

    ``args`` has ``--format``, ``--full``, ``--width`` and ``--top``; ``view`` has the rest.
    """
    name, top = args.format, args.top
    if name == "table":
        from backspot.render.text import render_text
        from backspot.render.text_parts import render_comparison
        from backspot.results.comparison import Comparison

        if top is not None or args.full:
            view = replace(view, top=top, fewest=top or 0)
        color = use_color(sys.stdout)
        if isinstance(result, Comparison):
            write_text(render_comparison(result, view, width=args.width, color=color))
            return
        write_text(
            render_text(
                result,
                view,
                width=args.width,
                color=color,
                full=args.full,
                regroup=args.by is None,
                more="--full",
            )
        )
        return
    from backspot.render.formats import formats_of

    kind = type(result)
    found = next(one for one in formats_of(kind) if one.name == name)
    view = replace(view, top=found.top if top is None else top)
    write_bytes(found.renderer(kind)(result, view))
    if not found.has_warnings:
        for warning in warnings:
            complain(f"warning: {warning}")
