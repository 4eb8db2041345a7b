"""The rooms of the package, and which of them may import which.

Every import counts: at the head of a file, within a function, for types only, and by a name that
is given to ``import_module``.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from backspot import testing
from backspot.analysis import parts as report
from support.house import COMPOSERS, PARTS, SPINE, arrows as arrows_into_parts, files, part_of
from support.words import names_of

pytestmark = pytest.mark.xdist_group("architecture")  # one worker parses the files

HOME = Path(__file__).parents[1]
SOURCE = HOME / "src"

# From the ground up. A room imports rooms of lower floors only. "" is the package's root.
FLOORS = (
    ("errors", "imports", "interrupts", "presented", "threads", "_version"),
    ("formatting", "styled"),
    ("checks", "children", "descriptors", "paths", "progress", "registry"),
    ("results", "_startup", "trace"),
    ("analysis.timeline",),
    ("analysis.typical",),
    ("comparison",),
    ("analysis.attribution",),
    ("analysis.accounting", "analysis.caveats"),
    ("analysis.recording",),
    ("analysis.findings", "analysis.host"),
    ("analysis.replay", "analysis.memory"),
    ("analysis",),
    ("render",),
    ("pipeline",),
    ("job",),
    ("live",),
    ("integrations",),
    ("",),
    ("commands", "testing"),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
GROUND = {room for floor in FLOORS[:3] for room in floor}
# The demo trains a model, and imports torch by name, so that it can say what is not installed.
WITH_TORCH = ("live", "integrations", "commands.demo")

# The files of the core that still import a file of a part.
ARROWS = {
    ("commands/_console.py", "render/comparison.py"),
    ("live/profiling.py", "live/loaders.py"),
    ("live/profiling.py", "live/step_log.py"),
    ("live/profiling.py", "render/labelled_trace.py"),
    ("live/recording.py", "live/step_log.py"),
    ("render/html/_page_data.py", "render/html/_findings.py"),
}
MOST_NAMES = 28
PUBLIC_FUNCTIONS = (
    ("backspot.live.profiling", "profile"),
    ("backspot.live.instrumentation", "instrument"),
    ("backspot.pipeline", "locate"),
    ("backspot.comparison.compare", "compare"),
    ("backspot.job.gather", "ranks"),
)
MOST_PARAMETERS = {
    "profile": 14,  # what may be tried is the caller's to decide
    "instrument": 8,
    "locate": 8,
    "compare": 3,
    "ranks": 3,
}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted((SOURCE / "backspot").rglob("*.py"))}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def called(function: ast.expr) -> str:
    match function:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, each with its line; modules of other packages too."""
    for node in ast.walk(tree_of(module)):
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
            # For import_module. A file that names its own package imports nothing.
            yield str(node.value), node.lineno
        elif isinstance(node, ast.Call) and called(node.func).endswith(
            ("_import", "import_module")
        ):
            yield from (
                (arg.value, arg.lineno) for arg in node.args if isinstance(arg, ast.Constant)
            )


@functools.cache
def imported() -> dict[str, list[tuple[str, int]]]:
    return {module: list(imports_of(module)) for module in FILES}


def arrows() -> dict[str, dict[str, int]]:
    """The files that each file imports, with the line of the import."""
    return {
        module: {other: line for other, line in others if other in FILES and other != module}
        for module, others in imported().items()
    }


def room_of(module: str) -> str:
    """The room of a file: the longest one of ``FLOORS`` that its name begins with."""
    inner = module.removeprefix("backspot").removeprefix(".")
    fitting = [room for room in FLOOR_OF if room and f"{inner}.".startswith(f"{room}.")]
    return max(fitting, key=len, default=inner)


def is_within(module: str, *rooms: str) -> bool:
    """Whether a file is in one of the rooms, or in a room within it."""
    return any(f"{module}.".startswith(f"backspot.{room}.".replace("..", ".")) for room in rooms)


def test_every_file_has_a_room() -> None:
    homeless = [module for module in FILES if room_of(module) not in FLOOR_OF]
    assert not homeless, "give it a place in FLOORS"


def test_every_floor_is_there() -> None:
    inner = {module.removeprefix("backspot").removeprefix(".") for module in FILES}
    assert not [room for room in FLOOR_OF if room not in inner], "delete these from FLOORS"


