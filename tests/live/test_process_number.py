"""Each copy of a process knows its own number, however it was made."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest

pytest.importorskip("torch")

from backspot.live.process_number import process_number

pytestmark = pytest.mark.posix
WITHOUT_HOOKS = True


def _numbers() -> tuple[int, int]:
    return process_number(), os.getpid()


def _by_os() -> tuple[int, int]:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, "{} {}".format(*_numbers()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    known, own = os.read(reads, 100).split()
    os.close(reads)
    os.close(writes)
    return int(known), int(own)


def _by_multiprocessing() -> tuple[int, int]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_numbers)


def _in_a_thread() -> tuple[int, int]:
    numbers = []
    thread = threading.Thread(target=lambda: numbers.append(_by_os()))
    thread.start()
    thread.join()
    return numbers[0]


def _copy_of_a_copy() -> tuple[int, int]:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_by_os)


@pytest.mark.parametrize("copied", [_by_os, _by_multiprocessing, _in_a_thread, _copy_of_a_copy])
def test_a_copy_of_a_process_knows_its_own_number_and_the_first_one_still_its_own(copied):
    before = process_number()
    known, own = copied()
    assert known == own != before
    assert process_number() == os.getpid() == before
