"""Results as JSON, and reports read back: the format for other programs.

``docs/json.md`` has its rules. ``docs/report.schema.json`` is its JSON Schema, made by
``python -m backspot.render.json > docs/report.schema.json``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from backspot import results
from backspot.errors import NotATraceError, SourceNotFoundError
from backspot.formatting import visible
from backspot.paths import path_text
from backspot.presented import Presented
from backspot.render._consistency import contradiction
from backspot.render.formats import Format
from backspot.render.view import View
from backspot.results.comparison import Comparison
from backspot.results.report import SCHEMA, Answer, Report

Saved = TypeVar("Saved")
HOW_TO_READ = (
    "Times are nanoseconds of one step, on the clock that clock names; divide by step_ns for a "
    "share. "
    "First answer: what costs most, and in its remedy what to do first. Then findings of tier "
    "stable, the one to act on first, with remedy and saves (backspot explain RULE has more). Then "
    "modules, the slowest backward first; is_module is false for time that no module owns. "
    "warnings: read them before you trust it."
)
_AGAIN = "make it again from the trace"
_SELDOM = {
    field.name
    for kind in results.__all__
    for field in getattr(getattr(results, kind), "__dataclass_fields__", {}).values()
    if "seldom" in field.metadata
}
# What few traces have is left out where it is empty. A string has no quote without a backslash.
_UNRECORDED = re.compile(
    rf',"(?:{"|".join(sorted(_SELDOM))})":(?:null|false|""|\[\]|\{{\}})(?=[,}}])'.encode()
)
# Characters that a terminal or a page might obey. In JSON they only occur in strings.
_UNSAFE = re.compile(r"[^\x20-\x7e\n]+")


def to_json(report: Report, view: View | None = None) -> bytes:
    """The report as JSON in UTF-8, indented; ``load`` returns an equal report.

    A view limits and orders the rows. Invisible characters are written as escapes, and so is half a
    surrogate pair, which a module's name may hold; only two such halves in a row are read back as
    the character that they make.
    """
    return encoded(report if view is None else replace(report, modules=view.rows(report)))


def comparison_to_json(comparison: Comparison, view: View | None = None) -> bytes:
    """The comparison as JSON in UTF-8, indented; a view limits the changes."""
    if view is not None:
        comparison = replace(comparison, changes=comparison.changes[: view.top])
    return encoded(comparison)


FORMATS = (Format(".json", {Report: to_json, Comparison: comparison_to_json}, name="json"),)


def compact(result: Any) -> bytes:
    """A result, or what holds results, as JSON in UTF-8 without blanks.

    A report begins with how to read it and with its answer, for other programs.
    """
    data = plain(result)
    if isinstance(result, Report):
        head = b'{"how_to_read":' + plain(HOW_TO_READ) + b',"answer":' + plain(result.answer)
        data = head + b"," + data[1:]
    return _UNRECORDED.sub(b"", data)


def plain(result: Any) -> bytes:
    """A result, or a part of one, as JSON in UTF-8 without blanks."""
    try:
        return msgspec.json.encode(result)
    except UnicodeEncodeError:  # UTF-8 cannot hold half a surrogate pair; an escape can
        return json.dumps(msgspec.to_builtins(result), separators=(",", ":")).encode()


def encoded(result: Presented) -> bytes:
    """A result as JSON in UTF-8, indented."""
    try:
        text = msgspec.json.format(compact(result), indent=1).decode()
    except msgspec.DecodeError:
        text = json.dumps(json.loads(compact(result)), indent=1)
    return (_UNSAFE.sub(_escaped, text) + "\n").encode()


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable():
        return character
    return "".join(
        character
        if character.isprintable()
        else json.dumps(character)[1:-1].replace("\x7f", "\\u007f")
        for character in character
    )


def schema_of(kind: type) -> str:
    """The name of the schema of a kind of result, with its version: each result has it."""
    (default,) = (field.default for field in fields(kind) if field.name == "schema")
    return str(default)


class _Head(msgspec.Struct):
    schema: str = ""


def load(path: str | os.PathLike[str], kind: type[Saved]) -> Saved:
    """Read a result of one kind that was written as JSON.

    Raises:
        SourceNotFoundError: If the file does not exist or cannot be read.
        NotATraceError: If the file is not a report, is broken or inconsistent, or has another
            schema.
        UsageError: If ``path`` is not a path.
    """
    shown = visible(path_text(path, f"{kind.__name__}.load"))
    if not shown:
        raise SourceNotFoundError("the path is empty: name a saved report")
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise SourceNotFoundError(f"{shown}: there is no such file") from None
    except OSError as error:
        raise SourceNotFoundError(f"{shown} cannot be read: {error.strerror}") from error
    try:
        return _decoded(data, kind, shown)
    except msgspec.ValidationError as error:
        raise NotATraceError(
            f"{shown} is not a complete Backspot report: {visible(str(error))}"
        ) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if isinstance(error, NotATraceError):
            raise
        if data[:2] == b"\x1f\x8b":
            raise NotATraceError(
                f"{shown} is compressed, so it is not a saved report; backspot.locate reads traces"
            ) from None
        raise NotATraceError(f"{shown} is not JSON, or is broken: {visible(str(error))}") from None


def _decoded(data: bytes, kind: type[Saved], shown: str) -> Saved:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.ValidationError:
        head = _Head()
    except msgspec.DecodeError:
        # msgspec refuses half a surrogate pair; Python's reader accepts it.
        plain = json.loads(data)
        _check_schema(plain.get("schema", "") if isinstance(plain, dict) else "", kind, shown)
        return _checked(msgspec.convert(plain, kind), shown)
    _check_schema(head.schema, kind, shown)
    return _checked(msgspec.json.decode(data, type=kind), shown)


def _check_schema(schema_name: object, kind: type, shown: str) -> None:
    own_schema = schema_of(kind)
    if schema_name == own_schema:
        return
    family, _, version = (
        schema_name.partition("/") if isinstance(schema_name, str) else ("", "", "")
    )
    own_family, _, own_version = own_schema.partition("/")
    if family == own_family and version.isdecimal():
        newer = int(version) > int(own_version)
        age, remedy = ("a newer", "pip install -U backspot") if newer else ("an older", _AGAIN)
        raise NotATraceError(
            f"{shown} was written by {age} Backspot (schema {schema_name}; this one reads "
            f"{own_schema}): {remedy}"
        )
    raise NotATraceError(
        f"{shown} is not a report that Backspot saved (its schema is not {own_schema}); "
        "backspot.locate reads traces"
    )


def _checked(report: Saved, shown: str) -> Saved:
    if isinstance(report, Report) and (contradiction_text := contradiction(report)):
        raise NotATraceError(f"{shown} contradicts itself: {contradiction_text}; save it again")
    return report


def schema() -> bytes:
    """The JSON Schema of a report; the descriptions are those of the classes."""
    (form, answer), defs = msgspec.json.schema_components(
        (Report, Answer), ref_template="#/$defs/{name}"
    )
    form = {**form, "$defs": defs}
    meaning = cleandoc(Report.answer.__doc__ or "")
    defs["Report"]["properties"]["answer"] = {**answer, "description": meaning}
    how = {"type": "string", "description": "How to read the report, in some sentences."}
    defs["Report"]["properties"]["how_to_read"] = how
    for kind, definition in form["$defs"].items():
        summary, fields = _described(getattr(results, kind))
        definition["description"] = summary
        for name, field in definition["properties"].items():
            if "additionalProperties" in field and name not in definition.get("required", ()):
                field.setdefault("default", {})  # msgspec before 0.23 leaves it out
        for name, meaning in fields.items():
            definition["properties"][name]["description"] = meaning
    form["$defs"]["Report"]["properties"]["schema"] |= {"const": SCHEMA}
    form["$defs"]["Report"]["required"].append("schema")
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        "title": "A Backspot report",
        **form,
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def _described(kind: type) -> tuple[str, dict[str, str]]:
    """The summary of a class's docstring, and the meaning of each attribute."""
    summary, _, attributes = cleandoc(kind.__doc__ or "").partition("Attributes:")
    attributes = attributes.partition("\n\n")[0]  # an example follows
    entries = re.split(r"\n    (?=\w+: )", attributes)
    fields = (entry.split(": ", 1) for entry in entries if ": " in entry)
    return " ".join(summary.split()), {
        name.strip(): " ".join(meaning.split()) for name, meaning in fields
    }


if __name__ == "__main__":
    import sys

    sys.stdout.buffer.write(schema())
