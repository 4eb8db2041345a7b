"""Which cases of a parametrized test are quick."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases; those that are not among the quick ones are marked as slow."""
    cases = list(cases)
    assert any(case in quick for case in cases), "none is quick"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
