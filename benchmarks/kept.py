"""The answers that stay in the repository: one file a device, a question after the other.

    python -m benchmarks keep FILE... [--as NAME] [--merge] [--folder FOLDER]

A benchmark writes all that it has measured to a file (``-o FILE``). ``keep`` puts what claims,
pages and readers need into ``results/cpu.json`` or ``results/cuda.json``: the commit, the date, the
hardware, the command, the summary, and a line for each case, with four significant digits. Each
machine is named once, and the answers have its number.

The answer of a question replaces the one before; ``--as`` keeps it under another name beside that
one, and ``--merge`` replaces the lines of its cases alone. Where cases are of several runs,
``parts`` says which are of another one than the rest (than the largest, once the first has none
left), and the summary is made again of all lines, by the function ``summary_of_lines(lines,
device)`` of the benchmark. FILE can be such a file of a device, too: its newer answers are taken.

What is kept of a case is what the benchmark gives as ``lines``; else a row of its table, else the
plain values of its record. The first column is the name of the case; a case without an ``end`` is
done. A summary is of the lines of these. Where a run can leave out some lines of a case, as those
of a variant, ``MERGED_BY`` of the benchmark names the columns that say which line is which.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from benchmarks.harness import RESULTS, UsageError, write_text
from benchmarks.questions import QUESTIONS
from benchmarks.workers import NO_TIME

Answer = dict[str, Any]
"""What is kept of a question: see ``answer_of``."""

DEVICES = ("cuda", "cpu")
LIMIT = 400_000
"""Bytes that all of ``results`` has at most."""

_DIGITS = 4
_LONG = 80  # characters of a text
_FEW = 12  # cases whose lines a claim can name
_FAULTS = "done, with faults"


# The file of a device ----------------------------------------------------------------------------


def path_of(device: str, folder: Path = RESULTS) -> Path:
    """Return where the answers of a device are."""
    return folder / f"{device}.json"


def read_evidence(path: Path) -> Answer:
    """Return the answers of a device; none where there is no file yet."""
    if not path.exists():
        return {"commit": "", "date": "", "questions": {}}
    return _with_machines(json.loads(path.read_text(encoding="utf-8")))


def write_evidence(path: Path, evidence: Answer) -> None:
    """Write the answers of a device, each machine and each case in a line of its own."""
    head = {key: value for key, value in evidence.items() if key != "questions"}
    machines: list[Any] = []
    answers = ",\n".join(
        f"{_json(name)}: {_text_of(_numbered(answer, machines))}"
        for name, answer in evidence["questions"].items()
    )
    known = ",\n".join(map(_json, machines))
    write_text(
        path,
        f'{_json(head)[:-1]}, "machines": [\n{known}\n], "questions": {{\n{answers}\n}}}}\n',
    )


def _with_machines(document: Answer) -> Answer:
    """Return the answers of a file, each with its machines in place of their numbers."""
    machines = document.pop("machines")
    for answer in document["questions"].values():
        for run in (answer, *answer.get("parts", ())):
            run["hardware"] = machines[run["hardware"]]
    return document


def _numbered(answer: Answer, machines: list[Any]) -> Answer:
    """Return an answer with the numbers of its machines; those not yet among them are added."""

    def of(run: Answer) -> Answer:
        if run["hardware"] not in machines:
            machines.append(run["hardware"])
        return run | {"hardware": machines.index(run["hardware"])}

    parts = [of(part) for part in answer.get("parts", ())]
    return of(answer) | ({"parts": parts} if parts else {})


def _text_of(answer: Answer) -> str:
    head = {key: value for key, value in answer.items() if key not in ("summary", "lines")}
    lines = ",\n".join(map(_json, answer.get("lines", ())))
    return f'{_json(head)[:-1]},\n "summary": {_json(answer.get("summary", {}))},\n "lines": [' + (
        f"\n{lines}\n]}}" if lines else "]}"
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def rows_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the lines of an answer as dictionaries by column."""
    columns = answer.get("columns", [])
    return [
        dict(zip(columns, [*line, *[None] * (len(columns) - len(line))], strict=True))
        for line in answer.get("lines", [])
    ]


