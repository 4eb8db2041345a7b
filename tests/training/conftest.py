import pytest

pytest.importorskip("torch")

from support.hooks import (
    default_hooks,  # noqa: F401
    for_each_kind as pytest_generate_tests,  # noqa: F401
)


@pytest.fixture
def set_reentrant():
    """Timm's switch, for this test alone: whether its models checkpoint reentrantly."""
    config = pytest.importorskip("timm.layers")
    before = config.use_reentrant_ckpt()
    yield config.set_reentrant_ckpt
    config.set_reentrant_ckpt(before)
