"""The pieces of a page that need no script: the answer, phases, findings and a table.

The page and the notebooks share them. Every name comes from a trace: nothing gets into the markup
but through ``shown``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from urllib.parse import urlsplit

from backspot.formatting import counted, decimals_for, duration, milliseconds, percent, visible
from backspot.render._sentences import (
    HEADING,
    KINDS,
    Part,
    cost_of,
    heaviest,
    heaviest_line,
    kept_phases,
    made_by,
    node_name,
    operators_by,
    phase_text,
    worth,
)
from backspot.results.report import Finding, LineCost, OperatorCost, Report, Row, WallKinds

__all__ = [
    "facts_list",
    "findings_list",
    "line_shown",
    "module_table",
    "operator_table",
    "phases_bar",
    "sentence",
    "shown",
    "warnings_list",
]

_TAGS = {"text": "", "name": "code", "node": "code", "number": "b"}


def shown(text: str) -> str:
    """Text from a trace, as text of a page: nothing in it is markup, nothing in it is hidden."""
    return escape(visible(text), quote=True)


def sentence(parts: Sequence[Part]) -> str:
    """One sentence; names are set as code."""
    return "".join(
        f"<{_TAGS[kind]}>{shown(text)}</{_TAGS[kind]}>" if _TAGS[kind] else shown(text)
        for kind, text in parts
    )


def facts_list(facts: Sequence[str]) -> str:
    """What was measured, fact by fact."""
    told = [facts[0][:1].upper() + facts[0][1:], *facts[1:]]
    return f'<ul class="facts">{"".join(f"<li>{shown(fact)}</li>" for fact in told)}</ul>'


def warnings_list(warnings: Sequence[str]) -> str:
    """What to know before trusting the numbers."""
    if not warnings:
        return ""
    items = "".join(f"<li>{shown(text)}</li>" for text in warnings)
    return f'<ul class="warnings" aria-label="Warnings">{items}</ul>'


def phases_bar(report: Report) -> str:
    """Where a step's time goes: one bar and its legend; nothing where the trace does not tell."""
    phases = kept_phases(report)
    if not phases:
        return ""
    texts = [phase_text(report, phase) for phase in phases]
    label = "; ".join(f"{name} {time}, {share}" for name, time, share in texts)
    bar = "".join(
        f'<span class="p-{phase.name}" style="flex-grow:{phase.wall_ns}"></span>'
        for phase in phases
    )
    legend = "".join(
        f'<li><i class="p-{phase.name}" aria-hidden="true"></i>{name} <b>{time}</b> '
        f'<span class="muted">{share}{_busy(report, phase.utilisation)}</span></li>'
        for phase, (name, time, share) in zip(phases, texts, strict=True)
    )
    per = "backward pass" if report.step_unit == "backward pass" else "step"
    whole = duration(sum(phase.wall_ns for phase in phases) / report.steps)
    return (
        f'<section class="phases"><h2>Where the {per} goes <span class="muted">{whole}</span></h2>'
        f'<div class="bar" role="img" aria-label="{shown(label)}">{bar}</div>'
        f'<ul class="legend">{legend}</ul></section>'
    )


def _busy(report: Report, utilisation: float) -> str:
    return f", GPU busy {percent(utilisation)}" if report.has_gpu else ""


def findings_list(report: Report, *, shown_first: int) -> str:
    """What makes the step slower than it need be, and what to do; the rest opens on demand."""
    if not report.findings:
        return ""
    items = [_finding(report, one) for one in report.findings]
    first, rest = items[:shown_first], items[shown_first:]
    more = ""
    if rest:
        summary = f"<summary>{counted(len(rest), 'more finding')}</summary>"
        more = f'<details>{summary}<ol class="found">{"".join(rest)}</ol></details>'
    return (
        f'<section class="findings"><h2>{HEADING}</h2>'
        f'<ol class="found">{"".join(first)}</ol>{more}</section>'
    )


def _finding(report: Report, finding: Finding) -> str:
    time, share = cost_of(report, finding)
    places, more = worth(finding, 3)
    named = "".join(
        f'<li><code data-path="{shown(place.path)}">{shown(place.label)}</code> '
        f'<span class="muted">{shown(place.line)} {duration(place.wall_ns / report.steps)}'
        "</span></li>"
        for place in places
    )
    named += f'<li class="muted">{more}</li>' if more else ""
    link = ""
    if urlsplit(finding.link).scheme == "https":
        link = f' <a href="{shown(finding.link)}" rel="noreferrer">Read more</a>'
    return (
        f'<li><div class="cost"><b>{time}</b><span class="muted">{share}</span></div>'
        f"<div><h3>{shown(finding.title)}</h3><p>{shown(finding.seen)}</p>"
        f'<p class="remedy">{shown(finding.remedy)}{link}</p>'
        f'<ul class="places" aria-label="Where">{named}</ul></div></li>'
    )


def line_shown(line: LineCost | None) -> str:
    """A line of source by its place; what stands in it shows where the pointer rests."""
    if line is None:
        return ""
    return f'<code title="{shown(line.text)}">{shown(made_by(line))}</code>'


