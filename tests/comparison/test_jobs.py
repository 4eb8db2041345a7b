"""Two jobs of many ranks are compared by their typical rank, and rank by rank."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import backspot
from backspot.commands import main
from backspot.errors import UsageError
from backspot.job.answer import answer
from backspot.job.summary import Summary
from backspot.render.comparison import render_comparison
from backspot.results.job import JobReport
from support.sample_reports import vit
from support.summaries import many, recorded

SLOW = "model.layers.2.mlp.down_proj"


def job_of(name: str) -> JobReport:
    return answer(recorded(name))


def longer(ranks: list[Summary], by: float) -> list[Summary]:
    """Make the forward kernels of one module take longer on all ranks."""
    return [
        msgspec.structs.replace(
            one,
            modules=tuple(
                msgspec.structs.replace(
                    module, forward_gpu=tuple(round(time + by) for time in module.forward_gpu)
                )
                if module.path == SLOW
                else module
                for module in one.modules
            ),
        )
        for one in ranks
    ]


def test_a_module_that_got_slower_on_all_ranks_is_claimed() -> None:
    before, after = answer(many(4)), answer(longer(many(4), 6_000_000))
    comparison = backspot.compare(before, after, names=("main", "branch"))
    assert [change.path for change in comparison.changes if change.differs] == [SLOW]
    assert comparison[SLOW].verdict == "longer"
    assert comparison[SLOW].change_ms == pytest.approx(6, rel=0.05)
    text = str(comparison)
    assert "main (4 ranks), 3 steps" in text
    assert "own time of" in text
    assert max(map(len, render_comparison(comparison, width=80).splitlines())) <= 80


def test_equal_jobs_do_not_differ() -> None:
    comparison = backspot.compare(job_of("fsdp_even"), job_of("fsdp_even"))
    parts = (comparison.step, comparison.whole, *comparison.phases, *comparison.ranks)
    assert {one.verdict for one in (*parts, *comparison.changes)} == {"within the noise"}


def test_causes_that_came_and_went_are_noted() -> None:
    comparison = backspot.compare(job_of("ddp_even"), job_of("ddp_host"))
    assert any(f"New: {SLOW} (Linear) is slow on rank 1" in note for note in comparison.notes)
    comparison = backspot.compare(job_of("ddp_host"), job_of("ddp_even"))
    assert any(f"Gone: {SLOW} (Linear) is slow on rank 1" in note for note in comparison.notes)


def test_ranks_are_compared_by_their_own_time() -> None:
    comparison = backspot.compare(job_of("ddp_even"), job_of("ddp_host"))
    before, after = job_of("ddp_even").ranks[1], job_of("ddp_host").ranks[1]
    (change,) = (one for one in comparison.ranks if one.path == "rank 1")
    assert change.before_ns_by_step == before.own_ns_by_step
    assert change.after_ns_by_step == after.own_ns_by_step


def test_jobs_that_share_nothing_are_said_to_be_different() -> None:
    other = [
        msgspec.structs.replace(
            one,
            modules=tuple(
                msgspec.structs.replace(module, path=f"other.{module.path}")
                for module in one.modules
            ),
        )
        for one in many(2)
    ]
    comparison = backspot.compare(answer(many(4)), answer(other))
    assert comparison.notes[0] == "The two jobs share no module: they are of different models."
    assert comparison.notes[1].startswith("The jobs have 4 and 2 ranks")
    assert {change.verdict for change in comparison.changes} == {"new", "gone"}


def test_a_job_is_not_compared_with_a_report_of_one_rank() -> None:
    with pytest.raises(UsageError, match="compare two jobs"):
        backspot.compare(job_of("ddp_even"), vit())


def test_a_saved_job_is_read_back_unchanged(tmp_path: Path) -> None:
    job = job_of("ddp_host")
    path = job.save(tmp_path / "job.json")
    assert backspot.JobReport.load(path) == job
    with pytest.raises(backspot.NotATraceError, match=r"schema is not backspot\.report"):
        backspot.Report.load(path)


@pytest.mark.parametrize("form", ["table", "md", "csv", "json"])
def test_diff_compares_saved_jobs(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [job_of(name).save(tmp_path / f"{name}.json") for name in ("ddp_even", "ddp_host")]
    assert main(["diff", *map(str, paths), "--format", form]) == 0
    out = capsys.readouterr().out
    assert "rank 1" in out
    assert SLOW[-12:] in out
    if form == "json":
        assert json.loads(out)["ranks"][0]["kind"] == "rank"


@pytest.mark.posix
@pytest.mark.slow
def test_diff_compares_two_folders_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = Path(__file__).parents[1] / "data" / "h200"
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        for rank in (0, 1):
            name = f"ddp.rank{rank}.trace.json.gz"
            (tmp_path / side / name).symlink_to(traces / name)
    assert main(["diff", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    assert "before (2 ranks)" in capsys.readouterr().out
