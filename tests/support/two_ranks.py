"""Two processes that train together, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import preloaded


def run_two_ranks(case: str, folder: Path, device: str = "cpu") -> None:
    """Each of them profiles, locates and checks; this one looks at their end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    ranks = [
        subprocess.Popen(
            [
                *preloaded.python(),
                "-m",
                "support.ranks",
                case,
                str(rank),
                str(folder / "meeting"),
                device,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, ends, strict=True):
        if "SKIP" in out:
            pytest.skip(out.partition("SKIP")[2].strip()[:200])
        assert rank.returncode == 0, err[-3000:]
        assert "fine" in out
