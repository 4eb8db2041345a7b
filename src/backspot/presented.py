"""How results print and save themselves, and where users find their classes.

Renderers import results, so results cannot import renderers. ``backspot/__init__.py`` imports both
and runs before any other module of the package. It sets ``forms`` and ``save_labelled``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import pandas as pd

Result: TypeAlias = Any
"""A ``Report``, ``Subtree``, ``Comparison`` or that of a part. Their modules import this one."""


_Known = TypeVar("_Known", bound="Beside")


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


class Beside:
    """What a result knows besides its data: it is not saved, compared, printed or copied.

    This is no field, because every field is written as JSON.
    """

    __slots__ = ("_beside",)


def known_beside(result: Beside) -> Mapping[str, Any]:
    """Return what a result knows besides its data, by name."""
    extras: Mapping[str, Any] = getattr(result, "_beside", {})
    return extras


def beside(result: Beside, name: str) -> Any:
    """Return what a result knows besides its data under a name; ``None`` where it knows nothing."""
    return known_beside(result).get(name)


def with_beside(result: _Known, extras: Mapping[str, Any]) -> _Known:
    """Add to a new result, which nobody has yet, what it knows besides its data; return it."""
    object.__setattr__(result, "_beside", {**known_beside(result), **extras})
    return result


LABELLED = (".trace.json", ".json.gz")
"""Suffixes of a labelled trace, which is a copy of a trace and not a form of a report."""


_Class = TypeVar("_Class", bound=type)
_ATTRIBUTES = "    Attributes:\n"


def _attributes_of(cls: type) -> str:
    """Return the lines of a docstring about attributes, each with a line break."""
    lines = (cls.__doc__ or "").partition(_ATTRIBUTES)[2].partition("\n\n")[0].rstrip()
    return f"{lines}\n" if lines else ""


def public(cls: _Class) -> _Class:
    """Name the package of a result as its home, in reprs, tracebacks and pickles.

    Its annotations are evaluated first, because the package does not have the names in them. Its
    docstring tells the attributes that it has from its bases, too.
    """
    from inspect import get_annotations

    cls.__annotations__ = get_annotations(cls, locals={cls.__name__: cls}, eval_str=True)
    cls.__module__ = cls.__module__.rpartition(".")[0]
    bases = [base for base in cls.__mro__[-1:0:-1] if "__dataclass_fields__" in vars(base)]
    if bases and cls.__doc__:
        before, own, after = cls.__doc__.partition(_ATTRIBUTES)
        if not own:
            before, example, after = cls.__doc__.partition("    Example:\n")
            before, after = f"{before.rstrip()}\n\n", f"\n{example}{after}"
        cls.__doc__ = "".join((before, _ATTRIBUTES, *map(_attributes_of, bases), after))
    if issubclass(cls, Presented):
        # Of its own: IPython prefers a class's own __repr__ to the _repr_pretty_ of its base.
        cls._repr_pretty_ = Presented._pretty  # type: ignore[attr-defined]
    return cls
