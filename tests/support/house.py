"""The core of the package, the parts that plug into it, and the arrows from the core into parts.

``python -m support.house`` in the folder ``tests``, or ``make house``, prints what each part costs.

A *part* is a capability that could be deleted: what makes a report of one trace does not need it.
All other files are the *core*. An *arrow* is a file of the core that imports a file of a part. Some
files put the core and the parts together: these may import anything.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parents[2]
SOURCE = HOME / "src"

# The files of each part, as patterns of their paths below ``src/backspot``; the first one counts.
# Their results are in ``results``: they are the contract, and import nothing.
PARTS = {
    "ranks": r"job/|render/_?job|html/_job|html/job\.css|commands/ranks|comparison/jobs"
    r"|live/gathering|torch_internals/store",
    "trials": r"live/trials/|(render|commands)/_trials",
    "plan": r"live/plan/|(render|commands)/(html/)?_plan|comparison/plans",
    "monitor": r"live/monitor|analysis/slowdowns",
    "compare": r"comparison/|render/_?comparison|html/_?comparison|commands/diff",
    "memory": r"analysis/memory/|(render|commands)/(html/)?_memory|live/memory\.",
    "out of memory": r"live/(out_of_memory|memory_history)|torch_internals/allocator"
    r"|render/_?out_of_memory",
    "limits": r"accounting/(formulas/|work|peaks)|(render|commands)/_limits|html/_roofline",
    "what if": r"analysis/replay/",
    "host": r"analysis/host/|findings/rules/lines|(render|commands)/_?host|html/_step",
    "why": r"analysis/findings/|commands/explain|render/((html/)?_findings|annotations)|^registry",
    "training": r"live/(step_log|termination)|analysis/(training|rare)|render/training"
    r"|html/_training",
    "loaders": r"live/loaders|torch_internals/batches",
    "labelled trace": r"labelled_trace|attribution/tracks|live/exporting",
    "formats": r"render/(flamegraph|markdown|notebook|tables)\.py|html/notebook",
    "children": r"^children|^_startup/|commands/_processes",
    "run": r"commands/(run|_script|demo)|live/(recorder|running|saving|discovery)\.py",
    "trainers": r"integrations/",
}

# The files in ``results`` that parts have.
RESULTS_OF = {
    "plan": ("plan",),
    "ranks": ("job",),
    "trials": ("trials",),
    "memory": ("memory",),
    "out of memory": ("out_of_memory",),
    "limits": ("limits", "work"),
    "host": ("host",),
    "training": ("training", "rare"),
    "labelled trace": ("tracks",),
    "compare": ("comparison",),
}
# Parts that build on another one, and go with it.
BUILDS_ON = {"plan": "trials"}
# Where these meet.
RESULTS = (
    *("results/__init__", "results/comparison", "results/costs", "results/findings"),
    "results/report",
)

# What puts the core and the parts together.
COMPOSERS = (
    *("__init__", "analysis/parts", "commands/_parts", "commands/_verbs", "live/__init__"),
    *("live/parts", "pipeline", "render/__init__", "render/html/__init__", "render/parts"),
    *("render/text", "testing"),
)

# What is read first: how a trace becomes a report, and how labels come into a trace.
SPINE = (
    *("pipeline", "trace/events", "trace/labels"),
    *("trace/read", "trace/chrome", "trace/json_events", "trace/columns"),
    *("analysis/timeline", "analysis/attribution/spans", "analysis/attribution/passes"),
    *("analysis/attribution/recompute", "analysis/attribution/join"),
    *("analysis/attribution/launches", "analysis/attribution/ownership"),
    *("analysis/attribution/shares", "analysis/accounting/clock", "analysis/accounting/ledger"),
    *("analysis/accounting/holders", "analysis/accounting/amounts", "analysis/accounting/rows"),
    *("analysis/accounting/phases", "analysis/typical", "analysis/recording", "analysis/parts"),
    *("results/costs", "results/report"),
    *("live/profiling", "live/recording", "live/sessions", "live/call_wrapper", "live/calls"),
)


@functools.cache
def files() -> dict[str, Path]:
    """All files of the package that people write, by their paths in it."""
    home = SOURCE / "backspot"
    written = (".py", ".html", ".js", ".css")
    found = (path for path in sorted(home.rglob("*")) if path.suffix in written)
    return {path.relative_to(home).as_posix(): path for path in found}


def part_of(file: str) -> str | None:
    """The part that a file belongs to; ``None`` for the core. ``results`` is all core."""
    if file.startswith("results/"):
        return None
    return next((part for part, pattern in PARTS.items() if re.search(pattern, file)), None)


def results_of(part: str) -> list[str]:
    """The files of a part in ``results``."""
    return [f"results/{name}.py" for name in RESULTS_OF.get(part, ())]


@functools.cache
def _file_of() -> dict[str, str]:
    named = {}
    for file in files():
        if file.endswith(".py"):
            parts = ["backspot", *Path(file).with_suffix("").parts]
            named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imported_by(file: str) -> Iterator[str]:
    """The files of the package that a file imports, also within functions and for types."""
    for node in ast.walk(ast.parse(files()[file].read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                name = inside if inside in _file_of() else node.module
                if name in _file_of():
                    yield _file_of()[name]


def arrows() -> set[tuple[str, str]]:
    """The imports from the core into parts, but for those of the files that compose."""
    return {
        (file, other)
        for file in files()
        if file.endswith(".py") and part_of(file) is None
        if file.removesuffix(".py") not in COMPOSERS
        for other in imported_by(file)
        if part_of(other) is not None
    }


def lines_of(*chosen: str) -> int:
    """The lines of some files."""
    return sum(len(files()[file].read_bytes().splitlines()) for file in chosen)


def main() -> None:
    """Print what each part has, and the house in one line."""
    from backspot.analysis.findings import all_rules

    by_part: dict[str | None, list[str]] = {}
    for file in files():
        by_part.setdefault(part_of(file), []).append(file)
    into = [part_of(other) for _, other in arrows()]
    print(f"{'part':16} {'files':>5} {'lines':>7} {'arrows into it':>15}")
    for part in PARTS:
        mine = by_part.get(part, [])
        print(f"{part:16} {len(mine):5} {lines_of(*mine):7,} {into.count(part):15}")
    core = by_part[None]
    spine = [f"{name}.py" for name in SPINE]
    print(f"{'spine':16} {len(spine):5} {lines_of(*spine):7,}")
    tiers = [getattr(rule, "tier", "stable") for rule in all_rules()]
    results = sum(path.stat().st_size for path in (HOME / "benchmarks/results").glob("*"))
    documents = [*(HOME / "docs").glob("*.md"), HOME / "README.md"]
    words = sum(len(path.read_text("utf-8").split()) for path in documents)
    print(
        f"core {len(core)} files, {lines_of(*core):,} lines; arrows {len(into)}; "
        f"parts {len(PARTS)}; stable rules {tiers.count('stable')}, "
        f"preview {tiers.count('preview')}; results {results // 1000:,} kB; words {words:,}"
    )


if __name__ == "__main__":
    main()
