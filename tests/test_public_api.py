"""What users import from ``backspot``: names and their homes, docstrings, examples."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib.util
import inspect
import pickle
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import backspot
from backspot import results
from backspot.job.answer import answer
from backspot.job.summary import from_json
from support.deaths import SNAPSHOT

DATA = Path(__file__).parent / "data"
TRACES = {
    "trace.json.gz": DATA / "h200" / "vit_patch_drop.trace.json.gz",
    "main.trace.json.gz": DATA / "findings" / "plain_vit.trace.json.gz",
    "branch.trace.json.gz": DATA / "findings" / "math_two_blocks_vit.trace.json.gz",
    "ddp.rank0.trace.json.gz": DATA / "h200" / "ddp.rank0.trace.json.gz",
    "ddp.rank1.trace.json.gz": DATA / "h200" / "ddp.rank1.trace.json.gz",
}
"""What lies in the working folder of the examples."""

NEED = {
    "instrument": "torch",
    "profile": "torch",
    "Instrumentation": "torch",
    "Instrumentation.active": "torch",
    "Instrumentation.remove": "torch",
    "Alarm": "torch",
    "Monitor": "torch",
    "Monitor.remove": "torch",
    "Monitor.training": "torch",
    "Report.to_pandas": "pandas",
}
"""Packages without which a public name has no docstring to read, or no example to run."""

NEEDS_RETURNS = {
    "Change.exceeds",
    "Change.too_noisy_for",
    "compare",
    "instrument",
    "locate",
    "profile",
    "ranks",
    "Comparison.__getitem__",
    "Comparison.save",
    "Comparison.slower_than",
    "JobReport.save",
    "Report.__getitem__",
    "JobReport.load",
    "OutOfMemory.load",
    "OutOfMemory.save",
    "Report.limit",
    "Report.load",
    "Report.save",
    "Report.share",
    "Report.to_pandas",
    "Report.top",
    "Report.what_if",
}
"""Every function and method that takes arguments or returns something; each says what it raises."""

NEEDS_EXAMPLE = NEEDS_RETURNS | {
    "Alarm",
    "BackspotError",
    "Change",
    "Comparison",
    "Finding",
    "Instrumentation",
    "JobReport",
    "Monitor",
    "NodeCost",
    "Phase",
    "Report",
    "Row",
    "Subtree",
}

LIVE = {"Alarm", "Instrumentation", "Monitor", "instrument", "profile"}
"""Public names that need torch."""
ERRORS = [name for name in backspot.__all__ if name.endswith("Error")]
RESULTS = results.__all__
CLASSES = [*ERRORS, *RESULTS]


def class_of(name: str) -> typing.Any:
    """What a public name of the package, or of its results, stands for."""
    return getattr(results if name in RESULTS else backspot, name)


def public_object(name: str) -> object:
    """A public name's object; one of a class is asked by ``Class.member``."""
    if name in NEED:
        pytest.importorskip(NEED[name])
    home, _, member = name.partition(".")
    found = class_of(home)
    return inspect.getattr_static(found, member) if member else found


def docstring_of(name: str) -> str:
    found = public_object(name)
    if isinstance(found, classmethod):
        found = found.__func__
    return inspect.cleandoc(found.__doc__ or "")


def members_of(name: str) -> Iterator[str]:
    """The public methods and properties of a public class: its own, and those of its parts."""
    cls = class_of(name)
    made_of = [base for base in cls.__mro__ if base is cls or base.__name__ == "InReport"]
    members = {member: value for one in made_of for member, value in vars(one).items()}
    for member, value in members.items():
        public = not member.startswith("_") or member == "__getitem__"
        if public and (isinstance(value, (property, classmethod)) or inspect.isfunction(value)):
            yield f"{name}.{member}"


DOCUMENTED = [
    *sorted({*backspot.__all__, *RESULTS} - {"Source", "__version__", "results"}),
    "Instrumentation.active",
    "Instrumentation.remove",
    "Monitor.remove",
    "Monitor.training",
    *(member for name in CLASSES for member in members_of(name)),
]


def sections(text: str) -> set[str]:
    names = ("Args", "Attributes", "Returns", "Raises", "Example")
    return {name for name in names if f"\n{name}:\n" in text}


# Names.


def test_dir_all_and_what_type_checkers_see_agree():
    tree = ast.parse(Path(backspot.__file__).read_text("utf-8"))
    checked = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imported = {
        alias.asname: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {**backspot._HOMES, "results": "backspot"}
    assert sorted({*imported, "__version__"}) == backspot.__all__ == dir(backspot)


def test_the_results_are_reached_without_an_import_of_their_own():
    code = "import backspot; print(backspot.results.NodeCost.__doc__.splitlines()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert (done.stdout, done.stderr) == (f"{docstring_of('NodeCost').splitlines()[0]}\n", "")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'backspot' has no attribute 'locat'"):
        backspot.locat


def test_importing_backspot_loads_none_of_what_the_names_need():
    code = (
        "import sys; before = set(sys.modules); import backspot; "
        "new = {'torch', 'numpy', 'msgspec', 'rich', 'dataclasses', 'inspect'}"
        " & (set(sys.modules) - before); assert not new, new"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [*CLASSES, "Alarm", "Instrumentation", "Monitor"])
def test_a_public_class_names_the_package_that_has_it_as_its_home(name):
    cls = public_object(name)
    home = "backspot.results" if name in RESULTS else "backspot"
    assert repr(cls) == f"<class '{home}.{name}'>"


@pytest.mark.parametrize("name", RESULTS)
def test_the_types_of_a_result_are_known_although_its_home_lacks_their_names(name):
    cls = getattr(results, name)
    hints = typing.get_type_hints(cls)
    assert list(hints) == [field.name for field in fields(cls)]
    assert not any(isinstance(hint, str) for hint in hints.values())


