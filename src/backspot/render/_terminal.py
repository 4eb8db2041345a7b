"""Fits a table into a given width: which columns, how wide, and where a name is cut.

rich.table would wrap or cut at the end; here the end of a path is what tells paths apart, and a
column goes as a whole before its numbers become unreadable.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from backspot.formatting import counted, visible
from backspot.render._sentences import HEADING, cost_of, kept_phases, phase_text, worth
from backspot.results.report import Finding, Report

__all__ = [
    "Column",
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
"""How many characters a cell may take: a letter and its marks. Marks alone could be a million."""
_WIDENS = "\ufe0f"


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        head: its heading; ``wide_head`` stands instead where all columns fit.
        cells: its cells, one a line of the table.
        need: how dispensable it is; 0 always stands, columns of one number stand or go together.
        least: how narrow a column of names can get; ``None`` where nothing may be cut.
        left: whether it is set to the left.
        cut_start: whether a name loses its start, because the end is what tells it apart.
        outlasts: from which ``need`` on columns go before this one gets narrower than ``ample``.
        ample: how wide a column of names need be to be read; never more than half of the line.
        gap: blanks before it.
        style: how it is set.
        bars: lengths of 0 to 1, drawn instead of cells.
    """

    head: str
    cells: Sequence[str] = ()
    need: int = 0
    least: int | None = None
    left: bool = False
    cut_start: bool = False
    outlasts: int | None = None
    ample: int = 48  # model.language_model.layers.31.self_attn.q_proj
    gap: int = 2
    style: str = ""
    wide_head: str = ""
    bars: Sequence[float] = field(default=())

    def natural(self, *, wide: bool) -> int:
        """The width at which nothing is cut."""
        if self.bars:
            return 16
        head = self.wide_head if wide and self.wide_head else self.head
        return max(cell_len(head), *(cell_len(cell) for cell in self.cells), 0)

    def narrowest(self, *, wide: bool) -> int:
        """The width that it cannot do without."""
        natural = self.natural(wide=wide)
        return natural if self.least is None else min(self.least, natural)

    def readable(self, width: int, *, wide: bool) -> int:
        """The width that it should have in a line of ``width``."""
        if self.outlasts is None:
            return self.narrowest(wide=wide)
        enough = min(self.natural(wide=wide), self.ample, width // 2)
        return max(self.narrowest(wide=wide), enough)


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
    """Whether a text takes at most ``width`` cells, and no more characters than they could need."""
    if len(text) <= width * _MARKS and not text.isascii():
        return cell_len(text) <= width
    return len(text) <= width


def _fitting(characters: Iterable[str], cells: int) -> int:
    """How many of the characters there is room for; what lies beyond them is never looked at."""
    taken = count = 0
    for character in islice(characters, max(0, cells * _MARKS)):
        # A selector may widen the character before it, whichever way they are looked at.
        taken += 1 if character == _WIDENS else cell_len(character)
        if taken > cells:
            break
        count += 1
    return count


def lay_out(columns: Sequence[Column], width: int, styles: Sequence[str] = ()) -> list[Text]:
    """Set the table; the first line is its head.

    Args:
        columns: in the order in which they stand.
        width: how many cells a line may take.
        styles: a style for each line below the head.
    """
    columns = [_bounded(column, width) for column in columns]
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


def _bounded(column: Column, width: int) -> Column:
    """The column without what no line has room for: it is measured many times over."""
    if column.least is None:
        return column
    cut = keep_end if column.cut_start else keep_start
    return replace(column, cells=[cut(cell, 2 * width) for cell in column.cells])


def _chosen(columns: Sequence[Column], width: int, *, wide: bool) -> list[Column]:
    """The columns that there is room for; a narrow one may stand where a wide one could not."""
    needs = {0}
    for need in sorted({column.need for column in columns} - {0}):
        if _fits([c for c in columns if c.need in needs | {need}], width, wide=wide):
            needs.add(need)
    return [column for column in columns if column.need in needs]


def _fits(columns: Sequence[Column], width: int, *, wide: bool) -> bool:
    most = max(column.need for column in columns)
    widths = [
        column.readable(width, wide=wide)
        if column.outlasts is not None and column.outlasts <= most
        else column.narrowest(wide=wide)
        for column in columns
    ]
    return _taken(columns, widths) <= width


def _taken(columns: Sequence[Column], widths: Sequence[int]) -> int:
    return sum(widths) + sum(column.gap for column in columns[1:])


def _widths(columns: Sequence[Column], width: int, *, wide: bool) -> list[int]:
    """Deal out what is left.

    To what outlasts others until it can be read, then to all names alike, and to bars only then.
    """
    widths = [column.narrowest(wide=wide) for column in columns]
    wanted = [column.natural(wide=wide) for column in columns]
    left = width - _taken(columns, widths)
    for index, column in enumerate(columns):
        if column.least is not None and left < 0:  # too narrow even for what cannot go
            less = min(-left, widths[index] - 1)
            widths[index] -= less
            left += less
    for index, column in enumerate(columns):
        more = max(0, min(left, column.readable(width, wide=wide) - widths[index]))
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
            cell, style = (column.wide_head if wide and column.wide_head else column.head), "dim"
        elif column.bars:
            cell, style = _bar(column.bars[row], width), column.style
        else:
            cell, style = column.cells[row], column.style
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
    """Facts in a row, broken between facts only; a line that goes on below ends with a dot."""
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
    """The step's phases, a fact each: ``22% forward``."""
    texts = [phase_text(report, phase) for phase in kept_phases(report)]
    return [f"{share} {name}" for name, _, share in texts]


def finding_lines(report: Report, width: int) -> Iterator[Text]:
    """A heading, and a paragraph for each of the most expensive findings."""
    if not report.findings:
        return
    yield Text()
    yield Text(HEADING, "bold")
    for number, finding in enumerate(report.findings[:_MOST], 1):
        yield from _hanging(f"{number}. ", _seen(report, finding, width), width)
        yield from _hanging("   ", Text(visible(finding.remedy)), width)
    rest = len(report.findings) - _MOST
    if rest > 0:
        yield Text(f"   {counted(rest, 'more finding')}: report.findings has all.", "dim")


def _seen(report: Report, finding: Finding, width: int) -> Text:
    """What, for how much, and where."""
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
    """A paragraph whose lines all begin below the first one's text."""
    console = Console(file=io.StringIO(), width=width, _environ={})
    for index, part in enumerate(text.wrap(console, width - len(lead))):
        part.rstrip()
        line = Text(" " * len(lead) if index else lead, no_wrap=True)
        line.append_text(part)
        yield line
