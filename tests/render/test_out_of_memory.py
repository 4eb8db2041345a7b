"""What is said of a training that died of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backspot.render.out_of_memory import render_out_of_memory
from backspot.results import HeldMemory, OutOfMemory, Report
from support.deaths import DEATHS, GB, HISTORY, SNAPSHOT
from support.sample_reports import ODD_NAMES, vit


@pytest.mark.parametrize("name", DEATHS)
def test_it_reads_as_it_did(golden, name):
    golden(f"out_of_memory.{name}.txt", render_out_of_memory(DEATHS[name], width=80) + "\n")


def words(one):
    return " ".join(render_out_of_memory(one, width=80).split())


def test_pieces_that_would_not_do_are_no_fragmentation():
    assert "expandable_segments" in words(SNAPSHOT)
    assert "free in pieces:" not in words(HISTORY)
    assert "expandable_segments" not in words(HISTORY)


def test_other_processes_are_named_where_they_have_much():
    assert "nvidia-smi" not in words(SNAPSHOT)
    assert "nvidia-smi" in words(replace(SNAPSHOT, free_bytes=0, reserved_bytes=60 * GB))


def test_a_smaller_batch_is_no_advice_where_little_is_of_the_batch():
    held = (HeldMemory("parameter", 70 * GB, 9), HeldMemory("other", 2 * GB, 9))
    assert "A smaller batch frees little" in words(replace(SNAPSHOT, held=held))


def test_a_request_beyond_all_memory_has_no_other_advice():
    said = words(replace(SNAPSHOT, asked_bytes=10**15))
    assert "No batch size helps" in said
    assert "smaller batch" not in said


@pytest.mark.parametrize("name", DEATHS)
def test_it_is_read_back_as_it_was_saved(name, tmp_path):
    one = DEATHS[name]
    assert OutOfMemory.load(one.save(tmp_path / "one.json")) == one
    report = replace(vit(), out_of_memory=one)
    assert Report.load(report.save(tmp_path / "report.json")) == report


@pytest.mark.parametrize("name", ODD_NAMES)
def test_no_name_gets_into_markup_or_a_terminal(name, tmp_path):
    held = (HeldMemory("activation", 9, 1, name, name, 1),)
    one = replace(HISTORY, path=name, class_name=name, limit=name, node=name, held=held)
    text = render_out_of_memory(one, width=80)
    page = one.save(tmp_path / "one.html").read_text(encoding="utf-8")
    reports = replace(vit(), out_of_memory=one)
    whole = reports.save(tmp_path / "report.html").read_text(encoding="utf-8")
    for shown in (text, reports.save(tmp_path / "r.txt").read_text(encoding="utf-8"), page, whole):
        assert "\x1b" not in shown
        assert "\u202e" not in shown
    for markup in (page, whole):
        assert "<img src=x" not in markup


def test_unlikely_numbers_are_shown_too():
    empty = replace(HISTORY, total_bytes=0, free_bytes=0, in_use_bytes=0, batch_size=0, held=())
    odd = replace(HISTORY, layers=(HeldMemory("activation", 10**15, 1, "a.*", "A", 0),))
    for one in (empty, odd, replace(SNAPSHOT, step=None, asked_bytes=None, class_name="")):
        assert "ran out of memory" in words(one)
