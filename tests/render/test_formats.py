"""Formats: found where they are declared, and imported only when they are asked for."""

import subprocess
import sys

import pytest

from backspot import Comparison, Report, compare
from backspot.render.formats import all_formats, formats_of
from backspot.render.view import View
from support.sample_reports import vit

HEAVY = ("numpy", "rich", "backspot.render.text", "backspot.render.html")


def imported_by(code: str) -> set[str]:
    names = f"{code}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", names], capture_output=True, check=True, text=True)
    return set(done.stdout.split()[-2000:])


def test_each_suffix_and_each_name_of_a_kind_is_declared_once():
    for kind in (Report, Comparison):
        formats = formats_of(kind)
        assert len({one.suffix for one in formats}) == len(formats)
        names = [one.name for one in formats if one.name]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("made", [vit(), compare(vit(), vit())], ids=["report", "comparison"])
def test_a_format_with_a_name_keeps_to_a_view(made):
    for one in formats_of(type(made)):
        render = one.renderer(type(made))
        if one.name not in ("", "github"):  # which has findings alone, and no rows
            assert len(render(made, View(top=1))) < len(render(made))


def test_importing_the_renderers_room_imports_no_renderer():
    assert not imported_by("import backspot.render").intersection(HEAVY)


def test_listing_the_formats_needs_no_numpy():
    assert all_formats()
    assert "numpy" not in imported_by("import backspot.render.formats as f; f.all_formats()")


def test_the_help_lists_formats_without_importing_them():
    code = "import backspot.commands as c; c.main(['show', '--help'])"
    assert not imported_by(code).intersection(HEAVY)
