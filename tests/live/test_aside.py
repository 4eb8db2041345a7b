"""Work in a copy of the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from backspot.live.aside import Aside

pytestmark = [
    pytest.mark.posix,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux copies a process safely"),
]


def test_work_is_done_in_a_process_that_is_no_child(tmp_path: Path) -> None:
    found = tmp_path / "found"
    aside = Aside()
    aside.begin(lambda: (time.sleep(0.1), found.write_text(f"{os.getpid()} {os.getppid()}")))
    assert not found.exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    aside.wait()
    assert str(os.getpid()) not in found.read_text().split()


def test_one_piece_of_work_comes_after_the_other(tmp_path: Path) -> None:
    done = tmp_path / "done"
    aside = Aside()

    def add(number: int) -> None:
        time.sleep(0.05 * (number == 0))
        with done.open("a") as file:
            file.write(str(number))

    for number in range(3):
        aside.begin(lambda number=number: add(number))
    aside.wait()
    assert done.read_text() == "012"


def test_what_a_killed_copy_has_not_done_is_done_here() -> None:
    here = os.getpid()
    done: list[int] = []

    def work() -> None:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(os.getpid())

    aside = Aside()
    aside.begin(work)
    aside.wait()
    aside.wait()
    assert done == [here]


def test_an_interrupt_comes_when_the_work_is_done(tmp_path: Path) -> None:
    done = tmp_path / "done"
    aside = Aside()
    aside.begin(lambda: (time.sleep(0.3), done.touch()))
    threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        aside.wait()
    assert done.exists()


def test_handlers_of_the_script_do_not_run_in_the_copy(tmp_path: Path) -> None:
    called = tmp_path / "called"
    before = signal.signal(signal.SIGTERM, lambda *_: called.touch())
    aside = Aside()
    try:
        aside.begin(lambda: os.kill(os.getpid(), signal.SIGTERM))
        aside.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not called.exists()


def test_no_copy_is_made_where_messages_go_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert not Aside.is_possible()
