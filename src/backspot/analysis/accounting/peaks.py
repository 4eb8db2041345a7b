"""What devices can do at best: a small table, by the names that the drivers give.

All numbers are dense, without sparsity, and with 32 bits of accumulation. Sources are the vendors'
data sheets and architecture papers; boost clocks, so no program reaches them for long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from backspot.results.limits import Peaks

__all__ = ["peaks_of"]


@dataclass(frozen=True, slots=True)
class _Device:
    """One kind of device.

    Attributes:
        name: matches the whole name of the device.
        half: peak of bf16 and fp16 on tensor cores, in TFLOP/s.
        tf32: peak of tf32 on tensor cores; 0 for none.
        fp32: peak of plain fp32.
        fp8: peak of fp8 on tensor cores; 0 for none.
        gbps: bandwidth in GB/s.
        source: the paper with these numbers.
        has_bf16: whether tensor cores know bf16.
    """

    name: str
    half: float
    tf32: float
    fp32: float
    fp8: float
    gbps: float
    source: str
    has_bf16: bool = True


_VOLTA = "NVIDIA Tesla V100 GPU Accelerator data sheet, 2020"
_TURING = "NVIDIA T4 Tensor Core GPU data sheet, 2019"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, 2022"
_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet, 2023"
_ADA = "NVIDIA data sheet of the card, 2023"
_AMPERE = "NVIDIA data sheet of the card, 2021"
_GEFORCE_30 = "NVIDIA Ampere GA102 GPU Architecture, 2021"
_GEFORCE_40 = "NVIDIA Ada GPU Architecture, 2023"
_GEFORCE_50 = "NVIDIA RTX Blackwell GPU Architecture, 2025"
_CDNA = "AMD data sheet of the accelerator"

_DEVICES = (
    _Device(r"Tesla V100-(SXM\d|DGXS).*", 125.0, 0, 15.7, 0, 900, _VOLTA, has_bf16=False),
    _Device(r"Tesla V100-PCIE.*", 112.0, 0, 14.0, 0, 900, _VOLTA, has_bf16=False),
    _Device(r"(NVIDIA |Tesla )T4", 65.0, 0, 8.1, 0, 320, _TURING, has_bf16=False),
    _Device(r"NVIDIA A100-SXM4-40GB", 312.0, 156.0, 19.5, 0, 1555, _A100),
    _Device(r"NVIDIA A100-SXM4-80GB", 312.0, 156.0, 19.5, 0, 2039, _A100),
    _Device(r"NVIDIA A100-PCIE-40GB", 312.0, 156.0, 19.5, 0, 1555, _A100),
    _Device(r"NVIDIA A100 80GB PCIe", 312.0, 156.0, 19.5, 0, 1935, _A100),
    _Device(r"NVIDIA A30", 165.0, 82.0, 10.3, 0, 933, _AMPERE),
    _Device(r"NVIDIA A10", 125.0, 62.5, 31.2, 0, 600, _AMPERE),
    _Device(r"NVIDIA A40", 149.7, 74.8, 37.4, 0, 696, _AMPERE),
    _Device(r"NVIDIA RTX A6000", 154.8, 77.4, 38.7, 0, 768, _AMPERE),
    _Device(r"NVIDIA L4", 121.0, 60.0, 30.3, 242.0, 300, _ADA),
    _Device(r"NVIDIA L40", 181.0, 90.5, 90.5, 362.0, 864, _ADA),
    _Device(r"NVIDIA L40S", 362.0, 183.0, 91.6, 733.0, 864, _ADA),
    _Device(r"NVIDIA RTX 6000 Ada Generation", 364.2, 182.1, 91.1, 728.5, 960, _ADA),
    _Device(r"NVIDIA H100 80GB HBM3", 989.4, 494.7, 66.9, 1978.9, 3352, _HOPPER),
    _Device(r"NVIDIA H100 PCIe", 756.0, 378.0, 51.2, 1513.0, 2039, _HOPPER),
    _Device(r"NVIDIA H100 NVL", 835.5, 417.5, 60.0, 1671.0, 3938, _HOPPER),
    _Device(r"NVIDIA H200", 989.4, 494.7, 66.9, 1978.9, 4800, "NVIDIA H200 data sheet, 2024"),
    _Device(r"NVIDIA H200 NVL", 835.5, 417.5, 60.0, 1671.0, 4800, "NVIDIA H200 data sheet, 2024"),
    _Device(r"NVIDIA B200", 2250.0, 1125.0, 75.0, 4500.0, 8000, "NVIDIA HGX B200 data sheet, 2025"),
    _Device(r"NVIDIA GeForce RTX 3080", 59.5, 29.8, 29.8, 0, 760, _GEFORCE_30),
    _Device(r"NVIDIA GeForce RTX 3090", 71.2, 35.6, 35.6, 0, 936, _GEFORCE_30),
    _Device(r"NVIDIA GeForce RTX 4080", 97.5, 48.7, 48.7, 194.9, 717, _GEFORCE_40),
    _Device(r"NVIDIA GeForce RTX 4090", 165.2, 82.6, 82.6, 330.3, 1008, _GEFORCE_40),
    _Device(r"NVIDIA GeForce RTX 5080", 112.6, 56.3, 56.3, 225.1, 960, _GEFORCE_50),
    _Device(r"NVIDIA GeForce RTX 5090", 209.5, 104.8, 104.8, 419.0, 1792, _GEFORCE_50),
    # PyTorch has one device for each of the two dies of this accelerator.
    _Device(r"AMD Instinct MI250X.*", 191.5, 0, 23.9, 0, 1638, _CDNA),
    _Device(r"AMD Instinct MI300X.*", 1307.4, 653.7, 163.4, 2614.9, 5300, _CDNA),
    _Device(r"AMD Instinct MI300A.*", 980.6, 490.3, 122.6, 1961.2, 5300, _CDNA),
    _Device(r"AMD Instinct MI325X.*", 1307.4, 653.7, 163.4, 2614.9, 6000, _CDNA),
    _Device(r"AMD Instinct MI350X.*", 2306.9, 0, 144.2, 4613.7, 8000, _CDNA),
    _Device(r"AMD Instinct MI355X.*", 2516.6, 0, 157.3, 5033.2, 8000, _CDNA),
)


def peaks_of(device: str, tflops: float | None = None, gbps: float | None = None) -> Peaks | None:
    """Return the peaks of a device.

    Args:
        device: its name, as the trace has it.
        tflops: the peak that a user gives, which then holds for numbers of each type.
        gbps: the bandwidth that a user gives.

    Returns:
        The peaks; ``None`` for an unknown device, unless both numbers are given.
    """
    known = next((one for one in _DEVICES if re.fullmatch(one.name, device)), None)
    if known is None and (tflops is None or gbps is None):
        return None
    of_types: dict[str, float] = {}
    if known is not None:
        of_types = {"bf16": known.half if known.has_bf16 else 0, "fp16": known.half}
        of_types |= {"tf32": known.tf32, "fp32": known.fp32, "fp8": known.fp8}
        of_types = {name: peak for name, peak in of_types.items() if peak}
    if tflops is not None:
        of_types = dict.fromkeys(("bf16", "fp16", "tf32", "fp32", "fp64", "fp8"), tflops)
    given = tflops is not None or gbps is not None
    return Peaks(
        device=device or "an unnamed device",
        tflops=of_types,
        gbps=gbps if gbps is not None else known.gbps if known is not None else 0.0,
        source="the user" if given else known.source if known is not None else "",
    )
