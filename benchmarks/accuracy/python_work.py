"""Python that holds up a step, in files written at random, and places of a step to run it in."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Work = Callable[[int], object]

_BODIES = {
    "arithmetic": """
        total = 0
        for NAME in range(size):
            total += NAME * 7 % 13
            if total > 1000:
                total -= 1000
        return total""",
    "words": """
        found = {}
        for NAME in range(size):
            for word in "The quick brown fox jumps over the lazy dog".lower().split():
                found[word] = found.get(word, 0) + NAME
        return found""",
    "boxes": """
        overlaps = []
        for NAME in range(size):
            overlaps.append(_overlap((NAME, 0, NAME + 4, 4), (2, 2, 9, NAME + 3)))
        return overlaps

    def _overlap(one, other):
        width = min(one[2], other[2]) - max(one[0], other[0])
        height = min(one[3], other[3]) - max(one[1], other[1])
        return max(width, 0) * max(height, 0)""",
    "ordering": """
        rows = [(NAME * 7919 % 1009, str(NAME)) for NAME in range(size)]
        return sorted(rows, key=lambda row: (row[0], len(row[1])))""",
    "generator": """
        return sum(NAME * NAME % 31 for NAME in range(4 * size))""",
    "distance": """
        before = list(range(24))
        for NAME in range(size):
            row = [NAME]
            for at in range(1, len(before)):
                cost = (NAME + at) % 3 > 0
                row.append(min(row[-1] + 1, before[at] + 1, before[at - 1] + cost))
            before = row
        return before""",
    "records": """
        kept = []
        for NAME in range(size):
            record = {"id": NAME, "name": f"{NAME:05d}", "tags": [NAME % 3, NAME % 5]}
            record["key"] = "-".join(map(str, record["tags"]))
            kept.append(json.dumps(record))
        return kept""",
    "tree": """
        total = 0
        for NAME in range(size):
            total += _depth((NAME, ((1, (2,)), (3,))))
        return total

    def _depth(node):
        if not isinstance(node, tuple):
            return 0
        return 1 + max(_depth(child) for child in node)""",
    "objects": """
        points = [_Point(NAME) for NAME in range(size)]
        for point in points:
            point.move(1)
        return points

    class _Point:
        def __init__(self, x):
            self.x = x
            self.seen = [x]

        def move(self, by):
            self.x += by
            self.seen.append(self.x)""",
    "queue": """
        heap = []
        for NAME in range(size):
            heapq.heappush(heap, (NAME * 37 % 101, NAME))
            while len(heap) > 16:
                heapq.heappop(heap)
        return heap""",
}
KINDS = tuple(_BODIES)


def written(folder: Path, kind: str, draw: random.Random) -> tuple[Work, str]:
    """Write a function that does one kind of work, somewhere in a file of its own.

    Returns:
        The function, which takes how much to do, and the file's name.
    """
    name, variable = f"{draw.choice(_NAMES)}_{draw.randrange(100)}", draw.choice("ijkn")
    lines = ["import heapq", "import json", *_filling(draw), f"def {name}(size):"]
    lines += [f"    # {draw.choice(_NAMES)}" for _ in range(draw.randrange(4))]
    body = _BODIES[kind].replace("NAME", variable).strip("\n").splitlines()
    lines += [line.removeprefix("    ") for line in body] + _filling(draw)
    file = folder / f"{name}_{kind}.py"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name), file.name


_NAMES = ("gather", "encode", "check", "match", "update", "collect", "assign", "summarize")


def _filling(draw: random.Random) -> list[str]:
    """Lines that do nothing here."""
    return [f"# {draw.random()}" for _ in range(draw.randrange(40))] + ["", ""]


def hot_lines(work: Work, size: int) -> tuple[set[int], dict[str, int]]:
    """Return the lines that run most often, and the first line of each function they are in.

    Python's own tracing counts them, which Backspot does not use.
    """
    file = work.__code__.co_filename
    counts: Counter[tuple[CodeType, int]] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line" or frame.f_code.co_name in ("<genexpr>", "<listcomp>", "<lambda>"):
            counts[frame.f_code, frame.f_lineno] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(size)
    finally:
        sys.settrace(before)
    most = max(counts.values())
    hot = [key for key, count in counts.items() if 4 * count >= most]
    return {line for _, line in hot}, {code.co_name: code.co_firstlineno for code, _ in hot}