def test_what_composes_a_report_is_of_parts() -> None:
    """Each function of ``analysis/parts.py`` and each ``Saying`` comes from the file of a part."""
    homes = {
        function.__module__
        for function in report.PARTS
        if function.__module__ != "backspot.analysis.parts"
    } | {
        f"backspot.render.{path.stem}"
        for path in (SOURCE / "backspot" / "render").glob("*.py")
        if re.search(r"^SAYING = ", path.read_text("utf-8"), re.M)
    }
    paths = {home: FILES[home].relative_to(SOURCE / "backspot").as_posix() for home in homes}
    assert len(paths) > 5
    homeless = [home for home, path in paths.items() if part_of(path) is None]
    assert not homeless, "give them a part in PARTS of tests/support/house.py"


def test_no_import_runs_back_up() -> None:
    upward = [
        f"{module}:{line} imports {other}"
        for module, others in arrows().items()
        for other, line in others.items()
        if room_of(module) != room_of(other)
        and FLOOR_OF[room_of(other)] >= FLOOR_OF[room_of(module)]
    ]
    assert not upward


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {module: set(others) for module, others in arrows().items()}

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


def test_only_the_live_rooms_import_torch() -> None:
    with_torch = [
        module
        for module, others in imported().items()
        if any(other.partition(".")[0] == "torch" for other, _ in others)
    ]
    assert with_torch
    assert not [module for module in with_torch if not is_within(module, *WITH_TORCH)]


def test_a_private_module_is_imported_by_its_own_room_only() -> None:
    outside = []
    for module, others in arrows().items():
        for other, line in others.items():
            home, _, name = other.rpartition(".")
            is_private = name.startswith("_") and not name.endswith("__")
            if is_private and not is_within(module, room_of(home)):
                outside.append(f"{module}:{line} imports {other}")
    assert not outside


def test_a_name_with_an_underscore_is_for_its_own_file_only() -> None:
    """So a file needs no list of the names that others may import."""
    outside = [
        f"{module} imports {alias.name} of {node.module}"
        for module in FILES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and node.module in FILES
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.endswith("__")
        if f"{node.module}.{alias.name}" not in FILES
    ]
    assert not outside


def test_imports_name_the_whole_way() -> None:
    assert not [
        f"{module}:{line} imports {other}"
        for module, others in imported().items()
        for other, line in others
        if other.startswith(".")
    ]


def test_the_core_imports_no_part_but_for_these_arrows() -> None:
    """A capability is a folder that can be deleted. This list may only become shorter."""
    assert arrows_into_parts() == ARROWS


def test_a_part_is_no_empty_promise() -> None:
    """Each pattern names files, and so do those of the spine and of what composes."""
    empty = [part for part in PARTS if not any(part_of(file) == part for file in files())]
    assert not empty, "delete these from PARTS in tests/support/house.py"
    known = {file.removesuffix(".py") for file in files()}
    assert not {*SPINE, *COMPOSERS} - known
    assert not [name for name in SPINE if part_of(f"{name}.py") is not None]


def test_the_public_names_stay_few() -> None:
    tree = tree_of("backspot")
    (names,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"
    )
    homes = ast.literal_eval(names)
    assert 10 < sum(len(names.split()) for names in homes.values()) <= MOST_NAMES


def test_public_functions_stay_within_their_parameters() -> None:
    found = {}
    for module, name in PUBLIC_FUNCTIONS:
        (function,) = (
            node
            for node in tree_of(module).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        )
        found[name] = len(function.args.args) + len(function.args.kwonlyargs)
    assert {name: count for name, count in found.items() if count > MOST_PARAMETERS[name]} == {}


def test_a_newcomer_finds_at_most_ten_entries_above_the_ground() -> None:
    entries = {module.split(".")[1] for module in FILES if "." in module} - {"testing"}
    assert len([name for name in entries - GROUND if not name.startswith("_")]) <= 10


def test_names_are_nouns_of_the_field() -> None:
    words = [names_of(tree_of(module)) for module in FILES]
    empty = sum(counts.empty.total() for counts in words)
    names = sum(counts.names + counts.locals for counts in words)
    assert empty <= 0.015 * names, "one, found, at and their like name nothing: make house"


def test_every_room_has_a_docstring_of_its_own() -> None:
    said = {module: ast.get_docstring(tree_of(module)) for module in FILES}
    rooms = [module for module, path in FILES.items() if path.name == "__init__.py"]
    assert not [room for room in rooms if not said[room]]
    assert len({said[room] for room in rooms}) == len(rooms)


