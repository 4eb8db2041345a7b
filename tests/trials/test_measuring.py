"""The clock that short work is timed with."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")

from backspot.live.trials.measuring import clock_of_thread, tick_of

TICK = 15_625_000


def coarse():
    """As the clock of a thread's own time on Windows, which ticks 64 times a second."""
    return time.thread_time_ns() // TICK * TICK


def test_a_clock_ticks_in_the_steps_in_which_it_goes_forward():
    assert tick_of(coarse) == TICK


def test_clock_time_counts_where_a_thread_s_own_time_is_coarse_or_not_known():
    assert clock_of_thread(coarse) is time.perf_counter_ns
    assert clock_of_thread(None) is time.perf_counter_ns


@pytest.mark.posix
def test_a_thread_s_own_time_counts_where_the_system_tells_it_finely():
    assert clock_of_thread() is time.thread_time_ns
