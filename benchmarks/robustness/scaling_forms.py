"""The reports that ``scaling.py`` writes in every form: in each, one thing is large."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from backspot import Report, compare
from backspot.render import renderer_for, suffixes
from backspot.render.json import comparison_to_json
from backspot.render.markdown import comparison_to_markdown
from backspot.render.tables import comparison_to_csv
from backspot.render.text import render_text
from backspot.render.text_parts import render_comparison, render_subtree
from backspot.render.view import View
from backspot.results.costs import KernelCost, Pass
from backspot.results.findings import Finding, Place
from benchmarks.common import TEST_DATA

sys.path.insert(0, str(TEST_DATA.parent))
from support.report_parts import line, node, report, row


def _one(**parts: tuple[object, ...]) -> Report:
    """A report of one row with these parts."""
    return report([row("fc", wall=10_000_000, **parts)])


def _rows(size: int) -> Report:
    spent = [node(f"N{i % 8}", 1_000 + i) for i in range(size)]
    return report(
        [row(f"blocks.{i // 8}.l{i % 8}", wall=1_000 + i, nodes=(spent[i],)) for i in range(size)]
    )


def _layers(size: int) -> Report:
    """Layers that repeat, each with a module inside."""
    rows = []
    for i in range(size // 3):
        rows.append(row(f"b.{i}.qkv", wall=1_000 + i, nodes=(node("AddmmBackward0", 1_000),)))
        rows.append(row(f"b.{i}.qkv.act", "GELU", wall=10, nodes=(node("GeluBackward0", 10),)))
        rows.append(row(f"b.{i}.norm", "LayerNorm", wall=99, nodes=(node("NormBackward0", 9),)))
    return report(rows)


def _flat(size: int) -> Report:
    rows = [row("", "Model"), *(row(f"m{i}", f"C{i}", wall=1_000 + i) for i in range(size))]
    return report([replace(one, nodes=(node(f"N{one.path}", one.wall_ns),)) for one in rows])


def _lines(size: int) -> Report:
    made = node("AddmmBackward0", 10)
    return _one(nodes=(made,), lines=tuple(line(made, f"f{i}.py", i) for i in range(size)))


def _steps(size: int) -> Report:
    rows = [row(f"m{i}", wall=size * 1_000, steps=size) for i in range(20)]
    return report(rows, step_ns=(1_000_000,) * size)


def _found(findings: int, places: int) -> Report:
    at = tuple(Place(f"m{i}", "Linear", 1, 10) for i in range(places))
    found = tuple(Finding(f"rule{i}", "title", "seen", "remedy", 10, at) for i in range(findings))
    return report([row("fc", wall=10_000_000)], findings=found)


def _passes(size: int) -> Report:
    made = report([row("fc", wall=size, steps=1)], step_ns=(size,))
    return replace(made, passes=tuple(Pass(i, 1, 1, 0, 0, 0, 0, 1, 0) for i in range(size)))


def _named(unit: str) -> Callable[[int], Report]:
    def made(size: int) -> Report:
        name = unit * (size // len(unit))
        spent = node(name, 5_000_000)
        long = row(name, name, wall=9_000_000, nodes=(spent,), lines=(line(spent, name, 1, name),))
        place = Place(name, name, 1, 900, name)
        found = Finding("rule", "title", name, name, 9_000_000, (place,), (name,))
        return report([long, row("fc", wall=4_000_000)], trace=name, findings=(found,))

    return made


_UNITS = {
    "letters": "a", "wide letters": "漢", "emoji": "😀", "marks": "e\u0301", "escapes": "\x1b",
    "markup": "|", "dots": "a.",
}  # fmt: skip

REPORTS: dict[str, tuple[Callable[[int], Report], int]] = {
    "rows": (_rows, 8_000),
    "layers": (_layers, 8_000),
    "flat": (_flat, 8_000),
    "depth of rows": (
        lambda size: report([row(".".join("a" * i), "Sequential", wall=10) for i in range(size)]),
        2_000,
    ),
    "nodes of a row": (
        lambda size: _one(nodes=tuple(node(f"N{i}", 10) for i in range(size))), 50_000,
    ),
    "lines of a row": (_lines, 50_000),
    "kernels of a row": (
        lambda size: _one(kernels=tuple(KernelCost(f"kernel{i}", 1, 1) for i in range(size))),
        50_000,
    ),
    "steps": (_steps, 10_000),
    "findings": (lambda size: _found(size, 1), 10_000),
    "places": (lambda size: _found(1, size), 50_000),
    "warnings": (
        lambda size: report(
            [row("fc", wall=10_000_000)], warnings=tuple(f"warning {i}" for i in range(size))
        ),
        2_000,
    ),
    "passes": (_passes, 100_000),
    "unowned": (
        lambda size: report(
            [row(f"(thing {i})", "", wall=10, is_module=False) for i in range(size)]
        ),
        4_000,
    ),
    **{f"name of {unit}": (_named(text), 200_000) for unit, text in _UNITS.items()},
}  # fmt: skip
"""How each is made, and the larger of its two sizes."""


def _renamed(made: Report) -> Report:
    """The same model inside another: all of its modules moved."""
    rows = tuple(
        replace(one, path=f"module.{one.path}") if one.is_module else one for one in made.modules
    )
    return replace(made, modules=rows)


def _relabelled(made: Report) -> Report:
    """The same model with a layer called otherwise in every block."""
    rows = tuple(replace(one, path=one.path.replace(".qkv", ".to_qkv")) for one in made.modules)
    return replace(made, modules=rows)


def _saved(made: Report) -> object:
    with TemporaryDirectory() as folder:
        return Report.load(made.save(Path(folder) / "report.json"))


def _tree(made: Report) -> object:
    paths = [one.path for one in made.modules]
    return render_subtree(made[paths[0] if len(paths) < 3 else min(paths, key=len)])


def _compared(made: Report, other: Report) -> object:
    found = compare(made, other)
    forms = (comparison_to_csv, comparison_to_json, comparison_to_markdown)
    return render_comparison(found, width=100), [form(found) for form in forms]


FORMS: dict[str, Callable[[Report], object]] = {
    "text": lambda made: render_text(made, width=100),
    "all rows": lambda made: render_text(made, View(top=None), width=100),
    "class": lambda made: render_text(made, View(by="class"), width=100),
    "pattern": lambda made: render_text(made, View(by="pattern"), width=100),
    "depth 1": lambda made: render_text(made, View(depth=1), width=100),
    "tree": _tree,
    "notebook": lambda made: made._repr_html_(),
    "load": _saved,
    "frame": lambda made: made.to_pandas(),
    "diff": lambda made: _compared(made, made),
    "diff of moved": lambda made: _compared(made, _renamed(made)),
    "diff of renamed": lambda made: _compared(made, _relabelled(made)),
    **{
        suffix: lambda made, suffix=suffix: renderer_for(f"x{suffix}")(made)
        for suffix in suffixes()
    },
}
