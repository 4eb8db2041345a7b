"""Public training scripts, and what each needs to run where there is no network.

They are in ``public_scripts.toml``, and those whose plan is followed in ``plan_scripts.toml``. A
checkout of ``repository`` at its commit lies in the folder ``repository`` of the folder of
checkouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

__all__ = ["COMMITS", "SCRIPTS", "Script", "Scripts"]


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
        varies: regular expressions of what no two runs of the script print alike, as its speed.
        path: folders, from the working folder, that the script imports from.
        interrupt: text on standard output after which Ctrl-C is pressed.
        together: whether several of its processes print at the same time, words in any order.
        compiled: whether its model is compiled: the second clock sees no module in compiled code.
        environment: variables as `NAME=VALUE`.
        devices: where it runs.
        options: of ``backspot run``.
        follow: by the name of a plan's setting, what makes it in this script: ``arguments``, with
            ``{}`` for the number that the setting ends with, or ``patches``, each a file from the
            checkout, a text that it has once, and its replacement.
    """

    repository: str
    file: str
    folder: str = ""
    arguments: tuple[str, ...] = ()
    data: tuple[tuple[Any, ...], ...] = ()
    needs: tuple[str, ...] = ()
    stubbed: str = ""
    varies: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    interrupt: str = ""
    together: bool = False
    compiled: bool = False
    environment: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    options: tuple[str, ...] = ()
    follow: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _read(fields: dict[str, Any]) -> Script:
    arguments = tuple(fields.pop("arguments", "").split())
    data = tuple(tuple(one) for one in fields.pop("data", ()))
    lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    return Script(**{**fields, **lists, "arguments": arguments, "data": data})


@dataclass(frozen=True)
class Scripts:
    """The scripts of one file, and the commits of their repositories."""

    commits: Mapping[str, str]
    scripts: Mapping[str, Script]

    @classmethod
    def read(cls, path: Path) -> Scripts:
        """Read a file in TOML.

        A script's table ``cpu`` makes another one, ``NAME-cpu``, with other values of its fields.
        """
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        scripts: dict[str, Script] = {}
        for name, fields in document["scripts"].items():
            small = fields.pop("cpu", None)
            scripts[name] = _read({**fields})
            if small is not None:
                scripts[f"{name}-cpu"] = _read({**fields, "devices": ["cpu"], **small})
        return cls(document["commits"], scripts)


_UNEDITED = Scripts.read(Path(__file__).with_suffix(".toml"))
COMMITS, SCRIPTS = _UNEDITED.commits, _UNEDITED.scripts
