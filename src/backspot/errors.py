"""What can go wrong, each kind with the exit code that the command line ends with.

Every message is one line that names the input and says what to do. The codes are part of the
public interface: 0 fine, 1 an error of Backspot's own, 2 usage, 3 not found or not readable, 4 not
a trace, 5 no backward in it, 6 the output exists, 7 an optional part is not installed, 8
slower than `diff --fail-above` allows, 130 interrupted.
"""

from __future__ import annotations

__all__ = [
    "AlreadyInstrumentedError",
    "BackspotError",
    "MissingDependencyError",
    "NoBackwardError",
    "NotATraceError",
    "OutputExistsError",
    "SlowerError",
    "SourceNotFoundError",
    "UsageError",
]


class BackspotError(Exception):
    """The base of every error that Backspot raises on purpose.

    Attributes:
        exit_code: what ``backspot`` exits with when this ends a command.
    """

    exit_code: int = 1


class UsageError(BackspotError, ValueError):
    """An argument that cannot be meant: an unknown mode, a negative depth, a wrong type."""

    exit_code = 2


class AlreadyInstrumentedError(UsageError):
    """The model, or a part of it, bears Backspot's hooks already."""


class SourceNotFoundError(BackspotError, FileNotFoundError):
    """The trace is not there, cannot be read, or the folder holds none."""

    exit_code = 3


class NotATraceError(BackspotError, ValueError):
    """The input is no Kineto trace, or is broken beyond use."""

    exit_code = 4


class NoBackwardError(BackspotError, ValueError):
    """A trace without a backward pass: there is nothing to rank."""

    exit_code = 5


class OutputExistsError(BackspotError, FileExistsError):
    """The output is there already and ``force`` was not given."""

    exit_code = 6


class MissingDependencyError(BackspotError, ImportError):
    """An optional part is not installed."""

    exit_code = 7


class SlowerError(BackspotError):
    """The backward got slower than ``diff --fail-above`` allows."""

    exit_code = 8
