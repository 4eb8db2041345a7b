"""Many ranks as a page: a heat map of ranks and modules, and a lane for each rank of one step.

All of it is there without a script. Of many ranks the page shows those that matter, and the median
of the others. Where a table is too narrow for its columns, each row becomes a block in which every
cell has its label (``_table``).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from backspot._version import __version__
from backspot.formatting import counted, duration, milliseconds
from backspot.render._job_words import (
    differs,
    groups_alike,
    median_of,
    middle,
    not_read,
    nothing_found,
    stalls,
    unexplained,
    worth,
)
from backspot.render.html._fragments import facts_list, page, shown, warnings_list
from backspot.results.job import (
    ROLES,
    GroupCost,
    JobFinding,
    JobReport,
    ModuleSpread,
    RankLane,
)

_COLUMNS = 16
_ROWS = 40
_THINNEST = 0.0005
"""Share of the lanes' time below which a part is not drawn."""
_DARK = 0.02
"""Share of the step from which a difference can be darkest, so that an even job stays pale."""
_BAR = '<span class="unseen">drawn</span>'


def job_to_html(job: JobReport) -> bytes:
    """The answer for all ranks as a page in UTF-8, which loads nothing."""
    chosen = _chosen(job)
    first = job.findings[0] if job.findings else None
    title = first.title if first else nothing_found(job)
    cost = f": {first.bound} <b>{duration(first.cost_ns)}</b> of each step" if first else ""
    facts = [
        f"{counted(len(job.ranks), 'rank')} of {job.world_size:,}",
        f"{counted(len(job.steps), 'step')} of {duration(job.step_ns)}",
        *filter(None, [stalls(job), unexplained(job) if first else ""]),
    ]
    warnings = [*job.warnings, *not_read(job)]
    sections = (
        f'<section class="answer" aria-label="The answer"><h1>{shown(title)}{cost}</h1>'
        f"{facts_list(facts)}{warnings_list(warnings)}</section>",
        _findings(job.findings),
        _lanes(job, chosen),
        _heat(job, chosen),
        _groups(job),
    )
    return page(
        f"{title[:100]} · Backspot",
        "all ranks of a job",
        "\n".join(filter(None, sections)),
        "Times are those of a typical step: the mean over the recorded ones that nothing "
        "held up. A rank waits from its own entry into a collective until the last rank enters; "
        "the rest is transfer. Waits can overlap with computing. What a difference costs is at "
        f"most its time. Made by Backspot {__version__}.",
        styles=("job.css",),
    )


def _chosen(job: JobReport) -> list[int]:
    """Return the positions of the ranks to show, ascending."""
    if len(job.ranks) <= _COLUMNS:
        return list(range(len(job.ranks)))
    place = {cost.rank: index for index, cost in enumerate(job.ranks)}
    by_wait = sorted(job.ranks, key=lambda rank: -rank.wait_ns)
    wanted = [finding.rank for finding in job.findings if finding.rank is not None]
    wanted += [slowest.rank for slowest in job.slowest]
    wanted += [module.worst_rank for module in job.modules if module.clear]
    wanted += [by_wait[0].rank, by_wait[-1].rank, job.ranks[0].rank]
    return sorted(place[rank] for rank in list(dict.fromkeys(wanted))[:_COLUMNS])


def _findings(findings: Sequence[JobFinding]) -> str:
    if not findings:
        return ""
    items = "".join(
        f'<li><div class="cost"><b>{duration(finding.cost_ns)}</b>'
        f'<span class="muted">{finding.bound}</span></div><div><h3>{shown(finding.title)}</h3>'
        f"<p>{shown(f'{finding.seen} {worth(finding)}')}</p>"
        f'<p class="remedy">{shown(finding.remedy)}</p></div></li>'
        for finding in findings[:_ROWS]
    )
    rest = len(findings) - _ROWS
    more = f'<p class="muted">{counted(rest, "more finding")} in the JSON form.</p>'
    return (
        f'<section class="findings"><h2>What to do</h2><ol class="found">{items}</ol>'
        f"{more if rest > 0 else ''}</section>"
    )


# Lanes -------------------------------------------------------------------------------------------


def _lanes(job: JobReport, chosen: Sequence[int]) -> str:
    wanted = {job.ranks[position].rank for position in chosen}
    lanes = [lane for lane in job.lanes if lane.rank in wanted]
    if not lanes:
        return ""
    span_ns = max(lane.end_ns for lane in job.lanes) or 1
    rows = "".join(_lane(lane, span_ns) for lane in lanes)
    rest = len(job.lanes) - len(lanes)
    more = f'<p class="muted">{counted(rest, "more rank")} in the JSON form.</p>' if rest else ""
    legend = "".join(
        f'<li><i class="{kind}" aria-hidden="true"></i>{text}</li>'
        for kind, text in (
            ("own", "the step"),
            ("wait", "in a collective, waiting for another rank"),
            ("move", "transfer"),
        )
    )
    return (
        f'<section><h2>Step {job.lane_step} <span class="muted">{duration(span_ns)} on one clock'
        f'</span></h2><ul class="legend">{legend}</ul><ol class="lanes">{rows}</ol>{more}</section>'
    )


def _lane(lane: RankLane, span_ns: int) -> str:
    def part(kind: str, start: int, end: int) -> str:
        if end - start < _THINNEST * span_ns:
            return ""
        left, width = 100 * start / span_ns, 100 * (end - start) / span_ns
        return f'<i class="{kind}" style="left:{left:.2f}%;width:{width:.2f}%"></i>'

    drawn = part("own", lane.begin_ns, lane.end_ns)
    waits: dict[int, int] = {}
    moved = 0
    for start, entered, end, last in lane.collectives:
        drawn += part("wait", start, entered) + part("move", entered, end)
        waits[last] = waits.get(last, 0) + entered - start
        moved += end - entered
    waited = sum(waits.values())
    wait_text = f"waits {duration(waited)}"
    if waited:
        most = max(sorted(waits), key=lambda rank: waits[rank])
        wait_text += f", most for rank {most}"
    text = f"{wait_text}; transfers {duration(moved)}"
    return (
        f'<li><span class="who">rank {lane.rank}</span>'
        f'<span class="lane" aria-hidden="true">{drawn}</span><span class="told">{text}</span></li>'
    )


