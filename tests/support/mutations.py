"""Break the package in one place at a time, and see that a test notices."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

__all__ = ["PACKAGE", "ROOT", "Mutation", "main"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "backspot"


class Mutation(NamedTuple):
    """One thing that is wrong.

    Attributes:
        name: what is wrong.
        file: in which file of the package.
        old: the text that is right; it occurs once in the file.
        new: what it becomes.
        tests: what pytest is to run, of which something must fail; below ``tests``, by spaces.
        also: further (file, old, new), where a second guard would save what the first lets through.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        """All that changes, as (file, old, new)."""
        return ((self.file, self.old, self.new), *self.also)


def main(description: str | None, mutations: Sequence[Mutation], *options: str) -> int:
    """Try the mutations that the command line asks for.

    Args:
        description: what the command line says about itself.
        mutations: all that there are.
        options: what pytest is given besides the tests.

    Returns:
        1 if a mutation survives, or its tests fail without it or give no verdict; else 0.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("words", nargs="*", help="of the names of the mutations; all without any")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many to try at a time")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for each of them")
    asked = parser.parse_args()
    chosen = [m for m in mutations if not asked.words or any(w in m.name for w in asked.words)]
    if not chosen:
        parser.error("no mutation has such a name")
    control = sorted({test for mutation in chosen for test in mutation.tests.split()})
    at_once = (*options, "-n", str(asked.jobs))
    sound = _pytest(control, PACKAGE.parent, at_once, len(chosen) * asked.timeout)
    if sound.returncode:
        print(f"These tests fail without a mutation already.\n{sound.stdout}")
        return 1
    attempt = partial(_attempt, options=(*options, "-n", "0"), timeout=asked.timeout)
    width = max(len(mutation.name) for mutation in chosen)
    survived = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for mutation, verdict in zip(chosen, pool.map(attempt, chosen), strict=True):
            print(f"{mutation.name:{width}}  {verdict}", flush=True)
            survived += verdict != "killed"
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return 1 if survived else 0


def _attempt(mutation: Mutation, options: Sequence[str], timeout: int) -> str:
    """Return what became of a mutation: ``killed``, or what is the matter."""
    with TemporaryDirectory(prefix="backspot-mutated-") as folder:
        copy = Path(folder) / "backspot"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in mutation.edits:
            source = (copy / file).read_text(encoding="utf-8")
            if source.count(old) != 1:
                return f"does not fit: {source.count(old)} times in {file}"
            (copy / file).write_text(source.replace(old, new), encoding="utf-8")
        try:
            ended = _pytest(mutation.tests.split(), Path(folder), options, timeout)
        except subprocess.TimeoutExpired:
            return f"no verdict: more than {timeout} s"
    if ended.returncode == 1 or ended.returncode < 0:  # it failed; or the process is gone with it
        return "killed"
    return "SURVIVED" if not ended.returncode else f"no verdict: {ended.stdout.strip()[-200:]}"


def _pytest(
    tests: Sequence[str], source: Path, options: Sequence[str], timeout: int
) -> subprocess.CompletedProcess[str]:
    """Run tests, up to the first failure, on the package that lies in a folder."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=ROOT,
        env={
            **os.environ,
            "HYPOTHESIS_PROFILE": "mutated",
            "PYTHONPATH": str(source),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
