"""The errors that Backspot raises, each with an exit code of the command line.

Every message is one line that names the input and says what to do. The exit codes are part of the
public interface: 0 success, 1 an error in Backspot itself, 2 usage, 3 not found or not readable,
4 not a trace, 5 a trace without a backward, 6 the output exists, 7 an optional dependency is not
installed, 8 slower than `diff --fail-above` allows, 130 interrupted.
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
        exit_code: the exit code of ``backspot`` when this error ends a command.
    """

    exit_code: int = 1


class UsageError(BackspotError, ValueError):
    """An invalid argument: an unknown mode, a negative depth, a wrong type."""

    exit_code = 2


class AlreadyInstrumentedError(UsageError):
    """The model, or a part of it, has Backspot's hooks already."""


class SourceNotFoundError(BackspotError, FileNotFoundError):
    """The trace does not exist or cannot be read, or the folder has none."""

    exit_code = 3


class NotATraceError(BackspotError, ValueError):
    """The input is no Kineto trace, or is broken beyond use."""

    exit_code = 4


class NoBackwardError(BackspotError, ValueError):
    """A trace without a backward pass: there is nothing to rank."""

    exit_code = 5


class OutputExistsError(BackspotError, FileExistsError):
    """The output exists already and ``force`` was not given."""

    exit_code = 6


class MissingDependencyError(BackspotError, ImportError):
    """An optional dependency is not installed."""

    exit_code = 7


class SlowerError(BackspotError):
    """The backward got slower than ``diff --fail-above`` allows."""

    exit_code = 8
