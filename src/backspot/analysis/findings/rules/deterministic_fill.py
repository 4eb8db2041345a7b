"""Fresh memory that deterministic mode fills before it is used."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding

__all__ = ["find"]


@rule("deterministic-fill")
def find(evidence: Evidence) -> Finding | None:
    """Find fills within ``empty`` and its like, which would otherwise write nothing."""
    empty = evidence.launched_in(
        "aten::empty*", "aten::new_empty*", "aten::resize_", "aten::_efficientzerotensor"
    )
    work = (empty >= 0) & evidence.work_named(lambda name: "FillFunctor" in name)
    if not work.any():
        return None
    return evidence.finding(
        title="Deterministic mode fills memory that is overwritten anyway",
        seen=(
            f"Fresh tensors are filled, by {evidence.per_step(int(work.sum()), 'kernel')}, "
            f"{evidence.ms(int(evidence.work_ns[work].sum()))}: with "
            "torch.use_deterministic_algorithms(True), empty memory is filled with NaN."
        ),
        remedy=(
            "torch.utils.deterministic.fill_uninitialized_memory = False: results stay as "
            "reproducible as before, unless something reads memory that nobody wrote."
        ),
        link=(
            "https://docs.pytorch.org/docs/stable/deterministic.html"
            "#torch.utils.deterministic.fill_uninitialized_memory"
        ),
        places=evidence.places_of_work(work),
        operators=evidence.top_operators(empty[work], evidence.work_ns[work]),
        kernels=evidence.top_kernels(work),
    )
