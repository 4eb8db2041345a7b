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
_EARLIER = "0.00 ms earlier"
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
        if job.findings and (sentence := unexplained(job)):
            lines += self._wrapped(f"{sentence}.")
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
            sentences = [finding.seen, worth(finding), finding.remedy]
            lines += self._wrapped(" ".join(filter(None, sentences)), "  ")
        lines += [*self._waits(), *self._slowest(), *self._modules()]
        for sentence in not_read(job):
            lines += ["", *self._wrapped(sentence)]
        for warning in job.warnings:
            lines += ["", *self._wrapped(f"! {visible(warning)}")]
        differ = sum(module.cost_ns > 0 for module in job.modules)
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
        ranked = sorted(job.ranks, key=lambda rank: (-rank.wait_ns, rank.rank))
        lines += self._heading("waits in collectives, most first (they can overlap with computing)")
        later = "late by" if self._narrow else f"{'enters':<{len(_EARLIER)}}"
        lines.append(
            f"{'rank':>6} {'wait':>10} {'transfer':>10} {later:>{len(later) + 1}} {'clock ±':>9}"
        )
        room = min(_HOST, self._width - len(lines[-1]) - 2)
        for rank in ranked[:top]:
            late = duration(abs(rank.late_ns))
            if self._narrow:
                late = f"-{late}" if rank.late_ns < 0 else late
            else:
                late += " earlier" if rank.late_ns < 0 else " later  " if rank.late_ns else ""
            lines.append(
                f"{rank.rank:>6} {duration(rank.wait_ns):>10} {duration(rank.transfer_ns):>10} "
                f"{late:>{len(later) + 1}} {duration(rank.uncertainty_ns):>9}  "
                f"{self._short(rank.host, room)}"
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
        longest = max(groups, key=lambda group: group.most_wait_ns)
        clauses = []
        if longest.collectives:
            clauses.append(counted(round(longest.collectives), "collective"))
        if longest.transfers:
            clauses.append(f"{counted(round(longest.transfers), 'transfer')} between two ranks")
        number = f"{len(groups)} groups of " if len(groups) > 1 else ""
        waits = (
            f"; {middle(self._job)} wait {duration(median_of(groups, 'wait_ns'))}, transfer "
            f"{duration(median_of(groups, 'transfer_ns'))}; rank {longest.most_waiting} waits most"
            f", {duration(longest.most_wait_ns)}"
        )
        return (
            f"{self._short(longest.name or '(process group)', 30)}, {ROLES[longest.role]}: "
            f"{' and '.join(clauses)} a step, {number}{counted(len(longest.ranks), 'rank')}"
            f"{waits if longest.collectives else ''}"
        )

    def _slowest(self) -> list[str]:
        steps = self._job.slowest[: self._top]
        if not steps:
            return []
        lines = self._heading("the last rank to enter, step by step, and what takes longest there")
        lines.append(f"{'step':>6} {'rank':>5} {'late by':>9} {'longer by':>10}  module")
        for step in steps:
            part_text = f", {step.differs_in}" if step.part and not self._narrow else ""
            lead = (
                f"{step.step:>6} {step.rank:>5} {duration(max(step.late_ns, 0)):>9} "
                f"{duration(step.longer_ns):>10}  "
            )
            room = self._width - len(lead)
            if not self._narrow:  # names are cut alike, whatever part stands behind them
                room -= max(map(len, PARTS.values())) + 3
            lines.append(f"{lead}{self._module(step, room) if step.part else '-'}{part_text}")
        return lines

    def _modules(self) -> list[str]:
        job = self._job
        modules = [module for module in job.modules if module.cost_ns][: self._top]
        if not modules:
            return []
        lines = self._heading(
            "modules, by what the difference over the ranks costs (* beyond the noise)"
        )
        lines.append(f"{'costs':>9} {middle(job):>9} {'worst':>9} {'rank':>5}    module")
        for module in modules:
            lead = (
                f"{duration(module.cost_ns):>9} {duration(module.median_ns):>9} "
                f"{duration(module.worst_ns):>9} {module.worst_rank:>5}  "
                f"{'*' if module.clear else ' '} "
            )
            lines.append(f"{lead}{self._module(module, self._width - len(lead))}".rstrip())
        return lines

    def _module(self, module: ModuleSpread | SlowestRank, width: int) -> str:
        """Return the path and class of a module; without room for both, the end of its path."""
        if self._whole or cell_len(visible(module.label)) <= width:
            return visible(module.label)
        return self._short(module.path or module.class_name, width)

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
