from __future__ import annotations

import pytest

from support.uncompiled import nothing_is_compiled  # noqa: F401 - for all tests here

pytest.importorskip("torch")


@pytest.fixture
def short(monkeypatch):
    """Few rounds: what they measure matters in few tests."""
    monkeypatch.setattr("backspot.live.plan.comparing._MOST_ROUNDS", 6)
    monkeypatch.setattr("backspot.live.trials.measuring._MOST_ROUNDS", 6)
    monkeypatch.setattr("backspot.live.trials.measuring._LEAST_SAMPLE", 1)


@pytest.fixture
def uncompiled(monkeypatch):
    """Nothing is compiled, which takes longer than all else."""
    monkeypatch.setattr("backspot.live.plan.settings._compilers", lambda *_: iter(()))
