"""Transfers that hold the clock of all ranks, so that no rank is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import numpy as np

from backspot.formatting import duration
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import fallback_rule
from backspot.job.summary import Purpose
from backspot.results.job import ROLES, JobFinding, Role

__all__ = ["find"]

_EXPOSED = 0.1
"""Share of the step from which exposed transfers are worth a claim."""
_GATHERS = (
    "Gather parameters earlier (FSDP2: set_modules_to_forward_prefetch and "
    "set_modules_to_backward_prefetch), or in larger groups of layers."
)
_REDUCES = (
    "Let the exchange run beside the backward: larger or smaller buckets, fewer bytes (bf16), or "
    "fewer exchanges (gradient accumulation with no_sync)."
)
_OF_ACTIVATIONS = (
    "The module needs what the others send, so nothing can run beside: use fewer ranks for it, on "
    "one host, or send fewer bytes (bf16)."
)
_OF_ROLE: dict[Role, str] = {
    "tensor": (
        "The next layer needs the activations, so nothing can run beside: split layers over fewer "
        "ranks, on one host, or add sequence parallelism."
    ),
    "expert": (
        "The experts need their tokens, so nothing can run beside: spread experts over fewer ranks,"
        " on one host, or send fewer bytes (bf16, fewer experts a token)."
    ),
}


@fallback_rule("exposed-transfer")
def find(evidence: Evidence, found: Sequence[JobFinding]) -> list[JobFinding]:
    """Find transfers that nothing hides, on half of the ranks, and that no other rule explains.

    Waits that nothing hides count as exposed, and others do not. So what all waits, and twice the
    uncertainty of the clock, leave of the exposed time is transfer for certain.
    """
    certain = median_low(
        cost.exposed_ns - cost.stalled_ns - cost.wait_ns - 2 * cost.uncertainty_ns
        for cost in evidence.costs
    )
    certain -= sum(one.cost_ns for one in found if one.kind == "transfer")
    if not evidence.waits or certain < _EXPOSED * evidence.step_ns:
        return []
    sums: dict[tuple[str, Purpose, Role], int] = {}
    for one in evidence.waits:
        role = evidence.roles[one.group.name, one.group.all_ranks]
        for column, call in enumerate(one.group.call):
            key = call.kind, call.purpose, role
            sums[key] = sums.get(key, 0) + int(np.median(one.transfer[:, column]))
    kind, purpose, role = max(sorted(sums), key=lambda key: sums[key])
    what = "activations" if purpose == "attention" else purpose
    if what == "activations":
        remedy = _OF_ROLE.get(role, _OF_ACTIVATIONS)
    else:
        gathers = purpose == "parameters" or (not purpose and "gather" in kind)
        remedy = _GATHERS if gathers else _REDUCES
    within = f" ({ROLES[role]})" if role in _OF_ROLE else f" of {what}" if what else ""
    return [
        JobFinding(
            rule="",
            kind="transfer",
            rank=None,
            path="",
            title=f"Transfers hold up all ranks, mostly {kind}{within}",
            seen=(
                f"In at least {duration(certain)} of a step, data moves between the ranks "
                "and nothing else runs, on the typical rank, waits for other ranks left out."
            ),
            remedy=remedy,
            cost_ns=certain,
            at_least=True,
        )
    ]