def figures_of(answer: Answer) -> dict[str, Any]:
    """Return what a claim can name: the summary, and the lines of few cases as ``rows``."""
    rows = rows_of(answer)
    named = {str(next(iter(row.values()))): row for row in rows}
    return {**answer.get("summary", {}), **({"rows": named} if len(rows) <= _FEW else {})}


# What is kept of a run ---------------------------------------------------------------------------


def answer_of(document: Mapping[str, Any]) -> Answer:
    """Return what is kept of all that a benchmark has written.

    Its ``end`` says whether all cases were through, ``cases`` how many of how many were,
    ``not_done`` which were not, ``failed`` which have failed and have no line, and ``wrong`` that
    the benchmark says that something is.
    """
    records = document.get("cases", {})
    ends = {name: one.get("end", "done") for name, one in records.items()}
    is_in_part = NO_TIME in ends.values()
    ends.pop(NO_TIME, None)  # says that of a run whose lines are no cases
    left = sorted(name for name, end in ends.items() if end == NO_TIME)
    faults = document.get("wrong") or {*ends.values()} - {"done", NO_TIME}
    hardware = document.get("hardware", {})
    answer: Answer = {
        "question": document["benchmark"],
        "commit": document["commit"],
        "date": hardware.get("date", ""),
        "command": document.get("command", ""),
        "seconds": document.get("seconds"),
        "end": "in part" if is_in_part else _FAULTS if faults else "done",
        "cases": [len(ends) - len(left), len(ends)] if ends else [],
    }
    answer |= {"not_done": left} if left else {}
    answer |= {"wrong": True} if document.get("wrong") else {}
    rows = [row for row in _rows(document) if row and next(iter(row.values())) not in left]
    kept = [
        {key: short(value) for key, value in row.items() if (key, value) != ("end", "done")}
        for row in rows
    ]
    columns = _columns(kept)
    lines = [_line(row, columns) for row in kept]
    named = {line[0] for line in lines}
    failed = sorted(
        name for name, end in ends.items() if end not in ("done", NO_TIME) and name not in named
    )
    answer |= {"failed": failed} if failed else {}
    machine = {key: value for key, value in hardware.items() if key != "date"}
    answer |= {"hardware": machine, "columns": columns}
    return {**answer, "summary": _few(document.get("summary", {})), "lines": lines}


