"""Layout for a terminal: tables, paragraphs and styled sentences in a given width.

A table of rich would wrap cells or cut them at the end. Here the end of a path is kept, because it
identifies the module, and a whole column is dropped before its numbers become unreadable.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from backspot.formatting import visible
from backspot.progress import is_terminal
from backspot.render._sections import Column
from backspot.render._words import Part
from backspot.styled import Console, Text, cell_len

_STYLES = {"text": "", "name": "bold cyan", "node": "bold", "number": "bold"}
_BLOCKS = " ▏▎▍▌▋▊▉█"
_NARROWEST = 40
_MARKS = 8
"""Characters that one terminal cell may take: a letter and its combining marks."""
_WIDENS = "\ufe0f"
_BETWEEN_NAMES = re.compile(r"[./](?=\w)")
_WORD = re.compile(
    r"((?:\d+ × (?=\S{1,40}(?:\s|$)))?(?:\S*\d (?:ns|µs|ms|s|kB|MB|GB)\b\S*|\S+)(?: ·(?!\S))?)\s*"
)
"""What stays on one line, and the space behind it: a word with the number before it, the unit or
the dot behind it."""


def keep_end(text: str, width: int) -> str:
    """Cut the start where the text is too wide, between names if possible: ``….11.mlp.fc1``."""
    if _fits_in(text, width):
        return text
    end = text[len(text) - _fitting(reversed(text), width - 1) :]
    between = _BETWEEN_NAMES.search(end, 0, len(end) // 2)
    return "…" + (end[between.start() :] if between else end)


def keep_start(text: str, width: int) -> str:
    """Cut the end where the text is too wide: ``ScaledDotProd…``."""
    if _fits_in(text, width):
        return text
    return text[: _fitting(text, width - 1)] + "…"


def _fits_in(text: str, width: int) -> bool:
    """Whether a text takes at most ``width`` cells and a sensible number of characters."""
    if len(text) <= width * _MARKS and not text.isascii():
        return cell_len(text) <= width
    return len(text) <= width


def _fitting(characters: Iterable[str], cells: int) -> int:
    """How many characters fit; the rest of a long text is never looked at."""
    cells_taken = count = 0
    for character in islice(characters, max(0, cells * _MARKS)):
        # A variation selector may widen the character before it.
        cells_taken += 1 if character == _WIDENS else cell_len(character)
        if cells_taken > cells:
            break
        count += 1
    return count


def lay_out(
    columns: Sequence[Column], width: int, styles: Sequence[str] = (), *, whole: bool = False
) -> list[Text]:
    """Lay out a table; the first line is its head, and ``styles`` has one for each other line."""
    columns = [_readable(column, width, whole=whole) for column in columns]
    columns = _with_whole_paths(columns, width) if whole else columns
    full = [replace(column, head=column.full_head or column.head) for column in columns]
    shown = full if _fits(full, width) else _chosen(columns, width)
    widths = _widths(shown, width)
    lines = [_line(shown, widths, None)]
    for index in range(max((len(column.cells) for column in shown), default=0)):
        line = _line(shown, widths, index)
        if index < len(styles) and styles[index]:
            line.stylize(styles[index])
        lines.append(line)
    return lines


def _with_whole_paths(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns, of which others are dropped before a path that fits into the line is cut."""
    needed = [column for column in columns if column.need <= 1]
    left = width - _taken(needed, [_narrowest(column) for column in needed])
    columns_out = []
    for column in columns:
        if _identifies(column) and not column.need:
            more = max(0, min(left, _natural(column) - _narrowest(column)))
            left -= more
            column = replace(column, least=_narrowest(column) + more)
        columns_out.append(column)
    return columns_out


def _identifies(column: Column) -> bool:
    """Whether this is a column of paths, or of places in the source."""
    return column.kind == "name" or column.cut_start


def _readable(column: Column, width: int, *, whole: bool) -> Column:
    """The column with visible cells, and without text that no line has room for.

    Cells are measured many times, and a name can be very long.
    """
    cut = keep_end if column.cut_start else keep_start
    shown = [(kind, visible(text)) for kind, text in column.cells]
    if column.least is not None and not (whole and _identifies(column)):
        shown = [(kind, cut(text, 2 * width)) for kind, text in shown]
    return replace(column, cells=shown)


def _natural(column: Column) -> int:
    """The width at which nothing is cut."""
    if column.bars:
        return 16
    return max(cell_len(column.head), *(cell_len(text) for _, text in column.cells), 0)


def _narrowest(column: Column) -> int:
    """The width that it needs at least."""
    natural = _natural(column)
    return natural if column.least is None else min(column.least, natural)


