"""What a trial of a finding's remedy measured, beside the remedy."""

from __future__ import annotations

from backspot.formatting import duration
from backspot.render._sections import Bar, Remark, Saying
from backspot.results.findings import Finding, alike, helps

_MARKS = {True: "✓", False: "✗", None: "·"}
_CHANGES = "≠"
"""The mark of a way that helps, but trains something else."""


def _remark(finding: Finding) -> Remark | None:
    """Its sentences, and each variant with its time."""
    tried = finding.tried
    if tried is None:
        return None
    sentence, saves, best, helping = str(tried), finding.saves, tried.best, helps(finding)
    agrees = bool(best and saves and alike(saves, best.saves_ns))
    if helping and saves and saves.ns and not agrees:
        sentence += f" By replay it would save {duration(saves.ns)}{' at best' * saves.at_best}."
    changes = bool(best and best.changes_training)
    changing = ", changes what is trained" * changes
    return Remark(
        _CHANGES if changes else _MARKS[helping],
        sentence,
        "" if helping is None else f"tried here, {tried.verdict}{changing}",
        helping is True and not changes,
        [
            Bar(
                variant.name,
                variant.ns,
                variant.low_ns,
                variant.high_ns,
                variant.verdict or variant.note,
            )
            for variant in tried.variants
        ],
        "Tried here",
    )


SAYING = Saying(remark=_remark)
