"""``backspot run`` on scripts for trainers and launchers: the slow module, and the same losses.

``benchmarks/robustness/unedited.py`` does more of this with public scripts.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import preloaded

pytest.importorskip("torch")

import backspot

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A script; the path of its slow module, ``""`` for the model; backward passes of a step."""

    file: str
    slow: str
    arguments: tuple[str, ...] = ()
    needs: str = "torch"
    ranks: int = 0
    passes: int = 1


CASES = {
    "mnist-accumulated": Case("mnist.py", "middle", ("--accumulate", "3"), passes=3),
    # A compiled region has one owner: the module that is compiled, here the model.
    "mnist-compiled": Case("mnist.py", "", ("--compile",)),
    "dcgan": Case("dcgan.py", "netG.main.3", passes=3),
    "huggingface": Case(
        "huggingface.py", "transformer.h.1.mlp.act.1", needs="transformers", passes=2
    ),
    "lightning": Case("lightning_trainer.py", "decoder.1", needs="lightning"),
    "accelerate": Case("accelerated.py", "3", needs="accelerate", passes=2),
    "torchrun": Case("distributed.py", "1", ranks=2),
}


def run(case: Case, folder: Path, *start: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    return subprocess.run(
        [
            *preloaded.python(),
            *(launch if case.ranks else ()),
            *start,
            str(SCRIPTS / case.file),
            *case.arguments,
        ],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **({} if start else {"ROUNDS": "0"}),  # only what is observed needs to be slow
            "LOSSES": str(folder / "losses"),
            "HF_HUB_OFFLINE": "1",
            "PYTHON_EXEC": str(preloaded.executable(folder)),  # of the ranks
            "PYTHONPATH": str(Path(backspot.__file__).parents[1]),
        },
        capture_output=True,
        check=False,
        text=True,
    )


def losses(done: subprocess.CompletedProcess[str], folder: Path) -> list[str]:
    """The lines with a loss, in hexadecimal, on standard output or in the files of the ranks."""
    assert done.returncode == 0, done.stderr
    files = [path.read_text() for path in sorted(folder.glob("losses*"))]
    found = [line for line in "\n".join([done.stdout, *files]).splitlines() if "0x" in line]
    assert found
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_slow_module_is_named_and_the_losses_are_the_same(name, tmp_path):
    case = CASES[name]
    pytest.importorskip(case.needs)
    one, other = tmp_path / "plain", tmp_path / "observed"
    plain = run(case, one)
    observed = run(case, other, "-m", "backspot", "run", "--warmup", "2", "--steps", "3")
    assert losses(observed, other) == losses(plain, one)
    reports = sorted((other / "backspot").glob("report*.json"))
    assert len(reports) == max(1, case.ranks), observed.stderr
    for report in map(backspot.Report.load, reports):
        # Waiting for the other rank can take longer than any module.
        assert next(row for row in report.modules if row.is_module).path == case.slow
        assert (report.steps, len(report.passes)) == (3, 3 * case.passes)
