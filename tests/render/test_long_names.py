"""Names and paths beyond all measure: every form takes time in step with their length.

At these sizes a form that takes time by the square of a length takes minutes.
"""

from functools import cache

import pytest
from rich.cells import cell_len

from backspot import Report, compare
from backspot.errors import BackspotError
from backspot.render import renderer_for, suffixes
from backspot.render.comparison import render_comparison
from backspot.render.text import render_text
from backspot.render.text_parts import render_subtree
from backspot.render.view import View
from support.sample_reports import line, node, report, row, vit

LENGTH = 150_000
ALPHABETS = {
    "letters": "a",
    "wide": "漢",
    "emoji": "😀",
    "selectors": "❤\ufe0f",
    "accents": "e\u0301",
    "nothing but marks": "\u0301",
    "escapes": "\x1b",
    "markup": "|",
    "dots": "a.",
}
FORMS = {
    "text": lambda made: render_text(made, width=100),
    "by class": lambda made: render_text(made, View(by="class"), width=100),
    "by pattern": lambda made: render_text(made, View(by="pattern"), width=100),
    "folded": lambda made: render_text(made, View(depth=1), width=100),
    "tree": lambda made: render_subtree(made[made.modules[0].path], width=100),
    "notebook": lambda made: made._repr_html_(),
    "comparison": lambda made: render_comparison(compare(made, vit()), width=100),
    **{
        suffix: lambda made, suffix=suffix: renderer_for(f"x{suffix}")(made)
        for suffix in suffixes()
    },
}


@cache
def named(name: str) -> Report:
    """A report in which a module, its class, its node and its line are called so."""
    made = node(name, 5_000_000)
    lines = (line(made, name, 1, name),)
    long = row(name, name, wall=9_000_000, nodes=(made,), lines=lines)
    return report([long, row("fc", wall=4_000_000)])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_bears_names_of_any_length(form):
    for unit in ALPHABETS.values():
        assert FORMS[form](named(unit * (LENGTH // len(unit)))), unit


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_no_line_of_the_terminal_is_longer_for_it(alphabet):
    unit = ALPHABETS[alphabet]
    made = named(unit * (LENGTH // len(unit)))
    lines = render_text(made, width=80).splitlines()
    lines += render_subtree(made[made.modules[0].path], width=80).splitlines()
    lines += render_comparison(compare(made, vit()), width=80).splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert max(map(len, lines)) <= 20 * 80
    assert len(lines) < 80


@pytest.mark.parametrize(
    ("text", "width", "end", "start"),
    [
        ("blocks.11.mlp.fc1", 17, "blocks.11.mlp.fc1", "blocks.11.mlp.fc1"),
        ("blocks.11.mlp.fc1", 8, "…mlp.fc1", "blocks.…"),
        ("漢字のモジュール", 16, "漢字のモジュール", "漢字のモジュール"),
        ("漢字のモジュール", 6, "…ール", "漢字…"),
        ("e\u0301" * 9, 4, "…" + "\u0301" + "e\u0301" * 3, "e\u0301" * 3 + "…"),
        ("", 5, "", ""),
        ("abc", 1, "…", "…"),
        ("abc", 0, "…", "…"),
    ],
)
def test_a_name_is_cut_to_the_cells_that_there_are(text, width, end, start):
    from backspot.render._terminal import keep_end, keep_start

    assert (keep_end(text, width), keep_start(text, width)) == (end, start)


def test_a_name_that_no_module_has_is_refused_whatever_its_length():
    made = named("a" * LENGTH)
    with pytest.raises(KeyError, match="no module"):
        made["a" * (LENGTH - 1) + "b"]


def test_a_path_of_many_names_finds_what_it_lies_in():
    deep = ".".join(["a"] * (LENGTH // 2))
    made = report([row("", "Model", wall=3), row("a.a", wall=6), row(deep, wall=12)])
    assert [child.row.path for child in made[""].children] == ["a.a"]
    assert [child.row.path for child in made["a.a"].children] == [deep]
    assert made[""].row.total_wall_ns == 7


def test_a_long_name_in_an_error_is_no_hang(tmp_path):
    with pytest.raises(BackspotError):
        Report.load(tmp_path / ("漢" * 100 + ".json"))
