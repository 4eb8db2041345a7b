"""Matrix products and convolutions that run on the GPU's ordinary cores."""

from __future__ import annotations

import re

from backspot.analysis.findings.evidence import Evidence
from backspot.analysis.findings.registry import rule
from backspot.results.findings import Finding

__all__ = ["find"]

_PLAIN = re.compile(
    r"_ffma|simt_[sd]?gemm|\b(ampere|volta|maxwell|turing|hopper)_[sd]gemm|gemmSN\w*<(float|double)"
    r"|(dgrad|wgrad)\w*engine<(float|double),|implicit_convolve_[sd]gemm<(float|double)|[sd]gemm_largek"
    r"|winograd\w*<float|cudnn\w*_[sd]gemm_|Cijk_\w*_SB_(?!\w*(XF32|TF32|_MI\d))"
)
_DOUBLE = re.compile(r"dgemm|<double")
_FP32 = (
    "torch.autocast('cuda', dtype=torch.bfloat16) around the forward (float16 before "
    "Ampere); or, to stay in fp32, torch.set_float32_matmul_precision('high') and "
    "torch.backends.cudnn.allow_tf32 = True."
)
_FP64 = (
    "Unless the result needs fp64: model.float(), and the batch likewise; a tensor made from "
    "NumPy is float64 unless told otherwise. Then torch.autocast('cuda', dtype=torch.bfloat16)."
)


@rule("no-tensor-cores")
def find(evidence: Evidence) -> Finding | None:
    """Find kernels that multiply in fp32 or fp64 without tensor cores, forward and backward."""
    work = evidence.work_named(lambda name: _PLAIN.search(name) is not None)
    if not work.any():
        return None
    double = evidence.work_named(lambda name: _DOUBLE.search(name) is not None) & work
    wide = 2 * int(evidence.work_ns[double].sum()) > int(evidence.work_ns[work].sum())
    return evidence.finding(
        title=f"Matrix products run in {'fp64' if wide else 'fp32'} without tensor cores",
        seen=(
            f"{evidence.per_step(int(work.sum()), 'kernel')}, "
            f"{evidence.ms(int(evidence.work_ns[work].sum()))} of the step; "
            "in half precision tensor cores do such products several times as fast."
        ),
        remedy=_FP64 if wide else _FP32,
        link=(
            "https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#tensorfloat-32-tf32-on-ampere-and-later-devices"
        ),
        places=evidence.places_of_work(work),
        nodes=evidence.top_nodes(evidence.spans_of_work(work)),
        kernels=evidence.top_kernels(work),
    )
