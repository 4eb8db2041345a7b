"""The findings on a page: as a list that needs no script, and for the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from backspot.formatting import counted, duration, visible
from backspot.render._findings import (
    HEADING,
    advice_of,
    cost_of,
    cost_of_place,
    listed,
    overlap,
    place_name,
    searched,
    unlisted,
    worth,
)
from backspot.render._remedies import remedy_sentence
from backspot.render._sections import Remark
from backspot.render.html._fragments import sentence, shown
from backspot.render.parts import remarks_on
from backspot.render.view import View
from backspot.results.findings import Finding, gain_of
from backspot.results.report import Report


def findings_list(report: Report, *, shown_first: int, preview: bool = False) -> str:
    """The findings, with what to do, and how many rules looked; some open on demand."""
    view = View(preview=preview)
    sentences = [
        sentence_text
        for sentence_text in (*unlisted(report, view), searched(report))
        if sentence_text
    ]
    below = "".join(
        f'<p class="muted searched">{shown(sentence_text)}</p>' for sentence_text in sentences
    )
    findings = listed(report, view)
    if not findings:
        return f'<section class="findings">{below}</section>' if sentences else ""
    items = [_finding(report, finding, findings[:index]) for index, finding in enumerate(findings)]
    first, rest = items[:shown_first], items[shown_first:]
    more = ""
    if rest:
        summary = f"<summary>{counted(len(rest), 'more finding')}</summary>"
        more = f'<details>{summary}<ol class="found">{"".join(rest)}</ol></details>'
    step = report.replayed_step
    priced = [finding for finding in findings if (gain := gain_of(finding)) and gain.ns]
    total = f'<p class="together" id="together" data-ns="{step.ns}" hidden></p>' if step else ""
    return (
        f'<section class="findings"><h2>{HEADING}</h2>'
        f'<ol class="found">{"".join(first)}</ol>{more}{total if priced else ""}{below}</section>'
    )


def first_to_do(report: Report) -> str:
    """What to do first, below the headline; nothing where no remedy has a price."""
    remedy = remedy_sentence(report)
    return f'<p class="first">{sentence(remedy)}</p>' if remedy else ""


def verdict_of_answer(report: Report) -> str:
    """What a trial of the answer's remedy says, for the headline; nothing where none was made."""
    subject = report.answer
    for finding in listed(report):
        about = [place.path for place in finding.places] == [
            subject.path
        ] or finding.rule == subject.rule
        if about and (remarks := remarks_on(finding)):
            mark, verdict_text = remarks[0].mark, remarks[0].said
            return f'<p class="verdict"><b>{mark}</b> {shown(verdict_text)}</p>'
    return ""


def _finding(report: Report, finding: Finding, before: Sequence[Finding]) -> str:
    time, share = cost_of(report, finding)
    places, more = worth(finding, 3)
    named = "".join(
        f'<li><code data-path="{shown(place.path)}">{shown(place_name(place))}</code> '
        f'<span class="muted">{shown(place.line)} {cost_of_place(place)}</span></li>'
        for place in places
    )
    named += f'<li class="muted">{more}</li>' if more else ""
    same = overlap(report, finding, before)
    same = f'<p class="muted">{shown(same)}</p>' if same else ""
    link = ""
    if urlsplit(finding.link).scheme == "https":
        link = f' <a href="{shown(finding.link)}" target="_blank" rel="noreferrer">Read more</a>'
    advice = advice_of(finding)
    remedy = f'<p class="remedy">{shown(advice)}{link}</p>' if advice else ""
    where = f'<ul class="places" aria-label="Where">{named}</ul>' if named else ""
    tick = ""
    if (gain := gain_of(finding)) and gain.ns:
        data = f'data-ns="{gain.ns}" data-best="{int(gain.at_best)}"'
        tick = f'<label class="fix" hidden><input type="checkbox" {data}> what if</label>'
    return (
        f'<li><div class="cost"><b>{time}</b><span class="muted">{share}</span>{tick}</div>'
        f"<div><h3>{shown(finding.title)}</h3><p>{shown(finding.seen)}</p>"
        f"{remedy}{''.join(map(_remark, remarks_on(finding)))}"
        f"{same}{where}</div></li>"
    )


def _remark(remark: Remark) -> str:
    """What a part says of a finding: its sentence, and a bar for each time, with its quartiles."""
    per = max((bar.high_ns for bar in remark.bars), default=0) / 100
    rows = "".join(
        f'<tr><th scope="row">{shown(bar.name)}</th><td class="n">{duration(bar.ns)}</td><td>'
        '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect y="1" width="{bar.ns / per:.2f}" height="8" stroke="none"/>'
        f'<path d="M{bar.low_ns / per:.2f} 5H{bar.high_ns / per:.2f}"/></svg>'
        f"</td><td>{shown(bar.said)}</td></tr>"
        for bar in remark.bars
        if per and bar.ns
    )
    label = f'class="bars" aria-label="{shown(remark.title)}"'
    table = f"<table {label}>{rows}</table>" if rows else ""
    remark_text = f"<p><b>{remark.mark}</b> {shown(remark.said)}</p>"
    return f'<div class="remark{" good" * remark.is_good}">{remark_text}{table}</div>'


def findings_data(
    report: Report, place: dict[str, int], *, preview: bool = False
) -> list[dict[str, Any]]:
    """The findings in the order of ``findings_list``."""
    return [_data(report, finding, place) for finding in listed(report, View(preview=preview))]


def _data(report: Report, finding: Finding, place: dict[str, int]) -> dict[str, Any]:
    """A finding, and what it costs in each row: modules by their index, others by their name."""
    return {
        "title": finding.title,
        "cost": cost_of(report, finding)[0],
        "remedy": advice_of(finding) or " ".join(remark.said for remark in remarks_on(finding)),
        "places": [
            [
                place[location.path] if location.class_name else visible(location.path),
                cost_of_place(location),
            ]
            for location in finding.places
            if not location.class_name or location.path in place
        ],
    }
