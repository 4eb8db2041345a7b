"""Data parallelism over processes: paths without wrappers, the same gradients on every rank."""

import sys

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

from support.two_ranks import run_two_ranks  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="built without torch.distributed"),
    pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file is for POSIX here"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "ddp-before",
        "ddp-after",
        "ddp-inner",
        "ddp-unused",
        "ddp-static",
        "ddp-no-sync",
        "ddp-late",
        "ddp-checkpoint",
        "ddp-compiled",
        "fsdp-before",
        "fsdp-after",
    ],
)
def test_each_rank_finds_the_owners_and_trains_as_ever(case, tmp_path):
    if not distributed.is_gloo_available():
        pytest.skip("built without gloo")
    run_two_ranks(case, tmp_path)
