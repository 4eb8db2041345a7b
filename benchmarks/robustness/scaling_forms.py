"""Does any output form take more than linear time?

    python -m benchmarks.robustness.scaling_forms
    python -m benchmarks.robustness.scaling_forms --cases rows,depth --forms text,.html

Each case makes a report of one size and one of ten times it: more rows, nodes, steps, lines,
findings, kernels, operators, passes, longer names, deeper paths. A ratio of much more than ten is
printed with a mark, and is the exit code. The times are of one run each, the best of three where
they are short.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from backspot import Report, compare
from backspot.render import renderer_for, suffixes
from backspot.render.json import comparison_to_json
from backspot.render.markdown import comparison_to_markdown
from backspot.render.tables import comparison_to_csv
from backspot.render.text import render_text
from backspot.render.text_comparison import render_comparison
from backspot.render.text_subtree import render_subtree
from backspot.render.view import View
from backspot.results.report import Finding, KernelCost, Pass, Place
from benchmarks.common import (
    TEST_DATA,
    UsageError,
    choose,
    command_line,
    parse,
    print_table,
    script,
    write_results,
)

sys.path.insert(0, str(TEST_DATA.parent))
from support.report_parts import line, node, report, row

_STEEP = 25.0
"""With caches and garbage collection, ten times as much takes up to twenty times as long."""
_SHORT = 0.2


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


def _depth(size: int) -> Report:
    return report([row(".".join("a" * i), "Sequential", wall=10) for i in range(size)])


def _nodes(size: int) -> Report:
    return report([row("fc", wall=10_000_000, nodes=tuple(node(f"N{i}", 10) for i in range(size)))])


def _lines(size: int) -> Report:
    made = node("AddmmBackward0", 10)
    lines = tuple(line(made, f"f{i}.py", i) for i in range(size))
    return report([row("fc", wall=10_000_000, nodes=(made,), lines=lines)])


def _kernels(size: int) -> Report:
    kernels = tuple(KernelCost(f"kernel{i}", 1, 1) for i in range(size))
    return report([row("fc", wall=10_000_000, kernels=kernels)])


def _steps(size: int) -> Report:
    rows = [row(f"m{i}", wall=size * 1_000, steps=size) for i in range(20)]
    return report(rows, step_ns=(1_000_000,) * size)


def _findings(size: int) -> Report:
    place = Place("fc", "Linear", 1, 10)
    found = tuple(Finding(f"rule{i}", "title", "seen", "remedy", 10, (place,)) for i in range(size))
    return report([row("fc", wall=10_000_000)], findings=found)


def _places(size: int) -> Report:
    places = tuple(Place(f"m{i}", "Linear", 1, 10) for i in range(size))
    found = Finding("rule", "title", "seen", "remedy", 10, places)
    return report([row("fc", wall=10_000_000)], findings=(found,))


def _warnings(size: int) -> Report:
    return report([row("fc", wall=10_000_000)], warnings=tuple(f"warning {i}" for i in range(size)))


def _passes(size: int) -> Report:
    made = report([row("fc", wall=size, steps=1)], step_ns=(size,))
    return replace(made, passes=tuple(Pass(i, 1, 1, 0, 0, 0, 0, 1, 0) for i in range(size)))


def _unowned(size: int) -> Report:
    return report([row(f"(thing {i})", "", wall=10, is_module=False) for i in range(size)])


def _named(unit: str) -> Callable[[int], Report]:
    def made(size: int) -> Report:
        name = unit * (size // len(unit))
        spent = node(name, 5_000_000)
        long = row(name, name, wall=9_000_000, nodes=(spent,), lines=(line(spent, name, 1, name),))
        place = Place(name, name, 1, 900, name)
        found = Finding("rule", "title", name, name, 9_000_000, (place,), (name,))
        return report([long, row("fc", wall=4_000_000)], trace=name, findings=(found,))

    return made


_CASES: dict[str, tuple[Callable[[int], Report], int]] = {
    "rows": (_rows, 8_000),
    "layers": (_layers, 8_000),
    "flat": (_flat, 8_000),
    "depth": (_depth, 2_000),
    "nodes": (_nodes, 50_000),
    "lines": (_lines, 50_000),
    "kernels": (_kernels, 50_000),
    "steps": (_steps, 10_000),
    "findings": (_findings, 10_000),
    "places": (_places, 50_000),
    "warnings": (_warnings, 2_000),
    "passes": (_passes, 100_000),
    "unowned": (_unowned, 4_000),
    "name of letters": (_named("a"), 200_000),
    "name of wide letters": (_named("漢"), 200_000),
    "name of emoji": (_named("😀"), 200_000),
    "name of marks": (_named("e\u0301"), 200_000),
    "name of escapes": (_named("\x1b"), 200_000),
    "name of markup": (_named("|"), 200_000),
    "path of dots": (_named("a."), 200_000),
}
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
    return render_subtree(made[made.modules[0].path if len(made.modules) < 3 else _root(made)])


def _root(made: Report) -> str:
    return min((one.path for one in made.modules), key=len)


def _in_every_form(made: Report, other: Report) -> object:
    found = compare(made, other)
    return (
        render_comparison(found, width=100),
        comparison_to_csv(found),
        comparison_to_json(found),
        comparison_to_markdown(found),
    )


_FORMS: dict[str, Callable[[Report], object]] = {
    "text": lambda made: render_text(made, width=100),
    "all rows": lambda made: render_text(made, View(top=None), width=100),
    "class": lambda made: render_text(made, View(by="class"), width=100),
    "pattern": lambda made: render_text(made, View(by="pattern"), width=100),
    "depth 1": lambda made: render_text(made, View(depth=1), width=100),
    "tree": _tree,
    "notebook": lambda made: made._repr_html_(),
    "load": _saved,
    "frame": lambda made: made.to_pandas(),
    "diff": lambda made: _in_every_form(made, made),
    "diff of moved": lambda made: _in_every_form(made, _renamed(made)),
    "diff of renamed": lambda made: _in_every_form(made, _relabelled(made)),
    **{
        suffix: lambda made, suffix=suffix: renderer_for(f"x{suffix}")(made)
        for suffix in suffixes()
    },
}


def _seconds(work: Callable[[Report], object], made: Report) -> float:
    taken = []
    for _ in range(3):
        since = time.perf_counter()
        work(made)
        taken.append(time.perf_counter() - since)
        if taken[-1] > 2 * _SHORT:
            break
    return min(taken)


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, device=False)
    parser.add_argument("--forms", help="comma-separated (default: all; with --small text)")
    options = parse(parser, argv)
    cases = choose(options, {n: f"{size:,} at most" for n, (_, size) in _CASES.items()}, ("rows",))
    forms = ["text"] if options.small else list(_FORMS)
    forms = options.forms.split(",") if options.forms else forms
    if set(forms) - set(_FORMS):
        raise UsageError(f"there are only the forms {', '.join(_FORMS)}")
    table = []
    for case in cases:
        make, size = _CASES[case]
        few, many = make(size // 10), make(size)
        for form in forms:
            short, long = (_seconds(_FORMS[form], of) for of in (few, many))
            more = 10 if case == "depth" else 1  # as many paths of as many more names each
            steep = long > _SHORT and long / short > _STEEP * more
            made = [case, form, short * 1e3, long * 1e3, long / short, "STEEP" if steep else ""]
            table.append(made)
            print(*made, file=sys.stderr, flush=True)
    head = ["case", "form", "ms", "ms of ten times", "ratio", ""]
    print_table(head, table)
    write_results(options, {"head": head, "rows": table})
    return 1 if any(row[-1] for row in table) and not options.small else 0


if __name__ == "__main__":
    sys.exit(main())