# Tables ------------------------------------------------------------------------------------------


def _table(
    title: str, about: str, heads: Sequence[tuple[str, str]], rows: Sequence[str], more: str = ""
) -> str:
    """A section with a table that becomes blocks where it is too narrow for its columns.

    Args:
        about: more on the title, in grey.
        heads: the classes and the text of each column's head; the first column names the row.
        rows: a heading, and cells with ``data-label``.
    """
    about_text = f' <span class="muted">{about}</span>' if about else ""
    drawn = "".join(f'<th scope="col" class="{kind}">{text}</th>' for kind, text in heads)
    below = f'<p class="muted">{more}</p>' if more else ""
    return (
        f'<section id="{title.split()[0].lower()}" tabindex="-1"><h2>{title}{about_text}</h2>'
        f'<div class="table-box stacks" style="--columns:{len(heads)}" role="region" '
        f'aria-label="{title}" tabindex="0"><table class="ranked"><thead><tr>{drawn}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{below}</section>"
    )


def _heat(job: JobReport, chosen: Sequence[int]) -> str:
    modules = [module for module in job.modules if module.cost_ns]
    if not modules:
        return ""
    others = sorted(set(range(len(job.ranks))) - set(chosen))
    most = max(modules[0].cost_ns, round(_DARK * job.step_ns))
    ranks = [str(job.ranks[position].rank) for position in chosen] + (["others"] if others else [])
    heads = [("", "module"), ("o4", "differs in"), ("n", "costs at most"), ("b", _BAR)]
    heads += [("n", text) for text in (middle(job), *ranks)]
    rows = [_row(module, job, chosen, others, most) for module in modules[:_ROWS]]
    rest = len(modules) - _ROWS
    notes = [f"{counted(rest, 'more module')} in the JSON form."] if rest > 0 else []
    if others:
        notes.append(f"others: the median of {counted(len(others), 'rank')}.")
    about = "ms, by rank; marked where a rank takes longer, beyond the noise"
    return _table("Modules over the ranks", about, heads, rows, " ".join(notes))


def _row(
    module: ModuleSpread,
    job: JobReport,
    chosen: Sequence[int],
    others: Sequence[int],
    most: int,
) -> str:
    def cell(ns: int, who: str, rank: int | None) -> str:
        heat = min(max((ns - module.median_ns) / most, 0.0), 1.0) ** 0.5  # small ones are seen too
        is_hot = heat >= 0.1 and differs(job, module, rank)
        style = f' style="--heat:{60 * heat:.0f}%"' if is_hot else ""
        return f'<td class="n" data-label="{who}"{style}>{milliseconds(ns, 2)}</td>'

    ranks = [(position, job.ranks[position].rank) for position in chosen]
    cells = "".join(
        cell(module.ns_by_rank[position], f"rank {rank}", rank) for position, rank in ranks
    )
    if others:
        cells += cell(
            median_low(module.ns_by_rank[position] for position in others), "others", None
        )
    mark = ' <span class="clear">beyond the noise</span>' if module.clear else ""
    return (
        f'<tr><th scope="row" title="{shown(module.class_name)}">'
        f"{_name(module.path or module.class_name)}"
        f'{mark}</th><td class="o4">{module.differs_in}</td>'
        f'<td class="n" data-label="costs"><b>{milliseconds(module.cost_ns, 2)}</b></td>'
        f'<td class="b"><span class="mix" style="--part:{min(module.cost_ns / most, 1):.3f}">'
        '<i class="k-sync"></i></span></td>'
        f'<td class="n" data-label="{middle(job)}">{milliseconds(module.median_ns, 2)}</td>'
        f"{cells}</tr>"
    )


def _name(name: str) -> str:
    """A name that breaks after its dots, if it must."""
    return f"<code>{shown(name).replace('.', '.<wbr>')}</code>"


def _groups(job: JobReport) -> str:
    if not job.groups:
        return ""
    measures = ("ranks", "exchanges", f"{middle(job)} wait", "transfer", "waits most")
    heads = ("", "process group"), ("", "for"), *(("n", text) for text in measures)
    rows = [
        f'<tr><th scope="row">{_name(longest.name or "(process group)")}</th>'
        f"<td>{ROLES[longest.role]}</td>{_numbers(measures, groups, longest)}</tr>"
        for groups in groups_alike(job)[:_ROWS]
        for longest in [max(groups, key=lambda group: group.most_wait_ns)]
    ]
    return _table("Collectives of a step", "", heads, rows)


def _numbers(measures: Sequence[str], groups: Sequence[GroupCost], longest: GroupCost) -> str:
    """The cells of process groups with one name; ``longest`` of them has the longest wait."""
    waits = (
        f"rank {longest.most_waiting}, {duration(longest.most_wait_ns)}"
        if longest.collectives
        else ""
    )
    texts = (
        f"{f'{len(groups)} × ' if len(groups) > 1 else ''}{len(longest.ranks)}",
        f"{longest.collectives + longest.transfers:.0f}",
        duration(median_of(groups, "wait_ns")),
        duration(median_of(groups, "transfer_ns")),
        waits,
    )
    return "".join(
        f'<td class="n" data-label="{head}">{text}</td>'
        for head, text in zip(measures, texts, strict=True)
    )
