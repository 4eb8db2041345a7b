"""What devices can do at best: a small table, by the names that the drivers give.

All numbers are dense: where a data sheet has numbers with sparsity, they are halved. Accumulation
is in 32 bits, as in PyTorch. The sources are the makers' data sheets and architecture papers. The
numbers hold at the boost clock of the data sheet. Most programs run below that clock; consumer
cards can run above.
"""

from __future__ import annotations

import re

import msgspec

from backspot.results.limits import Peaks


class _Device(msgspec.Struct, frozen=True):
    """One kind of device.

    Attributes:
        name: what the device is called, without the maker; names that end in ``*`` go on.
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

    def is_called(self, name: str) -> bool:
        begin = self.name.rstrip("*")
        return name == begin or (begin != self.name and name.startswith(begin))


_VOLTA = "NVIDIA V100 data sheet, 2020"
_TURING = "NVIDIA T4 data sheet, 2019"
_A100 = "NVIDIA A100 data sheet, 2022"
_AMPERE = "NVIDIA data sheet of the card, 2021"
_ADA = "NVIDIA data sheet of the card, 2023"
_H100 = "NVIDIA H100 data sheet, 2024"
_H200 = "NVIDIA H200 data sheet, 2024"
_H20 = "NVIDIA H20 data sheet, 2023"
_GH200 = "NVIDIA GH200 data sheet, 2024"
_BLACKWELL = "NVIDIA Blackwell data sheet, 2025"
_GEFORCE_30 = "NVIDIA Ampere GA102 architecture paper, 2021"
_GEFORCE_40 = "NVIDIA Ada architecture paper, 2023"
_GEFORCE_50 = "NVIDIA RTX Blackwell architecture paper, 2025"
_CDNA = "AMD data sheet of the accelerator"


def _geforce(name: str, cores: int, gigahertz: float, gbps: float, source: str) -> _Device:
    """Compute the peaks of a consumer card from its cores and boost clock, as its paper does.

    A core does two operations per clock. With accumulation in 32 bits, tensor cores do as much in
    tf32, twice as much in bf16 and fp16, and, after the 30 series, four times as much in fp8.
    """
    plain = 2e-3 * cores * gigahertz
    fp8 = 0.0 if source == _GEFORCE_30 else 4 * plain
    return _Device(f"GeForce RTX {name}", 2 * plain, plain, plain, fp8, gbps, source)


_DEVICES = (
    _Device("V100-SXM*", 125.0, 0, 15.7, 0, 900, _VOLTA, has_bf16=False),
    _Device("V100-DGXS*", 125.0, 0, 15.7, 0, 900, _VOLTA, has_bf16=False),
    _Device("V100-PCIE*", 112.0, 0, 14.0, 0, 900, _VOLTA, has_bf16=False),
    _Device("V100S-PCIE*", 130.0, 0, 16.4, 0, 1134, _VOLTA, has_bf16=False),
    _Device("T4", 65.0, 0, 8.1, 0, 320, _TURING, has_bf16=False),
    _Device("A100-SXM4-40GB", 312.0, 156.0, 19.5, 0, 1555, _A100),
    _Device("A100-SXM4-80GB", 312.0, 156.0, 19.5, 0, 2039, _A100),
    _Device("A100-PCIE-40GB", 312.0, 156.0, 19.5, 0, 1555, _A100),
    _Device("A100 80GB PCIe", 312.0, 156.0, 19.5, 0, 1935, _A100),
    # These variants for other markets have slower links between devices, and the same peaks.
    _Device("A800-SXM4-80GB", 312.0, 156.0, 19.5, 0, 2039, _A100),
    _Device("A800 80GB PCIe", 312.0, 156.0, 19.5, 0, 1935, _A100),
    _Device("A30", 165.0, 82.0, 10.3, 0, 933, _AMPERE),
    _Device("A10", 125.0, 62.5, 31.2, 0, 600, _AMPERE),
    # The tensor cores of this variant do 70 TFLOP/s, not the 125 of the A10.
    _Device("A10G", 70.0, 35.0, 35.0, 0, 600, _AMPERE),
    _Device("A40", 149.7, 74.8, 37.4, 0, 696, _AMPERE),
    _Device("RTX A6000", 154.8, 77.4, 38.7, 0, 768, _AMPERE),
    _Device("L4", 121.0, 60.0, 30.3, 242.5, 300, _ADA),
    _Device("L40", 181.05, 90.5, 90.5, 362.0, 864, _ADA),
    _Device("L40S", 362.05, 183.0, 91.6, 733.0, 864, _ADA),
    _Device("RTX 6000 Ada Generation", 364.2, 182.1, 91.1, 728.5, 960, _ADA),
    _Device("H100 80GB HBM3", 989.4, 494.7, 66.9, 1978.9, 3352, _H100),
    _Device("H100 PCIe", 756.0, 378.0, 51.2, 1513.0, 2039, _H100),
    _Device("H100 NVL", 835.5, 417.5, 60.0, 1670.5, 3938, _H100),
    _Device("H800", 989.4, 494.7, 66.9, 1978.9, 3352, _H100),
    _Device("H20", 148.0, 74.0, 44.0, 296.0, 4000, _H20),
    _Device("GH200 480GB", 989.4, 494.7, 66.9, 1978.9, 4000, _GH200),
    _Device("GH200 144G HBM3e", 989.4, 494.7, 66.9, 1978.9, 4900, _GH200),
    _Device("H200", 989.4, 494.7, 66.9, 1978.9, 4800, _H200),
    _Device("H200 NVL", 835.5, 417.5, 60.0, 1670.5, 4800, _H200),
    _Device("B200", 2250.0, 1100.0, 75.0, 4500.0, 7700, _BLACKWELL),
    _Device("GB200", 2500.0, 1250.0, 80.0, 5000.0, 8000, _BLACKWELL),
    _geforce("3050", 2560, 1.777, 224, _GEFORCE_30),
    _geforce("3060", 3584, 1.777, 360, _GEFORCE_30),
    _geforce("3060 Ti", 4864, 1.665, 448, _GEFORCE_30),
    _geforce("3070", 5888, 1.725, 448, _GEFORCE_30),
    _geforce("3070 Ti", 6144, 1.77, 608, _GEFORCE_30),
    _geforce("3080", 8704, 1.71, 760, _GEFORCE_30),
    _geforce("3080 Ti", 10240, 1.665, 912, _GEFORCE_30),
    _geforce("3090", 10496, 1.695, 936, _GEFORCE_30),
    _geforce("3090 Ti", 10752, 1.86, 1008, _GEFORCE_30),
    _geforce("4060", 3072, 2.46, 272, _GEFORCE_40),
    _geforce("4060 Ti", 4352, 2.535, 288, _GEFORCE_40),
    _geforce("4070", 5888, 2.475, 504, _GEFORCE_40),
    _geforce("4070 SUPER", 7168, 2.475, 504, _GEFORCE_40),
    _geforce("4070 Ti", 7680, 2.61, 504, _GEFORCE_40),
    _geforce("4070 Ti SUPER", 8448, 2.61, 672, _GEFORCE_40),
    _geforce("4080", 9728, 2.505, 717, _GEFORCE_40),
    _geforce("4080 SUPER", 10240, 2.55, 736, _GEFORCE_40),
    _geforce("4090", 16384, 2.52, 1008, _GEFORCE_40),
    _geforce("4090 D", 14592, 2.52, 1008, _GEFORCE_40),
    _geforce("5050", 2560, 2.572, 320, _GEFORCE_50),
    _geforce("5060", 3840, 2.497, 448, _GEFORCE_50),
    _geforce("5060 Ti", 4608, 2.572, 448, _GEFORCE_50),
    _geforce("5070", 6144, 2.512, 672, _GEFORCE_50),
    _geforce("5070 Ti", 8960, 2.452, 896, _GEFORCE_50),
    _geforce("5080", 10752, 2.617, 960, _GEFORCE_50),
    _geforce("5090", 21760, 2.407, 1792, _GEFORCE_50),
    # PyTorch has one device for each of the two dies of an MI250: half of the data sheet. Products
    # of fp32 matrices run on matrix cores, which is twice the vector rate.
    _Device("Instinct MI210", 181.0, 0, 45.3, 0, 1638, _CDNA),
    _Device("Instinct MI250", 181.0, 0, 45.3, 0, 1638, _CDNA),
    _Device("Instinct MI250X*", 191.5, 0, 47.9, 0, 1638, _CDNA),
    _Device("Instinct MI300X*", 1307.4, 653.7, 163.4, 2614.9, 5300, _CDNA),
    _Device("Instinct MI300A*", 980.6, 490.3, 122.6, 1961.2, 5300, _CDNA),
    _Device("Instinct MI325X*", 1307.4, 653.7, 163.4, 2614.9, 6000, _CDNA),
    _Device("Instinct MI350X*", 2306.9, 0, 144.2, 4613.7, 8000, _CDNA),
    _Device("Instinct MI355X*", 2516.6, 0, 157.3, 5033.2, 8000, _CDNA),
)
_MAKER = re.compile(r"^(NVIDIA |AMD |Tesla )+")
"""Drivers of different years put different words before the same name."""


def peaks_of(device: str, tflops: float | None = None, gbps: float | None = None) -> Peaks | None:
    """Return the peaks of a device.

    Args:
        tflops: the peak that a user gives, which then holds for numbers of each type.
        gbps: the bandwidth that a user gives.

    Returns:
        The peaks; ``None`` for an unknown device, unless both numbers are given.
    """
    name = _MAKER.sub("", device, count=1)
    known = next((device_peaks for device_peaks in _DEVICES if device_peaks.is_called(name)), None)
    if known is None and (tflops is None or gbps is None):
        return None
    of_types: dict[str, float] = {}
    if known is not None:
        of_types = {"bf16": known.half if known.has_bf16 else 0, "fp16": known.half}
        of_types |= {"tf32": known.tf32, "fp32": known.fp32, "fp8": known.fp8}
        of_types = {name: peak for name, peak in of_types.items() if peak}
    if tflops is not None:
        of_types = dict.fromkeys(("bf16", "fp16", "tf32", "fp32", "fp64", "fp8"), tflops)
    by_user = tflops is not None or gbps is not None
    return Peaks(
        device=device or "an unnamed device",
        tflops=of_types,
        gbps=gbps if gbps is not None else known.gbps if known is not None else 0.0,
        source="the user" if by_user else known.source if known is not None else "",
    )
