"""Write api.md: the reference of all public names, made from their signatures and docstrings.

Usage: python docs/make_api.py   (needs torch, because ``profile`` and others do)
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import backspot
from backspot import results
from backspot.results import comparison as changes, costs, job, memory, report
from backspot.trace import source

GROUPS = {
    "Entry points": (
        "profile",
        "instrument",
        "Instrumentation",
        "Monitor",
        "Alarm",
        "locate",
        "compare",
        "ranks",
        "Source",
    ),
    "Results": ("Report", "Row", "Finding", "Comparison", "JobReport"),
    "Errors": (
        "BackspotError",
        "UsageError",
        "AlreadyInstrumentedError",
        "SourceNotFoundError",
        "NotATraceError",
        "NoBackwardError",
        "OutputExistsError",
        "MissingDependencyError",
    ),
}
INTEGRATIONS = {
    "backward_budget": ("pytest_plugin.py", "BackwardBudget", "__call__"),
}
"""What ``backspot.integrations`` has: a name, and the file, the class and the method behind it."""
ALIASES = {
    **{
        alias: str(vars(report).get(alias) or getattr(costs, alias)).removeprefix("typing.")
        for alias in ("By", "LabelSource", "PhaseName", "Sort", "StepUnit")
    },
    **{
        alias: str(getattr(changes, alias)).removeprefix("typing.")
        for alias in ("ChangeKind", "Time", "Verdict")
    },
    "MemoryKind": str(memory.MemoryKind).removeprefix("typing."),
    **dict.fromkeys(("Count", "_Bytes"), "int"),
    **dict.fromkeys(("Measure", "Ratio"), "float"),
    "Progress": "Callable[[int, int | None], None]",
}
"""Types that are written out, because users cannot import their names."""
HEAD = """\
# The Python API

The names that programs need are imported from `backspot`, and the classes of what results hold are
in `backspot.results`. `import backspot` loads neither torch nor numpy;
`profile`, `instrument` and `Monitor` need torch, everything else does not. An invalid argument
raises `UsageError`, with the remedy. `help()` has an example of each class and method.

