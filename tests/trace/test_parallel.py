"""Reading with several processes: the same columns, and one process where that cannot be."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import backspot
from backspot.errors import UsageError
from backspot.trace import Events, parallel, read_events
from backspot.trace.chrome import ChromeDecoder
from support import h200
from support.synthetic import Trace

TICK = 10_000


@pytest.fixture(autouse=True)
def any_size_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are started for the small traces here, as else for large ones only."""
    monkeypatch.setattr(parallel, "_PAYS", 1)


def plain(name: str, tmp_path: Path) -> Path:
    path = tmp_path / "plain.json"
    path.write_bytes(gzip.decompress(h200.path_of(name).read_bytes()))
    return path


def columns(events: Events) -> dict[str, object]:
    arrays = {name: getattr(events, name) for name in events.__struct_fields__}
    for name in ("flows", "allocations", "frames"):
        part = arrays.pop(name)
        arrays |= {f"{name}.{one}": getattr(part, one) for one in part.__struct_fields__}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_patch_drop", "ddp.rank0", "gpt2_checkpointed_reentrant"])
@pytest.mark.parametrize("jobs", [2, 3, 7])
def test_several_processes_read_the_same_columns_as_one(
    name: str, jobs: int, tmp_path: Path
) -> None:
    path = plain(name, tmp_path)
    parts = parallel.decode_in_parts(path, path.stat().st_size, jobs, None)
    assert parts is not None
    assert columns(parts.columns.finish(str(path))) == columns(read_events(path, jobs=1))


@pytest.mark.slow
def test_arrows_named_by_text_meet_across_processes(tmp_path: Path) -> None:
    trace = Trace()
    for step in range(200):
        at = 100 * TICK * step
        trace.operator("aten::mul", at, at + TICK, seq=step)
        trace.node("MulBackward0", at + 2 * TICK, at + 3 * TICK, seq=step, flow_from=(1, at))
    document = trace.document()
    for event in document["traceEvents"]:
        if "id" in event:
            event["id"] = f"arrow {event['id']}"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document, indent=1))
    parts = parallel.decode_in_parts(path, path.stat().st_size, 4, None)
    assert parts is not None
    assert len(parts.columns.finish("").flows.forward_thread) == 200
    assert backspot.locate(path, jobs=4) == backspot.locate(path, jobs=1)