def test_the_results_that_a_report_and_a_comparison_hold_are_public():
    def held(hint: object) -> Iterator[type]:
        if isinstance(hint, type) and is_dataclass(hint):
            yield hint
        for part in typing.get_args(hint):
            yield from held(part)

    for name in RESULTS:
        for hint in typing.get_type_hints(getattr(results, name)).values():
            for cls in held(hint):
                assert getattr(results, cls.__name__) is cls


# Copies and pickles.


@pytest.fixture(scope="module")
def report() -> backspot.Report:
    return backspot.locate(TRACES["trace.json.gz"])


@pytest.fixture(scope="module")
def comparison() -> backspot.Comparison:
    return backspot.compare(
        backspot.locate(TRACES["main.trace.json.gz"]),
        backspot.locate(TRACES["branch.trace.json.gz"]),
    )


def test_results_are_pickled_and_copied(report, comparison):
    for result in (report, report["blocks.0"], report.modules[0], report.findings[0], comparison):
        assert pickle.loads(pickle.dumps(result)) == result
        assert copy.copy(result) == copy.deepcopy(result) == result


def test_a_pickle_loads_in_a_process_without_torch_that_has_imported_nothing(report, tmp_path):
    held = (report.modules[0], report["blocks.0"], backspot.UsageError("wrong"))
    (tmp_path / "held.pickle").write_bytes(pickle.dumps(held))
    code = """
import pickle, sys
sys.modules["torch"] = None
with open(sys.argv[1], "rb") as file:
    row, tree, error = pickle.load(file)
print(row, tree.row.path, type(error), error, error.exit_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "held.pickle")],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout == (
        f"{report.modules[0]!r} blocks.0 <class 'backspot.UsageError'> wrong 2\n"
    )


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_pickled_and_caught_as_one_of_backspots(name):
    error = getattr(backspot, name)("what to do")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args) == (type(error), error.args)
    assert isinstance(error, backspot.BackspotError)


def test_a_representation_is_short_and_shows_no_control_characters(report, comparison):
    shown = [report, report["blocks.0"], comparison, comparison.whole, comparison.changes[0]]
    for result in (*shown, report.modules[0], report.findings[0], report.phases[0]):
        assert len(repr(result)) < 200
    evil = backspot.results.Place("a\x1b[2J", "", 1, 1)
    assert repr(backspot.Finding("rule", "", "", "", 1, (evil,), 1)).isprintable()


# Docstrings.


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_has_a_docstring_of_whole_sentences(name):
    first = docstring_of(name).partition("\n")[0]
    assert first.endswith(".")
    if name.partition(".")[2] not in ("", "remove") and name in NEEDS_RETURNS:
        assert first.split()[0] in ("Draw", "Read", "Return", "Write")


@pytest.mark.parametrize("name", sorted(NEEDS_RETURNS))
def test_a_public_function_says_what_it_returns_and_raises(name):
    found = sections(docstring_of(name))
    assert found >= {"Returns", "Raises"}
    assert "Args" in found or name == "Report.to_pandas"


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_what_each_attribute_means_and_in_which_unit(name):
    text = docstring_of(name)
    for field in fields(getattr(results, name)):
        assert f"\n    {field.name}: " in text
        if field.name.endswith("_ns"):
            assert "nanoseconds" in text
        if field.name.endswith("_ms"):
            assert "milliseconds" in text


def test_no_public_function_is_left_out_of_the_demands():
    methods = {
        name
        for name in DOCUMENTED
        if not isinstance(public_object(name), (type, property)) and name not in LIVE
    }
    assert methods - NEEDS_RETURNS <= {
        "Instrumentation.remove",
        "Report.show",
        "Monitor.remove",
    }


def test_the_published_reference_is_current_and_has_every_name():
    """``python docs/make_api.py`` makes it so."""
    pytest.importorskip("torch")
    script = Path(__file__).parents[1] / "docs" / "make_api.py"
    spec = importlib.util.spec_from_file_location("make_api", script)
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    named = {name for names in make_api.GROUPS.values() for name in names}
    assert named == {*backspot.__all__} - {"__version__", "results"}
    assert script.with_name("api.md").read_text("utf-8") == make_api.made()


@pytest.fixture(scope="module")
def job() -> backspot.JobReport:
    ranks = [DATA / "ranks" / f"ddp_host.rank{rank}.json" for rank in (0, 1)]
    return answer([from_json(path.read_bytes()) for path in ranks])


# Examples.


@pytest.mark.parametrize("name", sorted(NEEDS_EXAMPLE))
def test_a_public_name_has_an_example(name):
    assert ">>> " in docstring_of(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_examples_of_a_public_name_run(name, report, comparison, job, tmp_path, monkeypatch):
    text = docstring_of(name)
    for link, trace in TRACES.items():
        shutil.copy(trace, tmp_path / link)
    monkeypatch.chdir(tmp_path)
    known = {"backspot": backspot, "report": report, "comparison": comparison, "job": job}
    known["death"] = SNAPSHOT
    examples = doctest.DocTestParser().get_doctest(text, known, name, name, 0)
    complaints: list[str] = []
    doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    ).run(examples, out=complaints.append)
    assert not complaints, "".join(complaints)


@pytest.mark.parametrize("name", ["profile", "instrument", "locate", "compare", "ranks"])
def test_types_can_be_checked_at_run_time(name):
    pytest.importorskip("torch")
    function = getattr(backspot, name)
    hints = typing.get_type_hints(function)
    assert hints.keys() == {*inspect.signature(function).parameters, "return"}
