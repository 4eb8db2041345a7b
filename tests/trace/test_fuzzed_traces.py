"""A few hundred broken traces; ``benchmarks/robustness/fuzz_traces.py`` makes any number."""

from __future__ import annotations

import pytest

from benchmarks.robustness import fuzz_traces


@pytest.fixture(scope="module")
def sources() -> list[fuzz_traces.Source]:
    return fuzz_traces.sources(traces=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["a", "b"])
def test_a_broken_trace_is_refused_or_adds_up(seed: str, sources: list[fuzz_traces.Source]) -> None:
    found = fuzz_traces.fuzz(sources, seed, range(100))
    assert found.bad == []
    # Neither is all refused, nor all sound.
    assert found.outcomes["warned"] + found.outcomes["clean"] >= 30
    assert found.outcomes["NotATraceError"] >= 3


@pytest.mark.slow
def test_a_case_is_made_again_by_its_number(sources: list[fuzz_traces.Source]) -> None:
    for number in range(20):
        one, other = (fuzz_traces.case(sources, "a", number)[0] for _ in range(2))
        assert one == other