Results are frozen, and [their JSON](json.md) has the same fields. What ends in `_ns` is a whole
number of nanoseconds of a [typical step](concepts.md#typical-step), in `_ms` milliseconds, and in
`_by_step` has one entry for each recorded step. Sizes are in bytes. Where no type stands, a field
is a number, a text or a truth value.

Made from the docstrings by `python docs/make_api.py`.
"""
PARTS_HEAD = """\
## What results hold

The classes of `backspot.results`. Those of a job come last; `help(backspot.results.RankCost)` says
what their fields mean.
"""
INTEGRATIONS_HEAD = """\
## In other programs

`BackspotCallback`, in `backspot.integrations.lightning` and `backspot.integrations.transformers`,
has [these options](lightning.md#options). `backward_budget` is a fixture of pytest, for
[a budget in CI](ci.md).
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
_TITLES = {"Args": "Arguments"}
_DEFAULT = re.compile(r" Default (?:[\w.]+|``[^`]*``)\.$")
"""The default of an argument, which its signature shows."""
_INVALID = re.compile(
    r"If (?:an argument|``\w+``(?: or ``\w+``)?) is (?:invalid|unknown|not a \w+)\."
)
"""What holds for every function, and stands at the head of the page."""
_TIMES = "Times are nanoseconds of a typical step."
"""What the head of the page says of all results."""
_PLAIN = ("int", "float", "str", "bool", "tuple[int, ...]", "tuple[str, ...]")
"""Types that a field's name and meaning say."""


def main() -> None:
    """Write the file beside this script."""
    Path(__file__).with_name("api.md").write_text(made(), encoding="utf-8")


def made() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        if title == "Errors":
            parts.append(f"| error | also a | meaning |\n| --- | --- | --- |\n{_errors(names)}\n")
            continue
        for name in names:
            parts += _section(name)
    parts.append(PARTS_HEAD)
    held = sorted(set(results.__all__) - set(backspot.__all__))
    of_jobs = [name for name in held if getattr(results, name).__module__ == job.__name__]
    seen: dict[str, str] = {}
    for name in held:
        if name not in of_jobs:
            parts += _part(name, seen)
    parts.append("| of a job | what it is | fields |\n| --- | --- | --- |")
    parts[-1] += "".join(map(_row, of_jobs)) + "\n"
    parts.append(INTEGRATIONS_HEAD)
    for name in INTEGRATIONS:
        parts += _integration(name)
    return "\n".join(parts)


def _section(name: str) -> Iterator[str]:
    yield f"### {name}\n"
    if name == "Source":
        # The text below an alias is no docstring that Python keeps.
        *_, text = ast.parse(inspect.getsource(source)).body
        yield f"{_markdown(ast.literal_eval(ast.unparse(text)).strip())}\n"
        return
    value = getattr(backspot, name)
    if not isinstance(value, type):
        yield _code(_signature(name, value))
        yield from _body(value)
        return
    yield from _body(value, example=False)
    members = {
        member: found
        for member, found in defined_by(value).items()
        if not member.startswith("_") or member == "__getitem__"
    }
    properties = {key: found for key, found in members.items() if isinstance(found, property)}
    if properties:
        yield "**Properties**\n"
        yield "\n".join(_property(key, found) for key, found in properties.items()) + "\n"
    for member, found in members.items():
        if isinstance(found, classmethod) or inspect.isfunction(found):
            heading = f"{name}.{member}".replace("__", r"\_\_")
            yield f"#### {heading}\n"
            if name != "Report" and member in ("save", "load"):
                yield f"{_markdown(_summary(found))} As [`Report.{member}`](#report{member}).\n"
                continue
            yield _code(_signature(f"{name}.{member}", getattr(value, member)))
            yield from _body(found, example=False)


def defined_by(cls: type) -> dict[str, Any]:
    """Return what a result defines, and its parts for it: the classes that it is made of."""
    made_of = [base for base in cls.__mro__[1:] if base.__name__ == "InReport"]
    return {name: found for one in (cls, *made_of) for name, found in vars(one).items()}


def _errors(names: Iterable[str]) -> str:
    """Return the rows of the table of errors."""
    found = [(name, getattr(backspot, name)) for name in names]
    return "\n".join(
        f"| `{name}` | {', '.join(f'`{base.__name__}`' for base in error.__bases__)} | "
        f"{_markdown(_summary(error))} |"
        for name, error in found
    )


def _part(name: str, seen: dict[str, str]) -> Iterator[str]:
    """Yield a class that results hold; ``seen`` has the fields so far, with their first class."""
    cls = getattr(results, name)
    yield f"### {name}\n"
    for title, section in _sections(inspect.cleandoc(cls.__doc__)):
        if not title:
            yield f"{_markdown(section.removesuffix(_TIMES).rstrip())}\n"
        elif title == "Attributes":
            entries = [*_entries(section, _types(cls))]
            firsts = [seen.setdefault(line, name) for line in entries]
            # Three fields or more that another class explains are named with that class.
            for first in sorted({one for one in firsts if firsts.count(one) > 2} - {name}):
                same = [line for line, one in zip(entries, firsts, strict=True) if one == first]
                names = ", ".join(line[2:].partition(":")[0] for line in same)
                entries = [line for line in entries if line not in same]
                entries.append(f"- {names}: as in [`{first}`](#{first.lower()})")
            yield "\n".join(entries) + "\n"


def _row(name: str) -> str:
    """Return the line of a table for a class that jobs hold."""
    cls = getattr(results, name)
    names = ", ".join(f"`{field.name}`" for field in fields(cls))
    return f"\n| `{name}` | {_markdown(_summary(cls))} | {names} |"


def _summary(value: Any) -> str:
    """Return the first sentence of a docstring."""
    return inspect.cleandoc(getattr(value, "__func__", value).__doc__ or "").partition("\n")[0]


def _integration(name: str) -> Iterator[str]:
    """Yield the section of a class whose package may not be installed, from its source."""
    file, class_name, method = INTEGRATIONS[name]
    tree = ast.parse((Path(backspot.__file__).parent / "integrations" / file).read_text("utf-8"))
    found = next(
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    function = next(
        node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method
    )
    text = ast.get_docstring(function) or ast.get_docstring(found)
    function.body = [ast.Pass()]
    known: dict[str, Any] = {}
    exec(ast.unparse(function), known)  # noqa: S102 - a signature of this package
    known[method].__doc__ = text
    yield f"### {name}\n"
    yield _code(_signature(name, known[method]).removesuffix(" -> None"))
    yield from _body(known[method])


def _property(name: str, value: property) -> str:
    kind = _type(inspect.signature(value.fget).return_annotation) if value.fget else ""
    shown = "" if kind.removesuffix(" | None") in _PLAIN else f" (`{kind}`)"
    return f"- `{name}`{shown}: {_markdown(' '.join((value.__doc__ or '').split()))}"


def _signature(name: str, function: Any) -> str:
    """Return the signature as the source has it, one parameter a line if it is long."""
    signature = inspect.signature(function)
    shown = [
        parameter.replace(annotation=_Shown(_type(parameter.annotation)))
        if parameter.annotation is not inspect.Parameter.empty
        else parameter
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    returns = _type(signature.return_annotation)
    line = f"{name}{signature.replace(parameters=shown, return_annotation=_Shown(returns))}"
    line = line.replace("'", '"')
    if len(line) <= 88:
        return line
    inside, _, after = line.partition("(")[2].rpartition(") -> ")
    parameters = _split(inside)
    return f"{name}(\n" + "".join(f"    {one},\n" for one in parameters) + f") -> {after}"


class _Shown:
    """An annotation that is shown as its text, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _split(parameters: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    return re.split(r", (?![^\[(]*[\])])", parameters)


def _type(annotation: Any) -> str:
    """Return an annotation as users would write it."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\bos\.(?=PathLike)", "", text)
    return re.sub(rf"\b({'|'.join(ALIASES)})\b", lambda found: ALIASES[found[0]], text)


def _body(value: Any, example: bool = True) -> Iterator[str]:
    function = value.__func__ if isinstance(value, classmethod) else value
    text = inspect.cleandoc(function.__doc__ or "")
    for index, (title, section) in enumerate(_sections(text)):
        if not index:
            yield f"{_markdown(section)}\n"
        elif title == "Example":
            if example:
                yield _code(section.replace("  # doctest: +SKIP", ""), "pycon")
        elif title == "Note":
            yield f"{_markdown(section)}\n"
        elif title == "Returns":
            yield f"**Returns:** {_markdown(section)}\n"
        elif entries := [*_entries(section, _types(value) if title == "Attributes" else {})]:
            yield f"**{_TITLES.get(title, title)}**\n"
            yield "\n".join(entries) + "\n"


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the sections of a docstring with their names; the first has none."""
    pieces = re.split(rf"^({'|'.join(_SECTIONS)}):\n", text, flags=re.MULTILINE)
    yield "", pieces[0].strip()
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        # Text that is not indented belongs to no section.
        section, _, rest = re.sub(r"\n\n(?=\S)", "\0", body, count=1).partition("\0")
        yield title, inspect.cleandoc("\n" + section.rstrip())
        if rest:
            yield "Note", rest.strip()


def _entries(section: str, types: dict[str, str]) -> Iterator[str]:
    """Yield ``name: meaning`` entries as the items of a list; names with one meaning share it."""
    names: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", section):
        name, _, meaning = entry.partition(": ")
        meaning = _DEFAULT.sub("", " ".join(meaning.split()))
        if name == "UsageError" and _INVALID.fullmatch(meaning):
            continue
        kind = types.get(name, "")
        words = re.findall(r"'([^']+)'", kind)
        if kind in _PLAIN or (words and all(f"``{word}``" in meaning for word in words)):
            kind = ""
        kind = f" (`{kind}`)" if kind else ""
        line = f"{kind}: {_markdown(meaning[:1].upper() + meaning[1:])}"
        names.setdefault(line, []).append(f"`{name}`")
    for line, found in names.items():
        yield f"- {', '.join(found)}{line}"


def _types(cls: Any) -> dict[str, str]:
    """Return the types of a result's fields, without whether they can be ``None``."""
    if not is_dataclass(cls):
        return {}
    return {field.name: _type(field.type).removesuffix(" | None") for field in fields(cls)}


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```\n"


if __name__ == "__main__":
    main()
