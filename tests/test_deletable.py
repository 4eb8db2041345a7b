"""A part can be deleted: nothing but what puts the parts together knows it.

``support/without.py`` deletes it in a copy. There, what is left is imported, checked by mypy, and
makes and prints a report.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.house import files, part_of
from support.without import without

pytestmark = [pytest.mark.slow, pytest.mark.posix]

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
IMPORTS = """
import importlib, pkgutil, backspot
for one in pkgutil.walk_packages(backspot.__path__, "backspot."):
    if not one.name.startswith(("backspot._startup.", "backspot.integrations.", "backspot.__main")):
        importlib.import_module(one.name)
"""
REPORTS = """
import sys, backspot
report = backspot.locate(sys.argv[1])
print(report)
for suffix in ("json", "html", "md", "csv"):
    report.save(f"report.{suffix}")
assert backspot.Report.load("report.json") == report
"""


def names_in(path: Path) -> Iterator[str]:
    """All names that code uses or makes."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def knowing(part: str, home: Path) -> list[str]:
    """The files of the core that have a word of the part."""
    found = []
    for file in files():
        path = home / "src" / "backspot" / file
        if not path.exists() or part_of(file) is not None:
            continue
        text = path.read_text("utf-8")
        words = names_in(path) if file.endswith(".py") else re.findall(r"\w+", text)
        found += [
            f"{file}: {word}" for word in sorted(set(words)) if re.fullmatch(WORDS[part], word)
        ]
    return found


def imports_of_nothing(home: Path) -> list[str]:
    """The imports of modules that are not there: mypy finds them in a copy that is installed."""
    source = home / "src"
    return [
        f"{path.relative_to(source)}: {node.module}"
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("backspot.")
        for module in [source / str(node.module).replace(".", "/")]
        if not module.with_suffix(".py").exists() and not module.is_dir()
    ]


def test_each_part_has_words_and_fields() -> None:
    assert WORDS.keys() == FIELDS.keys()


@pytest.mark.parametrize("part", WORDS)
def test_what_is_left_without_a_part_is_whole_and_has_no_word_of_it(
    part: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home, cache = tmp_path / "home", tmp_path_factory.getbasetemp() / "mypy"  # of this worker
    touched = without(part, home)
    assert not knowing(part, home)
    edited = [name for name in touched if (home / name).exists()]
    assert len(edited) <= 12, "too many files put this part together with the core"
    assert not imports_of_nothing(home)

    def run(*command: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(home / "src")}
        done = subprocess.run(
            [sys.executable, *command], cwd=home, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    assert "backward" in run("-c", IMPORTS + REPORTS, str(RECORDING))
    assert "backward" in run("-m", "backspot", "show", str(RECORDING))
    schema = run("-m", "backspot.render.json")
    assert not [field for field in FIELDS[part] if f'"{field}"' in schema]
    run("-m", "mypy", "--cache-dir", str(cache))
