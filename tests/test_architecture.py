"""The rooms of the package: which imports which, and what nobody may import.

Every import counts: at the head of a file, within a function, for types only, and by a name that
``import_module`` takes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# From the ground up. A room imports rooms of the floors below its own; "" is the package's root.
FLOORS = (
    ("errors", "_version"),
    ("formatting",),
    ("paths", "progress"),
    ("results", "trace"),
    ("comparison", "analysis.timeline"),
    ("analysis.attribution",),
    ("analysis.accounting", "analysis.caveats"),
    ("analysis.findings",),
    ("analysis",),
    ("render",),
    ("pipeline",),
    ("live",),
    ("integrations",),
    ("",),
    ("commands",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WITH_TORCH = ("live", "integrations")


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted((SOURCE / "backspot").rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def imported(module: str) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, each with the line; those of other packages too."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = ("." * node.level) + (node.module or "")
            for alias in node.names:
                inside = f"{home}.{alias.name}"
                yield (inside if inside in FILES else home), node.lineno
        elif (
            isinstance(node, ast.Constant)
            and node.value in FILES
            and not module.startswith(f"{node.value}.")
        ):
            # What import_module takes; a file that names its own package imports nothing.
            yield str(node.value), node.lineno


ARROWS = {
    module: {other: line for other, line in imported(module) if other in FILES and other != module}
    for module in FILES
}


def room_of(module: str) -> str:
    """The room of a file: the longest one of ``FLOORS`` that its name begins with."""
    inner = module.removeprefix("backspot").removeprefix(".")
    fitting = [room for room in FLOOR_OF if room and f"{inner}.".startswith(f"{room}.")]
    return max(fitting, key=len, default=inner)


def test_every_file_has_a_room() -> None:
    homeless = [module for module in FILES if room_of(module) not in FLOOR_OF]
    assert not homeless, "give it a place in FLOORS"


def test_no_import_runs_back_up() -> None:
    upward = [
        f"{module}:{line} imports {other}"
        for module, others in ARROWS.items()
        for other, line in others.items()
        if room_of(module) != room_of(other)
        and FLOOR_OF[room_of(other)] >= FLOOR_OF[room_of(module)]
    ]
    assert not upward


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {module: set(others) for module, others in ARROWS.items()}

    def without_the_ends(left: dict[str, set[str]]) -> dict[str, set[str]]:
        """What is left without the files that import none of the others, or that none imports."""
        wanted = {other for others in left.values() for other in others}
        return {
            module: kept
            for module, others in left.items()
            if module in wanted and (kept := others & left.keys())
        }

    while (fewer := without_the_ends(left)) != left:
        left = fewer
    assert not left


@pytest.mark.parametrize("module", FILES)
def test_only_the_live_rooms_import_torch(module: str) -> None:
    packages = {other.partition(".")[0] for other, _ in imported(module)}
    assert "torch" not in packages or room_of(module) in WITH_TORCH


@pytest.mark.parametrize("module", FILES)
def test_a_private_module_is_imported_by_its_own_room_only(module: str) -> None:
    for other, line in ARROWS[module].items():
        home, _, name = other.rpartition(".")
        if name.startswith("_") and not name.startswith("__") and home != "backspot":
            assert room_of(module) == room_of(other), f"line {line}: {other} is private"


@pytest.mark.parametrize("module", FILES)
def test_imports_name_the_whole_way(module: str) -> None:
    assert not [line for other, line in imported(module) if other.startswith(".")]