@pytest.mark.slow
def test_a_broken_event_in_any_part_is_reported_as_by_one_process(tmp_path: Path) -> None:
    text = plain("ddp.rank0", tmp_path).read_bytes()
    events = text.split(b"\n")
    path = tmp_path / "broken.json"
    for at in (5, len(events) // 2, len(events) - 5):
        broken = list(events)
        broken[at] = broken[at].replace(b'"ts":', b'"ts":"soon" ', 1)
        path.write_bytes(b"\n".join(broken))
        report = backspot.locate(path, jobs=3)
        assert report == backspot.locate(path, jobs=1)
        assert "malformed" in report.warnings[0]
    path.write_bytes(text[: len(text) * 9 // 10])
    assert "cut short" in backspot.locate(path, jobs=3).warnings[0]


def test_a_list_that_ends_early_ends_for_all_processes(tmp_path: Path) -> None:
    text = plain("ddp.rank0", tmp_path).read_bytes()
    document = json.loads(text)
    document["otherEvents"] = [{"ph": "X", "cat": "cpu_op", "name": "no", "ts": 1, "dur": 1}] * 9000
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    events = read_events(path, jobs=2)
    assert "no" not in events.names
    assert len(events.start) == len(read_events(path, jobs=1).start)


def test_without_a_python_to_start_one_process_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plain("ddp.rank0", tmp_path)
    expected = backspot.locate(path, jobs=1)
    for executable in ("", "/bin/false", str(tmp_path / "python-that-is-not-there")):
        monkeypatch.setattr(sys, "executable", executable)
        assert backspot.locate(path, jobs=2) == expected


@pytest.mark.parametrize("does", ["exit 0", "exit 1", "echo no; exit 0", "kill -9 $$"])
def test_where_another_process_does_not_do_its_part_one_process_reads(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = plain("ddp.rank0", tmp_path)
    expected = backspot.locate(path, jobs=1)
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\n{does}\n")
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    assert backspot.locate(path, jobs=3) == expected


@pytest.mark.slow
@pytest.mark.parametrize("where", ["event", "head", "tail"])
def test_text_longer_than_a_stretch_is_read_once(where: str, tmp_path: Path) -> None:
    document = json.loads(plain("ddp.rank0", tmp_path).read_bytes())
    filler = "x" * len(json.dumps(document))
    events = document.pop("traceEvents")
    if where == "event":
        long = {"ph": "X", "cat": "cpu_op", "name": filler, "pid": 1, "tid": 1, "ts": 1, "dur": 1}
        events.insert(len(events) // 2, long)
    before = {"filler": filler} if where == "head" else {}
    after = {"filler": filler} if where == "tail" else {}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({**document, **before, "traceEvents": events, **after}))
    parts = parallel.decode_in_parts(path, path.stat().st_size, 3, None)
    assert parts is not None
    assert columns(parts.columns.finish(str(path))) == columns(read_events(path, jobs=1))


@pytest.mark.slow
def test_a_script_without_a_main_guard_can_read_in_several_processes(tmp_path: Path) -> None:
    path = plain("ddp.rank0", tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import backspot\n"
        "from backspot.trace import parallel\n"
        "parallel._PAYS = 1\n"
        f"print('once', backspot.locate({str(path)!r}, jobs=3).wall_ns)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == f"once {backspot.locate(path, jobs=1).wall_ns}\n"


@pytest.mark.slow
def test_progress_of_several_processes_ends_with_the_whole_file(tmp_path: Path) -> None:
    path = plain("ddp.rank0", tmp_path)
    size, seen = path.stat().st_size, list[tuple[int, "int | None"]]()
    backspot.locate(path, jobs=2, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (size, size)
    assert all(0 <= done <= size for done, _ in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("megabytes", "jobs", "started"), [(0, 40, 0), (30, 40, 0), (60, 40, 1), (60, 1, 0), (80, 2, 1)]
)
def test_no_more_processes_are_started_than_pay(
    megabytes: int, jobs: int, started: int, tmp_path: Path
) -> None:
    text = plain("ddp.rank0", tmp_path).read_bytes()
    path = tmp_path / "t.json"
    between = b"},\n{"
    # Blanks between the events are soon read.
    filler = b" " * (megabytes * (1 << 20) // text.count(between) + 1)
    path.write_bytes(text.replace(between, b"}," + filler + b"{"))
    code = (
        "import sys\n"
        "import backspot\n"
        "started = []\n"
        "sys.addaudithook(lambda name, _: started.append(name))\n"
        f"backspot.locate({str(path)!r}, jobs={jobs})\n"
        "print(started.count('subprocess.Popen'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == started


@pytest.mark.parametrize("jobs", [0, -1, True, "2", 1.5])
def test_an_invalid_number_of_processes_is_refused(jobs: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="jobs="):
        backspot.locate(tmp_path, jobs=jobs)


@pytest.mark.slow
def test_twice_the_trace_is_twice_the_pieces_and_twice_the_columns(tmp_path: Path) -> None:
    """What is decoded at a time does not grow with the trace."""

    def pieces(steps: int) -> tuple[int, int]:
        trace = Trace()
        for step in range(steps):
            at = 100 * TICK * step
            trace.operator("aten::mul", at, at + TICK, seq=step)
            trace.node("MulBackward0", at + 2 * TICK, at + 3 * TICK, seq=step)
        path = trace.save(tmp_path / "t.json")
        asked: list[int] = []
        with path.open("rb") as file:

            def read(size: int) -> bytes:
                asked.append(size)
                return file.read(size)

            decoder = ChromeDecoder(read, "")
            decoder.run()
        assert max(asked) <= 1 << 20
        return len(asked), decoder.seen

    (few, seen), (many, seen_of_two) = pieces(4_000), pieces(8_000)
    assert seen_of_two == 2 * seen
    assert many <= 2 * few + 2
