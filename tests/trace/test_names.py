"""The names that others write into a trace: which ones the predicates recognise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backspot.trace import names

EXAMPLES: tuple[tuple[Callable[[str], bool], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        names.is_python_frame,
        ("train.py(12): step", "<built-in method apply of type object at 0x1>"),
        ("nn.Module: Linear_0", "aten::mm"),
    ),
    (
        names.is_fetch_mark,
        (
            "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
            "[pl][profile][_TrainingEpochLoop].train_dataloader_next",
            "[pl][profile][_EvaluationLoop].val_next",
        ),
        ("[pl][profile][Strategy]SingleDeviceStrategy.training_step",),
    ),
    (
        names.is_copy_mark,
        ("[pl][profile][Strategy]SingleDeviceStrategy.batch_to_device",),
        ("[pl][profile]run_training_batch",),
    ),
    (
        names.is_forward_mark,
        (
            "DistributedDataParallel.forward",
            "FSDP::root_pre_forward",
            "[pl][profile][Strategy]SingleDeviceStrategy.training_step",
        ),
        ("[pl][profile][Strategy]SingleDeviceStrategy.validation_step",),
    ),
    (
        names.is_optimizer_mark,
        (
            "Optimizer.step#AdamW.step",
            "Optimizer.zero_grad#AdamW.zero_grad",
        ),
        ("ProfilerStep#3", "MyOptimizer.step"),
    ),
    (
        names.is_clipping_mark,
        ("[pl][profile][LightningModule]Net.configure_gradient_clipping",),
        ("Optimizer.step#AdamW.step",),
    ),
    (
        names.is_accumulate_grad,
        ("AccumulateGrad", "torch::autograd::AccumulateGrad"),
        ("MulBackward0",),
    ),
    (names.is_node, ("MulBackward0", "MyFunctionBackward"), ("torch::autograd::CopySlices",)),
    (names.is_generated_node, ("MulBackward0",), ("MyFunctionBackward",)),
    (
        names.is_view_node,
        ("torch::autograd::CopySlices", "AsStridedBackward0"),
        ("MulBackward0",),
    ),
    (
        names.is_gradient_operator,
        ("aten::_foreach_mul_", "aten::_fused_adamw_", "aten::zero_"),
        ("aten::zero_grad", "aten::mul_"),
    ),
    (names.is_norm, ("aten::norm", "aten::linalg_vector_norm"), ("aten::layer_norm",)),
    (names.is_pin_memory, ("aten::_pin_memory",), ("aten::is_pinned",)),
    (names.is_runtime_call, ("cudaLaunchKernel", "cuLaunchKernelEx"), ("cudnn::conv", "cumsum")),
    (
        names.is_synchronization,
        ("cudaStreamSynchronize", "hipDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize"),
        ("cudaMemcpyAsync", "cudaLaunchKernel"),
    ),
    (
        names.is_copy_from_device,
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy PtoP (Device -> Device)"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy DtoD (Device -> Device)"),
    ),
    (
        names.is_communication,
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "void rcclKernel"),
        ("void gemm<float>",),
    ),
    (names.is_sort, ("DeviceRadixSortOnesweepKernel", "merge_sort"), ("void gemm<float>",)),
    (
        names.is_fused_optimizer,
        ("void multi_tensor_apply_kernel<FusedAdam>", "triton_poi_fused_add_0"),
        ("vectorized_elementwise_kernel",),
    ),
    (
        names.is_half_atomic,
        (
            "indexFuncLargeIndex<c10::BFloat16, long>",
            "vectorized_scatter<c10::Half, ReduceAdd>",
            "upsample_bilinear2d_backward_out_frame<c10::Half>",
        ),
        ("indexFuncLargeIndex<float, long>", "upsample_bilinear2d_out_frame<c10::Half>"),
    ),
    (
        names.is_vector_product,
        ("void gemv2T_kernel_val<float>", "internal::gemmSN_TN_kernel<float>"),
        ("void gemm<float>", "my_gemv_kernel"),
    ),
    (names.is_pairwise_distance, ("cdist_backward_kernel<float>",), ("histogram_dist_kernel",)),
    (names.is_zero_fill, ("FillFunctor<float>", "Memset (Device)"), ("void gemm<float>",)),
    (names.is_layout_conversion, ("nchwToNhwcKernel",), ("void gemm<float>",)),
    (
        names.is_without_tensor_cores,
        ("ampere_sgemm_128x64_nn", "cutlass_80_simt_sgemm_128x64"),
        ("ampere_bf16_s16816gemm_bf16_128x64", "Cijk_Ailk_Bljk_SB_MT_TF32"),
    ),
    (names.is_double, ("cutlass_dgemm", "kernel<double>"), ("ampere_sgemm_128x64_nn",)),
)


@pytest.mark.parametrize(
    ("predicate", "name"),
    [(predicate, name) for predicate, named, _ in EXAMPLES for name in named],
)
def test_a_name_of_the_kind_is_recognised(predicate: Callable[[str], bool], name: str) -> None:
    assert predicate(name)


@pytest.mark.parametrize(
    ("predicate", "name"),
    [(predicate, name) for predicate, _, others in EXAMPLES for name in others],
)
def test_a_name_of_another_kind_is_not(predicate: Callable[[str], bool], name: str) -> None:
    assert not predicate(name)


@pytest.mark.parametrize(
    ("site", "name"),
    [
        ("extern_kernels.bias_addmm", "aten::addmm"),
        ("torch.ops.aten.sort.stable", "aten::sort"),
        ("torch.ops.higher_order.graphsafe_run_with_rng_state", "aten::native_dropout"),
        ("triton_poi_fused_add_3", "triton_poi_fused_add_3"),
    ],
)
def test_a_launch_of_a_site(site: str, name: str) -> None:
    assert names.is_launch_of(site, name)
    assert not names.is_launch_of(site, "triton_poi_fused_mul_4")
    assert not names.is_launch_of("triton_poi_fused_mul_4", name)
