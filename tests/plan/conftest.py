from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Plans keep away from steps that run compiled code, which tests before these may have run."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.clear_compilation_metrics()
