"""Fragments of HTML that need no script: the answer, phases, findings, tables and the frame.

Pages and notebooks share them. Every name comes from a trace and gets into the markup only through
``shown``.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from pkgutil import get_data
from string import Template

from backspot._version import __version__
from backspot.formatting import duration, percent, visible
from backspot.render._answer import answered
from backspot.render._columns import module_columns, operator_columns
from backspot.render._facts import setting
from backspot.render._phases import explained, kept_phases, phase_text
from backspot.render._sections import Column, Section, Table
from backspot.render._words import KINDS, Part, made_by
from backspot.render.view import Selection, View, heaviest_line, operators_by
from backspot.results.costs import OperatorCost, Row, WallKinds
from backspot.results.report import Report

_LITTLE = 0.01
"""Share of the step below which phases have one entry of the legend together."""
_TAGS = {"text": "", "name": "code", "node": "code", "number": "b"}


@cache
def asset(name: str) -> str:
    """The text of a file in this folder, without indentation: a page is to stay small."""
    data = get_data(__package__, name) or b""
    return "\n".join(line.strip() for line in data.decode().splitlines()).strip()


def shown(text: str) -> str:
    """Text from a trace as HTML: markup is escaped, invisible characters are visible."""
    return escape(visible(text), quote=True)


def sentence(clauses: Sequence[Part]) -> str:
    """One sentence, with names as code."""
    return "".join(
        f"<{_TAGS[kind]}>{shown(text)}</{_TAGS[kind]}>" if _TAGS[kind] else shown(text)
        for kind, text in clauses
    )


def line_of_answer(report: Report) -> str:
    """The source line that made the node of the answer, or nothing if that is not known."""
    row = answered(report)
    line = None if row is None else heaviest_line(row, "wall")
    if line is None:
        return ""
    source = f" <code>{shown(line.text.strip())}</code>" if line.text else ""
    return f'<p class="line-of-answer">← <code>{shown(made_by(line))}</code>{source}</p>'


def facts_of(report: Report, sections: Sequence[Section]) -> str:
    """What was measured, and the facts of the parts."""
    return facts_list([*setting(report), *("; ".join(section.said) for section in sections)])


def facts_list(facts: Sequence[str]) -> str:
    """Some facts as a list."""
    items = [facts[0][:1].upper() + facts[0][1:], *facts[1:]]
    return f'<ul class="facts">{"".join(f"<li>{shown(fact)}</li>" for fact in items)}</ul>'


def warnings_list(warnings: Sequence[str]) -> str:
    """The warnings, or nothing if there are none."""
    if not warnings:
        return ""
    items = "".join(f"<li>{shown(text)}</li>" for text in warnings)
    return f'<ul class="warnings" aria-label="Warnings">{items}</ul>'


def phases_bar(report: Report) -> str:
    """The phases of a step as one bar with its legend, and what long ones mean; or nothing."""
    phases = kept_phases(report)
    if not phases:
        return ""
    texts = [phase_text(report, phase) for phase in phases]
    little = [phase for phase in phases if 0 <= phase.wall_ns < _LITTLE * report.step_ns]
    little = little if len(little) > 1 else []
    label = "; ".join(f"{name} {time}, {share}" for name, time, share in texts)
    bar = "".join(
        f'<span class="p-{phase.name}" style="flex-grow:{phase.wall_ns}"></span>'
        for phase in phases
        if phase.wall_ns > 0
    )
    legend = "".join(
        f'<li><i class="p-{phase.name}" aria-hidden="true"></i>{name} <b>{time}</b> '
        f'<span class="muted">{share}'
        + (f", GPU busy {percent(phase.utilisation)}" if report.has_gpu else "")
        + "</span></li>"
        for phase, (name, time, share) in zip(phases, texts, strict=True)
        if phase not in little
    )
    if little:
        names = ", ".join(
            name for phase, (name, _, _) in zip(phases, texts, strict=True) if phase in little
        )
        legend += (
            f'<li class="muted">{shown(names)}: {duration(sum(phase.wall_ns for phase in little))} '
            "together</li>"
        )
    unit = "backward pass" if report.per == "pass" else "step"
    step_text = duration(report.step_ns)
    meanings = "".join(f'<p class="meaning">{shown(text)}</p>' for text in explained(report))
    return (
        f'<section class="phases"><h2>Time in a {unit} <span class="muted">{step_text}</span></h2>'
        f'<div class="bar" role="img" aria-label="{shown(label)}">{bar}</div>'
        f'<ul class="legend">{legend}</ul>{meanings}</section>'
    )


_CLASSES = {
    "rank": "n rank",
    "name": "",
    "class": "class o2",
    "time": "n",
    "share": "n",
    "saves": "n o1 saves",
    "detail": "n o3",
    "bar": "b",
    "node": "node",
    "line": "o2",
    "count": "n",
    "phase": "",
}
_CLASS = "n o1"
"""The classes of columns: ``n`` is aligned right; where it is narrow, ``o3`` goes first and ``o1``
last."""


def module_table(report: Report, chosen: Selection, view: View, *, lines: bool = False) -> str:
    """The ranked rows as a table, and below them rows that no module owns.

    Args:
        lines: whether to name the source line that made the heaviest node.
    """
    left_out = ("spread", "recompute", "exact", "calls", "forward", *(() if lines else ("line",)))
    columns = module_columns(report, chosen.shown, chosen.unowned, view)
    columns = [column for column in columns if column.kind not in left_out]
    bars = _kinds_bars(report, [*chosen.shown, *chosen.unowned])
    rows = _rows(columns, bars, '<th scope="row"><code class="path"><bdi dir="ltr">{}</bdi></code>')
    span = sum(column.kind != "node time" for column in columns)
    body, rest = rows[: len(chosen.shown)], rows[len(chosen.shown) :]
    below = (
        f'<tbody class="unowned"><tr><th scope="rowgroup" colspan="{span}">'
        f"owned by no module:</th></tr>{''.join(rest)}</tbody>"
        if rest
        else ""
    )
    return f'<table class="ranked">{_head(columns)}<tbody>{"".join(body)}</tbody>{below}</table>'


def tables_of(sections: Sequence[Section]) -> str:
    """The tables of the parts, and what these say beside them."""
    return "".join(_tables(section) for section in sections if section.tables)


def _tables(section: Section) -> str:
    sentences = "; ".join(section.said)
    sentence_html = f"<p>{shown(sentences[0].upper() + sentences[1:])}.</p>" if sentences else ""
    tables_html = []
    for table in section.tables:
        rows = "".join(_rows(table.columns, (), '<th scope="row"><code>{}</code>'))
        tables_html.append(
            f'<h3>{shown(table.heading)}</h3><div class="table-box scroll"><table class="ranked">'
            f"{_head(table.columns)}<tbody>{rows}</tbody></table></div>"
            f"{_note(table)}"
        )
    heading = f"<h2>{shown(section.title)}</h2>"
    return (
        f'<section class="{section.part}">{heading}{sentence_html}{"".join(tables_html)}</section>'
    )


def _note(table: Table) -> str:
    return f'<p class="muted">{shown(table.note)}</p>' if table.note else ""


def last_of(sections: Sequence[Section]) -> str:
    """What parts say below all else: with a title also tables, sentences and code."""
    return "".join(_last(section) for section in sections)


def _last(section: Section) -> str:
    sentences = "".join(f"<p>{shown(text)}</p>" for text in section.said)
    if not section.title:
        return f'<div class="muted">{sentences}</div>'
    tables = "".join(
        f'<div class="scroll"><table class="ranked">{_head(table.columns)}<tbody>'
        f"{''.join(_rows(table.columns, (), '<th scope=row>{}'))}</tbody></table></div>"
        f"{_note(table)}"
        for table in section.tables
    )
    heading = f"<h2>{shown(section.title)}</h2>"
    code = code_list(section)
    return f'<section class="{section.part}">{heading}{tables}{sentences}{code}</section>'


def code_list(section: Section) -> str:
    """Code to write, as a list."""
    items = "".join(
        f"<li>{number}. {shown(purpose)}<pre><code>{block(code)}</code></pre></li>"
        for number, (purpose, code) in enumerate(section.code, 1)
    )
    return f'<ol class="to-write">{items}</ol>' if items else ""


def block(code: str) -> str:
    """Lines of code."""
    return "\n".join(map(shown, code.splitlines()))


def operator_table(report: Report, limit: int) -> str:
    """The autograd nodes by name, for traces that name no modules."""
    ranked = operators_by(report, "wall")[:limit]
    if not ranked:
        return "<p>The trace has no autograd nodes. Was the backward recorded?</p>"
    columns = operator_columns(report, ranked, "wall")
    rows = _rows(
        columns, _kinds_bars(report, ranked), '<th scope="row" class="of-nodes"><code>{}</code>'
    )
    return f'<table class="ranked">{_head(columns)}<tbody>{"".join(rows)}</tbody></table>'


def _head(columns: Sequence[Column]) -> str:
    cells = "".join(
        f'<th scope="col" class="{_CLASSES.get(column.kind, _CLASS)}">'
        + ('<span class="unseen">drawn</span>' if column.kind == "bar" else column.head)
        + "</th>"
        for column in columns
        if column.kind != "node time"  # it is in the node's cell
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _rows(columns: Sequence[Column], bars: Sequence[str], name: str) -> list[str]:
    """The rows of a table; ``name`` is the start of a row's heading, with its name at ``{}``."""
    times = next((column.cells for column in columns if column.kind == "node time"), ())

    def cell(column: Column, row: int) -> str:
        kind, text = column.kind, shown(column.cells[row][1])
        if kind == "name":
            return f"{name.format(text)}</th>"
        if kind == "rank":
            return f'<td class="n muted rank">{text}</td>'
        if kind == "bar":
            text = bars[row]
        elif kind == "time":
            text = f"<b>{text}</b>"
        elif kind == "node" and text:
            spent = f"<code>{text}</code> <span>{shown(times[row][1])}</span>"
            text = f'<span class="node-cost">{spent}</span>'
        elif kind == "line" and column.hints:
            text = text and f'<code title="{shown(column.hints[row])}">{text}</code>'
        classes = _CLASSES.get(kind, _CLASS)
        return f'<td class="{classes}">{text}</td>' if classes else f"<td>{text}</td>"

    return [
        f"<tr>{''.join(cell(column, row) for column in columns if column.kind != 'node time')}</tr>"
        for row in range(len(columns[0].cells))
    ]


