"""What outputs lay out, and nothing of how: columns, tables, and the sections that parts say.

A part, such as memory, gives what it has to say as a ``Saying``, which ``parts.py`` lists. Text,
Markdown, pages and notebooks lay it out, and know no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from backspot.formatting import decimals_for, milliseconds
from backspot.render._words import Part
from backspot.render.view import View
from backspot.results.comparison import Comparison
from backspot.results.costs import Row
from backspot.results.findings import Finding, FirstRemedy
from backspot.results.report import Answer, Order, Report

Value: TypeAlias = str | float | None
"""An entry of a table for programs."""
Kind: TypeAlias = Literal[
    "rank",
    "name",
    "class",
    "members",
    "time",
    "spread",
    "share",
    "saves",
    "amount",
    "detail",
    "bar",
    "other time",
    "recompute",
    "exact",
    "calls",
    "forward",
    "node",
    "node time",
    "line",
    "count",
    "phase",
    "change",
    "verdict",
]
"""What a column holds. Each output decides by it how to style the column, or to leave it out.

An ``amount`` is a figure of a part with a unit of its own, as memory is; a ``detail`` is one that a
screen has no room for, unless rows are ranked by it.
"""

UNKNOWN = "–"
"""What a cell has in place of a number that is not known; a note below the table has the reason."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. The attributes below ``cells`` are for terminals, unless they say so.

    Attributes:
        cells: its cells, one for each row, not yet escaped.
        hints: for pages, text for each cell that appears under the pointer.
        bars: lengths of 0 to 1, drawn instead of cells.
        full_head: the heading with its unit, for outputs that have room for it.
        need: how dispensable it is. Columns with need 0 are always shown; columns with the same
            need are shown or dropped together, the highest need first.
        least: how narrow a column of names can get; ``None`` if nothing may be cut.
        left: whether it is aligned left (in every output).
        cut_start: whether a long name loses its start, because the end identifies it.
        outlasts: columns with this ``need`` or more are dropped before this one gets narrower than
            ``ample``.
        ample: the width at which a column of names is readable; at most half of the line is used.
        gap: number of blanks before it.
        style: the style of its cells.
        leads: in every output, whether it stands before the times.
    """

    kind: Kind
    head: str
    cells: Sequence[Part] = ()
    hints: Sequence[str] = ()
    bars: Sequence[float] = ()
    full_head: str = ""
    need: int = 0
    least: int | None = None
    left: bool = False
    cut_start: bool = False
    outlasts: int | None = None
    ample: int = 48  # model.language_model.layers.31.self_attn.q_proj
    gap: int = 2
    style: str = ""
    leads: bool = False


def numbers(values: Iterable[object]) -> list[Part]:
    """Cells of numbers."""
    return [("number", str(value)) for value in values]


def milliseconds_of(largest_ns: float) -> Callable[[int], str]:
    """How a table writes times of nanoseconds; the largest one decides the number of decimals."""
    decimals = decimals_for(largest_ns)
    return lambda ns: milliseconds(ns, decimals)


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its heading, and what to know to read it."""

    heading: str
    note: str
    columns: Sequence[Column]


@dataclass(frozen=True, slots=True)
class Section:
    """What a part says about one thing.

    Attributes:
        kind: where it stands. ``"facts"``: beside how it was measured; ``"sentences"``: below the
            phases; ``"tables"``: its tables below all else, and what it says beside the answer;
            ``"last"``: whole below the findings, on a screen too, because somebody asked for it.
        part: the part that says it, for the style of a page.
        said: short facts, or sentences of their own; the most important first.
        brief: how many of these a screen has.
        title: the heading of all tables, where there is room for it.
        tables: its tables.
        units: the unit of what it adds to the table of modules: ``memory in MB``.
        terms: for a page, what it adds to the table of modules, each with its meaning.
        code: code to write, in its order, each after what it is for.
        gives_way: how many of the first of what is said a screen leaves out that lacks room for
            findings.
    """

    kind: Literal["facts", "sentences", "tables", "last"]
    part: str
    said: Sequence[str] = ()
    brief: int = 1
    title: str = ""
    tables: Sequence[Table] = ()
    units: str = ""
    terms: Sequence[tuple[str, str]] = ()
    code: Sequence[tuple[str, str]] = ()
    gives_way: int = 0


