"""A number of an open file is not taken for the file: whoever closes it may open another."""

from __future__ import annotations

import os

import pytest

from backspot.descriptors import Descriptor

pytestmark = pytest.mark.posix


def removed(path):
    """The number of an open file that has no name any more."""
    path.write_text("{}")
    number = os.open(path, os.O_RDONLY)
    path.unlink()
    return number


def test_it_is_open_until_it_is_closed(tmp_path):
    number = removed(tmp_path / "trace")
    descriptor = Descriptor(number)
    os.pread(number, 2, 0)
    assert descriptor.is_open
    descriptor.close()
    assert not descriptor.is_open
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)


def test_a_pipe_that_is_used_is_the_same_one():
    reading, writing = os.pipe()
    descriptor = Descriptor(reading)
    os.write(writing, b"x")
    os.read(reading, 1)
    assert descriptor.is_open
    descriptor.close()
    os.close(writing)


@pytest.mark.parametrize("what", ["a file", "a file without a name", "a pipe"])
def test_another_file_with_its_number_stays_open(what, tmp_path):
    number = removed(tmp_path / "trace")
    descriptor = Descriptor(number)
    os.close(number)
    if what == "a pipe":
        others = os.pipe()
    elif what == "a file":  # it may have the inode of the other one
        others = (os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY),)
    else:
        others = (removed(tmp_path / "log"),)
    assert number in others
    assert not descriptor.is_open
    descriptor.close()
    for other in others:
        os.close(other)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_copy_of_the_process_has_it_unless_it_is_kept_from_copies(is_kept, tmp_path):
    number = removed(tmp_path / "trace")
    descriptor = Descriptor(number)
    if is_kept:
        descriptor.keep_from_copies()
    copy = os.fork()
    if not copy:
        os._exit(os.path.exists(f"/proc/self/fd/{number}"))  # noqa: PTH110
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == (not is_kept)
    assert descriptor.is_open
    descriptor.close()
