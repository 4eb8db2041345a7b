"""What a script's signal handlers raise is the script's, whatever Backspot does at that moment.

Python runs the handler of a signal between two instructions of the main thread: also between two of
Backspot's, where an error must not end the training. A cluster's notice or a timeout must reach the
script all the same.

- ``contained`` and ``pass_on`` tell such an exception by its traceback. They cost nothing unless
  there is an error, so they are what hooks use.
- ``heard`` also notices what other code has caught, such as a ``TimeoutError`` while a file is
  written. It is for work of some length.
"""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Iterator
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


class heard:  # noqa: N801 - as contained
    """A ``with`` block that raises what a signal's handler raised in it, whoever has caught that.

    Attributes:
        raised: what a handler raised last; ``None`` if no handler has raised anything.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._replaced: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> heard:
        """Stand before the script's handlers. Only the main thread runs them."""
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler) and handler is not signal.default_int_handler:
                    noting = self._noting(handler)
                    self._replaced[number] = handler, noting
                    signal.signal(number, noting)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put the handlers back, but for those that the script has replaced since."""
        while self._replaced:
            number, (handler, noting) = next(iter(self._replaced.items()))
            try:
                if signal.getsignal(number) is noting:
                    signal.signal(number, handler)
                del self._replaced[number]
            except BaseException as raised:  # a handler ran just now
                self.raised = raised
        if self.raised is not None and self.raised is not error:
            _raise(self.raised)

    def _noting(self, handler: Callable[[int, FrameType | None], Any]) -> Callable[..., Any]:
        def noting(number: int, frame: FrameType | None) -> Any:
            try:
                return handler(number, frame)
            except BaseException as error:
                self.raised = error
                raise

        return noting


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
