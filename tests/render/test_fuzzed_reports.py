"""A few hundred broken reports; ``benchmarks/robustness/fuzz_reports.py`` makes any number."""

from __future__ import annotations

import pytest

from benchmarks.robustness import fuzz_reports


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["a", "b"])
def test_a_broken_report_is_refused_or_serves_for_everything(seed):
    found = fuzz_reports.fuzz(fuzz_reports.sources(traces=8), seed, range(60))
    assert found.bad == []
    assert found.outcomes["loaded"] >= 10
    assert found.outcomes["NotATraceError"] >= 10
