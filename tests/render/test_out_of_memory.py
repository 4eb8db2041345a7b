"""What is said of a training that died of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backspot.render.out_of_memory import render_out_of_memory
from backspot.results import HeldMemory, OutOfMemory, Report
from support.deaths import DEATHS, GB, HISTORY, PROCESS, SNAPSHOT
from support.sample_reports import ODD_NAMES, vit


@pytest.mark.parametrize("name", DEATHS)
def test_it_reads_as_it_did(golden, name):
    golden(f"out_of_memory.{name}.txt", render_out_of_memory(DEATHS[name], width=80) + "\n")


def words(one):
    return " ".join(render_out_of_memory(one, width=80).split())


def test_pieces_that_would_not_do_are_no_fragmentation():
    assert "expandable_segments" in words(SNAPSHOT)
    assert "free in pieces:" not in words(HISTORY)
    # One that is large enough could not be used for another reason.
    assert "expandable_segments" not in words(replace(SNAPSHOT, largest_piece_bytes=3 * GB))
    assert "expandable_segments" not in words(HISTORY)


def test_other_processes_are_named_where_they_have_much():
    assert "nvidia-smi" not in words(SNAPSHOT)
    assert "nvidia-smi" in words(replace(SNAPSHOT, free_bytes=0, reserved_bytes=60 * GB))


def test_a_smaller_batch_is_no_advice_where_little_is_of_the_batch():
    held = (HeldMemory("parameter", 70 * GB, 9), HeldMemory("other", 2 * GB, 9))
    assert "A smaller batch frees little" in words(replace(SNAPSHOT, held=held))


OF_DRIVER = replace(SNAPSHOT, source="process", error="AcceleratorError", asked_bytes=None)


def test_pinned_memory_is_not_told_as_the_gpus():
    said = words(replace(OF_DRIVER, free_bytes=70 * GB, in_use_bytes=5 * GB, reserved_bytes=6 * GB))
    assert "of pinned memory of the host, or in a library, as 70.0 GB of the 79.1 GB" in said
    assert "batch" not in said
    assert "share" not in said


def test_a_full_gpu_that_a_library_asks_is_the_gpus():
    assert "pinned" not in words(OF_DRIVER)
    asked_pytorch = replace(OF_DRIVER, error="OutOfMemoryError", free_bytes=70 * GB)
    assert "pinned" not in words(asked_pytorch)


def test_an_allocator_that_tells_nothing_makes_memory_nobodys():
    held = (HeldMemory("parameter", 8 * GB, 200),)
    silent = replace(OF_DRIVER, held=held, in_use_bytes=8 * GB, reserved_bytes=0, pieces_bytes=0)
    said = words(silent)
    assert "not told: tensors, CUDA, libraries, other processes 70.2 GB" in said
    assert "smaller batch" not in said
    assert "nvidia-smi" not in said
    assert "smaller batch" not in words(replace(silent, held=(), in_use_bytes=0))


def test_what_a_limit_of_addresses_counts_is_of_this_process():
    assert "other processes" in words(PROCESS)
    said = words(replace(PROCESS, limit="ulimit -v"))
    assert "addresses this process has reserved 38.2 GB" in said
    assert "other processes" not in said


def test_a_host_without_memory_for_data_has_no_advice_on_the_batch():
    assert "smaller batch" in words(PROCESS)
    assert "smaller batch" not in words(replace(PROCESS, phase="other"))
    worker = replace(PROCESS, total_bytes=0, free_bytes=0, in_use_bytes=0, held=())
    assert "smaller batch" not in words(worker)
    assert "of another process" in words(worker)


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
