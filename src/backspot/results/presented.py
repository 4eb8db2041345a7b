"""How results print, draw and save themselves without knowing how.

Renderers import results, so results cannot import renderers. ``backspot/__init__.py`` knows both,
and runs before any module of the package: it sets ``forms`` and ``labelling``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = ["LABELLED", "Forms", "Labelling", "Presented", "Result", "forms", "labelling"]

Result: TypeAlias = Any
"""A ``Report``, a ``Subtree`` or a ``Comparison``: they import this module."""


class Forms(Protocol):
    """What ``backspot.render`` makes of a result."""

    def as_text(self, result: Result, /) -> str:
        """Text for a terminal."""

    def as_html(self, result: Result, /) -> str:
        """HTML for a notebook's cell."""

    def write(
        self, result: Result, path: str | os.PathLike[str], /, *, force: bool = False
    ) -> Path:
        """A file in the form that its suffix names."""

    def read(self, path: str | os.PathLike[str], /) -> Result:
        """The report that was saved as JSON."""

    def as_frame(self, report: Result, /) -> pd.DataFrame:
        """A data frame, one row a module."""

    def draw(self, report: Result, /, **options: Any) -> Axes:  # noqa: ANN401 - those of Report.plot
        """A bar chart of the most expensive modules."""


class Labelling(Protocol):
    """What ``backspot.pipeline`` does with a report's trace."""

    def save_labelled(
        self, report: Result, path: str | os.PathLike[str], /, *, force: bool = False
    ) -> Path:
        """Write a labelled copy of the trace that the report was made of."""


def _unwired() -> NoReturn:
    raise RuntimeError("import backspot, which joins results to what prints and saves them")


forms: Callable[[], Forms] = _unwired
"""Imports the renderers and gives them."""
labelling: Callable[[], Labelling] = _unwired
"""Imports the pipeline and gives it."""


class Presented:
    """A result that prints itself and shows itself in a notebook."""

    __slots__ = ()

    def __str__(self) -> str:
        return forms().as_text(self)

    def _repr_html_(self) -> str:
        return forms().as_html(self)


LABELLED = (".trace.json", ".trace.json.gz")
"""How a labelled trace ends, which is made of a trace and no form of a report."""