def module_table(
    report: Report, rows: Sequence[Row], unowned: Sequence[Row], *, lines: bool = False
) -> str:
    """The ranked rows as a table, and below them what no module owns.

    Args:
        report: what they are rows of.
        rows: the modules.
        unowned: what no module owns.
        lines: whether to name the line of source that made the heaviest node.
    """
    steps = report.steps
    every = [*rows, *unowned]
    lines = lines and any(heaviest_line(row, "wall") for row in every)
    decimals = decimals_for(max((row.wall_ns for row in every), default=0) / steps)
    longest = max((row.wall_ns for row in every), default=0) or 1

    def time(ns: int) -> str:
        return milliseconds(ns / steps, decimals)

    def line(rank: int | None, row: Row) -> str:
        node = heaviest(row, "wall")
        cells = [
            f'<td class="n muted rank">{rank or ""}</td>',
            f'<th scope="row"><code class="path"><bdi dir="ltr">{shown(row.name)}</bdi></code>'
            "</th>",
            f'<td class="o2">{shown(row.class_name) if row.is_module else ""}</td>',
            f'<td class="n"><b>{time(row.wall_ns)}</b></td>',
            f'<td class="n">{percent(report.share(row))}</td>',
            f'<td class="b">{_kinds_bar(report, row.wall_on, row.wall_ns, longest)}</td>',
        ]
        if report.has_gpu:
            cells.append(f'<td class="n o1">{time(row.gpu_ns)}</td>')
        cells.append(f'<td class="n o1">{time(row.cpu_ns)}</td>')
        if node:
            name = f"<code>{shown(node_name(node.name))}</code>"
            spent = f'<span class="node-cost">{name} <span>{time(node.wall_ns)}</span></span>'
        cells.append(f'<td class="node">{spent if node else ""}</td>')
        if lines:
            cells.append(f"<td>{line_shown(heaviest_line(row, 'wall'))}</td>")
        return f"<tr>{''.join(cells)}</tr>"

    titles = [("module", ""), ("class", "o2"), *_times(report), ("heaviest node", "node")]
    titles += [("made by", "")] if lines else []
    body = "".join(line(rank, row) for rank, row in enumerate(rows, 1))
    rest = "".join(line(None, row) for row in unowned)
    below = (
        f'<tbody class="unowned"><tr><th scope="rowgroup" colspan="{len(titles) + 1}">'
        "no module owns:</th>"
        f"</tr>{rest}</tbody>"
        if rest
        else ""
    )
    return f'<table class="ranked">{_head(titles)}<tbody>{body}</tbody>{below}</table>'


def _times(report: Report) -> list[tuple[str, str]]:
    """The titles and classes of the columns that tables of costs share."""
    gpu = [("GPU", "n o1")] if report.has_gpu else []
    return [("wall", "n"), ("share", "n"), ("drawn", "b"), *gpu, ("CPU", "n o1")]


def _head(titles: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f'<th scope="col" class="{kind}">'
        + (f'<span class="unseen">{title}</span>' if kind == "b" else title)
        + "</th>"
        for title, kind in [("#", "n rank"), *titles]
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _kinds_bar(report: Report, spent: WallKinds, wall_ns: int, longest: int) -> str:
    """A bar as long as the row's time, in the colours of what it is spent on."""
    if not wall_ns:
        return ""
    kinds = [(kind, getattr(spent, f"{kind}_ns")) for kind in KINDS if report.has_gpu]
    parts = [(kind, ns) for kind, ns in kinds if ns > 0] or [("unknown", wall_ns)]
    told = "".join(f'<i class="k-{kind}" style="flex-grow:{ns}"></i>' for kind, ns in parts)
    return f'<span class="mix" style="--part:{wall_ns / longest:.3f}">{told}</span>'


def operator_table(report: Report, limit: int) -> str:
    """The autograd nodes by name, where no module can be named."""
    ranked: list[OperatorCost] = operators_by(report, "wall")[:limit]
    if not ranked:
        return "<p>No autograd node ran in it: was the backward recorded?</p>"
    steps, whole = report.steps, report.wall_ns or 1
    decimals = decimals_for(max((one.wall_ns for one in ranked), default=0) / steps)
    longest = max((one.wall_ns for one in ranked), default=0) or 1

    def time(ns: int) -> str:
        return milliseconds(ns / steps, decimals)

    lines = "".join(
        f'<tr><td class="n muted rank">{rank}</td>'
        f'<th scope="row" class="of-nodes"><code>{shown(node_name(one.name))}</code></th>'
        f'<td class="n"><b>{time(one.wall_ns)}</b></td>'
        f'<td class="n">{percent(one.wall_ns / whole)}</td>'
        f'<td class="b">{_kinds_bar(report, WallKinds(), one.wall_ns, longest)}</td>'
        + (f'<td class="n o1">{time(one.gpu_ns)}</td>' if report.has_gpu else "")
        + f'<td class="n o1">{time(one.cpu_ns)}</td><td class="n">{one.count:,}</td></tr>'
        for rank, one in enumerate(ranked, 1)
    )
    titles = [("autograd node", ""), *_times(report), ("count", "n")]
    return f'<table class="ranked">{_head(titles)}<tbody>{lines}</tbody></table>'
