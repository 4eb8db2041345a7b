"""A trace, and texts, without what could name a person, a machine, a file or its content.

What stays is listed, not what goes: times, numbers, the names of operators, kernels, modules and
classes, and the fields of events in ``names.TELLING_NOTHING``. Files become ``source-1.py``, the
same one each time, so that lines can still be told apart.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from backspot.trace import names

_FILE = re.compile(
    r"(?P<file>[^\s'\"(),;\[\]{}|]*\.(?:pyx?|ipynb)|<[\w-]+>(?=:\d))(?P<line>:\d+(?:-\d+)?)?(?!\w)"
)
_PYTHON = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
_PATH = re.compile(r"[^\s'\"(),;<>\[\]{}|]*[\\/~][^\s'\"(),;<>\[\]{}|]*")
_DATA = re.compile(
    r"[^\s'\"(),;\[\]{}|/\\]+\.(?:json|gz|txt|csv|tsv|pt|pth|ckpt|bin|parquet|np[yz]|jpe?g|png|h5|"
    r"hdf5|tar|zip|safetensors|ya?ml|toml|log|cfg|ini)\b"
)
_ERROR = re.compile(r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)): [^;)]*")
_UNIT = re.compile(r"[\w.]+/s\W?")
_KNOWN_ADDRESS = re.compile(r"https://(?:docs\.)?pytorch\.org/\S*")
_NUMBERS = re.compile(r"[-\d.,%<\s\[\]()eE]*|True|False|None|")
_THREAD = re.compile(r"(?:backward \()?(?:thread|stream) \d+")
_DEVICE = re.compile(r"(?:CPU|GPU ?\d*)")
_LEAST = 3
"""Letters of a name of the user or the machine, from which it is searched for in texts."""
_NOBODY = {"root", "user", "ubuntu", "localhost", "nobody", "python"}
_GONE = "…"


class Anonymizer:
    """Takes out of texts what could name a person, a machine or a file.

    One for all texts of a file: the same source file gets the same stand-in.
    """

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._annotations: dict[str, int] = {}
        own = [re.escape(name) for name in _own_names()]
        self._own = re.compile("|".join(own)) if own else None

    def text(self, text: str) -> str:
        """Return a sentence without files, paths, messages of errors and names of this machine."""
        text = _ERROR.sub(r"\1", text)
        text = _FILE.sub(lambda found: self.file(found["file"]) + (found["line"] or ""), text)
        text = _PATH.sub(self._path, text)
        text = _DATA.sub(_GONE, text)
        return self._own.sub(_GONE, text) if self._own else text

    def file(self, file: str) -> str:
        """Return the stand-in of a source file; ``""`` stays."""
        if not file:
            return ""
        return f"source-{self._files.setdefault(file, len(self._files) + 1)}.py"

    def place(self, place: str) -> str:
        """Return ``file:line`` with the stand-in of the file; ``""`` stays."""
        file, colon, line = place.rpartition(":")
        if not colon or not re.fullmatch(r"\d+(?:-\d+)?", line):
            return self.file(place)
        return f"{self.file(file)}:{line}"

    def trace(self, trace: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield a trace anew, as JSON."""
        yield b"{"
        for key, value in trace.items():
            if key in names.HEAD_TELLING_NOTHING and _is_plain(value):
                yield f"{json.dumps(key)}:{json.dumps(value)},\n".encode()
        devices = trace.get("deviceProperties")
        if isinstance(devices, list):
            kept = [
                {
                    key: value
                    for key, value in device.items()
                    if key == "name" or not isinstance(value, str)
                }
                for device in devices
                if isinstance(device, dict)
            ]
            yield f'"deviceProperties":{json.dumps(kept)},\n'.encode()
        ranks = trace.get("distributedInfo")
        if isinstance(ranks, dict):
            known = {key: ranks[key] for key in ("backend", "rank", "world_size") if key in ranks}
            yield f'"distributedInfo":{json.dumps(known)},\n'.encode()
        yield b'"traceEvents":[\n'
        events = [one for one in trace.get("traceEvents", ()) if isinstance(one, dict)]
        for number, event in enumerate(events, 1):
            made = json.dumps(self._event(event), separators=(",", ":"))
            yield (made + (",\n" if number < len(events) else "\n")).encode()
        yield b"]}\n"

    def _event(self, event: Mapping[str, Any]) -> dict[str, Any]:
        name, category = str(event.get("name", "")), str(event.get("cat", ""))
        heading = event.get("ph") == "M"
        found: dict[str, Any] = {"ph": str(event.get("ph", ""))[:1]}
        for key in ("cat", "pid", "tid", "ts", "dur", "id", "bp", "s"):
            if key in event:
                value = event[key]
                found[key] = self.text(value) if isinstance(value, str) else value
        found["name"] = self.text(name) if heading else self._name(name, category)
        given = event.get("args")
        if isinstance(given, dict):
            if heading:
                found["args"] = {key: _heading(name, one) for key, one in given.items()}
            else:
                found["args"] = {
                    key: self.text(one) if isinstance(one, str) else one
                    for key, one in given.items()
                    if _is_number(one) or (key in names.TELLING_NOTHING and _is_plain(one))
                }
        return found

    def _name(self, name: str, category: str) -> str:
        if category in names.PYTHON_CATEGORIES:
            python = _PYTHON.fullmatch(name)
            if python:
                return f"{self.file(python['file'])}({python['line']}): {python['function']}"
            return self.text(name)
        of_user = category in names.ANNOTATION_CATEGORIES or "annotation" in category
        if (of_user or (" " in name and category in names.OPERATOR_CATEGORIES)) and not (
            names.is_known_annotation(name)
        ):
            return f"annotation {self._annotations.setdefault(name, len(self._annotations) + 1)}"
        return self.text(name)

    def _path(self, found: re.Match[str]) -> str:
        text = found[0]
        if _UNIT.fullmatch(text) or _KNOWN_ADDRESS.fullmatch(text):
            return text
        return _GONE


def _own_names() -> list[str]:
    """The names of this user, this machine and the home directory, the longest first."""
    found = {str(Path.home()), socket.gethostname()}
    with suppress(Exception):  # no entry for this user
        found.add(getpass.getuser())
    found |= {os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME")}
    kept = {one for one in found if len(one) >= _LEAST and one.lower() not in _NOBODY}
    return sorted(kept, key=len, reverse=True)


def _heading(name: str, value: Any) -> Any:
    """The name of a process or thread, which programs choose; numbers of threads and streams."""
    if not isinstance(value, str):
        return value if _is_number(value) else ""
    known = (_DEVICE if name == "process_labels" else _THREAD).match(value)
    closing = ")" if known and known[0].startswith("backward (") else ""
    return known[0] + closing if known else name.partition("_")[0]


def _is_number(value: Any) -> bool:
    """Whether a value is a number, a text of one, or a list of such."""
    if isinstance(value, list):
        return all(map(_is_number, value))
    if isinstance(value, str):
        return _NUMBERS.fullmatch(value) is not None
    return value is None or isinstance(value, int | float)


def _is_plain(value: Any) -> bool:
    """Whether a value is a text, a number, or a list of such."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str) or _is_number(value)