def _rows(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if document.get("lines"):
        yield from document["lines"]
        return
    records = [{"case": name, **one} for name, one in document.get("cases", {}).items()]
    for row in document.get("rows") or records:
        yield {key: _cut(value) for key, value in row.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 4 and not any(isinstance(one, (list, dict)) for one in value)
    return not isinstance(value, dict)


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > _LONG
    return value[: _LONG - 1] + "…" if is_long else value


def short(value: Any) -> Any:
    """Return a value with four significant digits.

    A page rounds once more: where the last of the four is a 5, the next two say which way.
    """
    if isinstance(value, float):
        four = f"{value:.{_DIGITS - 1}e}".partition("e")[0].rstrip("0")
        return float(f"{value:.{_DIGITS + 2 * four.endswith('5')}g}")
    if isinstance(value, (list, tuple)):
        return [short(one) for one in value]
    if isinstance(value, Mapping):
        return {key: short(one) for key, one in value.items()}
    return value


def _few(summary: Any) -> Any:
    """Return a summary with how many there are in place of long lists."""
    if isinstance(summary, Mapping):
        return len(summary) if len(summary) > 60 else {k: _few(v) for k, v in summary.items()}
    if isinstance(summary, (list, tuple)):
        return [_few(one) for one in summary] if len(summary) <= 4 else len(summary)
    return short(summary)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of the cases, and then what most of them have: lines end with their last."""
    counts = Counter(key for row in rows for key, value in row.items() if value is not None)
    first = next(iter(rows[0]), "") if rows else ""
    return sorted(counts, key=lambda key: (key != first, -counts[key]))


def _line(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    line = [row.get(column) for column in columns]
    while line and line[-1] is None:
        line.pop()
    return line


# Putting an answer to those that are there -------------------------------------------------------


def summary_of_lines(question: str) -> Callable[[Sequence[Any], str], dict[str, Any]] | None:
    """Return what makes a summary of kept lines on a device, if the benchmark has that.

    It is ``summary_of_lines``; beside a ``function`` that answers, ``function_of_lines``. Lines of
    cases that have failed are left out.
    """
    _, _, function = QUESTIONS[question].where.partition(":")
    summary_of: Callable[[Sequence[Any], str], dict[str, Any]] | None = getattr(
        _benchmark(question), f"{function or 'summary'}_of_lines", None
    )
    if summary_of is None:
        return None
    return lambda rows, device: summary_of([row for row in rows if not row.get("end")], device)


def _benchmark(question: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{QUESTIONS[question].where.partition(':')[0]}")


def merged(old: Answer, new: Answer) -> Answer:
    """Return an answer whose cases are those of a newer run, where that has done them.

    Raises:
        UsageError: If the benchmark cannot make a summary of lines, or not of these.
    """
    summary_of = summary_of_lines(new["question"])
    if summary_of is None:
        raise UsageError(
            f"a part of {new['question']} cannot be merged, as no summary is made of its lines: "
            "keep a whole run"
        )
    by: tuple[str, ...] = getattr(_benchmark(new["question"]), "MERGED_BY", ())
    new_rows = rows_of(new)
    newer = {_key(row, by) for row in new_rows}
    old_rows = [
        row
        for row in rows_of(old)
        if _key(row, by) not in newer and _case(row) not in new.get("failed", ())
    ]
    rows = [*old_rows, *new_rows]
    cases = {_case(row) for row in rows}
    failed, left = (
        {*old.get(key, ()), *new.get(key, ())} - cases for key in ("failed", "not_done")
    )
    left -= failed
    if not old_rows and failed == {*new.get("failed", ())} and left == {*new.get("not_done", ())}:
        return new
    try:
        summary = summary_of(rows, device_of(new["hardware"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"a part of {new['question']} cannot be merged, as the kept lines lack what its "
            f"summary needs ({type(error).__name__}: {error}): keep a whole run"
        ) from None
    wrong = bool(old_rows and _is_wrong(old)) or _is_wrong(new)
    faults = wrong or failed or any(row.get("end") for row in rows)
    columns, kept = _columns(rows), [_key(row, by) for row in old_rows]
    parts = [
        _part(part, [key for key in _keys(part) if key in kept]) for part in old.get("parts", ())
    ]
    parts.append(_part(new, list(dict.fromkeys(_key(row, by) for row in new_rows))))
    parts = _united(part for part in parts if part["cases"])
    base = {key: value for key, value in old.items() if key not in _ENDS}
    if parts and not {*kept} - {key for part in parts for key in _keys(part)}:
        largest = max(parts, key=lambda part: len(_keys(part)))
        of_run = new if [*map(_run, parts)] == [_run(new)] else {"command": "", "seconds": None}
        base |= _run(largest) | {key: of_run[key] for key in ("command", "seconds")}
    parts = [part for part in parts if _run(part) != _run(base)]
    done = len(cases | failed)
    answer = base | {
        "end": "in part" if left else _FAULTS if faults else "done",
        "cases": [done, done + len(left)],
        "parts": parts,
        "columns": columns,
        "summary": _few(summary),
        "lines": [_line(row, columns) for row in rows],
    }
    ends = {"not_done": sorted(left), "failed": sorted(failed), "wrong": wrong}
    return answer | {key: value for key, value in ends.items() if value}


_ENDS = ("not_done", "failed", "wrong")
"""What only some answers have."""
_Key: TypeAlias = tuple[Any, ...]


def _case(row: Mapping[str, Any]) -> Any:
    return next(iter(row.values()))


def _key(row: Mapping[str, Any], by: Sequence[str]) -> _Key:
    """Return what says which line this is: its case, or the values of these columns."""
    return tuple(row.get(column) for column in by) if by else (_case(row),)


def _part(of: Mapping[str, Any], keys: Sequence[_Key]) -> Answer:
    """Return what is said of some of the lines: their run, their cases, and which lines."""
    part = _run(of) | {"cases": list(dict.fromkeys(key[0] for key in keys))}
    return part | ({"lines": [*map(list, keys)]} if any(len(key) > 1 for key in keys) else {})


def _run(of: Mapping[str, Any]) -> Answer:
    """Return what says of which run lines are."""
    return {key: of[key] for key in ("commit", "date", "hardware")}


def _united(parts: Iterable[Answer]) -> list[Answer]:
    """Return parts of which no two are of one run."""
    united: list[Answer] = []
    for part in parts:
        same = next((one for one in united if _run(one) == _run(part)), None)
        if same is None:
            united.append(part)
        else:
            same |= _part(same, [*_keys(same), *_keys(part)])
    return united


def _keys(part: Answer) -> list[_Key]:
    return [tuple(key) for key in part.get("lines", [[case] for case in part["cases"]])]


def _is_wrong(answer: Answer) -> bool:
    """Return whether its benchmark says that something is wrong, whatever cases have failed."""
    if answer["end"] != _FAULTS or answer.get("failed") or "wrong" in answer:
        return bool(answer.get("wrong"))
    # Of what was kept before ``wrong`` was, this is known where no case has failed.
    return not any(row.get("end") for row in rows_of(answer))


def device_of(hardware: Mapping[str, Any]) -> str:
    """Return whose file the answers of a machine are in."""
    return "cpu" if hardware.get("device", "cpu") == "cpu" else "cuda"


def keep(document: Mapping[str, Any], folder: Path, name: str = "", merge: bool = False) -> str:
    """Keep what a benchmark has written, and say what was kept.

    Raises:
        UsageError: If this is of a small run, or of no commit, or cannot be merged.
    """
    if document.get("benchmark") not in QUESTIONS:
        raise UsageError("no question of today has this answer")
    if document.get("small"):
        raise UsageError("a small run answers nothing")
    if not document.get("commit"):
        raise UsageError("no commit is known; BENCHMARKS_COMMIT can say it")
    answer = answer_of(document)
    path = path_of(device_of(answer["hardware"]), folder)
    evidence = read_evidence(path)
    name, known = name or answer["question"], evidence["questions"]
    if merge and name in known:
        answer = merged(known[name], answer)
    known[name] = answer
    write_evidence(path, evidence)
    done = " of ".join(map(str, answer["cases"])) or "all"
    return f"{path.name}: {name}, {done} cases at {answer['commit']}, {len(answer['lines'])} lines"


def take(evidence: Answer, folder: Path) -> str:
    """Take the newer answers of another file of a device, and say which."""
    device = device_of(next(iter(evidence["questions"].values()), {"hardware": {}})["hardware"])
    path = path_of(device, folder)
    own = read_evidence(path)
    newer = {
        name: answer
        for name, answer in evidence["questions"].items()
        if name not in own["questions"] or _is_newer(answer, own["questions"][name])
    }
    own["questions"] |= newer
    if evidence["date"] > own["date"]:
        own |= {"commit": evidence["commit"], "date": evidence["date"]}
    write_evidence(path, own)
    return f"{path.name}: {', '.join(newer) or 'nothing that is newer'}"


def _is_newer(other: Answer, own: Answer) -> bool:
    """Return whether another answer is not older, and takes the place of all that is merged here.

    A day is all that is known of when a run was: of two of one day, the other one is taken.
    """
    theirs, run = other.get("parts", ()), _run(other)
    merged_here = [
        part["date"] for part in own.get("parts", ()) if part not in theirs and _run(part) != run
    ]
    if merged_here and other["date"] <= max(merged_here):
        return False
    return _last(other) >= _last(own)


def _last(answer: Answer) -> str:
    return max(part.get("date", "") for part in (answer, *answer.get("parts", ())))


def main(argv: list[str]) -> int:
    """Run the command: 2 where a file cannot be kept, with a line that says why."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks keep", description="Keep answers in results/cpu.json and cuda.json."
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="what a benchmark has written with -o")
    add("--as", dest="name", default="", help="keep it under this name (default: the question)")
    add("--merge", action="store_true", help="replace the lines of its cases alone")
    add("--folder", type=Path, default=RESULTS, help="where the answers are (default: results)")
    run = parser.parse_args(argv)
    if run.name and len(run.files) > 1:
        parser.error("--as names one FILE")
    for path in run.files:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if "questions" in document:
                print(take(_with_machines(document), run.folder))
            else:
                print(keep(document, run.folder, run.name, run.merge))
        except (OSError, ValueError, KeyError, UsageError) as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 2
    return 0
