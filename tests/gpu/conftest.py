import os

import pytest

torch = pytest.importorskip("torch")

# cuBLAS computes the same bits each time with a workspace of this kind alone, and looks once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def deterministic():
    """PyTorch computes the same bits each time, or complains."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
