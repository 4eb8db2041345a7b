"""On a real GPU: why its clock is low is read from NVML, and takes no time worth a word."""

from __future__ import annotations

import subprocess

import pytest

torch = pytest.importorskip("torch")
nvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

from backspot.live.surroundings import low_clock, slowed_by  # noqa: E402
from support.gpu_models import DEVICE, needs_gpu  # noqa: E402

pytestmark = needs_gpu


def test_the_clock_that_is_said_is_that_of_nvidia_smi() -> None:
    x = torch.randn(4_096, 4_096, device=DEVICE)
    for _ in range(200):
        x = (x @ x).tanh()
    lines = [line for line in slowed_by() if "MHz" in line]
    fields = "clocks.sm,clocks.max.sm,clocks_event_reasons.active"
    uuid = torch.cuda.get_device_properties(x.device).uuid
    asked = (f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    answer = subprocess.check_output(["nvidia-smi", *asked], text=True)
    torch.cuda.synchronize()
    now, most, reasons = (int(each, 0) for each in answer.split(","))
    said = low_clock(now, most, reasons)
    assert bool(lines) == bool(said)
    assert all(line.startswith(f"GPU {x.device.index}: its clock is") for line in lines)
