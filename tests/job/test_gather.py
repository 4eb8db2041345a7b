"""The traces of a job, read in processes, from a cache, or by an executor of the user's."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backspot.commands import main
from backspot.errors import SourceNotFoundError, UsageError
from backspot.job import readers, worker
from backspot.job.answer import answer
from backspot.job.gather import ranks
from support.summaries import RANKS, recorded

TRACES = Path(__file__).parents[1] / "data" / "h200"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (0, 1):
        shutil.copy(TRACES / f"ddp.rank{rank}.trace.json.gz", folder / f"rank{rank}.json.gz")
    return folder


@pytest.mark.slow
def test_a_folder_is_read_in_processes_of_their_own(folder: Path) -> None:
    (folder / "settings.json").write_text("{}")
    job = ranks(folder)
    assert [(one.rank, one.source) for one in job.ranks] == [
        (rank, str(folder / f"rank{rank}.json.gz")) for rank in (0, 1)
    ]
    assert job.lost == ()


@pytest.mark.slow
def test_an_executor_gives_the_same_answer(folder: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        assert ranks(folder, executor) == ranks(sorted(folder.iterdir(), reverse=True))


def test_a_damaged_trace_costs_its_own_rank_only(folder: Path) -> None:
    (folder / "rank2.json").write_text("no trace")
    with ThreadPoolExecutor(1) as executor:
        job = ranks([folder, folder / "missing.json"], executor)
    assert len(job.ranks) == 2
    assert [Path(one.source).name for one in job.lost] == ["rank2.json", "missing.json"]
    assert "is no Kineto trace" in job.lost[0].reason
    assert "is not there" in job.lost[1].reason


def test_what_was_read_once_is_not_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "kept"
    with ThreadPoolExecutor(1) as executor:
        first = ranks(folder, executor, cache=cache)
        assert len(list(cache.iterdir())) == 2
        read = _counted(monkeypatch)
        assert ranks(folder, executor, cache=cache) == first
        assert read == []
        next(cache.iterdir()).write_bytes(b"broken")
        assert ranks(folder, executor, cache=cache) == first
        assert len(read) == 1
        shutil.copy(folder / "rank0.json.gz", folder / "copied")
        (folder / "copied").replace(folder / "rank0.json.gz")  # another time of change
        assert ranks(folder, executor, cache=cache) == first
        assert len(read) == 2


def test_summaries_that_were_kept_stand_for_their_traces(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "kept"
    with ThreadPoolExecutor(1) as executor:
        job = ranks(folder, executor, cache=cache)
        copied = shutil.copytree(cache, tmp_path / "copied")
        with pytest.raises(UsageError, match="both of rank"):
            ranks([copied, folder], executor)
        for sources in (copied, [*copied.iterdir()]):
            again = ranks(sources, executor)
            assert again.findings == job.findings
            assert [one.wait_ns for one in again.ranks] == [one.wait_ns for one in job.ranks]
        as_json = [RANKS / f"fsdp_kernel.rank{rank}.json" for rank in (0, 1)]
        assert ranks(as_json, executor).findings == answer(recorded("fsdp_kernel")).findings
        old = tmp_path / "old.rank1.json"
        old.write_text(as_json[1].read_text().replace("backspot.rank/4", "backspot.rank/1"))
        with pytest.raises(UsageError, match=r"old\.rank1\.json is no summary of version .*/4"):
            ranks([as_json[0], old], executor)


def test_a_reason_that_holds_for_many_traces_is_said_once(tmp_path: Path) -> None:
    for rank in range(40):
        (tmp_path / f"rank{rank:02}.json").write_text("no trace")
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(UsageError) as refused:
            ranks(tmp_path, executor)
        said = str(refused.value)
        assert said.count("is no Kineto trace") == 1
        assert "rank00.json (and 39 more: " in said
        assert "give a file that export_chrome_trace wrote" in said
        assert len(said) < 200 + 3 * len(str(tmp_path))
        traces = [RANKS / f"fsdp_kernel.rank{rank}.json" for rank in (0, 1)]
        job = ranks([*traces, tmp_path], executor)
    assert len(job.lost) == 40
    for text in (str(job), job.save(tmp_path / "job.html").read_text()):
        said = " ".join(text.split())
        assert said.count("not read: ") == 1
        assert "(and 39 more: " in said


def test_an_interrupted_reading_goes_on_where_it_was(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = _counted(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        ranks(folder, Interrupted(), cache=tmp_path / "kept")  # type: ignore[arg-type]
    assert len(read) == 1
    with ThreadPoolExecutor(1) as executor:
        assert len(ranks(folder, executor, cache=tmp_path / "kept").ranks) == 2
    assert len(read) == 2


class Interrupted:
    """An executor that is interrupted while it does its second task."""

    def __init__(self) -> None:
        self.given: list[Future[bytes]] = []

    def submit(self, work: Callable[..., bytes], *arguments: object) -> Future[bytes]:
        future: Future[bytes] = Future()
        if self.given:
            future.set_exception(KeyboardInterrupt())
        else:
            future.set_result(work(*arguments))
        self.given.append(future)
        return future


@pytest.mark.slow
def test_what_gives_no_two_ranks_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="has no trace"):
        ranks(tmp_path / "traces" / "..")
    (folder / "notes.json").write_text("no trace")
    with pytest.raises(UsageError, match=r"fewer than two ranks.*notes\.json is no Kineto trace"):
        ranks([folder / "rank0.json.gz", folder / "notes.json"])
    with pytest.raises(UsageError, match="paths of two traces or more"):
        ranks([])
    with pytest.raises(UsageError, match="give a folder"):
        ranks(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="executor="):
        ranks(folder, 3)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("other", [[], ["rank0.json.gz"]], ids=["alone", "with one that is there"])
def test_a_missing_path_has_the_exit_code_that_it_has_in_every_command(
    folder: Path, other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = folder / "nothing.json"
    assert main(["ranks", *(str(folder / name) for name in other), str(missing)]) == 3
    said = capsys.readouterr().err
    assert f"{missing} is not there: check the trace's path" in said.replace("\n", " ")
    with ThreadPoolExecutor(1) as executor, pytest.raises(SourceNotFoundError, match="two ranks"):
        ranks([*(folder / name for name in other), missing], executor)


@pytest.mark.slow
def test_the_command_prints_the_answer_as_text_and_as_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = str(tmp_path / "kept")
    assert main(["ranks", str(folder), "--cache", cache]) == 0
    said = capsys.readouterr().out
    assert said.startswith("No rank differs from the others beyond the noise.")
    more = re.search(r"\nNext: --top (\d+) for all ranks, steps and modules", said)
    assert more
    assert "job.save" not in said
    assert main(["ranks", str(folder), "--cache", cache, "--top", more[1]]) == 0
    assert "Next: " not in capsys.readouterr().out
    assert main(["ranks", str(folder), "--cache", cache, "--format", "json"]) == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert (said["schema"], said["world_size"]) == ("backspot.job/1", 2)


def test_an_answer_that_was_saved_is_printed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(answer(recorded("ddp_host")).save(tmp_path / "job.json"))
    slow = "model.layers.2.mlp.down_proj (Linear) is slow on rank 1: up to 10.4 ms a step\n"
    for verb in ("ranks", "show"):
        assert main([verb, path]) == 0
        said = capsys.readouterr().out
        assert said.startswith(slow)
        more = re.search(r"\nNext: --top (\d+) ", said)
        assert more
        assert main([verb, path, "--top", more[1]]) == 0
        assert "Next: " not in capsys.readouterr().out
    for more in (["--depth", "2"], ["-o", str(tmp_path / "x.html")]):
        assert main(["show", path, *more]) == 2
        assert "is an answer for many ranks: show takes --top and" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("there.json", 6), ("job.txt", 2), ("no/job.html", 3)])
def test_a_wrong_output_is_told_before_the_traces_are_read(
    name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.json").write_text("precious")
    output = str(tmp_path / name)
    assert main(["ranks", str(tmp_path / "missing"), "-o", output]) == code
    assert capsys.readouterr().err.startswith(f"backspot: error: {output}")
    assert (tmp_path / "there.json").read_text() == "precious"


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that grows with each trace that is read."""
    read: list[Path] = []
    original: Callable[[Path], Any] = worker.summarize

    def summarize(path: Path) -> Any:
        read.append(path)
        return original(path)

    monkeypatch.setattr(worker, "summarize", summarize)
    return read


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no signals")
def test_a_trace_that_ends_its_process_costs_no_other_trace(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process reads all traces, and one of them is more than its memory holds."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "read = Path.open\n"
        "def opened(self, *arguments, **more):\n"
        "    if 'fatal' in self.name:\n"
        "        print('out of memory', file=sys.stderr, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return read(self, *arguments, **more)\n"
        "Path.open = opened\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(readers, "processors", lambda: 1)
    shutil.copy(folder / "rank0.json.gz", folder / "fatal.json")
    job = ranks([folder / "rank0.json.gz", folder / "fatal.json", folder / "rank1.json.gz"])
    assert [one.rank for one in job.ranks] == [0, 1]
    assert [(Path(lost.source).name, lost.reason) for lost in job.lost] == [
        ("fatal.json", "out of memory")
    ]