def _ample(column: Column, width: int) -> int:
    """The width that it should have in a line of ``width``."""
    if column.outlasts is None:
        return _narrowest(column)
    enough = min(_natural(column), column.ample, width // 2)
    return max(_narrowest(column), enough)


def _chosen(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that fit; a narrow one may be kept after a wide one was dropped."""
    needs = {0}
    for need in sorted({column.need for column in columns} - {0}):
        if _fits([c for c in columns if c.need in needs | {need}], width):
            needs.add(need)
    return [column for column in columns if column.need in needs]


def _fits(columns: Sequence[Column], width: int) -> bool:
    most = max(column.need for column in columns)
    widths = [
        _ample(column, width)
        if column.outlasts is not None and column.outlasts <= most
        else _narrowest(column)
        for column in columns
    ]
    return _taken(columns, widths) <= width


def _taken(columns: Sequence[Column], widths: Sequence[int]) -> int:
    return sum(widths) + sum(column.gap for column in columns[1:])


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Distribute the width that is left.

    Columns that outlast others come first, until they are readable; then all names; then bars.
    """
    widths = [_narrowest(column) for column in columns]
    wanted = [_natural(column) for column in columns]
    left = width - _taken(columns, widths)
    for index, column in enumerate(columns):
        if column.least is not None and left < 0:  # even the needed columns do not fit
            less = min(-left, widths[index] - 1)
            widths[index] -= less
            left += less
    for index, column in enumerate(columns):
        more = max(0, min(left, _ample(column, width) - widths[index]))
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


def _line(columns: Sequence[Column], widths: Sequence[int], row: int | None) -> Text:
    line = Text(no_wrap=True)
    for index, (column, width) in enumerate(zip(columns, widths, strict=True)):
        if index:
            line.append(" " * column.gap)
        if row is None:
            cell, style = column.head, "dim"
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
    """Facts in a row, broken between facts if possible; a line that continues ends with a dot."""
    if not facts:
        return
    lines = [facts[0][:1].upper() + facts[0][1:]]
    for left, fact in zip(range(len(facts) - 1, 0, -1), facts[1:], strict=True):
        more = " ·" if left > 1 else ""
        if cell_len(f"{lines[-1]} · {fact}{more}") > width:
            lines[-1] += " ·"
            lines.append(fact)
        else:
            lines[-1] += f" · {fact}"
    for line in lines:
        for line_part in paragraph(Text(line), width):
            yield Text(line_part.plain.replace(_JOINT, " "), "dim", no_wrap=True)


_JOINT = "\ue000"
"""Stands for a space that is no place to break; no foreign text has it, as it is not printable."""


def unbroken(command: str) -> str:
    """A part of a fact that stays on one line, however long, so that it can be copied."""
    return command.replace(" ", _JOINT)


def paragraph(text: Text, width: int, lead: str = "", *, whole: bool = False) -> Iterator[Text]:
    """The lines of a paragraph; ``lead`` begins the first, and the others are indented as far."""
    breaks = _breaks(text.plain, width - len(lead), whole=whole)
    for index, line_part in enumerate(text.divide(breaks)):
        line_part.rstrip()
        line = Text(" " * len(lead) if index else lead, no_wrap=True)
        line.append_text(line_part)
        yield line


def _breaks(text: str, width: int, *, whole: bool) -> list[int]:
    """Where lines begin, but the first; a word is broken if it is longer than a line, or never."""
    begins = []
    cells_taken = cell_len(
        text[: len(text) - len(text.lstrip())]
    )  # the name that comes first is blank
    for word in _WORD.finditer(text):
        if cells_taken and cells_taken + cell_len(word[1]) > width:
            begins.append(word.start())
            cells_taken = 0
        rest = word[0]
        while not whole and _JOINT not in rest and not _fits_in(rest.rstrip(), width):
            rest = rest[max(1, _fitting(rest, width)) :]
            begins.append(word.end() - len(rest))
        cells_taken += cell_len(rest)
    return begins


def space_for(width: int | None) -> tuple[int, bool]:
    """The number of cells in a line, and whether paths stay whole.

    They do if no terminal shows the text and no width is wanted: nothing cuts a line there.
    """
    if width is not None:
        return max(_NARROWEST, width), False
    return max(_NARROWEST, shutil.get_terminal_size().columns), not is_terminal(sys.stdout)


def sentence(clauses: Sequence[Part], width: int, *, whole: bool) -> Text:
    """One sentence with styled names, which are cut if they are longer than a line."""
    # A path may be longer than the line; its end and its class identify it.
    styled = Text()
    for kind, text in clauses:
        shown = visible(text)
        if kind == "name" and not whole:
            shown = keep_end(shown, min(width, 80))
        elif kind == "node" and not whole:
            shown = keep_start(shown, min(width, 60))
        styled.append(shown, _STYLES[kind])
    return styled


def written(lines: Sequence[Text], width: int, *, color: bool) -> str:
    """Lines as a string, whatever the environment says about colours and terminals."""
    for line in lines:
        line.rstrip()
    if not color:  # nothing of a style is left, and Rich takes longer to say so
        return "\n".join(line.plain for line in lines).rstrip("\n")
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        color_system="standard",
        force_terminal=True,
        force_jupyter=False,
        force_interactive=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
        _environ={},
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    return file.getvalue().rstrip("\n")
