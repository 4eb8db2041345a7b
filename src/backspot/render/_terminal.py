"""Layout for a terminal: tables and paragraphs in a given width.

A table of rich would wrap cells or cut them at the end. Here the end of a path is kept, because it
identifies the module, and a whole column is dropped before its numbers become unreadable.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from backspot.formatting import counted, visible
from backspot.render._columns import Column
from backspot.render._sentences import HEADING, cost_of, kept_phases, phase_text, searched, worth
from backspot.results.report import Finding, Report

__all__ = [
    "fact_lines",
    "finding_lines",
    "fits",
    "keep_end",
    "keep_start",
    "lay_out",
    "phase_facts",
]

_BLOCKS = " ▏▎▍▌▋▊▉█"
_MARKS = 8
"""Characters that one terminal cell may take: a letter and its combining marks."""
_WIDENS = "\ufe0f"


def keep_end(text: str, width: int) -> str:
    """Cut the start where the text is too wide: ``…ks.11.mlp.fc1``."""
    if fits(text, width):
        return text
    return "…" + text[len(text) - _fitting(reversed(text), width - 1) :]


def keep_start(text: str, width: int) -> str:
    """Cut the end where the text is too wide: ``ScaledDotProd…``."""
    if fits(text, width):
        return text
    return text[: _fitting(text, width - 1)] + "…"


def fits(text: str, width: int) -> bool:
    """Whether a text takes at most ``width`` cells and a sensible number of characters."""
    if len(text) <= width * _MARKS and not text.isascii():
        return cell_len(text) <= width
    return len(text) <= width


def _fitting(characters: Iterable[str], cells: int) -> int:
    """How many characters fit; the rest of a long text is never looked at."""
    taken = count = 0
    for character in islice(characters, max(0, cells * _MARKS)):
        # A variation selector may widen the character before it.
        taken += 1 if character == _WIDENS else cell_len(character)
        if taken > cells:
            break
        count += 1
    return count


def lay_out(columns: Sequence[Column], width: int, styles: Sequence[str] = ()) -> list[Text]:
    """Lay out a table; the first line is its head.

    Args:
        columns: the columns, in order.
        width: number of cells in a line.
        styles: a style for each line below the head.
    """
    columns = [_readable(column, width) for column in columns]
    wide = _fits(columns, width, wide=True)
    kept = _chosen(columns, width, wide=wide)
    widths = _widths(kept, width, wide=wide)
    lines = [_line(kept, widths, None, wide=wide)]
    for index in range(max((len(column.cells) for column in kept), default=0)):
        line = _line(kept, widths, index, wide=wide)
        if index < len(styles) and styles[index]:
            line.stylize(styles[index])
        lines.append(line)
    return lines


def _readable(column: Column, width: int) -> Column:
    """The column with visible cells, and without text that no line has room for.

    Cells are measured many times, and a name can be very long.
    """
    cut = keep_end if column.cut_start else keep_start
    shown = [(kind, visible(text)) for kind, text in column.cells]
    if column.least is not None:
        shown = [(kind, cut(text, 2 * width)) for kind, text in shown]
    return replace(column, cells=shown)


def _head(column: Column, *, wide: bool) -> str:
    return column.full_head if wide and column.full_head else column.head


def _natural(column: Column, *, wide: bool) -> int:
    """The width at which nothing is cut."""
    if column.bars:
        return 16
    return max(cell_len(_head(column, wide=wide)), *(cell_len(text) for _, text in column.cells), 0)


def _narrowest(column: Column, *, wide: bool) -> int:
    """The width that it needs at least."""
    natural = _natural(column, wide=wide)
    return natural if column.least is None else min(column.least, natural)


def _ample(column: Column, width: int, *, wide: bool) -> int:
    """The width that it should have in a line of ``width``."""
    if column.outlasts is None:
        return _narrowest(column, wide=wide)
    enough = min(_natural(column, wide=wide), column.ample, width // 2)
    return max(_narrowest(column, wide=wide), enough)


def _chosen(columns: Sequence[Column], width: int, *, wide: bool) -> list[Column]:
    """The columns that fit; a narrow one may be kept after a wide one was dropped."""
    needs = {0}
    for need in sorted({column.need for column in columns} - {0}):
        if _fits([c for c in columns if c.need in needs | {need}], width, wide=wide):
            needs.add(need)
    return [column for column in columns if column.need in needs]


def _fits(columns: Sequence[Column], width: int, *, wide: bool) -> bool:
    most = max(column.need for column in columns)
    widths = [
        _ample(column, width, wide=wide)
        if column.outlasts is not None and column.outlasts <= most
        else _narrowest(column, wide=wide)
        for column in columns
    ]
    return _taken(columns, widths) <= width


def _taken(columns: Sequence[Column], widths: Sequence[int]) -> int:
    return sum(widths) + sum(column.gap for column in columns[1:])


def _widths(columns: Sequence[Column], width: int, *, wide: bool) -> list[int]:
    """Distribute the width that is left.

    Columns that outlast others come first, until they are readable; then all names; then bars.
    """
    widths = [_narrowest(column, wide=wide) for column in columns]
    wanted = [_natural(column, wide=wide) for column in columns]
    left = width - _taken(columns, widths)
    for index, column in enumerate(columns):
        if column.least is not None and left < 0:  # even the needed columns do not fit
            less = min(-left, widths[index] - 1)
            widths[index] -= less
            left += less
    for index, column in enumerate(columns):
        more = max(0, min(left, _ample(column, width, wide=wide) - widths[index]))
        widths[index] += more
        left -= more
    while left > 0:
        growing = [index for index, want in enumerate(wanted) if widths[index] < want]
        if not growing:
            break
        growing = [index for index in growing if not columns[index].bars] or growing
        for index in growing[:left]:
            widths[index] += 1
        left -= len(growing[:left])
    return widths


def _line(columns: Sequence[Column], widths: Sequence[int], row: int | None, *, wide: bool) -> Text:
    line = Text(no_wrap=True)
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        if index:
            line.append(" " * column.gap)
        if row is None:
            cell, style = _head(column, wide=wide), "dim"
        elif column.bars:
            cell, style = _bar(column.bars[row], width), column.style
        else:
            cell, style = column.cells[row][1], column.style
        cell = keep_end(cell, width) if column.cut_start else keep_start(cell, width)
        blanks = " " * (width - cell_len(cell))
        line.append(cell + blanks if column.left or column.bars else blanks + cell, style)
    line.rstrip()
    return line


def _bar(length: float, width: int) -> str:
    eighths = round(min(1.0, max(0.0, length)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")


def fact_lines(facts: Sequence[str], width: int) -> Iterator[Text]:
    """Facts in a row, broken only between facts; a line that continues ends with a dot."""
    line = facts[0][:1].upper() + facts[0][1:]
    for left, fact in zip(range(len(facts) - 1, 0, -1), facts[1:], strict=True):
        more = " ·" if left > 1 else ""
        if cell_len(f"{line} · {fact}{more}") > width:
            yield Text(f"{line} ·", "dim")
            line = fact
        else:
            line = f"{line} · {fact}"
    yield Text(line, "dim")


_MOST = 5


def phase_facts(report: Report) -> list[str]:
    """The phases of the step, one fact each: ``22% forward``."""
    texts = [phase_text(report, phase) for phase in kept_phases(report)]
    return [f"{share} {name}" for name, _, share in texts]


def finding_lines(report: Report, width: int) -> Iterator[Text]:
    """A heading, a paragraph for each of the most expensive findings, and how many rules looked."""
    if report.findings:
        yield Text()
        yield Text(HEADING, "bold")
    for number, finding in enumerate(report.findings[:_MOST], 1):
        yield from _hanging(f"{number}. ", _seen(report, finding, width), width)
        yield from _hanging("   ", Text(visible(finding.remedy)), width)
    rest = len(report.findings) - _MOST
    if rest > 0:
        yield Text(f"   {counted(rest, 'more finding')}; report.findings lists all.", "dim")
    if told := searched(report):
        yield Text()
        yield Text(told, "dim")


def _seen(report: Report, finding: Finding, width: int) -> Text:
    """What was found, its cost, and where."""
    text = Text(visible(finding.title), "bold")
    text.append(f": {', '.join(cost_of(report, finding))}", "not bold")
    (place, *_), more = worth(finding, 1)
    text.append(" in ", "not bold")
    text.append(keep_end(visible(place.label), min(width - 8, 70)), "not bold cyan")
    if place.line:
        text.append(f", {keep_end(visible(place.line), min(width - 8, 60))}", "not bold")
    text.append(f" and {more}." if more else ".", "not bold")
    return text


def _hanging(lead: str, text: Text, width: int) -> Iterator[Text]:
    """A paragraph with a hanging indent."""
    console = Console(file=io.StringIO(), width=width, _environ={})
    for index, part in enumerate(text.wrap(console, width - len(lead))):
        part.rstrip()
        line = Text(" " * len(lead) if index else lead, no_wrap=True)
        line.append_text(part)
        yield line
