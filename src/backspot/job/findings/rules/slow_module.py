"""A module that takes longer on one rank."""

from __future__ import annotations

from backspot.formatting import duration, visible
from backspot.job.findings.evidence import Evidence
from backspot.job.findings.registry import rule
from backspot.job.modules import Claim
from backspot.results.job import JobFinding

__all__ = ["find"]


@rule("slow-module")
def find(evidence: Evidence) -> list[JobFinding]:
    """Find modules that take longer on one rank, in their kernels or on the host."""
    has_gpu = evidence.table.has_gpu
    return [_finding(claim, has_gpu) for claim in evidence.claims if claim.module.is_module]


def _finding(claim: Claim, has_gpu: bool) -> JobFinding:
    direction, _, kind = claim.part.partition("_")
    on_host = kind == "host"
    where = ", where the host holds up the GPU" if on_host and has_gpu else ""
    look = (
        "Look for what only this rank does in the module on the host: I/O, logging, a wait, a busy "
        "core"
    )
    compare = (
        "Compare the shapes and the kernels of the module on both ranks: unequal sequence lengths, "
        "experts or shards"
    )
    name = visible(claim.module.label)
    return JobFinding(
        rule="",
        kind="host" if on_host else "gpu",
        rank=claim.rank,
        path=claim.module.path,
        title=f"{name} is slow on rank {claim.rank}",
        seen=(
            f"It takes {duration(claim.taken_ns)} of a step there, and {duration(claim.usual_ns)} "
            f"on the other ranks. The difference is in its {direction}"
            f"{where if on_host else ', in kernels'}."
        ),
        remedy=(f"{look if on_host else compare}{'' if has_gpu else '; or for unequal work'}."),
        cost_ns=claim.taken_ns - claim.usual_ns,
    )
