"""Data parallelism over processes: paths without wrappers, the same gradients on every rank."""

import sys

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

from support.gloo import train_two_ranks  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="built without torch.distributed"),
    pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file is for POSIX here"),
]


CASES = {
    "ddp": "before after inner unused static no-sync late checkpoint compiled",
    "fsdp": "before after",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_each_rank_finds_the_owners_and_trains_as_ever(kind, tmp_path):
    if not distributed.is_gloo_available():
        pytest.skip("built without gloo")
    train_two_ranks([f"{kind}-{case}" for case in CASES[kind].split()], tmp_path)
