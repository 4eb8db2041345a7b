"""Matrix products and convolutions that run without tensor cores."""

from __future__ import annotations

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import finding, rule
from backspot.results.findings import Finding
from backspot.trace import names

__all__ = ["find"]

_FP32 = (
    "Run the forward under torch.autocast('cuda', dtype=torch.bfloat16) (float16 before Ampere). "
    "To stay in fp32, use torch.set_float32_matmul_precision('high') and "
    "torch.backends.cudnn.allow_tf32 = True."
)
_FP64 = (
    "Unless the result needs fp64, call model.float() and convert the batch likewise: tensors made "
    "from NumPy arrays are float64 by default. Then use torch.autocast('cuda', "
    "dtype=torch.bfloat16)."
)


@rule("no-tensor-cores", devices=("cuda",))
def find(evidence: Evidence) -> Finding | None:
    """Find kernels that multiply in fp32 or fp64 without tensor cores, forward and backward."""
    costs, say = evidence.costs, evidence.wording
    work = evidence.work_named(names.is_without_tensor_cores)
    if not work.any():
        return None
    double = evidence.work_named(names.is_double) & work
    wide = 2 * costs.of_work(double) > costs.of_work(work)
    return finding(
        costs.places_of_work(work),
        title=f"Matrix products run in {'fp64' if wide else 'fp32'} without tensor cores",
        seen=(
            f"{say.per_step(int(work.sum()), 'kernel')}, {say.ms(costs.of_work(work))} of the "
            "step. In half precision, tensor cores run such products several times as fast."
        ),
        remedy=_FP64 if wide else _FP32,
        link=(
            "https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#tensorfloat-32-tf32-on-ampere-and-later-devices"
        ),
        nodes=costs.top_nodes(evidence.spans_of_work(work)),
        kernels=costs.top_kernels(work),
    )
