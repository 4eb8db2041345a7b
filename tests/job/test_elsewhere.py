"""Traces that are read by other processes, on a cluster, or from an object store."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from backspot.commands import main
from backspot.errors import SourceNotFoundError, UsageError
from backspot.job.gather import ranks
from backspot.results.job import JobReport

TRACES = [
    Path(__file__).parents[1] / "data" / "h200" / f"ddp.rank{rank}.trace.json.gz" for rank in (0, 1)
]


@pytest.fixture(scope="module")
def here() -> JobReport:
    with ThreadPoolExecutor(1) as executor:
        return ranks(TRACES, executor)


@pytest.mark.slow
def test_a_pool_of_processes_gives_the_same_answer(here: JobReport) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        assert ranks(TRACES, executor) == here


# An object store ----------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[str]:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    for trace in TRACES:
        system.pipe(f"/bucket/traces/{trace.name}", trace.read_bytes())
    system.pipe("/bucket/traces/notes.txt", b"not a trace")
    yield "memory://bucket/traces"
    system.rm("/bucket", recursive=True)


def test_a_folder_of_an_object_store_gives_the_same_answer(
    store: str, here: JobReport, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as executor:
        job = ranks(store, executor, cache=tmp_path)
        assert [one.source for one in job.ranks] == [
            f"memory:///bucket/traces/{trace.name}" for trace in TRACES
        ]
        assert job.slowest == here.slowest
        assert len(list(tmp_path.iterdir())) == 2
        assert ranks(store, executor, cache=tmp_path) == job


def test_what_an_object_store_does_not_have_is_said(store: str) -> None:
    with ThreadPoolExecutor(1) as executor:
        job = ranks([store, f"{store}/rank7.json"], executor)
        assert "is not there" in job.lost[0].reason
        with pytest.raises(UsageError, match="nowhere"):
            ranks("nowhere://bucket", executor)
        with pytest.raises(SourceNotFoundError, match="has no trace"):
            ranks(store.removesuffix("/traces"), executor)


# A cluster ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dask_cluster_gives_the_same_answer_and_survives_a_worker(
    here: JobReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with (
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert ranks(TRACES, client.get_executor()) == here
        assert main(["ranks", *map(str, TRACES), "--scheduler", cluster.scheduler_address]) == 0
        assert "2 ranks of 2" in capsys.readouterr().out
        victim = next(iter(cluster.workers.values()))
        client.submit(os._exit, 1, workers=[victim.worker_address], pure=False)
        assert ranks(TRACES, client.get_executor()) == here
