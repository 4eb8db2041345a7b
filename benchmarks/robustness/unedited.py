"""Does `backspot run` name the slow module of scripts that nobody wrote for it?

Each script in the folder `scripts` has one slow module. It runs twice, plainly and under
`backspot run`. The losses that it prints must be the same, bit for bit, and so must be its exit
code. The report must name the slow module, and nothing of Backspot may be left when it ends.

    python -m benchmarks unedited
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import backspot
from backspot import Report
from benchmarks.common import choose, command_line, parse, print_table, script, write_results

SCRIPTS = Path(__file__).parent / "scripts"
OPTIONS = ("--warmup", "2", "--steps", "3")


@dataclass(frozen=True)
class Case:
    """A script, and what its report must say.

    Attributes:
        slow: the path of the slow module; empty for the model itself.
        arguments: what the script is called with.
        needs: the package that it needs beside torch.
        ranks: how many processes torchrun starts; 0 without torchrun.
        passes: how many backward passes a step has.
    """

    file: str
    slow: str
    arguments: tuple[str, ...] = ()
    needs: str = ""
    ranks: int = 0
    passes: int = 1


CASES = {
    "mnist": Case("mnist.py", "middle"),
    "mnist-accumulated": Case("mnist.py", "middle", ("--accumulate", "3"), passes=3),
    # A compiled region has one owner: the module that is compiled, here the model.
    "mnist-compiled": Case("mnist.py", "", ("--compile",)),
    "word-language-model": Case("word_language_model.py", "between"),
    "gan": Case("gan.py", "discriminator.model.1", passes=6),
    "dcgan": Case("dcgan.py", "netG.main.3", passes=3),
    "huggingface": Case(
        "huggingface.py", "transformer.h.1.mlp.act.1", needs="transformers", passes=2
    ),
    "lightning": Case("lightning_trainer.py", "decoder.1", needs="lightning"),
    "accelerate": Case("accelerated.py", "3", needs="accelerate", passes=2),
    "detection": Case("detection.py", "roi_heads.box_head.fc7.1", needs="torchvision"),
    "torchrun": Case("distributed.py", "1", ranks=2),
}


def missing(case: Case) -> str:
    """Return the package that is missing here; empty if there is none."""
    for name in ("torch", case.needs):
        if name and importlib.util.find_spec(name) is None:
            return name
    return ""


def start(
    case: Case,
    folder: Path,
    *,
    options: Sequence[str] | None = None,
    python: Sequence[str] = (sys.executable,),
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder.

    Args:
        case: the case.
        folder: the working folder.
        options: options of ``backspot run``; ``None`` runs the script without Backspot.
        python: what starts Python.
    """
    command = [*python]
    if case.ranks:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(case.ranks)]
    if options is not None:
        command += ["-m", "backspot", "run", *options]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "LOSSES": str(folder / "losses"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(backspot.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    return subprocess.run(
        [*command, str(SCRIPTS / case.file), *case.arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        check=False,
        text=True,
    )


def losses(output: str, folder: Path) -> list[str]:
    """Return the losses: what has a binary fraction in it, on standard output or in the files."""
    lines = output.splitlines()
    for path in sorted(folder.glob("losses*")):
        lines += path.read_text().splitlines()
    return [line for line in lines if "0x" in line]


def last_line(text: str) -> str:
    """Return the last line of a text; empty for none."""
    return (text.strip().splitlines() or [""])[-1]


def judge(case: Case, folder: Path, python: Sequence[str] = (sys.executable,)) -> tuple[str, float]:
    """Run a script twice.

    Args:
        case: the case.
        folder: where it works.
        python: what starts Python.

    Returns:
        What is wrong, empty if nothing is; and the seconds that Backspot took.
    """
    for name in ("plain", "observed"):
        (folder / name).mkdir()
    since = time.perf_counter()
    plain = start(case, folder / "plain", python=python)
    between = time.perf_counter()
    observed = start(case, folder / "observed", options=OPTIONS, python=python)
    seconds = (time.perf_counter() - between) - (between - since)
    if plain.returncode:
        return f"the script itself fails: {last_line(plain.stderr)}", seconds
    if observed.returncode:
        return f"exit code {observed.returncode}: {last_line(observed.stderr)}", seconds
    told = losses(plain.stdout, folder / "plain")
    if not told or told != losses(observed.stdout, folder / "observed"):
        return "the losses differ", seconds
    files = sorted((folder / "observed" / "backspot").glob("report*.json"))
    if len(files) != max(1, case.ranks):
        return f"{len(files)} reports: {last_line(observed.stderr)}", seconds
    for path in files:
        report = Report.load(path)
        # Waiting for the other rank can take longer than any module.
        first = next(row for row in report.modules if row.is_module)
        if first.path != case.slow:
            return f"{path.name} names {first.path!r}", seconds
        if (report.steps, len(report.passes)) != (3, 3 * case.passes):
            return f"{path.name}: {report.steps} steps, {len(report.passes)} passes", seconds
    return "", seconds


@script
def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts."""
    arguments = parse(command_line(__doc__, device=False), argv)
    names = choose(arguments, dict.fromkeys(CASES, ""), small=("mnist",))
    rows, wrong = [], 0
    for name in names:
        case = CASES[name]
        lacks = missing(case)
        with tempfile.TemporaryDirectory() as folder:
            found, seconds = (f"needs {lacks}", 0.0) if lacks else judge(case, Path(folder))
        wrong += bool(found) and not lacks
        rows.append((name, case.slow, found or "named, losses equal", round(seconds, 1)))
    head = ("script", "slow module", "outcome", "seconds more")
    print_table(head, rows)
    write_results(arguments, {"cases": [dict(zip(head, row, strict=True)) for row in rows]})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
