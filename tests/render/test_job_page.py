"""The page of many ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from backspot.job.answer import answer
from backspot.job.summary import Summary, from_json
from backspot.results.job import JobReport
from benchmarks.cost.ranks import generated, slow_rank

RANKS = Path(__file__).parents[1] / "data" / "ranks"


def recorded(name: str) -> list[Summary]:
    return [from_json((RANKS / f"{name}.rank{rank}.json").read_bytes()) for rank in (0, 1)]


def page_of(job: JobReport, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return job.save(folder / "job.html").read_text()


def text_of(html: str) -> str:
    return re.sub(
        r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(style|script)>.*?</\1>", "", html))
    )


@pytest.mark.parametrize("name", ["ddp_even", "fsdp_even"])
def test_no_cell_is_coloured_where_no_rank_differs(name: str, tmp_path: Path) -> None:
    even = answer(recorded(name))
    assert not even.findings
    page = page_of(even, tmp_path)
    assert ("nothing recorded shows why" if even.late else "No rank differs") in page
    assert even.modules[0].path in page.replace("<wbr>", "")
    assert "--heat:" not in page


def test_only_the_module_that_differs_is_coloured(tmp_path: Path) -> None:
    job = answer(recorded("ddp_host"))
    assert len([one for one in job.modules if one.cost_ns]) > 1
    rows = re.findall(r"<tr>.*?</tr>", page_of(job, tmp_path).replace("<wbr>", ""))
    coloured = [row for row in rows if "--heat:" in row]
    assert [re.findall("<code>(.*?)</code>", row) for row in coloured] == [[job.findings[0].path]]


def test_the_mean_of_two_ranks_is_not_called_a_median(tmp_path: Path) -> None:
    job = answer(recorded("ddp_host"))
    page, text = text_of(page_of(job, tmp_path)), str(job)
    assert "costs at most drawn mean" in page
    assert "mean wait" in page
    assert re.search(r"costs +mean +worst", text)
    first, _ = recorded("fsdp_even")
    many = answer([generated(first, rank, 4) for rank in range(4)])
    assert "costs at most drawn median" in text_of(page_of(many, tmp_path / "many"))
    assert re.search(r"costs +median +worst", str(many))


def test_the_page_shows_the_answer_the_lanes_and_the_heat_map(tmp_path: Path) -> None:
    html = page_of(answer(recorded("ddp_host")), tmp_path)
    text = text_of(html)
    assert "model.layers.2.mlp.down_proj (Linear) is slow on rank 1" in text
    assert "rank 0 waits 53.9 ms, most for rank 1" in text
    assert html.count("--heat:54%") + html.count("--heat:42%") >= 1
    assert html.count("<script") == 1  # which chooses light or dark
    assert len(html) < 60_000


@pytest.mark.parametrize(("at_least", "bound"), [(False, "up to"), (True, "at least")])
def test_each_cost_is_a_bound_in_one_direction(at_least: bool, bound: str, tmp_path: Path) -> None:
    job = answer(recorded("ddp_host"))
    job = replace(job, findings=tuple(replace(one, at_least=at_least) for one in job.findings))
    text = text_of(page_of(job, tmp_path))
    assert text.count(f"{bound} 10.4 ms of each step") == 1
    assert text.count(f"10.4 ms {bound}") == 1


def test_names_from_a_trace_are_no_markup(tmp_path: Path) -> None:
    job = answer(recorded("ddp_host"))
    evil = "<img src=x onerror=alert(1)>"
    modules = tuple(replace(one, path=evil, class_name=evil) for one in job.modules)
    groups = tuple(replace(one, name=evil) for one in job.groups)
    findings = tuple(replace(one, title=evil, seen=evil, remedy=evil) for one in job.findings)
    job = replace(job, modules=modules, groups=groups, findings=findings, warnings=(evil,))
    assert "<img" not in page_of(job, tmp_path)


@pytest.mark.parametrize("count", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_ranks_that_are_alike_are_folded(count: int, tmp_path: Path) -> None:
    first, _ = recorded("fsdp_even")
    job = answer([generated(first, rank, count) for rank in range(count)])
    html = page_of(job, tmp_path)
    assert f"rank {slow_rank(count)}" in text_of(html)
    assert "the median of" in text_of(html)
    assert len(html) < 150_000
