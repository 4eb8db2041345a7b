"""Operators without a fast kernel on a GPU: what is found, and what looks alike and is healthy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import backspot
from backspot.results.findings import Finding
from support.synthetic import Trace

US = 1_000
HOST, ENGINE = 1, 2
ATEN = "void at::native::"
DEPTHWISE = f"{ATEN}(anonymous namespace)::conv_depthwise3d_cuda_backward_weight_kernel<float>"
DEPTHWISE_2D = f"{ATEN}(anonymous namespace)::conv_depthwise2d_grad_weight_kernel<float, unsigned>"
DENSE = "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32>"
BILINEAR = f"{ATEN}(anonymous namespace)::upsample_bilinear2d_backward_out_frame<float, float>"
BILINEAR_HALF = BILINEAR.replace("float, float", "c10::BFloat16, float")
SCATTER = f"{ATEN}_scatter_gather_elementwise_kernel<128, 8, at::native::_cuda_scatter_gather_"
SCATTER_HALF = f"{SCATTER}internal_kernel<true, c10::BFloat16>::operator()<at::native::ReduceAdd>"
SCATTER_FLOAT = f"{SCATTER}internal_kernel<true, float>::operator()<at::native::ReduceAdd>"
GEMV = "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128>"
GEMM = "nvjet_sm90_tst_128x128_64x6_1x2_h_bz_NTN"
FILL = (
    f"{ATEN}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1>>"
)
SGEMM = "ampere_sgemm_32x32_sliced1x4_nn"
CDIST = f"{ATEN}(anonymous namespace)::cdist_kernel_cuda_impl<float, dists<float>::one>"


@dataclass(frozen=True)
class Step:
    """A module's operator with a kernel, and its node with another; times in microseconds."""

    operator: str
    node: str
    kernel: str
    forward: int
    backward: int
    blocks: float = 4.0
    rest: int = 4_000
    blocks_forward: float | None = None
    zeros: float = 0.0
    times: int = 1

    def findings(self, folder: Path) -> dict[str, Finding]:
        trace = Trace()
        trace.annotation("ProfilerStep#1", 0, 20_000 * US)
        trace.forward("", "Net", 10 * US, 200 * US)
        trace.operator("aten::linear", 20 * US, 30 * US, seq=0)
        trace.forward("layer", "Layer", 40 * US, 150 * US)
        trace.operator(self.operator, 50 * US, 100 * US, seq=1)
        trace.node(self.node, 300 * US, 400 * US, seq=1)
        trace.operator(self.operator, 310 * US, 390 * US, thread=ENGINE)
        trace.node("AddmmBackward0", 500 * US, 600 * US, seq=0)
        at = 600 * US
        forward = self.blocks if self.blocks_forward is None else self.blocks_forward
        several = range(self.times)
        for launch, thread, name, length, blocks in (
            (25, HOST, GEMM, self.rest // 3, self.blocks),
            *(
                (60 + one, HOST, self.kernel, self.forward // self.times, forward)
                for one in several
            ),
            *([(315, ENGINE, FILL, 1, self.zeros)] if self.zeros else []),
            *(
                (320 + one, ENGINE, self.kernel, self.backward // self.times, self.blocks)
                for one in several
            ),
            (520, ENGINE, GEMM, 2 * self.rest // 3, self.blocks),
        ):
            trace.kernel(at, at + length * US, launch=launch * US, launch_thread=thread, name=name)
            work = next(one for one in reversed(trace.events) if one["cat"] == "kernel")
            work["args"]["blocks per SM"] = blocks
            at += length * US
        report = backspot.locate(trace.save(folder / "trace.json"))
        return {one.rule: one for one in report.findings}


RULES = ("slow-convolution", "atomic-additions", "tiny-products", "pairwise-distance")


ENLARGED = Step(
    "aten::upsample_bilinear2d", "UpsampleBilinear2DBackward0", BILINEAR, 700, 1_200, 124.0,
    blocks_forward=0.03,
)  # fmt: skip
"""Cells become many, with four blocks of threads for all channels together in the forward."""


@pytest.mark.parametrize(
    ("rule", "step", "says"),
    [
        (RULES[0], Step("aten::conv3d", "ConvolutionBackward0", DEPTHWISE, 400, 900), "2-D depth"),
        (RULES[0], Step("aten::conv3d", "ConvolutionBackward0", DENSE, 200, 2_000), "cudnn"),
        (
            RULES[1],
            Step("aten::upsample_bilinear2d", "UpsampleBilinear2DBackward0", BILINEAR, 90, 900),
            "small products",
        ),
        (
            RULES[1],
            Step("aten::upsample_bilinear2d", "UpsampleBilinear2DBackward0", BILINEAR_HALF, 9, 900),
            "in fp32",
        ),
        (RULES[1], Step("aten::gather", "GatherBackward0", SCATTER_HALF, 90, 900), "in fp32"),
        # From 8 by 8 cells to 64 by 64, with four blocks of threads for all channels together.
        (
            RULES[1],
            replace(ENLARGED, zeros=3.9),
            "products",
        ),
        (RULES[1], replace(ENLARGED, zeros=3.9, kernel=BILINEAR_HALF), "by two small products"),
        # 65,535 matrices a launch, with a block for each.
        (RULES[2], Step("aten::bmm", "BmmBackward0", SGEMM, 976, 976, 496.5, times=8), "element"),
        (RULES[2], Step("aten::bmm", "BmmBackward0", GEMV, 500, 500), "element-wise products"),
        (RULES[2], Step("aten::bmm", "BmmBackward0", GEMM, 500, 500, 30_000), "element-wise"),
        (RULES[3], Step("aten::cdist", "CdistBackward0", CDIST, 500, 500), "broadcast"),
    ],
)
def test_an_operator_without_a_fast_kernel_is_found_where_it_is(tmp_path, rule, step, says):
    found = step.findings(tmp_path)
    assert set(found) & set(RULES) == {rule}
    assert found[rule].path == "layer"
    assert says in found[rule].remedy


@pytest.mark.parametrize(
    "step",
    [
        Step("aten::conv2d", "ConvolutionBackward0", DENSE, 200, 1_000),
        Step("aten::conv2d", "ConvolutionBackward0", DEPTHWISE_2D, 100, 1_000),
        Step("aten::upsample_bilinear2d", "UpsampleBilinear2DBackward0", BILINEAR, 300, 600),
        replace(ENLARGED, zeros=62.0),
        Step(
            "aten::upsample_bilinear2d",
            "UpsampleBilinear2DBackward0",
            BILINEAR,
            700,
            1_200,
            124.0,
            4_000,
            2.0,
            3.9,
        ),
        Step("aten::bmm", "BmmBackward0", SGEMM, 1_600, 1_600, 496.5, times=8),
        Step("aten::bmm", "BmmBackward0", SGEMM, 122, 122, 496.5),
        Step("aten::gather", "GatherBackward0", SCATTER_FLOAT, 90, 900),
        Step("aten::bmm", "BmmBackward0", GEMM, 500, 1_000, 60.0),
        Step("aten::linear", "AddmmBackward0", GEMV, 500, 1_000),
        Step("aten::cdist", "MmBackward0", GEMM, 500, 1_000),
        Step("aten::conv3d", "ConvolutionBackward0", DEPTHWISE, 4, 9),
    ],
    ids=[
        "dense",
        "flat",
        "doubled",
        "doubled by few threads",
        "by many threads",
        "many of 30 by 30",
        "one launch",
        "gathered",
        "large",
        "vector",
        "euclidean",
        "little",
    ],
)
def test_a_healthy_operator_of_the_same_kind_is_left_alone(tmp_path, step):
    assert not set(step.findings(tmp_path)) & set(RULES)
