"""Modules within modules, far deeper than Python can call itself."""

import copy
import json
import sys

import pytest

from backspot import Report, compare
from backspot.render import renderer_for, suffixes
from backspot.render.comparison import render_comparison
from backspot.render.text import render_text
from backspot.render.text_parts import render_subtree
from backspot.render.view import View
from support.sample_reports import node, report, row

DEPTH = 2_000


@pytest.fixture(scope="module")
def deep() -> Report:
    """A chain of modules, each with one inside it."""
    paths = [".".join(["0"] * depth) for depth in range(DEPTH)]
    rows = [row(path, "Sequential", wall=10, calls=1) for path in paths]
    bottom = ".".join(["0"] * DEPTH)
    rows.append(row(bottom, wall=9_000_000, nodes=(node("AddmmBackward0", 9_000_000),)))
    return report(rows)


@pytest.fixture(autouse=True)
def pythons_own_limit():
    """Something that other tests import may have raised it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    assert sys.getrecursionlimit() < DEPTH
    yield
    sys.setrecursionlimit(before)


@pytest.mark.slow
def test_each_module_has_all_that_is_inside_it(deep):
    one, depth = deep[""], 0
    assert one.row.total_wall_ns == deep.wall_ns
    while one.children:
        (inner,) = one.children
        assert inner.row.total_wall_ns == one.row.total_wall_ns - one.row.wall_ns
        one, depth = inner, depth + 1
    assert depth == DEPTH
    assert one.row.class_name == "Linear"


@pytest.mark.slow
def test_a_deep_module_can_be_compared_shown_and_let_go(deep):
    one, other = deep[""], deep[""]
    assert one == other
    assert hash(one) == hash(other)
    assert one != deep["0"]
    assert one != "something else"
    assert repr(one) == f"<Subtree of Sequential: {DEPTH:,} modules inside>"
    del one, other


@pytest.mark.slow
def test_a_deep_tree_keeps_the_names_of_its_modules_in_sight(deep):
    lines = render_subtree(deep[""], width=100).splitlines()
    assert len(lines) == DEPTH + 4
    assert all("└─ 0" in line for line in lines[4:])


@pytest.mark.parametrize("depth", [0, 1, DEPTH - 1, DEPTH])
def test_a_deep_model_is_folded_at_any_depth(deep, depth):
    folded = deep.top(depth=depth)
    assert len(folded) == depth + 1
    assert sum(one.wall_ns for one in folded) == deep.wall_ns


@pytest.mark.slow
@pytest.mark.parametrize("by", ["class", "pattern"])
def test_a_deep_model_is_added_up_by_kind(deep, by):
    assert sum(one.wall_ns for one in deep.top(by=by)) == deep.wall_ns
    assert render_text(deep, View(by=by), width=100)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", suffixes())
def test_a_deep_model_has_every_form(deep, suffix):
    assert renderer_for(f"x{suffix}")(deep)


@pytest.mark.slow
def test_a_deep_model_is_saved_and_loaded(deep, tmp_path):
    assert Report.load(deep.save(tmp_path / "report.json")) == deep


@pytest.mark.slow
def test_a_deep_model_shows_in_a_notebook_and_a_terminal(deep):
    assert "AddmmBackward0" in deep._repr_html_()
    assert "AddmmBackward0" in render_text(deep, width=100)


@pytest.mark.slow
def test_a_deep_model_is_compared_with_itself_and_with_another(deep):
    assert not any(change.claimed for change in compare(deep, deep).changes)
    wrapped = report([row("module", "Sequential", wall=10), row("", "Wrapper", wall=10)])
    assert render_comparison(compare(deep, wrapped), width=100)


@pytest.mark.slow
def test_names_that_hold_what_the_order_of_paths_is_made_of_stay_apart():
    """Whatever characters names hold, only a dot makes one module lie in another."""
    paths = ["a", "a\0b", "a.b", "a\0b.c", "a\1", "a\1\1b", "a-b", "a!", "a.b.c", "ab", "a\1.x"]
    made = report([row("", "Model"), *(row(path, wall=1) for path in paths)])

    def inside(path: str) -> set[str]:
        return {child.row.path for child in made[path].children}

    assert inside("") == {"a", "a\0b", "a\1", "a\1\1b", "a-b", "a!", "ab"}
    assert inside("a") == {"a.b"}
    assert inside("a.b") == {"a.b.c"}
    assert inside("a\0b") == {"a\0b.c"}
    assert inside("a\1") == {"a\1.x"}


@pytest.mark.slow
def test_a_frozen_report_of_a_deep_model_can_be_copied(deep):
    assert copy.deepcopy(deep) == deep
    assert json.loads(renderer_for("x.json")(deep))["modules"][0]["class_name"] == "Linear"
