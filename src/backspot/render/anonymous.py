"""Reports to share: without what could name a person, a machine, a file, or show its content.

What stays is listed, not what goes. Each field of a result is of one kind:

- names of modules, classes, functions, operators and kernels stay, and so do numbers;
- places become ``source-1.py:12``, the same file the same number;
- of errors the class stays; lines of source and the command go;
- all else is a sentence: a word of it stays if Backspot's own files have it, if it is a number, or
  if it is one of the names that stay. Any other word becomes ``…``, and with it all paths,
  addresses, annotations and names that nobody could list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, cast

from backspot.results.report import Report

_NAMES = frozenset(
    (
        *("path", "paths", "class_name", "root", "before_path", "peak_path", "function", "node"),
        *("nodes", "operator", "operators", "kernels", "device"),
    )
)
"""Fields with names of modules, classes, functions, operators, kernels and devices."""
_OWN = frozenset(("schema", "rule", "link"))
"""Fields that only Backspot writes."""
_NAMED = frozenset(("NodeCost", "KernelCost", "OperatorCost", "FusedKernel"))
"""Results whose ``name`` is one of autograd or of a kernel."""
_PLACES = frozenset(("line", "file", "lines", "waits"))
_SOURCE = frozenset(("text", "command"))
_ERRORS = frozenset(("note", "why_not", "error", "reason"))
"""Fields that may be the message of an exception."""
_RECORDED = {
    "device": re.compile(r"[\w().,;:+× -]+"),
    "time": re.compile(r"[\d:.TZ +-]+(?:UTC)?"),
    "torch": re.compile(r"\d[\w.]*(?:\+(?:cpu|cu|rocm|xpu|git)[\w.]*)?"),
    "memory": re.compile(r"[\d.]+ of [\d.]+ GB"),
}
"""What stays of ``Report.recorded``, and the form that it has."""
_GONE = "…"

_WORD = re.compile(r"\w+")
_TOKEN = re.compile(r"\S+")
_EDGES = "\"'`“”‘’()[]{}<>,.;:!?…"
_PYTHON = re.compile(r"(?P<file>.*\S\.(?:pyx?|ipynb)|<[\w -]+>)(?P<line>:\d+(?:-\d+)?)")
_PLACE = re.compile(r"(?P<file>.+):(?P<line>\d+(?:-\d+)?)", re.DOTALL)
_STAND_IN = re.compile(r"source-\d+\.py(?::\d+(?:-\d+)?)?")
_NUMBER = re.compile(r"\d[\d_]*(?:[x×]\d+)*(?:e\d+)?[x×]?|[\d.,]*\d[a-zµμ]{1,2}")
_FRACTION = re.compile(r"\d+/\d+")
_ADDRESS = re.compile(r"\d+(?:\.\d+){3,}")
_OF_PATHS = re.compile(r"[/\\@]|~(?!\d)")
_CLASS_OF_ERROR = re.compile(r"((?:torch\.(?:\w+\.)*)?[A-Z]\w*)(?::.*)?", re.DOTALL)
_MESSAGE = re.compile(
    r"((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)):\s.*", re.DOTALL
)


def anonymous(report: Report) -> Report:
    """Return a report without lines of source, files, the command, and foreign words."""
    anonymizer = _Anonymizer(report)
    changed = cast(Report, anonymizer.result(report))
    recorded = {
        name: value
        for name, value in report.recorded.items()
        if name in _RECORDED and _RECORDED[name].fullmatch(value)
    }
    return replace(changed, recorded=recorded, trace="a recording")


class _Anonymizer:
    """Takes out of one report what could name somebody: a file has one stand-in in all of it."""

    def __init__(self, report: Report) -> None:
        self._files: dict[str, int] = {}
        self._names: set[str] = set()
        places: set[str] = set()
        for kind, value in _strings(report, "", ""):
            if kind == "name":
                self._names |= {value, *_WORD.findall(value)}
                self._names |= {token.strip(_EDGES) for token in value.split()}
            elif kind == "place":
                match = _PLACE.fullmatch(value)
                places.add(match["file"] if match else value)
        patterns = sorted(map(re.escape, filter(None, places)), key=len, reverse=True)
        self._places = (
            re.compile(rf"(?<![\w/\\])({'|'.join(patterns)})(?=:\d)") if patterns else None
        )

    def result(self, result: Any) -> Any:
        """Return a result of the report without foreign words."""
        changes = {}
        for field in fields(result):
            if field.init:
                before = getattr(result, field.name)
                after = self._value(before, field.name, type(result).__name__)
                if after is not before:
                    changes[field.name] = after
        return replace(result, **changes) if changes else result

    def _value(self, value: Any, field: str, owner: str) -> Any:
        if isinstance(value, str):
            return self._string(value, _kind(field, owner))
        if isinstance(value, tuple):
            return tuple(self._value(item, field, owner) for item in value)
        if isinstance(value, Mapping):
            return {
                self._string(key, _kind("path", owner)): self._value(item, field, owner)
                for key, item in value.items()
            }
        if is_dataclass(value) and not isinstance(value, type):
            return self.result(value)
        return value

    def _string(self, text: str, kind: str) -> str:
        if kind in ("name", "own") or not text:
            return text
        if kind == "source":
            return ""
        if kind == "place":
            match = _PLACE.fullmatch(text)
            return f"{self._file(match['file'])}:{match['line']}" if match else self._file(text)
        if kind == "error" and (match := _CLASS_OF_ERROR.fullmatch(text)):
            return match[1]
        return self._sentence(text)

    def _file(self, file: str) -> str:
        return f"source-{self._files.setdefault(file, len(self._files) + 1)}.py"

    def _sentence(self, text: str) -> str:
        text = _MESSAGE.sub(r"\1", text)
        if self._places is not None:
            text = self._places.sub(lambda match: self._file(match[1]), text)
        text = _TOKEN.sub(self._token, text)
        return re.sub(rf"{_GONE}(?:\s+{_GONE})+", _GONE, text)

    def _token(self, match: re.Match[str]) -> str:
        token = match[0]
        if token in self._names or token in _own_words():
            return token
        core = token.strip(_EDGES)
        before, after = token.split(core, 1) if core else (token, "")
        return before + self._core(core) + after

    def _core(self, core: str) -> str:
        if not core or core in self._names or core in _own_words() or _FRACTION.fullmatch(core):
            return core
        if _STAND_IN.fullmatch(core):
            return core
        if python := _PYTHON.fullmatch(core):
            return self._file(python["file"]) + python["line"]
        if _OF_PATHS.search(core) or _ADDRESS.search(core):
            return _GONE
        return core if all(map(self._stays, _WORD.findall(core))) else _GONE

    def _stays(self, word: str) -> bool:
        return bool(word in _own_words() or word in self._names or _NUMBER.fullmatch(word))


def _kind(field: str, owner: str) -> str:
    """What a text is: a name, Backspot's own, a place, source, an error, a sentence."""
    if field in _OWN:
        return "own"
    if field in _NAMES or (field == "name" and owner in _NAMED):
        # An operator, a kernel or a class is no path; a module's key may have any character.
        return "name"
    if field in _PLACES:
        return "place"
    if field in _SOURCE:
        return "source"
    return "error" if field in _ERRORS else "sentence"


def _strings(value: Any, field: str, owner: str) -> Iterator[tuple[str, str]]:
    """Yield all texts of a result, each after what it is."""
    if isinstance(value, str):
        yield _kind(field, owner), value
    elif isinstance(value, tuple):
        for item in value:
            yield from _strings(item, field, owner)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield _kind("path", owner), key
            yield from _strings(item, field, owner)
    elif is_dataclass(value) and not isinstance(value, type):
        for inner_field in fields(value):
            if inner_field.init:
                yield from _strings(
                    getattr(value, inner_field.name), inner_field.name, type(value).__name__
                )


@cache
def _own_words() -> frozenset[str]:
    """The words of Backspot's own files, alone and with what is written beside them.

    Without these files, as in an installation of compiled files alone, no word of a sentence stays.
    """
    words: set[str] = set()
    for text in _sources(files("backspot")):
        words.update(_WORD.findall(text))
        words.update(token.strip(_EDGES) for token in text.split())
    return frozenset(words)


def _sources(folder: Any) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry)
        elif entry.name.endswith(".py"):
            yield entry.read_text("utf-8")
