"""A report as Markdown, for an issue or a pull request, in the order of the text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from backspot.formatting import counted, decimals_for, milliseconds, percent, visible
from backspot.render._sentences import (
    HEADING,
    Part,
    answer,
    by_operator,
    cost_of,
    coverage,
    heaviest,
    heaviest_line,
    kept_phases,
    made_by,
    node_name,
    notes,
    operators_by,
    phase_text,
    remedies,
    select,
    setting,
    time_of,
    worth,
)
from backspot.results.report import By, NodeCost, OperatorCost, Report, Row, Sort

__all__ = ["as_code", "as_sentence", "as_table", "as_text", "to_markdown"]

_FINDINGS = 5


def to_markdown(
    report: Report,
    *,
    top: int | None = 30,
    depth: int | None = None,
    sort: Sort = "wall",
    by: By = "path",
) -> bytes:
    """The report as GitHub's Markdown, in UTF-8; the arguments are those of ``render_text``.

    No name can leave its cell, start a tag or a link, or call upon anybody.
    """
    chosen = select(report, top=top, depth=depth, sort=sort, by=by)
    per = "pass" if report.step_unit == "backward pass" else "step"
    facts = "; ".join([*setting(report), f"times in ms per {per}"])
    sentence = as_sentence(answer(report, depth=depth, sort=sort, by=by))
    lines = [f"**{sentence}**", "", f"{facts[0].upper()}{facts[1:]}.", ""]
    if phases := [phase_text(report, phase) for phase in kept_phases(report)]:
        goes = ", ".join(f"{name} {time} ({share})" for name, time, share in phases)
        lines += [as_text(f"Where the {per} goes: {goes}."), ""]
    if warnings := remedies(report):
        lines += [*(f"- Warning: {as_text(text)}" for text in warnings), ""]
    if by_operator(report):
        lines += _table(report, [], operators_by(report, sort)[:top], sort, by)
    else:
        lines += _table(report, [*chosen.shown, *chosen.unowned], [], sort, by)
        below = [coverage(report), *notes(report, chosen, sort=sort, by=by)]
        lines += ["", *map(as_text, below)]
    lines += _findings(report)
    return ("\n".join(lines).rstrip("\n") + "\n").encode()


def _findings(report: Report) -> list[str]:
    """What makes the step slower than it need be, and what to do."""
    if not report.findings:
        return []
    lines = ["", f"**{HEADING}**", ""]
    for number, finding in enumerate(report.findings[:_FINDINGS], 1):
        places, more = worth(finding, 3)
        named = [
            as_code(place.label) + (f", {as_code(place.line)}" if place.line else "")
            for place in places
        ]
        where = "; ".join([*named, more] if more else named)
        cost = as_text(", ".join(cost_of(report, finding)))
        lines.append(f"{number}. **{as_text(finding.title)}**: {cost} in {where}.")
        lines.append(f"   {as_text(finding.seen)} {as_text(finding.remedy)}")
    if len(report.findings) > _FINDINGS:
        rest = counted(len(report.findings) - _FINDINGS, "more finding")
        lines += ["", f"{rest}: report.findings has all."]
    return lines


def _table(
    report: Report,
    rows: Sequence[Row],
    operators: Sequence[OperatorCost],
    sort: Sort,
    by: By,
) -> list[str]:
    kinds: list[Sort] = [sort, *(kind for kind in _KINDS if kind != sort)]
    if not report.has_gpu and sort != "gpu":
        kinds.remove("gpu")
    costs: Sequence[Row | OperatorCost] = rows or operators
    decimals = decimals_for(max((time_of(cost, sort) for cost in costs), default=0) / report.steps)

    def times(cost: Row | NodeCost | OperatorCost) -> list[str]:
        spent = [milliseconds(time_of(cost, kind) / report.steps, decimals) for kind in kinds]
        return [spent[0], as_text(percent(_share(report, cost, sort))), *spent[1:]]

    titles = [f"{_KINDS[kind]} ms" for kind in kinds]
    titles.insert(1, "share")
    if not rows:
        head = ["#", "node", *titles, "count"]
        body = [
            [str(rank), as_code(node_name(cost.name)), *times(cost), str(cost.count)]
            for rank, cost in enumerate(operators, 1)
        ]
        return as_table(head, body, names={1})
    head = ["#", "class" if by == "class" else "module", "class", "modules", *titles]
    head += ["calls", "heaviest node", "its ms", "made by"]
    body = []
    for rank, row in enumerate(rows, 1):
        node, line = heaviest(row, sort), heaviest_line(row, sort)
        body.append(
            [
                str(rank) if row.is_module else "",
                as_code(row.name) if row.is_module else as_text(row.name),
                as_code(row.class_name) if row.is_module and row.class_name else "",
                str(row.members) if row.is_module else "",
                *times(row),
                str(row.calls) if row.is_module else "",
                as_code(node_name(node.name)) if node else "",
                milliseconds(time_of(node, sort) / report.steps, decimals) if node else "",
                as_code(made_by(line)) if line else "",
            ]
        )
    useless = {"path": {3}, "class": {2}, "pattern": set[int]()}[by]
    if not any(row.lines for row in rows):
        useless = {*useless, len(head) - 1}
    keep = [index for index in range(len(head)) if index not in useless]
    chosen = [[line[index] for index in keep] for line in (head, *body)]
    names = {place for place, title in enumerate(chosen[0]) if title in _NAMES}
    return as_table(chosen[0], chosen[1:], names=names)


_KINDS: dict[Sort, str] = {"wall": "wall", "gpu": "GPU", "cpu": "CPU"}
_NAMES = {"module", "class", "heaviest node", "made by"}


def _share(report: Report, cost: Row | NodeCost | OperatorCost, sort: Sort) -> float:
    whole = {"wall": report.wall_ns, "gpu": report.gpu_ns, "cpu": report.cpu_ns}[sort]
    return time_of(cost, sort) / whole if whole else 0.0


# What a code span can hold in any reader of Markdown, in a table too.
_PLAIN = re.compile(r"[\w .,:()*/+#%=^-]+\Z")


def as_text(text: str) -> str:
    """Text without any markup."""
    return re.sub(r"[\\`*_\[\]{}<>&|~@$#!^]", lambda found: f"&#{ord(found[0])};", visible(text))


def as_code(name: str) -> str:
    """A name as code; one that a code span cannot hold everywhere, as text without any markup."""
    shown = visible(name)
    if _PLAIN.match(shown) and shown == shown.strip():
        return f"`{shown}`"
    return "".join(
        character if character.isalnum() or character == " " else f"&#{ord(character)};"
        for character in shown
    )


def as_sentence(parts: Sequence[Part]) -> str:
    """A sentence whose names are code."""
    return "".join(
        as_code(text) if kind in ("name", "node") else as_text(text) for kind, text in parts
    )


def as_table(head: Sequence[str], body: Sequence[Sequence[str]], *, names: set[int]) -> list[str]:
    """A table's lines; the columns at ``names`` are set to the left, numbers to the right."""
    rule = ["---" if index in names else "--:" for index in range(len(head))]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *body)]
