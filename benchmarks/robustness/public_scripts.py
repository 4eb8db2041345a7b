"""Public training scripts, and what each needs to run where there is no network.

They are in ``public_scripts.toml``. A checkout of ``repository`` at its commit lies in the folder
``repository`` of the folder of checkouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

__all__ = ["COMMITS", "SCRIPTS", "Script"]


@dataclass(frozen=True)
class Script:
    """A public script.

    Attributes:
        repository: whose checkout has it.
        file: the script, from the working folder.
        folder: the working folder, from the checkout.
        arguments: what the script is called with.
        data: toy data: each a kind, a path from the working folder, and sizes (``toy_data.py``).
        needs: packages beside torch that must be there.
        stubbed: what else stands in for something that is not there.
        timings: regular expressions of what the script prints about its own speed.
        path: folders, from the working folder, that the script imports from.
        interrupt: text on standard output after which Ctrl-C is pressed.
        compiled: whether its model is compiled: the second clock sees no module in compiled code.
        environment: variables as `NAME=VALUE`.
        devices: where it runs.
        options: of ``backspot run``.
    """

    repository: str
    file: str
    folder: str = ""
    arguments: tuple[str, ...] = ()
    data: tuple[tuple[Any, ...], ...] = ()
    needs: tuple[str, ...] = ()
    stubbed: str = ""
    timings: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    interrupt: str = ""
    compiled: bool = False
    environment: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    options: tuple[str, ...] = ()


def _read(fields: dict[str, Any]) -> Script:
    arguments = tuple(fields.pop("arguments", "").split())
    data = tuple(tuple(one) for one in fields.pop("data", ()))
    lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return Script(**{**fields, **lists, "arguments": arguments, "data": data})


_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
_DOCUMENT = tomllib.loads(_TEXT)
COMMITS: dict[str, str] = _DOCUMENT["commits"]
SCRIPTS = {name: _read(fields) for name, fields in _DOCUMENT["scripts"].items()}
