"""Data parallelism over processes: paths without wrappers, the same gradients on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

WORKER = Path(__file__).parents[1] / "helpers" / "ranks.py"

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="built without torch.distributed"),
    pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file is for POSIX here"),
]


def run(case: str, folder: Path) -> None:
    """Two processes, each of which profiles, locates and checks; this one looks at their end."""
    if not distributed.is_gloo_available():
        pytest.skip("built without gloo")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), case, str(rank), str(folder / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, ends, strict=True):
        if "SKIP" in out:
            pytest.skip(out.partition("SKIP")[2].strip()[:200])
        assert rank.returncode == 0, err[-3000:]
        assert "fine" in out


@pytest.mark.parametrize(
    "case",
    [
        "ddp-before",
        "ddp-after",
        "ddp-inner",
        "ddp-unused",
        "ddp-static",
        "ddp-no-sync",
        "ddp-checkpoint",
        "ddp-compiled",
        "fsdp-before",
        "fsdp-after",
    ],
)
def test_each_rank_finds_the_owners_and_trains_as_ever(case, tmp_path):
    run(case, tmp_path)
