"""The claims of ``README.md`` and ``docs/evidence.md``, made from what was measured.

    python -m benchmarks.claims

``claims.toml`` has the words, with a field for each figure: ``{cuda.planted.hit}`` is
from the summary of ``planted`` in ``results/cuda.json``; ``{cuda.planted.trials:,}`` has a format
as Python's. A claim without a figure is an error. Each claim says on what it was measured, and at
which commit; what was measured before the day of the last ``benchmarks all`` of its device, at
another commit than that, is called older.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept import DEVICES, figures_of, path_of, read_evidence
from benchmarks.questions import QUESTIONS

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

_ROOT = Path(__file__).parents[1]
PAGES = (_ROOT / "README.md", _ROOT / "docs" / "evidence.md")
_WORDS = Path(__file__).with_suffix(".toml")
_BLOCK = re.compile(r"(<!-- claims: (\w+) -->\n).*?(<!-- end of claims -->\n)", re.DOTALL)
_FIELD = re.compile(r"\{([a-z]+)\.(\w+)[^}]*\}")
_NO_FIGURE = re.compile(r"\{[^}]*\}|`[^`]*`|\]\([^)]*\)|\b[A-Za-z][\w.]*-?\d+|<!--.*?-->")


class _Formatter(string.Formatter):
    """Fields are paths, whose parts may have spaces; one with a colon stands in brackets."""

    def get_field(self, field: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        found: Any = given
        for part in re.split(r"[.\[]", field.removesuffix("]")):
            if not isinstance(found, Mapping) or part not in found:
                raise KeyError(f"no figure for {field!r}")
            found = found[part]
        if found is None:
            raise KeyError(f"no figure for {field!r}")
        return found, field


def read() -> dict[str, Any]:
    """Return the answers of both devices."""
    return {device: read_evidence(path_of(device)) for device in DEVICES}


def claims() -> list[dict[str, Any]]:
    """Return the words of all claims."""
    found: list[dict[str, Any]] = tomllib.loads(_WORDS.read_text(encoding="utf-8"))["claim"]
    return found


def without_a_figure(text: str) -> list[str]:
    """Return the numbers of a claim that no field gives; those in names and code are none."""
    return re.findall(r"\d[\d.,]*%?", _NO_FIGURE.sub("", text))


def made(text: str, evidence: Mapping[str, Any]) -> str:
    """Return a page with the claims of today.

    Raises:
        KeyError: If a claim has no figure.
    """
    figures = {
        device: {name: figures_of(answer) for name, answer in of["questions"].items()}
        for device, of in evidence.items()
    }
    formatter = _Formatter()

    def said(words: str) -> str:
        return formatter.vformat(" ".join(words.split()), (), figures)

    def row(claim: Mapping[str, Any]) -> str:
        names = dict.fromkeys(_FIELD.findall(claim["result"]))
        commands = ", ".join(dict.fromkeys(f"`{name}`" for _, name in names if name in QUESTIONS))
        measured = "; ".join(dict.fromkeys(_measured(evidence[d], name) for d, name in names))
        head = f"**{claim['title']}**: {said(claim['of'])}"
        return f"| {head} | {said(claim['result'])} | {commands} | {measured} |"

    def block(found: re.Match[str]) -> str:
        if found[2] == "table":
            lines = ["| claim | result | benchmark | measured |", "| --- | --- | --- | --- |"]
            lines += map(row, claims())
        else:
            short = [claim for claim in claims() if "short" in claim]
            lines = [f"- **{claim['title']}**: {said(claim['short'])}" for claim in short]
            names = dict.fromkeys(_FIELD.findall("".join(claim["short"] for claim in short)))
            lines += ["", _measured_in_short([(evidence[d], name) for d, name in names])]
        return found[1] + "\n".join(lines) + "\n" + found[3]

    return _BLOCK.sub(block, text)


_Answer = tuple[Mapping[str, Any], str]
"""The evidence of a device, and a question."""


def _device(of: Mapping[str, Any], name: str) -> str:
    hardware = of["questions"][name]["hardware"]
    if hardware["device"] == "cpu":
        cores = hardware.get("cpus_used") or hardware.get("cpus", 2)
        return f"{cores} CPU core{'s' * (cores > 1)}"
    return str(hardware["device"].removeprefix("NVIDIA ").split()[0])


def _is_older(of: Mapping[str, Any], name: str) -> bool:
    answer = of["questions"][name]
    return answer["commit"] != of["commit"] and answer["date"] < of["date"]


def _measured_in_short(answers: Sequence[_Answer]) -> str:
    """Say in a sentence on what questions were answered, and by which code."""
    devices: dict[str, dict[str, None]] = {}
    for of, name in answers:
        if not _is_older(of, name):
            commit = of["questions"][name]["commit"]
            devices.setdefault(commit, {})[_device(of, name)] = None
    newest = [f"on {', '.join(known)} at {commit}" for commit, known in devices.items()]
    older = [f"`{name}` on {_device(of, name)}" for of, name in answers if _is_older(of, name)]
    said = [*newest, *([f"with older code: {', '.join(older)}"] if older else [])]
    return f"Measured {'; '.join(said)}."


def _measured(of: Mapping[str, Any], name: str) -> str:
    """Say on what a question was answered, when, and by which code."""
    entry = of["questions"][name]
    older = "older: " if _is_older(of, name) else ""
    said = [f"{older}{_device(of, name)}", entry["date"], entry["commit"]]
    done, wanted = entry.get("cases") or (1, 1)
    said += [f"{done} of {wanted} cases"] if done < wanted else []
    cases: Counter[str] = Counter()
    for part in entry.get("parts", ()):  # also two of one commit, on machines that differ
        cases[f"{part['date']}, {part['commit']}"] += len(part["cases"])
    said += [f"{count} of them {run}" for run, count in cases.items()]
    return ", ".join(part for part in said if part)


def main() -> int:
    """Write the claims into the pages."""
    evidence = read()
    for page in PAGES:
        page.write_text(made(page.read_text(encoding="utf-8"), evidence), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
