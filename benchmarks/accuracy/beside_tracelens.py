"""Are operations and rates of operators those that TraceLens finds in the same trace?

    python -m benchmarks beside_tracelens

For each recording: operations, bytes and TFLOP/s of each operator with a formula, from Backspot and
from TraceLens (https://github.com/AMD-AGI/TraceLens, installed from its repository: the package of
this name on PyPI is another one). Where the operations differ, the difference must be one of the
known ones, to a thousandth.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from backspot.analysis.accounting.formulas import Inputs, bytes_formulas, flops_formulas
from backspot.analysis.accounting.work import Counted, count_work
from backspot.analysis.attribution.ownership import attribute
from backspot.analysis.timeline import first_started, grouped
from backspot.trace import Events, read_events
from benchmarks.harness import TEST_DATA, CannotRunError, Figures, Run

_TRACES = {
    "vit": "memory/vit.trace.json.gz",
    "llama": "memory/llama.trace.json.gz",
    "gpt2_checkpointed": "h200/gpt2_checkpointed.trace.json.gz",
    "vit_patch_drop": "h200/vit_patch_drop.trace.json.gz",
    "resnet_channels_last": "h200/resnet_channels_last.trace.json.gz",
}
_SMALL = ("resnet_channels_last",)
_EQUAL = 1e-6  # their numbers are floating point sums
_NEAR = 1e-3  # of what they halve for a causal mask, the diagonal is whole


class _Sums(NamedTuple):
    """What one tool says of all calls of an operator.

    Attributes:
        flops: operations.
        moved: bytes.
        device_us: device time in microseconds.
    """

    flops: float
    moved: float
    device_us: float

    @property
    def tflops(self) -> float:
        """10¹² operations per second."""
        return self.flops / self.device_us / 1e6 if self.device_us else 0.0


# Backspot ----------------------------------------------------------------------------------------


def _ours(events: Events) -> dict[str, _Sums]:
    flops, moved = count_work(events, flops_formulas()), count_work(events, bytes_formulas())
    device = _device_us(events, flops)
    found = {}
    for name in np.unique(events.name[flops.index]).tolist():
        mine, same = events.name[flops.index] == name, events.name[moved.index] == name
        found[events.names[name]] = _Sums(
            float(flops.amount[mine].sum()), float(moved.amount[same].sum()), device[mine].sum()
        )
    return found


def _device_us(events: Events, counted: Counted) -> Any:
    """Return the device time that each of these operators launches."""
    work = attribute(events).work
    found = np.zeros(len(counted.index))
    mine = dict(grouped(work.thread, np.flatnonzero(work.launch >= 0)))
    for thread, here in grouped(events.thread[counted.index]):
        if thread in mine:
            index, launched = counted.index[here], mine[thread]
            at = first_started(events.start[index], events.end[index], here).at(
                work.launch[launched]
            )
            length = (work.end - work.start)[launched] / 1e3
            np.add.at(found, at[at >= 0], length[at >= 0])
    return found


# TraceLens ---------------------------------------------------------------------------------------


def _theirs(path: Path) -> dict[str, _Sums]:
    try:
        from TraceLens.TreePerf.tree_perf import TreePerfAnalyzer
    except ModuleNotFoundError as error:
        raise CannotRunError(
            "TraceLens is not installed: pip install git+https://github.com/AMD-AGI/TraceLens"
        ) from error
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        whole.write_text(json.dumps(_with_arrows(path)))
        table = TreePerfAnalyzer.from_file(str(whole)).build_df_unified_perf_table()
    columns = ["GFLOPS", "Data Moved (MB)", "Kernel Time (µs)"]
    return {
        _operator(name): _Sums(1e9 * gflops, 2**20 * moved, device_us)
        for name, (gflops, moved, device_us) in zip(
            table.groupby("name").groups,
            table.groupby("name")[columns].sum().to_numpy().tolist(),
            strict=True,
        )
    }


def _with_arrows(path: Path) -> dict[str, Any]:
    """Return a trace with the profiler's arrows from launches to device work.

    The recordings are trimmed to what Backspot reads: to the correlation, which says the same.
    """
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    events = document["traceEvents"]
    ends: dict[str, dict[int, Any]] = {"s": {}, "f": {}}
    kinds = {"cuda_runtime": "s", "cuda_driver": "s"}
    kinds |= dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), "f")
    for event in events:
        correlation = event.get("args", {}).get("correlation")
        if correlation is not None and event.get("cat") in kinds:
            ends[kinds[event["cat"]]][correlation] = event
    for number in ends["s"].keys() & ends["f"].keys():
        for phase, found in ends.items():
            where = {key: found[number][key] for key in ("pid", "tid", "ts")}
            events.append({"ph": phase, "id": number, "cat": "ac2g", "name": "ac2g"} | where)
    return document


def _operator(name: str) -> str:
    """Return the operator that a node of the autograd graph stands for; other names as they are."""
    if not re.fullmatch(r"\w+Backward0", name):
        return name
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("0")).lower()
    return f"aten::_{snake}"


# Known differences -------------------------------------------------------------------------------

_ATTENTION = "aten::_scaled_dot_product_cudnn_attention"


def _with_bias(inputs: Inputs) -> float:
    return flops_formulas()["aten::addmm"](inputs) + inputs.shape(1)[0] * inputs.shape(2)[1]


def _all_gradients(inputs: Inputs) -> float:
    values = [*inputs.values[:10], "[True, True, False]"]
    whole = Inputs(inputs.shapes, inputs.types, inputs.strides, values)
    return flops_formulas()["aten::convolution_backward"](whole)


def _half_if_causal(inputs: Inputs) -> float:
    return flops_formulas()[_ATTENTION](inputs) / (1 + bool(inputs.value(6)))


def _four_products(inputs: Inputs) -> float:
    ours = flops_formulas()[f"{_ATTENTION}_backward"](inputs)
    return ours * 4 / 5 / (1 + bool(inputs.value(14)))


_KNOWN: dict[str, tuple[str, Callable[[Inputs], float]]] = {
    "aten::addmm": ("they add the bias", _with_bias),
    "aten::convolution_backward": (
        "they count gradients of inputs that are not computed",
        _all_gradients,
    ),
    _ATTENTION: ("they halve it for a causal mask", _half_if_causal),
    f"{_ATTENTION}_backward": (
        "they leave out the scores that are computed again, and halve it for a causal mask",
        _four_products,
    ),
}


def _expected(events: Events, name: str) -> float:
    """Return the operations that TraceLens should find, by the differences that are known."""
    index = count_work(events, flops_formulas()).index
    mine = index[events.name[index] == events.names.index(name)]
    signatures = events.signature[mine].tolist()
    return sum(_KNOWN[name][1](Inputs.of(events.signatures[at])) for at in signatures)


def _beside(events: Events, path: Path) -> list[dict[str, Any]]:
    """Return each operator that both know, with why they differ; ``?`` where this is not known."""
    found = []
    theirs = _theirs(path)
    for name, our in sorted(_ours(events).items(), key=lambda one: -one[1].flops):
        if our.flops and name in theirs:
            their = theirs[name]
            why = ""
            if abs(our.flops - their.flops) > _EQUAL * our.flops:
                known = name in _KNOWN and abs(_expected(events, name) / their.flops - 1) < _NEAR
                why = _KNOWN[name][0] if known else "?"
            found.append(
                {
                    "operator": name.removeprefix("aten::"),
                    "gflop": [our.flops / 1e9, their.flops / 1e9],
                    "gb": [our.moved / 1e9, their.moved / 1e9],
                    "tflops": [our.tflops, their.tflops],
                    "why": why,
                }
            )
    return found


def answer(run: Run) -> Figures:
    """Compare, ours beside theirs."""
    rows = []
    for name in run.choose(_TRACES, _SMALL):
        path = TEST_DATA / _TRACES[name]
        rows += [{"trace": name, **one} for one in _beside(read_events(path), path)]
    return {"rows": rows, "wrong": any(one["why"] == "?" for one in rows)}
