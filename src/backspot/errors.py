"""Errors that Backspot raises on purpose, each with the exit code of the command line.

Every message is one line that names the input and says what to do. The exit codes are part of the
public interface: 0 success, 1 an error inside Backspot, 2 usage, 3 not found or not readable, 4 not
a trace, 5 a trace without a backward, 6 the output exists, 7 an optional dependency is missing, 8
slower than ``diff --fail-above`` allows, 9 too noisy to tell (with ``--strict``), 130 interrupted.
"""

from __future__ import annotations


class BackspotError(Exception):
    """Base class of every error that Backspot raises on purpose.

    Attributes:
        exit_code: Exit code of ``backspot`` if this error ends a command.

    Example:
        >>> try:
        ...     backspot.locate("missing.json")
        ... except backspot.BackspotError as error:
        ...     print(error, error.exit_code)
        missing.json is not there: check the trace's path 3
    """

    __module__ = "backspot"
    exit_code: int = 1


class UsageError(BackspotError, ValueError):
    """An invalid argument: an unknown option, a negative depth, a wrong type. Exit code 2."""

    __module__ = "backspot"
    exit_code = 2


class AlreadyInstrumentedError(UsageError):
    """The model, or a part of it, already has Backspot's hooks. Exit code 2."""

    __module__ = "backspot"


class SourceNotFoundError(BackspotError, FileNotFoundError):
    """The trace is missing, cannot be read, or its folder contains none. Exit code 3."""

    __module__ = "backspot"
    exit_code = 3


class NotATraceError(BackspotError, ValueError):
    """The input is not a Kineto trace, or is too broken to use. Exit code 4."""

    __module__ = "backspot"
    exit_code = 4


class NoBackwardError(BackspotError, ValueError):
    """The trace has no backward pass, so there is nothing to rank. Exit code 5."""

    __module__ = "backspot"
    exit_code = 5


class OutputExistsError(BackspotError, FileExistsError):
    """The output file exists and ``force`` is false. Exit code 6."""

    __module__ = "backspot"
    exit_code = 6


class MissingDependencyError(BackspotError, ImportError):
    """An optional dependency is not installed. Exit code 7."""

    __module__ = "backspot"
    exit_code = 7


class SlowerError(BackspotError):
    """The backward got slower than ``diff --fail-above`` allows. Exit code 8."""

    exit_code = 8


class TooNoisyError(BackspotError):
    """The noise is too large for ``diff --fail-above --strict`` to tell. Exit code 9."""

    exit_code = 9
