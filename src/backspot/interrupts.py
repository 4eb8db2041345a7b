"""What a script's signal handlers raise is the script's, whatever Backspot does at that moment.

Python runs the handler of a signal between two instructions of the main thread: also between two of
Backspot's, where an error must not end the training. A cluster's notice or a timeout must reach the
script all the same.

- ``contained`` and ``pass_on`` tell such an exception by its traceback. They cost nothing unless
  there is an error, so they are what hooks use.
- ``heard`` also notices what other code has caught, such as a ``TimeoutError`` while a file is
  written. It is for work of some length.
- ``later`` has handlers run after a moment in which Python drops what they raise, such as a fork.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any


def pass_on(error: BaseException) -> None:
    """Raise the exception of a signal's handler that an error is, or that led to it, if any.

    To be called where the error was caught.
    """
    caught_in = error.__traceback__.tb_frame if error.__traceback__ else None
    for cause in _chain(error):
        handler = _handler(cause.__traceback__)
        # An exception that the script was handling before is in the chain too.
        if handler and (cause is error or any(caught_in is frame for frame in _callers(handler))):
            _raise(cause)


class contained:  # noqa: N801 - as contextlib.suppress
    """A ``with`` block whose errors do not leave it, but for those of a signal's handler."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Return whether the block ended with an ordinary error."""
        if not isinstance(error, Exception):
            return False
        pass_on(error)
        return True


class _Before:
    """Stands before the handlers of signals, for a ``with`` block."""

    def __init__(self) -> None:
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def _stand(self, number: int, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in the place of a handler."""
        raise NotImplementedError

    def _replace(self, *, interrupt: bool) -> None:
        """Stand before the script's handlers, and Python's own. Only the main thread runs them.

        Args:
            interrupt: whether also before the handler that raises ``KeyboardInterrupt``.
        """
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler) and (interrupt or handler is not signal.default_int_handler):
                    standing = self._stand(number, handler)
                    self._replaced[number] = handler, standing
                    signal.signal(number, standing)

    def _put_back(self) -> BaseException | None:
        """Put the handlers back, but for those that the script has replaced since.

        Returns:
            What one of them raised meanwhile.
        """
        found = None
        while self._replaced:
            number, (handler, standing) = next(iter(self._replaced.items()))
            try:
                if signal.getsignal(number) is standing:
                    signal.signal(number, handler)
                del self._replaced[number]
            except BaseException as raised:  # a handler ran just now
                found = raised
        return found


class heard(_Before):  # noqa: N801 - as contained
    """A ``with`` block that raises what a signal's handler raised in it, whoever has caught that.

    Attributes:
        raised: what a handler raised last; ``None`` if no handler has raised anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.raised: BaseException | None = None

    def __enter__(self) -> heard:
        """Stand before the handlers."""
        self._replace(interrupt=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handlers back, and raise what one of them raised."""
        raised = self._put_back()
        self.raised = raised if raised is not None else self.raised
        if self.raised is not None and self.raised is not error:
            _raise(self.raised)

    def _stand(self, number: int, handler: Callable[..., Any]) -> Callable[..., Any]:
        def noting(number: int, frame: FrameType | None) -> Any:
            try:
                return handler(number, frame)
            except BaseException as error:
                self.raised = error
                raise

        return noting


class later(_Before):  # noqa: N801 - as contained
    """A ``with`` block after which the handlers run of the signals that come in it.

    Python only prints what a handler raises in a function that runs beside a fork, and the function
    stops, such as the one that releases the lock of ``logging``. A process that is forked in the
    block gets none of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()
        self._came: list[int] = []

    def __enter__(self) -> None:
        """Stand before the handlers."""
        try:
            self._replace(interrupt=True)
        except BaseException:  # a handler ran before this stood before it
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        """Put the handlers back, and send the signals again that have come."""
        raised = self._put_back()
        came, self._came = self._came, []
        if os.getpid() == self._process:
            try:
                _send(came)
            finally:
                if raised is not None:
                    _raise(raised)

    def _stand(self, number: int, handler: Callable[..., Any]) -> Callable[..., Any]:
        return lambda number, frame: self._came.append(number)


def _send(signals: Sequence[int]) -> None:
    """Send this process signals, each of them whatever the handler of another one raises."""
    if signals:
        try:
            signal.raise_signal(signals[0])
        finally:
            _send(signals[1:])


def _raise(error: BaseException) -> None:
    """Raise an exception as it was: the error that is handled now is none of its context."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    visited = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _handler(traceback: TracebackType | None) -> FrameType | None:
    """Return the frame of a signal's handler: the frame that it interrupted is an argument."""
    interrupted = None
    while traceback is not None:
        frame = traceback.tb_frame
        if interrupted is not None and _is_given(frame, interrupted):
            return frame
        interrupted, traceback = frame, traceback.tb_next
    return None


def _is_given(frame: FrameType, wanted: FrameType) -> bool:
    code = frame.f_code
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]
    values = frame.f_locals
    values_given = [values.get(name) for name in names]
    return any(
        value is wanted or (type(value) is tuple and any(item is wanted for item in value))
        for value in values_given
    )
