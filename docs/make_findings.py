"""Write findings.md: the pages of all rules, made from the docstrings of their functions.

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

A finding says why a step is slow. `report.findings` has those first of which it is known what a step gains, by a trial or by replay (of a bound for causes all over the step, a quarter counts); then those of which it is not known; then those without which a step takes as long. `backspot show` and the page begin with one about their headline, if it is among the first three. `backspot explain RULE` prints a section of this page.

- **The time** of a finding is clock time in a typical step, and the most that its remedy can save; but where the host waits no more, later work begins earlier, too. Findings can share time: do not add them up.
- **"3.3 ms less without it"** (`finding.saves`) stands where the remedy saves clearly less or more than that time: other work hides the cause, or the cause has a part in the forward, too. It is a replay with the remedy, such as a fused optimizer, or else without the work of the cause. "At best" is a bound.
- **Tried here**, the advice was [measured beside the training](tried.md), in `run` and `profile`. Advice that does not help is left out, and its finding goes last.
- **The places** are modules by path, the most expensive first, or `(optimizer)` and `(data)`.
- **The tier** of a rule is `stable` once two sources that nobody here wrote have shown it right: the place, the cause and the remedy. A `preview` rule looks, too, and what it finds is the end of `report.findings`, with `finding.tier`. No headline, answer, order or trial depends on it, and it is shown with `--preview`. *Sources* are threads with a fix of which [the slow step was rebuilt](published.md) and the rule named cause and place, scripts of others, unedited, in which the remedy pays, and `timm` (healthy models) and `scripts` (of others, unedited) in the [results](../benchmarks/results/README.md). A stable rule that names fewer than two was stable before that was asked, and the cases of its second source wait for a GPU; without it, the rule becomes preview.
- **True of nearly every step**, as that the host launches late (*common* below): such a rule is a finding where a trial has measured that its remedy helps, or where the replay of the remedy gains a tenth of the step (of a bound all over the step, a quarter counts). Elsewhere its `finding.tier` is `account`, and it is one line of the report.
- **From** is the share of a step that the cause must take in most steps: 1%, or what the section says.
- **What a rule needs** may not be in the trace. `report.rules` says of each rule whether it `found` something or `nothing`, or why it could not look: `needs a GPU`, `needs stacks`, `needs memory`, `needs labels` (those of Backspot), `needs blocks` (of kernels), `needs shapes` (where what it saw may be as it should be). `--full` and the page count them. On accelerators other than GPUs of NVIDIA and AMD, only rules for any device look. A trace that is cut short has no findings.

Each rule is tested on a recording with its cause and on one without ([results](../benchmarks/results/README.md)). This page is made from the docstrings of the rules by `python docs/make_findings.py`.

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
    tables = (
        _table(
            "rule",
            ("looks at", "from", "tier", "sources"),
            [
                (rule, *_head(rule), rule.tier + ", common" * rule.common, _sources(rule))
                for rule in of_time
            ],
        ),
        MEMORY + _table("rule about memory", ("tier",), [(rule, rule.tier) for rule in of_memory]),
        RANKS + _table("rule over ranks", ("tier",), [(rule, rule.tier) for rule in of_ranks]),
    )
    sections = (
        f"## {rule.name}\n\n{rule.page.partition(chr(10))[2].strip()}\n"
        for rule in (*of_time, *of_memory, *of_ranks)
    )
    return HEAD + "\n".join((*tables, *sections))


def _head(rule: Any) -> tuple[str, str]:
    """Return what a rule looks at, and from which share of a step it finds something."""
    looks_at = ", ".join((DEVICES[tuple(rule.devices)], *rule.needs))
    return looks_at, f"{100 * rule.least:g}%" if rule.least else ""


def _sources(rule: Any) -> str:
    """Return who has shown that a rule is right, with links."""

    def linked(source: str) -> str:
        for mark, between in (("#", "issues"), (":", "blob/HEAD")):
            repository, found, rest = source.partition(mark)
            if found:
                return f"[{source}](https://github.com/{repository}/{between}/{rest})"
        return source

    return ", ".join(map(linked, rule.sources))


def _table(name: str, columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> str:
    head = (name, "in short", *columns)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for rule, *cells in rows:
        lines.append(f"| {' | '.join((f'[{rule.name}](#{rule.name})', rule.short, *cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