@dataclass(frozen=True, slots=True)
class Lead:
    """What a screen begins with where a part ranks the rows, by another thing than their time.

    Attributes:
        order: the ranking, as in ``View.order``.
        answer: the sentence that answers.
        facts: what it is about; each list is a line.
        advice: what to do about it; ``""`` for nothing.
        is_repeated: whether repeated layers come first.
        share: the share of the whole that a row has.
        is_asked: whether a screen begins with it although nobody asks for this ranking.
    """

    order: Order
    answer: Sequence[Part]
    facts: Sequence[Sequence[str]]
    advice: str
    is_repeated: bool
    share: Callable[[Row], float]
    is_asked: bool


class Cost(NamedTuple):
    """What a part knows to cost much in a step, as the answer if nothing costs more.

    Attributes:
        answer: it.
        said: the same in words.
        name: what stands for it behind that: ``without them``.
    """

    answer: Answer
    said: Sequence[Part]
    name: str


@dataclass(frozen=True, slots=True)
class Fields:
    """What a part adds to each row of a table for programs: the fields, and their values."""

    names: Sequence[str]
    values: Callable[[Row], Iterable[Value]]


@dataclass(frozen=True, slots=True)
class Amount:
    """What else than time a page can measure rows by, in bytes.

    Attributes:
        key: its name for the script.
        name: on the switch.
        head: above its column.
        title: what is measured.
        whole: of all rows.
        field: of a row; what it holds has the numbers.
        of: the number that is measured.
        details: the numbers that the details of a row show, each with its words.
        summed: those that add up over a group of rows.
    """

    key: str
    name: str
    head: str
    title: str
    whole: int
    field: str
    of: str
    details: Sequence[tuple[str, str]]
    summed: Sequence[str]


class Bar(NamedTuple):
    """One of several times to compare: its name, the time with its quartiles, what is said of it.

    All times are nanoseconds.
    """

    name: str
    ns: int
    low_ns: int
    high_ns: int
    said: str


@dataclass(frozen=True, slots=True)
class Remark:
    """What a part says of a finding, beside its remedy.

    Attributes:
        mark: a sign before it.
        said: it in sentences.
        brief: the same for a line that is short; ``""`` for nothing.
        is_good: whether it speaks for the remedy.
        bars: times to compare.
        title: what these are.
    """

    mark: str
    said: str
    brief: str = ""
    is_good: bool = False
    bars: Sequence[Bar] = ()
    title: str = ""


@dataclass(frozen=True, slots=True)
class Saying:
    """What a part says of a report: functions that say nothing where it has nothing.

    Attributes:
        sections: its sections, for a view.
        columns: what it adds to the table of modules: of these rows, for a view, with a function
            that writes times.
        fields: the same, for programs.
        lead: what a screen begins with if the part ranks the rows.
        page: what the script of a page needs of it.
        amounts: what else than time a page can measure rows by.
        needs: in words, and with the option that records it, what its rules need.
        remark: what it says of a finding.
        costs: what else than modules, phases and findings may cost most in the step.
        remedies: what else than the remedies of findings can be done, with its price.
        compared: what it says of a comparison: a heading, then a sentence for each thing.
    """

    sections: Callable[[Report, View], Sequence[Section]] = lambda _, __: ()
    columns: Callable[[Report, Sequence[Row], View, Callable[[int], str]], Sequence[Column]] = (
        lambda *_: ()
    )
    fields: Callable[[Report], Fields | None] = lambda _: None
    lead: Callable[[Report], Lead | None] = lambda _: None
    page: Callable[[Report], Mapping[str, Any]] = lambda _: {}
    amounts: Callable[[Report], Sequence[Amount]] = lambda _: ()
    needs: Mapping[str, str] = field(default_factory=dict)
    remark: Callable[[Finding], Remark | None] = lambda _: None
    costs: Callable[[Report], Sequence[Cost]] = lambda _: ()
    remedies: Callable[[Report], Sequence[FirstRemedy]] = lambda _: ()
    compared: Callable[[Comparison], Sequence[str]] = lambda _: ()
