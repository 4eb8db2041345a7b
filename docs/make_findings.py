"""Write findings.md: what rules find, why and what to do, from the docstrings of their functions.

Usage: python docs/make_findings.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from backspot.analysis.findings import all_rules
from backspot.analysis.memory.registry import rules_about_memory
from backspot.commands._verbs import other_rules

HEAD = """\
# Findings: why a step is slow, and what to do

`report.findings` has those first of which it is known what a step gains, by a trial or by replay; then those of which it is not known; then those without which a step takes as long. `backspot show` and the page begin with one about their headline, if it is among the first three.

- **The time** of a finding is clock time in a typical step, and the most that its remedy can save; but where the host waits no more, later work begins earlier, too. Findings can share time: do not add them up.
- **"3.3 ms less without it"** (`finding.saves`) stands where the remedy saves clearly less or more than that time, by a replay with the remedy, or else without the work of the cause. "At best" is a bound.
- **Tried here**, the advice was [measured beside the training](tried.md). Advice that does not help is left out, and its finding goes last.
- **The places** are modules by path, the most expensive first, or `(optimizer)` and `(data)`.
- **The tier** ([why](decisions/tiers.md)): a rule is `stable` once two sources that nobody here wrote have shown it right: threads with a fix of which [the slow step was rebuilt](published.md), `timm` (healthy models) and `scripts` (of others, unedited) in the [results](../benchmarks/results/README.md). Those with fewer were stable before that was asked. `preview` findings come last and are shown with `--preview`.
- **True of nearly every step** (*common*): a finding only where a trial or the replay of the remedy says that it pays (a tenth of the step; of a bound, a quarter). Elsewhere its tier is `account`, and it is one line of the report.
- **From 1%** of the step, in most steps, unless the rule says otherwise.
- **What a rule needs** may not be in the trace. `report.rules` says of each whether it `found` something or `nothing`, or why it could not look: `needs a GPU`, `needs stacks`, `needs memory`, `needs labels` (of Backspot), `needs blocks` (of kernels), `needs shapes`. On other accelerators than GPUs of NVIDIA and AMD, only rules for any device look. A trace that is cut short has no findings.

**`backspot explain RULE`** says more than this page: how the rule finds its cause, from which limits on, and what does not count. Both are the docstring of the rule (`python docs/make_findings.py`).

"""  # noqa: E501
MEMORY = """\
Rules about memory need a [recording of it](memory-and-limits.md). Their findings have `held_bytes` instead of a time and come after those about time. Limits are shares of the peak of the device that holds the most.

"""  # noqa: E501
RANKS = """\
Rules over ranks need the traces of at least two ranks. [Many ranks](ranks.md#findings) says from which difference they make a claim.

"""  # noqa: E501
DEVICES = {
    ("cpu",): "CPU",
    ("cuda",): "GPU",
    ("cpu", "cuda"): "CPU and GPU",
    ("cpu", "cuda", "other"): "any device",
}


def main() -> None:
    """Write the file beside this script."""
    Path(__file__).with_name("findings.md").write_text(made(), encoding="utf-8")


def made() -> str:
    """Return the whole page."""
    of_time, of_memory, of_ranks = (
        sorted(rules, key=lambda rule: rule.name)
        for rules in (all_rules(), rules_about_memory(), other_rules())
    )
    lists = (
        _list(of_time),
        MEMORY + _list(of_memory),
        RANKS + _list(of_ranks),
    )
    sections = (
        *(_section(rule, _head(rule)) for rule in of_time),
        *(_section(rule) for rule in (*of_memory, *of_ranks)),
    )
    return HEAD + "\n".join((*lists, *sections))


def _section(rule: Any, *parts: str) -> str:
    """Return the section of a rule: its cause and its remedy, and not how it is found."""
    shown = [f"## {rule.name}", *parts]
    kept = True
    for part in rule.page.partition("\n")[2].strip().split("\n\n"):
        if part.startswith("**"):
            kept = not part.startswith("**Found by**")
        if kept:
            shown.append(part.removeprefix("**Cause.** "))
    return "\n\n".join(shown) + "\n"


def _head(rule: Any) -> str:
    """Return what a rule looks at, and who has shown it right."""
    looks_at = ", ".join((DEVICES[tuple(rule.devices)], *rule.needs))
    return " · ".join(filter(None, (looks_at, _sources(rule))))


def _sources(rule: Any) -> str:
    """Return who has shown that a rule is right, with links."""

    def linked(source: str) -> str:
        for mark, between in (("#", "issues"), (":", "blob/HEAD")):
            repository, found, rest = source.partition(mark)
            if found:
                return f"[{source}](https://github.com/{repository}/{between}/{rest})"
        return source

    return ", ".join(map(linked, rule.sources))


def _list(rules: Iterable[Any]) -> str:
    """Return the rules with what they are about, and those marked that are not plainly stable."""
    lines = []
    for rule in rules:
        mark = " *common*" if rule.common else " *preview*" if rule.tier == "preview" else ""
        lines.append(f"- [{rule.name}](#{rule.name}): {rule.short}{mark}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
