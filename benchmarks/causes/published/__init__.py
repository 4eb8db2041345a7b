"""Slow training steps that people published with their fix, rebuilt.

Each file in a folder has one: a first line that says what was slow; ``CASE``, what its
authors changed and gained, with what an ideal answer names; and ``build(fixed, context)``, which
returns a step, as it was or as it became, and the models to instrument. The facts are the authors',
the code is ours. What an ideal answer names comes from the published thread alone, and was written
before any run: in ``blind`` and ``blind_second`` by somebody who had not read the rules, in ``own``
by somebody who had. Figures of the three stand apart.

- ``parts.py``: sizes and a training step for the cases.
- ``page.py``: the page of the documentation.
- ``main.py``: runs the cases; ``judge.py``: holds reports against them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.models import Context

Step = Callable[[], "torch.Tensor"]
"""One training step; returns its loss."""
Models = Mapping[str, "torch.nn.Module"]
Build = Callable[[bool, "Context"], tuple[Step, Models]]


@dataclass(frozen=True)
class Published:
    """What is known of a case.

    Attributes:
        source: the thread, ``owner/repository#number``.
        cause: phrases, one of which names the cause: all of its words are in a finding's text.
        half: phrases that name what the cause leads to, but not the cause itself.
        place: paths of modules (``*`` is one name, ``**`` any number of them), functions
            (``name()``) and rows that are no module (``(optimizer)``).
        fix: what was changed.
        gain: as published.
        device: ``cuda`` where its figures mean nothing on a CPU, else ``any``.
        same: whether the loss stays the same.
        partly: whether the fix leaves a part of the cause.
        remains: whether what the fix leaves may be found for the same cause. The promise is judged
            all the same; whether the finding is gone is not.
        because: the cause in a sentence.
    """

    source: str
    cause: tuple[str, ...]
    place: tuple[str, ...]
    fix: str
    gain: str
    device: str = "any"
    same: bool = True
    partly: bool = False
    half: tuple[str, ...] = ()
    remains: bool = False
    because: str = ""


FOLDERS = ("blind", "blind_second", "own")
"""Of ``published_causes``."""
THIRD = "blind_third"
"""Of ``blind_set_3``."""


def names(folder: str = "") -> list[str]:
    """Return the names of the cases of ``published_causes``, or of those in one folder."""
    folders = [folder] if folder else FOLDERS
    paths = [str(Path(__file__).parent / one) for one in folders]
    return sorted(found.name for found in iter_modules(paths))


def load(name: str) -> tuple[Published, Build]:
    """Return a case, and what builds it."""
    module = _module(name)
    return module.CASE, module.build


def title(name: str) -> str:
    """Return what was slow in a case."""
    return str(_module(name).__doc__).rstrip(".")


def facts(name: str) -> dict[str, Any]:
    """Return the title of a case and what is known of it, without its imports: pages need these."""
    path = Path(__file__).parent / folder_of(name) / f"{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
    }
    case = assigned["CASE"]
    assert isinstance(case, ast.Call)
    known = {word.arg: ast.literal_eval(word.value) for word in case.keywords if word.arg}
    return {"title": str(ast.get_docstring(tree)).rstrip("."), **known}


@functools.cache
def folder_of(name: str) -> str:
    """Return the folder of a case."""
    return next(folder for folder in (*FOLDERS, THIRD) if name in names(folder))


def _module(name: str) -> Any:
    return import_module(f"benchmarks.causes.published.{folder_of(name)}.{name}")
