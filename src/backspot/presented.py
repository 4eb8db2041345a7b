"""How results print and save themselves, and where users find their classes.

Renderers import results, so results cannot import renderers. ``backspot/__init__.py`` imports both
and runs before any other module of the package. It sets ``forms`` and ``save_labelled``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import pandas as pd

Result: TypeAlias = Any
"""A ``Report``, ``Subtree``, ``Comparison`` or that of a part. Their modules import this one."""


class Forms(Protocol):
    """The functions of ``backspot.render``."""

    def as_text(self, result: Result, /) -> str:
        """Return text for a terminal."""

    def as_html(self, result: Result, /) -> str:
        """Return HTML for a notebook cell."""

    def find_answer(self, report: Result, /) -> Any:
        """Return what costs most in the step of a report."""

    def show(self, report: Result, height: int, /, *, preview: bool = False) -> None:
        """Display the page of a report in the output of a notebook's cell."""

    def write(
        self,
        result: Result,
        path: str | os.PathLike[str],
        /,
        *,
        force: bool = False,
        preview: bool = False,
    ) -> Path:
        """Write a file in the format that its suffix names, and return its path."""

    def read(self, path: str | os.PathLike[str], kind: type, /) -> Result:
        """Return the report of this kind that was saved as JSON."""

    def as_frame(self, report: Result, /) -> pd.DataFrame:
        """Return a data frame with one row per module."""


def _unwired(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("import backspot first: it connects results with the code that prints them")


forms: Callable[[], Forms] = _unwired
"""Import the renderers and return them."""
save_labelled: Callable[..., Path] = _unwired
"""Write a labelled copy of the trace that a report was made from: a function of the pipeline."""


class Presented:
    """A result that prints itself and displays itself in a notebook."""

    __slots__ = ()

    def __str__(self) -> str:
        return forms().as_text(self)

    def _repr_html_(self) -> str:
        return forms().as_html(self)

    def _made_of(self) -> list[str]:
        """The files that it was made of, which saving it must not overwrite."""
        raise NotImplementedError

    def _pretty(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


LABELLED = (".trace.json", ".json.gz")
"""Suffixes of a labelled trace, which is a copy of a trace and not a form of a report."""


_Class = TypeVar("_Class", bound=type)


def public(cls: _Class) -> _Class:
    """Name the package of a result as its home, in reprs, tracebacks and pickles.

    Its annotations are evaluated first, because the package does not have the names in them.
    """
    from inspect import get_annotations

    cls.__annotations__ = get_annotations(cls, locals={cls.__name__: cls}, eval_str=True)
    cls.__module__ = cls.__module__.rpartition(".")[0]
    if issubclass(cls, Presented):
        # Of its own: IPython prefers a class's own __repr__ to the _repr_pretty_ of its base.
        cls._repr_pretty_ = Presented._pretty  # type: ignore[attr-defined]
    return cls
