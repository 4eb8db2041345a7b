"""What a trial of a finding's remedy measured, beside the remedy."""

from __future__ import annotations

from backspot.formatting import duration
from backspot.render._sections import Bar, Remark, Saying
from backspot.results.findings import Finding, alike, helps

_MARKS = {True: "✓", False: "✗", None: "·"}


def _remark(finding: Finding) -> Remark | None:
    """Its sentences, and each variant with its time."""
    tried = finding.tried
    if tried is None:
        return None
    said, saves, best, known = str(tried), finding.saves, tried.best, helps(finding)
    agrees = bool(best and saves and alike(saves, best.saves_ns))
    if known and saves and saves.ns and not agrees:
        said += f" By replay it would save {duration(saves.ns)}{' at best' * saves.at_best}."
    return Remark(
        _MARKS[known],
        said,
        "" if known is None else f"tried here, {tried.verdict}",
        known is True,
        [
            Bar(one.name, one.ns, one.low_ns, one.high_ns, one.verdict or one.note)
            for one in tried.variants
        ],
        "Tried here",
    )


SAYING = Saying(remark=_remark)
