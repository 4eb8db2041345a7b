"""A training that died of memory, where it left no other report: as text, page and JSON."""

from __future__ import annotations

from backspot._version import __version__
from backspot.formatting import visible
from backspot.render._out_of_memory import advice, caught, headline, source, tables
from backspot.render._sections import Section
from backspot.render._terminal import lay_out, paragraph, space_for, written
from backspot.render.formats import Format
from backspot.render.html._fragments import facts_list, page, shown, tables_of
from backspot.render.json import encoded
from backspot.results.out_of_memory import OutOfMemory
from backspot.styled import Text


def render_out_of_memory(
    failure: OutOfMemory, *, width: int | None = None, color: bool = False
) -> str:
    """Return where it died, who held the memory, and what helps."""
    width, whole = space_for(width)
    lines = [*paragraph(Text(visible(headline(failure)), "bold"), width, whole=whole)]
    for table in tables(failure):
        lines += [Text(), *lay_out(table.columns, width, whole=whole), Text()]
    for sentence in (*advice(failure), *caught(failure)):
        lines += paragraph(Text(visible(sentence)), width, "→ ", whole=whole)
    lines += paragraph(Text(source(failure), "dim"), width, whole=whole)
    return written(lines, width, color=color)


def out_of_memory_to_html(failure: OutOfMemory) -> bytes:
    """It as a page in UTF-8, which loads nothing."""
    main = (
        f'<section class="answer" aria-label="The answer"><h1>{shown(headline(failure))}</h1>'
        f"{facts_list([*advice(failure), *caught(failure)])}</section>"
        f"{tables_of([Section('tables', 'out-of-memory', title='Memory', tables=tables(failure))])}"
    )
    return page(
        f"{headline(failure)[:100]} · Backspot",
        "a training that died of memory",
        main,
        f"Made by Backspot {__version__}.",
        styles=("plots.css",),
    )


def _file(failure: OutOfMemory) -> bytes:
    return (render_out_of_memory(failure, width=80) + "\n").encode()


__all__ = ["FORMATS", "TEXTS", "headline", "out_of_memory_to_html", "render_out_of_memory"]

FORMATS = (
    Format(".html", {OutOfMemory: out_of_memory_to_html}),
    Format(".json", {OutOfMemory: encoded}, name="json"),
    Format(".txt", {OutOfMemory: _file}),
)
TEXTS = {OutOfMemory: render_out_of_memory}
