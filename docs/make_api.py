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
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import backspot
from backspot import results
from backspot.results import costs, report
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
EXPLAINED = ("Answer", "Place", "Saving")
"""What results hold most often: each of their fields has a line."""
LISTED = ("Comparison", "JobReport")
"""Public results whose fields stand in a list of types, as those of what results hold."""
INTEGRATIONS = {
    "backward_budget": ("pytest_plugin.py", "BackwardBudget", "__call__"),
}
"""What ``backspot.integrations`` has: a name, and the file, the class and the method behind it."""
ALIASES = {
    **{
        alias: str(vars(report).get(alias) or getattr(costs, alias)).removeprefix("typing.")
        for alias in ("By", "Sort")
    },
    **dict.fromkeys(("Count", "_Bytes"), "int"),
    **dict.fromkeys(("Measure", "Ratio"), "float"),
    "Progress": "Callable[[int, int | None], None]",
}
"""Types that are written out, because users cannot import their names."""
HEAD = """\
# The Python API

Programs import from `backspot`, and the classes of what results hold from `backspot.results`.
`import backspot` loads neither torch nor numpy; `profile`, `instrument` and `Monitor` need torch.
An invalid argument raises `UsageError`, with the remedy.

This page has names, signatures and one line for each argument and field, from the docstrings
(`python docs/make_api.py`). `help(backspot.profile)` has the details, what is raised, and an
example; [report.schema.json](report.schema.json) the whole meaning of each field of a report.

Results are frozen, and [their JSON](json.md) has the same fields. What ends in `_ns` is whole
nanoseconds of a [typical step](concepts.md#typical-step), in `_ms` milliseconds, in `_bytes` bytes,
and in `_by_step` has one entry for each recorded step. Where no type stands, a field is a number, a
text or a truth value; with `?` it is `None` where it is not known, or does not apply.
"""
PARTS_HEAD = """\
## What results hold

The classes of `backspot.results`, with the types of their fields.
`help(backspot.results.LineCost)` and the schema say what each field means.
"""
INTEGRATIONS_HEAD = """\
## In other programs

`BackspotCallback`, in `backspot.integrations.lightning` and `backspot.integrations.transformers`,
has [these options](lightning.md#options). `backward_budget` is a fixture of pytest, for
[a budget in CI](ci.md).
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
_TITLES = {"Args": "Arguments"}
_SENTENCE = re.compile(r"(?<=[^.\s]{2})[.;] |\.$")
"""Where the first sentence of a meaning ends, or the part of it that stands alone."""
_REMARK = re.compile(
    r": (?!`)|, (?=(?:as|at|by|for|if|so|those|until|where|which|with)\b"
    r"|(?:the )?(?:largest|longest|most)\b)"
)
"""Where an explanation begins that the first words of a sentence do not need."""
_PLAIN = ("int", "float", "str", "bool", "tuple[int, ...]", "tuple[str, ...]")
"""Types that a field's name and meaning say."""


def main() -> None:
    """Write the file beside this script."""
    Path(__file__).with_name("api.md").write_text(made(), encoding="utf-8")


def made() -> str:
    """Return the whole page."""
    parts = [HEAD]
    seen: dict[str, str] = {}
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        if title == "Errors":
            parts.append(f"{_errors(names)}\n")
            continue
        for name in names:
            parts += _section(name, seen)
    phases = _wrapped(f"PhaseName = {_type_of_phases}")
    parts.append(f"{PARTS_HEAD}\n{_code(phases)}")
    for name in sorted(set(results.__all__) - set(backspot.__all__)):
        kept = _class if name in EXPLAINED else _fields
        parts += kept(name, getattr(results, name), seen)
    parts.append(INTEGRATIONS_HEAD)
    for name in INTEGRATIONS:
        parts += _integration(name)
    return "\n".join(parts)


def _section(name: str, seen: dict[str, str]) -> Iterator[str]:
    """Yield a public name; ``seen`` has the fields so far, with their first class."""
    if name == "Source":
        # The text below an alias is no docstring that Python keeps.
        *_, text = ast.parse(inspect.getsource(source)).body
        yield f"### {name}\n"
        yield f"{_markdown(ast.literal_eval(ast.unparse(text)).strip())}\n"
        return
    value = getattr(backspot, name)
    if not isinstance(value, type):
        yield from _function(name, value, seen)
        return
    yield from (_fields if name in LISTED else _class)(name, value, seen)
    members = {
        member: found
        for member, found in defined_by(value).items()
        if not member.startswith("_") or member == "__getitem__"
    }
    properties = {key: found for key, found in members.items() if isinstance(found, property)}
    if properties:
        yield "Properties:\n"
        yield "\n".join(_property(key, found) for key, found in properties.items()) + "\n"
    for member, found in members.items():
        if isinstance(found, classmethod) or inspect.isfunction(found):
            heading = f"{name}.{member}".replace("__", r"\_\_")
            yield f"#### {heading}\n"
            yield _code(_signature(f"{name}.{member}", getattr(value, member)))
            if name != "Report" and member in ("save", "load"):
                yield f"{_markdown(_summary(found))} As [`Report.{member}`](#report{member}).\n"
            else:
                yield from _body(found, name, {})


def _class(name: str, cls: Any, seen: dict[str, str]) -> Iterator[str]:
    """Yield a class with its arguments and fields, each field where it is first explained."""
    yield f"### {name}\n"
    yield f"{_markdown(_summary(cls))}\n"
    for title, section in _sections(inspect.cleandoc(cls.__doc__)):
        entries = [*_entries(section, _types(cls))] if title in ("Args", "Attributes") else []
        if title == "Args":
            yield "Arguments:\n"
        if entries:
            earlier: dict[str, list[str]] = {}
            for entry in entries:
                earlier.setdefault(seen.setdefault(entry, name), []).append(entry)
            entries = earlier.pop(name, [])
            for first, known in earlier.items():
                names = ", ".join(line[2:].partition(":")[0] for line in known)
                entries.append(f"- {names}: as in [`{first}`](#{first.lower()})")
            yield "\n".join(entries) + "\n"