def test_the_tests_of_this_group_share_a_worker(request: pytest.FixtureRequest) -> None:
    """A test without the name of its group in its id runs in any worker, without a word."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("needs workers")
    assert request.node.nodeid.endswith("@architecture")


def files_in(room: Path) -> dict[str, str]:
    """The pattern by which a docstring names each public file and folder of a room, by its name."""
    return {
        **{path.stem: rf"``{path.stem}``|\b{path.stem}\.py\b" for path in room.glob("[!_]*.py")},
        **{
            path.parent.name: rf"``{path.parent.name}``|\b{path.parent.name}/"
            for path in room.glob("[!_]*/__init__.py")
        },
    }


def test_a_room_that_lists_its_files_lists_all_of_them() -> None:
    with_lists, missing = [], []
    for module, path in FILES.items():
        if path.name == "__init__.py":
            said = ast.get_docstring(tree_of(module)) or ""
            inside = files_in(path.parent)
            named = {name for name, pattern in inside.items() if re.search(pattern, said)}
            if named:
                with_lists.append(module)
                missing += [f"{module} does not name {name}" for name in inside.keys() - named]
    assert "backspot.analysis.accounting" in with_lists
    assert not missing


def test_every_file_that_contributing_names_exists() -> None:
    folders = ("src", "tests", "benchmarks", "docs", "notebooks")
    paths = [
        f"/{path.relative_to(HOME)}" for name in folders for path in (HOME / name).rglob("*.py")
    ]
    named = set(re.findall(r"[\w/]+\.py\b", (HOME / "CONTRIBUTING.md").read_text("utf-8")))
    assert len(named) > 20
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]


# Benchmarks -------------------------------------------------------------------------------------

PRIVATE_IN_BENCHMARKS = {
    # What the third blind set is judged by stays as it was before its first run.
    ("causes/published/judge.py", "backspot.results.findings"),
    # What one of the processes imports that read a trace, whose memory is measured.
    ("cost/read.py", "backspot.trace.parallel"),
}


def reached_from(text: str) -> Iterator[str]:
    """The names of the package that a program uses; those in programs that are its texts, too."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(home)):
                yield from (f"{home}.{alias.name}" for alias in node.names)
            case ast.Attribute(value=ast.Name("backspot"), attr=name):
                yield f"backspot.{name}"
            case ast.Constant(value=str(inner)) if "import backspot" in inner or (
                "from backspot" in inner
            ):
                with suppress(SyntaxError):
                    yield from reached_from(inner)


def documented() -> set[str]:
    """What the reference of the Python API lists."""
    text = (HOME / "docs" / "api.md").read_text("utf-8")
    return set(re.findall(r"^(?:### |- `)(\w+)", text, re.M))


@functools.cache
def used_by_benchmarks() -> dict[str, set[str]]:
    """What each file of the benchmarks uses of the package."""
    folder = HOME / "benchmarks"
    return {
        path.relative_to(folder).as_posix(): {
            name
            for name in reached_from(path.read_text("utf-8"))
            if name.partition(".")[0] == "backspot"
        }
        for path in folder.rglob("*.py")
    }


def test_benchmarks_use_what_the_reference_lists_and_what_testing_names() -> None:
    allowed = {"backspot", "backspot.testing", "backspot.results", "backspot.__file__"}
    allowed |= {f"backspot.testing.{name}" for name in dir(testing)}
    for home in ("backspot", "backspot.results"):
        allowed |= {f"{home}.{name}" for name in documented()}
    used = used_by_benchmarks()
    private = {
        (file, name if name in FILES else name.rpartition(".")[0])
        for file, names in used.items()
        for name in names - allowed
    }
    assert private == PRIVATE_IN_BENCHMARKS
    assert {"backspot.profile", "backspot.results.Rung"} <= set().union(*used.values())


@pytest.mark.parametrize("name", [name for name in dir(testing) if name != "about"])
def test_a_name_of_testing_is_there_is_used_and_says_what_it_is(name: str) -> None:
    said = testing.about(name)
    assert said[0].isupper()
    assert said.endswith(".")
    used = set().union(*used_by_benchmarks().values())
    assert f"backspot.testing.{name}" in used, "nobody uses it: delete it from testing.py"
    home, _ = testing._NAMES[name]
    if is_within(home, *WITH_TORCH):
        pytest.importorskip("torch")
    assert getattr(testing, name) is not None


def test_no_file_of_the_package_imports_what_is_for_tests() -> None:
    assert not [module for module, others in arrows().items() if "backspot.testing" in others]


def test_no_thread_of_a_training_is_asked_for_its_threads():
    # The question gives it the number of torch.set_num_threads, which changes its sums.
    asking = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if "get_num_threads" in file.read_text(encoding="utf-8")
    ]
    assert sorted(asking) == ["backspot/commands/demo.py", "backspot/threads.py"]
