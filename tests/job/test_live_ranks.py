"""Ranks that are put together while they train, with one of them slow or gone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")

import backspot  # noqa: E402
from support.gloo import TRAINING, train  # noqa: E402

if not distributed.is_gloo_available():
    pytest.skip("built without gloo", allow_module_level=True)

PROFILED = """
import backspot
from backspot.live import gathering
gathering.LIMIT_S = 8.0
taken = 0
def last_step_of_a_rank():
    global taken
    step()
    taken += 1
    if taken == 10 and rank == 3:
        os._exit(0)
report = backspot.profile(
    last_step_of_a_rank, model, steps=8, warmup=2, unprofiled=0, stacks=False, ranks="all"
)
if rank == 0:
    import msgspec
    sys.stdout.buffer.write(msgspec.json.encode(report.job))
else:
    assert report.job is None
"""


@pytest.mark.slow
def test_the_slow_rank_is_named_and_so_is_one_that_has_ended(tmp_path: Path) -> None:
    """Planted: 150 ms in one module of rank 1. Rank 3 ends before it leaves its summary.

    Eight steps: a busy machine holds up one or two of them.
    """
    (output, _), *_ = train(TRAINING + PROFILED, 4, tmp_path, "-c")
    job = msgspec.json.decode(output, type=backspot.JobReport)
    assert [one.rank for one in job.ranks] == [0, 1, 2]
    assert [lost.source for lost in job.lost] == ["rank 3"]
    assert job.findings, job
    first = job.findings[0]
    assert (first.rank, first.path, first.kind) == (1, "2.0", "host")


def test_a_process_outside_a_job_is_refused() -> None:
    with pytest.raises(backspot.UsageError, match="init_process_group"):
        backspot.profile(lambda: None, torch.nn.Linear(1, 1), ranks="all")
    with pytest.raises(backspot.UsageError, match="ranks='some'"):
        backspot.profile(lambda: None, torch.nn.Linear(1, 1), ranks="some")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_script_that_runs_on_all_ranks_has_one_answer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{TRAINING}\nfor _ in range(40):\n    step()\n")
    # Eight steps: a busy machine holds up one or two of them.
    before = ["-m", "backspot", "run", "--warmup", "2", "--steps", "8", "--exit"]
    (_, first), (_, second) = train("train.py", 2, tmp_path, *before)
    assert 0 < first.index("2.0 (Linear) is slow on rank 1") < first.index("Rank 0 by itself:")
    assert first.index("Rank 0 by itself:") < first.index("of the backward")
    assert "slow on rank" not in second
    job = msgspec.json.decode((tmp_path / "backspot" / "job.json").read_bytes())
    assert job["findings"][0]["path"] == "2.0"