def _fields(name: str, cls: Any, _: dict[str, str]) -> Iterator[str]:
    """Yield a class with the types of its fields."""
    yield f"### {name}\n"
    yield f"{_markdown(_summary(cls))}\n"
    yield _code("\n".join(_wrapped(f"{field}: {kind}") for field, kind in _types(cls).items()))


def _function(name: str, function: Any, seen: dict[str, str]) -> Iterator[str]:
    """Yield a function: its signature, its summary and its arguments."""
    yield f"### {name}\n"
    yield _code(_signature(name, function))
    yield from _body(function, name, seen)


def defined_by(cls: type) -> dict[str, Any]:
    """Return what a result defines, and its parts for it: the classes that it is made of."""
    made_of = [base for base in cls.__mro__[1:] if base.__name__ == "InReport"]
    return {name: found for one in (cls, *made_of) for name, found in vars(one).items()}


def _errors(names: Iterable[str]) -> str:
    """Return the errors with what else they are."""
    found = [(name, getattr(backspot, name)) for name in names]
    return "\n".join(
        f"- `{name}` ({', '.join(f'`{base.__name__}`' for base in error.__bases__)}): "
        f"{_short(_summary(error))}"
        for name, error in found
    )


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
    yield from _function(name, known[method], {})


def _property(name: str, value: property) -> str:
    kind = _type(inspect.signature(value.fget).return_annotation) if value.fget else ""
    (line,) = _entries(f"{name}: {value.__doc__}", {name: kind})
    return line


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


def _wrapped(line: str) -> str:
    """Put what a type can be on a line each, if they are too many for one."""
    line = line.replace("'", '"')
    if len(line) <= 100 or not line.endswith("]"):
        return line
    before, _, inside = line.partition("[")
    return f"{before}[\n" + "".join(f"    {one},\n" for one in _split(inside[:-1])) + "]"


def _split(parameters: str) -> list[str]:
    """Split at the commas that are not inside brackets."""
    return re.split(r", (?![^\[(]*[\])])", parameters)


def _type(annotation: Any) -> str:
    """Return an annotation as users would write it."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(?:os|typing|backspot|backspot\.results)\.(?=[A-Z])", "", text)
    text = text.replace(_type_of_phases, "PhaseName").replace("'", '"')
    return re.sub(rf"\b({'|'.join(ALIASES)})\b", lambda found: ALIASES[found[0]], text)


_type_of_phases = str(costs.PhaseName).removeprefix("typing.")


def _body(function: Any, name: str, seen: dict[str, str]) -> Iterator[str]:
    """Yield the first sentence of a docstring, the arguments, and the errors by name."""
    yield f"{_markdown(_summary(function))}\n"
    found = dict(_sections(inspect.cleandoc(getattr(function, "__func__", function).__doc__)))
    if entries := [*_entries(found.get("Args", ""), {})]:
        seen.update(dict.fromkeys(entries, name))
        yield "\n".join(entries) + "\n"
    raised = re.findall(r"^(\w+): ", found.get("Raises", ""), re.MULTILINE)
    if raised := [one for one in raised if one != "UsageError"]:
        yield f"Raises {', '.join(f'`{one}`' for one in raised)}.\n"


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
    """Yield names and meanings as the items of a list; names with one meaning share it."""
    names: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", section) if section else ():
        name, _, meaning = entry.partition(": ")
        kind = types.get(name, "")
        asked = "?" if kind.endswith(" | None") else ""
        kind = kind.removesuffix(" | None")
        meaning = _short(" ".join(meaning.split()))
        words = re.findall(r'"([^"]+)"', kind)
        if kind in _PLAIN or (words and all(f"`{word}`" in meaning for word in words)):
            kind = ""
        kind = f" (`{kind}`)" if kind else ""
        names.setdefault(f"{kind}: {meaning}", []).append(f"`{name}`{asked}")
    for line, found in names.items():
        yield f"- {', '.join(found)}{line}"


def _short(meaning: str) -> str:
    """Return the first sentence of a meaning, without full stop and explanations."""
    text = _markdown(_SENTENCE.split(meaning, maxsplit=1)[0])
    for found in _REMARK.finditer(text):
        before = text[: found.start()]
        whole = before.count("`") % 2 == 0 and before.count("(") == before.count(")")
        if whole and len(before.split()) > 3 and before.count("`") < 4:
            text = before
            break
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _types(cls: Any) -> dict[str, str]:
    """Return the types of a result's fields, as users would write them."""
    if not is_dataclass(cls):
        return {}
    hints = get_type_hints(cls)
    return {field.name: _type(_written(hints[field.name])) for field in fields(cls)}


def _written(hint: Any) -> str:
    """Return a type as an annotation has it, in all versions of Python the same."""
    of = get_args(hint)
    if hint in (None, type(None)) or hint is ...:
        return "None" if hint is not ... else "..."
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(repr, of))}]"
    if get_origin(hint) in (Union, UnionType):
        if all(get_origin(one) is Literal for one in of):
            return _written(Literal[tuple(word for one in of for word in get_args(one))])
        return " | ".join(map(_written, of))
    return f"{hint.__name__}[{', '.join(map(_written, of))}]" if of else hint.__name__


def _markdown(text: str) -> str:
    return text.replace("``", "`")


def _code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```\n"


if __name__ == "__main__":
    main()
