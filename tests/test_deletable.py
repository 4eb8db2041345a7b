"""A part can be deleted: nothing but what puts the parts together knows it.

``support/without.py`` deletes it in a copy. There, what is left is imported, checked by mypy, and
makes and prints a report. mypy reads all of it, and checks the bodies of functions only in the
files that ask something else for what is gone, as an attribute, by a keyword or in an import: the
others can only break by the import of a module, and these are all looked at.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from support import preloaded
from support.house import files, part_of
from support.without import without

# One worker has the cache of mypy, and what the files say.
pytestmark = [pytest.mark.slow, pytest.mark.posix, pytest.mark.xdist_group("deletable")]

RECORDING = Path(__file__).parent / "data" / "h200" / "vit_patch_drop.trace.json.gz"
WORDS = {
    "memory": r"held_bytes|profile_memory|at_peak_bytes|kept_bytes|Memory(Of\w+|Share|Timeline)",
    "ranks": r"JobReport|RankCost|Gathering|gathering_of",
    "trials": r"tried|trials?|Tried|Trying|Variant|with_trials",
    "host": r"HostLine|StepPicture|Wait|places_in|picture|render_lines|step_lanes|with_host"
    r"|without_waits",
    "plan": r"plan|[Pp]lan_\w+|Plan|Planning|PlannedStep|PlanOutcome|planned|Rung|InRun",
}
"""What a part calls its own, as a pattern of names; in pages, of words."""
FIELDS = {
    "memory": ("held_bytes", "at_peak_bytes", "MemoryOfDevice"),
    "ranks": ("JobReport", "RankCost"),
    "trials": ("tried", "Tried", "Variant", "plan"),
    "plan": ("plan", "Plan", "Rung"),
    "host": ("HostLine", "StepPicture", "launches", "picture", "waits", "without_waits"),
}
"""What the JSON schema has of it, if anything."""
USES = """
import importlib, pkgutil, runpy, sys, backspot
from backspot import commands
for one in pkgutil.walk_packages(backspot.__path__, "backspot."):
    if not one.name.startswith(("backspot._startup.", "backspot.integrations.", "backspot.__main")):
        importlib.import_module(one.name)
report = backspot.locate(sys.argv[1])
print(report)
print("shown:")
for suffix in ("json", "html", "md", "csv"):
    report.save(f"report.{suffix}")
assert backspot.Report.load("report.json") == report
assert commands.main(["show", sys.argv[1]]) == 0
print("schema:")
runpy.run_module("backspot.render.json", run_name="__main__")
"""


NOT_READ = """
[[tool.mypy.overrides]]
module = ["pandas.*", "IPython.*", "rich.*", "torch.*"]
follow_imports = "skip"
follow_imports_for_stubs = true
"""
"""Packages of others that mypy reads for as long as all else, and that know no part."""


class Said(NamedTuple):
    """What a file says.

    Attributes:
        names: all that its code uses or makes; in a page, its words.
        asked: those of them that something else must have: what is a variable or a function of the
            file itself is not gone. One that is handed on by its position alone is not seen.
        imports: the modules of the package that it imports, also by a name of a package.
    """

    names: frozenset[str]
    asked: frozenset[str]
    imports: frozenset[str]


@functools.cache  # the copies have nearly the same files
def said(text: str, is_code: bool) -> Said:
    """Return what a file with a text says."""
    if not is_code:
        return Said(frozenset(re.findall(r"\w+", text)), frozenset(), frozenset())
    names, asked, imports = set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                asked.add(name)
            case ast.MatchClass(kwd_attrs=attributes):
                asked.update(attributes)
            case ast.ImportFrom(module=str(home), names=aliases) if home.startswith("backspot"):
                asked.update(alias.name for alias in aliases)
                imports.add(home)
                imports.update(f"{home}.{alias.name}" for alias in aliases)
    return Said(frozenset(names | asked), frozenset(asked), frozenset(imports))


def left_in(home: Path) -> dict[str, Said]:
    """What each file of the package says that is left in a copy."""
    paths = {file: home / "src" / "backspot" / file for file in files()}
    return {
        file: said(path.read_text("utf-8"), file.endswith(".py"))
        for file, path in paths.items()
        if path.exists()
    }


def knowing(part: str, left: dict[str, Said]) -> list[str]:
    """The files of the core that have a word of the part."""
    return [
        f"{file}: {word}"
        for file, says in left.items()
        if part_of(file) is None
        for word in sorted(says.names)
        if re.fullmatch(WORDS[part], word)
    ]


def imports_of_nothing(left: dict[str, Said]) -> list[str]:
    """The imports of modules that are not there: mypy finds them in a copy that is installed."""
    modules = {file: f"backspot/{file}".removesuffix(".py").replace("/", ".") for file in files()}
    gone = {
        module.removesuffix(".__init__") for file, module in modules.items() if file not in left
    }
    return [f"{file}: {module}" for file, says in left.items() for module in says.imports & gone]


def test_each_part_has_words_and_fields() -> None:
    assert WORDS.keys() == FIELDS.keys()


@pytest.mark.parametrize("part", WORDS)
def test_what_is_left_without_a_part_is_whole_and_has_no_word_of_it(
    part: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home, cache = tmp_path / "home", tmp_path_factory.getbasetemp() / "mypy"  # of this worker
    deleted = without(part, home)
    left = left_in(home)
    assert not knowing(part, left)
    edited = [name for name in deleted.touched if (home / name).exists()]
    assert len(edited) <= 12, "too many files put this part together with the core"
    assert not imports_of_nothing(left)

    def run(*command: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(home / "src")}
        done = subprocess.run(
            [*preloaded.python(), *command], cwd=home, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    printed, _, schema = run("-c", USES, str(RECORDING)).partition("schema:\n")
    assert all("backward" in text for text in printed.split("shown:\n"))
    assert schema.startswith("{")
    assert not [field for field in FIELDS[part] if f'"{field}"' in schema]
    about = [f"src/backspot/{file}" for file, says in left.items() if says.asked & deleted.names]
    checked = sorted({*about, *(name for name in edited if name.startswith("src/"))})
    with (home / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write(NOT_READ)
    run("-m", "mypy", "--cache-dir", str(cache), "--follow-imports", "silent", *checked)
