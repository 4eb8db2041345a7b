"""Many ranks as text for a terminal, and in each format."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from backspot.formatting import counted, duration, visible
from backspot.render._job_words import (
    ROWS,
    groups_alike,
    median_of,
    middle,
    not_read,
    nothing_found,
    stalls,
    unexplained,
    worth,
)
from backspot.render._terminal import fact_lines, keep_end, space_for
from backspot.render.formats import Format
from backspot.render.html._job import job_to_html
from backspot.render.json import encoded
from backspot.results.job import (
    PARTS,
    ROLES,
    GroupCost,
    JobReport,
    ModuleSpread,
    SlowestRank,
)
from backspot.styled import cell_len

_HOST = 20  # cells
_NARROW = 72  # cells
_CALLS = ("job.ranks, job.slowest, job.modules for all", 'job.save("job.html")')


def render_job(
    job: JobReport, top: int = ROWS, *, width: int | None = None, more: Sequence[str] = _CALLS
) -> str:
    """Return the answer, the waits, the slowest ranks and the modules that differ.

    Args:
        top: how many modules, ranks and steps to show of each.
        more: what to ask for the rest, for the end: calls, or options of ``backspot ranks``.
            ``{}`` stands for how many there are at most of ranks, steps or modules.
    """
    return "\n".join(_Page(job, top, *space_for(width)).lines(more))


class _Page:
    """The lines of an answer for many ranks; ``whole`` is whether no path is cut."""

    def __init__(self, job: JobReport, top: int, width: int, whole: bool) -> None:
        self._job, self._top, self._width, self._whole = job, top, width, whole
        self._narrow = width < _NARROW

    def lines(self, more: Sequence[str]) -> list[str]:
        """All lines, with what to ask for the rest if there is a rest."""
        job = self._job
        lines = self._wrapped(_answer(job))
        if job.findings and (said := unexplained(job)):
            lines += self._wrapped(f"{said}.")
        lines += self._wrapped(
            f"{counted(len(job.ranks), 'rank')} of {job.world_size}{_role(job)}, "
            f"{counted(len(job.steps), 'step')} of {duration(job.step_ns)}. "
            "Times are of a typical step."
        )
        for number, finding in enumerate(job.findings):
            if number:  # the answer names the first
                lines.append("")
                cost = f"{finding.bound} {duration(finding.cost_ns)} of a step"
                lines += self._wrapped(f"{finding.title}: {cost}")
            told = [finding.seen, worth(finding), finding.remedy]
            lines += self._wrapped(" ".join(filter(None, told)), "  ")
        lines += [*self._waits(), *self._slowest(), *self._modules()]
        for said in not_read(job):
            lines += ["", *self._wrapped(said)]
        for warning in job.warnings:
            lines += ["", *self._wrapped(f"! {visible(warning)}")]
        differ = sum(one.cost_ns > 0 for one in job.modules)
        longest = max(len(job.ranks), len(job.slowest), differ)
        if more and longest > self._top:
            facts = [fact.format(longest) for fact in more]
            facts[0] = f"next: {facts[0]}"
            lines += [line.plain for line in fact_lines(facts, self._width)]
        return lines

    def _wrapped(self, text: str, indent: str = "") -> list[str]:
        return textwrap.wrap(
            text,
            self._width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=not self._whole,
            break_on_hyphens=False,
        )

    def _heading(self, text: str) -> list[str]:
        return ["", *self._wrapped(text)]

    def _waits(self) -> list[str]:
        job, top = self._job, self._top
        bubbles = stalls(job, top)
        lines = ["", *self._wrapped(bubbles)] if bubbles else []
        ranked = sorted(job.ranks, key=lambda one: (-one.wait_ns, one.rank))
        lines += self._heading("waits in collectives, most first (they can overlap with computing)")
        later = "late by" if self._narrow else "enters later by"
        lines.append(
            f"{'rank':>6} {'wait':>10} {'transfer':>10} {later:>{len(later) + 1}} {'clock ±':>9}"
        )
        room = min(_HOST, self._width - len(lines[-1]) - 2)
        for one in ranked[:top]:
            late = f"{'-' if one.late_ns < 0 else ''}{duration(abs(one.late_ns))}"
            lines.append(
                f"{one.rank:>6} {duration(one.wait_ns):>10} {duration(one.transfer_ns):>10} "
                f"{late:>{len(later) + 1}} {duration(one.uncertainty_ns):>9}  "
                f"{self._short(one.host, room)}"
            )
        if len(ranked) > top:
            lines.append(f"  and {counted(len(ranked) - top, 'rank')} more")
        alike = groups_alike(job)
        for groups in alike[:top] if len(alike) > 1 or top > ROWS else ():
            lines += self._wrapped(self._group(groups), "  ")
        if len(alike) > max(top, 1):
            lines.append(f"  and {counted(len(alike) - top, 'more process group')}")
        return [line.rstrip() for line in lines]

    def _group(self, groups: Sequence[GroupCost]) -> str:
        """Say what process groups with one name do."""
        one = max(groups, key=lambda group: group.most_wait_ns)
        said = []
        if one.collectives:
            said.append(counted(round(one.collectives), "collective"))
        if one.transfers:
            said.append(f"{counted(round(one.transfers), 'transfer')} between two ranks")
        number = f"{len(groups)} groups of " if len(groups) > 1 else ""
        waits = (
            f"; {middle(self._job)} wait {duration(median_of(groups, 'wait_ns'))}, transfer "
            f"{duration(median_of(groups, 'transfer_ns'))}; rank {one.most_waiting} waits most, "
            f"{duration(one.most_wait_ns)}"
        )
        return (
            f"{self._short(one.name or '(process group)', 30)}, {ROLES[one.role]}: "
            f"{' and '.join(said)} a step, {number}{counted(len(one.ranks), 'rank')}"
            f"{waits if one.collectives else ''}"
        )

    def _slowest(self) -> list[str]:
        steps = self._job.slowest[: self._top]
        if not steps:
            return []
        lines = self._heading("the last rank to enter, step by step, and what takes longest there")
        lines.append(f"{'step':>6} {'rank':>5} {'late by':>9} {'longer by':>10}  module")
        for one in steps:
            part = f", {one.differs_in}" if one.part and not self._narrow else ""
            lead = (
                f"{one.step:>6} {one.rank:>5} {duration(max(one.late_ns, 0)):>9} "
                f"{duration(one.longer_ns):>10}  "
            )
            room = self._width - len(lead)
            if not self._narrow:  # names are cut alike, whatever part stands behind them
                room -= max(map(len, PARTS.values())) + 3
            lines.append(f"{lead}{self._module(one, room) if one.part else '-'}{part}")
        return lines

    def _modules(self) -> list[str]:
        job = self._job
        modules = [one for one in job.modules if one.cost_ns][: self._top]
        if not modules:
            return []
        lines = self._heading(
            "modules, by what the difference over the ranks costs (* beyond the noise)"
        )
        lines.append(f"{'costs':>9} {middle(job):>9} {'worst':>9} {'rank':>5}    module")
        for one in modules:
            lead = (
                f"{duration(one.cost_ns):>9} {duration(one.median_ns):>9} "
                f"{duration(one.worst_ns):>9} {one.worst_rank:>5}  {'*' if one.clear else ' '} "
            )
            lines.append(f"{lead}{self._module(one, self._width - len(lead))}".rstrip())
        return lines

    def _module(self, one: ModuleSpread | SlowestRank, width: int) -> str:
        """Return the path and class of a module; without room for both, the end of its path."""
        if self._whole or cell_len(visible(one.label)) <= width:
            return visible(one.label)
        return self._short(one.path or one.class_name, width)

    def _short(self, name: str, width: int) -> str:
        """Return the end of a name, which says most, or all of it without a terminal."""
        return visible(name) if self._whole else keep_end(visible(name), max(8, width))


def _answer(job: JobReport) -> str:
    if not job.findings:
        return f"{nothing_found(job)}."
    first = job.findings[0]
    return f"{first.title}: {first.bound} {duration(first.cost_ns)} a step"


def _role(job: JobReport) -> str:
    """Return what all process groups are for, if that is one thing and known."""
    roles = {group.role for group in job.groups}
    return f" ({ROLES[roles.pop()]})" if len(roles) == 1 and "unknown" not in roles else ""


FORMATS = (
    Format(".html", {JobReport: job_to_html}),
    Format(".json", {JobReport: encoded}, name="json"),
)
TEXTS = {JobReport: render_job}
