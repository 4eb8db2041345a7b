"""Fresh memory that deterministic mode fills before it is used."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import names

__all__ = ["find"]

_EMPTY = ("aten::empty*", "aten::new_empty*", "aten::resize_", "aten::_efficientzerotensor")


@rule("deterministic-fill", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find fills inside ``empty`` and similar operators, which otherwise write nothing."""
    costs, say = evidence.costs, evidence.wording
    empty = evidence.launched_in(*_EMPTY)
    work = (empty >= 0) & evidence.work_named(lambda name: names.FILL_FUNCTOR in name)
    if not work.any():
        return None
    return finding(
        costs.places_of_work(work),
        title="Deterministic mode fills memory that is overwritten anyway",
        seen=(
            f"{say.per_step(int(work.sum()), 'kernel')} to fill new tensors, "
            f"{say.ms(costs.of_work(work))}: torch.use_deterministic_algorithms(True) fills empty "
            "memory with NaN."
        ),
        remedy=(
            "Set torch.utils.deterministic.fill_uninitialized_memory = False. Results stay "
            "reproducible, unless the program reads memory that it never wrote."
        ),
        link=(
            "https://docs.pytorch.org/docs/stable/deterministic.html"
            "#torch.utils.deterministic.fill_uninitialized_memory"
        ),
        operators=costs.top_operators(evidence.names_of(empty[work]), costs.recorded_work_ns[work]),
        kernels=costs.top_kernels(work),
    )
