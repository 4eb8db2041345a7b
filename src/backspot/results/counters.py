"""What hardware counters say of a module, where the profiler sampled some."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backspot.results.public import public

__all__ = ["CountersOfModule", "measured_gbps", "summed_counters"]

_BYTES = (("dram__bytes.sum",), ("dram__bytes_read.sum", "dram__bytes_write.sum"))
_SHARES = (
    "HBM BW (%)",
    "DRAM BW (%)",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
)


@public
@dataclass(frozen=True, slots=True)
class CountersOfModule:
    """Hardware counters while the device worked for the backward of one module.

    Attributes:
        mean: The mean of each counter, by the name that the trace has for it. Of a counter that
            adds up (``dram__bytes_read.sum``) it is the amount per second.
        sampled_ns: Device time of the module in the samples that count, in nanoseconds over all
            steps: those that are filled by this module to at least nine tenths.
    """

    mean: dict[str, float]
    sampled_ns: int


def measured_gbps(counters: CountersOfModule | None, peak: float | None) -> float | None:
    """Return the measured bandwidth of the memory in 10⁹ bytes per second.

    Args:
        counters: what was sampled.
        peak: the device's peak, which some counters are shares of; ``None`` if it is not known.
    """
    found = counters.mean if counters is not None else {}
    for names in _BYTES:
        if all(name in found for name in names):
            return sum(found[name] for name in names) / 1e9
    for name in _SHARES:
        if name in found and peak is not None:
            return found[name] / 100 * peak
    return None


def summed_counters(parts: Iterable[CountersOfModule | None]) -> CountersOfModule | None:
    """Return the counters of several modules together, weighted by their sampled time."""
    known = [one for one in parts if one is not None]
    if not known:
        return None
    names = dict.fromkeys(name for one in known for name in one.mean)
    return CountersOfModule(
        {name: _mean(name, known) for name in names}, sum(one.sampled_ns for one in known)
    )


def _mean(name: str, parts: Iterable[CountersOfModule]) -> float:
    having = [one for one in parts if name in one.mean]
    whole = sum(one.sampled_ns for one in having)
    return sum(one.mean[name] * one.sampled_ns for one in having) / whole