def _kinds_bars(report: Report, costs: Sequence[Row | OperatorCost]) -> list[str]:
    """Bars as long as the costs' wall times, coloured by what the time is spent on."""
    longest = max((cost.wall_ns for cost in costs), default=0)
    bars = []
    for cost in costs:
        spent = cost.wall_on if isinstance(cost, Row) else WallKinds()
        kinds = [(kind, getattr(spent, f"{kind}_ns")) for kind in KINDS if report.has_gpu]
        spent_on = [(kind, ns) for kind, ns in kinds if ns > 0] or [("unknown", cost.wall_ns)]
        drawn = "".join(f'<i class="k-{kind}" style="flex-grow:{ns}"></i>' for kind, ns in spent_on)
        share = cost.wall_ns / longest if longest else 0.0
        bars.append(f'<span class="mix" style="--part:{share:.3f}">{drawn}</span>' if share else "")
    return bars


def page(
    title: str,
    about: str,
    main: str,
    footer: str,
    *,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: str = "",
) -> bytes:
    """A page in UTF-8 that loads nothing, and whose content security policy forbids it to.

    Args:
        main: its content, as HTML, with ``id="modules"`` where the modules begin.
        styles: files in this folder to add to the style of every page.
        scripts: the same, for the script.
        data: what the scripts read, as HTML.
    """
    script = "\n".join(map(asset, ("theme.js", *scripts)))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    document = Template(asset("page.html")).substitute(
        version=__version__,
        title=shown(title),
        about=shown(about),
        style="\n".join(map(asset, ("report.css", *styles))),
        main=main,
        footer=shown(footer),
        data=data,
        script=script,
        script_hash=f"sha256-{digest}",
    )
    return document.encode()
