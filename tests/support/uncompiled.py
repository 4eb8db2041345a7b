"""Tests that begin as if nothing was compiled in this process."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """What tries copies keeps away from compiled code, which tests before these may have run."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.clear_compilation_metrics()
