"""Labelled traces in Perfetto itself: its UI and its engine show the tracks as they are written."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import pytest

import backspot
from backspot.trace.labels import parse_label
from support.perfetto import Perfetto, perfetto
from support.tracks import added_of, exactly, slices_of

DATA = Path(__file__).parents[1] / "data"
EVERY = tuple(
    path
    for path in sorted(DATA.glob("*/*.json.gz"))
    # Nothing can be labelled in these: they have no backward pass.
    if path.name not in ("cuda_graph_step.trace.json.gz", "tracelens_qwen_forward_only.json.gz")
)
SOME = (
    "compiled/vit",
    "findings/launch_cells_recommender",  # a module that is called again and again
    "foreign/hta_resnet",
    "h200/ddp.rank0",
    "h200/double_backward",
    "h200/gpt2_checkpointed_reentrant",
    "h200/gradient_accumulation",
    "h200/model_parallel",
    "h200/python_stack",
    "h200/two_streams",
    "h200/vit_patch_drop",
)

_SLICES = """
    select thread.tid, process.pid, slice.name, slice.ts, slice.dur, slice.depth
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) left join process using (upid)
    where slice.category = 'backspot' order by slice.id
"""
_ARROWS = """
    select source.name, source.ts, source.dur, target.name, target.ts, thread.tid
    from flow join slice source on flow.slice_out = source.id
    join slice target on flow.slice_in = target.id
    join thread_track on target.track_id = thread_track.id join thread using (utid)
    where target.category = 'backspot'
"""
_ERRORS = "select name from stats where severity in ('error', 'data_loss') and value > 0"
_TRACKS = """() => {
    const tracks = window.app.trace.workspace.flatTracks;
    tracks.forEach((track) => track.expand());
    return tracks.map((track) => track.fullPath);
}"""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name.removesuffix('.gz').removesuffix('.json')}".removesuffix(
        ".trace"
    )


@pytest.mark.slow
@pytest.mark.xdist_group("perfetto")
def test_perfetto_shows_the_spans_and_the_arrows_as_they_are_written(browser, tmp_path, request):
    every = request.config.getoption("--every-trace")
    chosen = [path for path in EVERY if every or name_of(path) in SOME]
    assert every or len(chosen) == len(SOME)
    with perfetto(browser) as viewer:
        for number, source in enumerate(chosen):
            labelled = tmp_path / f"{number}.json"
            backspot.locate(source, trace=labelled)
            viewer.open(labelled)
            check(viewer, labelled.read_bytes())


def check(viewer: Perfetto, text: bytes) -> None:
    added = added_of(text)
    written = slices_of(added)
    shown = defaultdict(list)
    for tid, pid, *one in viewer.query(_SLICES):
        shown[int(pid), int(tid)].append(one)
    assert shown.keys() == written.keys()
    for track, slices in written.items():
        assert len(shown[track]) == len(slices)
        for one, (name, start, duration, depth) in zip(slices, shown[track], strict=True):
            assert (name, int(depth)) == (one.name, depth_of(one))
            assert int(start) == near(one.start)
            assert int(start) + int(duration) == near(one.end)
    starts = [exactly(e["ts"]) for e in added if e["ph"] == "s"]
    ends = [(e["tid"], exactly(e["ts"])) for e in added if e["ph"] == "f"]
    arrows = viewer.query(_ARROWS)
    assert len(arrows) == len(starts) == len(ends)
    led = sorted((int(tid), int(ts)) for *_, ts, tid in arrows)
    assert all(
        tid == to and ts == near(at) for (tid, ts), (to, at) in zip(led, sorted(ends), strict=True)
    )
    for source, start, duration, target, _, _ in arrows:
        # An arrow leaves the module's call, or a call in it that begins at the same time.
        assert any(int(start) <= at <= int(start) + int(duration) for at in starts)
        if source.startswith("forward: "):
            assert path_of(source).startswith(path_of(target))
    # Kineto's own spans can overlap; begin and end events, as Backspot writes them, cannot.
    errors = {name for (name,) in viewer.query(_ERRORS)}
    assert errors <= {"slice_drop_overlapping_complete_event"}
    beside(viewer.page.evaluate(_TRACKS), len(written))


def near(nanoseconds: int):
    """Perfetto reads microseconds as doubles, which are coarser the later it is."""
    return pytest.approx(nanoseconds, rel=0, abs=2 + 1e3 * math.ulp(nanoseconds / 1e3))


def path_of(label: str) -> str:
    found = parse_label(label)
    return found.path if found else label.partition(": ")[2]


def depth_of(one) -> int:
    depth = 0
    while one.around:
        one, depth = one.around, depth + 1
    return depth


def beside(paths: list[list[str]], tracks: int) -> None:
    """An added track comes directly after what it explains, but for numbers that were taken."""
    groups = defaultdict(list)
    for path in paths:
        if len(path) == 2 and path[1] not in groups[path[0]]:
            groups[path[0]].append(path[1])
    found = 0
    for names in groups.values():
        for index, name in enumerate(names):
            if name.startswith("backward ("):
                explained = int(name[: name.index(")")].rpartition(" ")[2])
                before = [number_of(one) for one in names[:index]]
                last = [number for number in before if not explained < number < number_of(name)][-1]
                assert last == explained, names
                found += 1
    assert found == tracks


def number_of(track: str) -> int:
    return int(track.rpartition(" ")[2])
