"""Why a step is slow, and what to do: one rule a file, and the list of them.

A rule is a pure function from ``Evidence`` to a finding, or to ``None`` where it sees nothing. A
new rule is a file with a ``find`` and a line in ``RULES``; ``docs/findings.md`` explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.rules import (
    attention_math,
    backward_ratio,
    casts,
    cpu_operators,
    dense_embedding,
    deterministic_fill,
    device_copies,
    duplicate_indices,
    exposed_communication,
    gradient_accumulation,
    host_to_device_volume,
    launch_bound,
    layout_copies,
    no_tensor_cores,
    optimizer_kernels,
    pageable_copy,
    recompute,
    small_batch,
    sorted_indexing,
    sync_in_backward,
    unused_gradient,
    waiting_for_data,
    zero_grad_fill,
)
from backspot.results.costs import Row, line_of
from backspot.results.findings import Finding, Place

__all__ = ["LEAST_SHARE", "RULES", "Evidence", "find_all"]

Rule = Callable[[Evidence], Finding | None]

RULES: tuple[Rule, ...] = (
    sync_in_backward.find,
    sorted_indexing.find,
    duplicate_indices.find,
    dense_embedding.find,
    deterministic_fill.find,
    pageable_copy.find,
    casts.find,
    layout_copies.find,
    recompute.find,
    launch_bound.find,
    no_tensor_cores.find,
    attention_math.find,
    gradient_accumulation.find,
    unused_gradient.find,
    exposed_communication.find,
    waiting_for_data.find,
    host_to_device_volume.find,
    device_copies.find,
    cpu_operators.find,
    small_batch.find,
    optimizer_kernels.find,
    zero_grad_fill.find,
)

LEAST_SHARE = 0.01
"""What takes less of the step than this is not worth a word."""


def find_all(evidence: Evidence) -> tuple[Finding, ...]:
    """All that the rules find, the most expensive first."""
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    found = [one for one in found if one.wall_ns >= LEAST_SHARE * evidence.step_ns]
    # A ratio only says that something is odd: where another rule says what, it adds nothing.
    ratio = backward_ratio.find(evidence, found)
    if ratio is not None and ratio.wall_ns >= LEAST_SHARE * evidence.step_ns:
        found.append(ratio)
    rows = {row.path: row for row in evidence.report.modules}
    told = [_with_lines(finding, rows) for finding in found]
    return tuple(sorted(told, key=lambda one: (-one.wall_ns, one.rule)))


def _with_lines(finding: Finding, rows: Mapping[str, Row]) -> Finding:
    """The finding with each place's line of source: that of the heaviest node that takes part."""

    def line(place: Place) -> str:
        row = rows.get(place.path)
        if row is None:
            return ""
        return next((found for node in finding.nodes if (found := line_of(row, node))), "")

    places = (replace(place, line=place.line or line(place)) for place in finding.places)
    return replace(finding, places=tuple(places))
