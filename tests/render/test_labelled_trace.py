"""Labelled traces: the original untouched, and tracks that viewers show whole."""

from __future__ import annotations

import gzip
import json
import shutil
from bisect import bisect_right
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import backspot
from backspot.analysis.attribution.ownership import attribute
from backspot.analysis.attribution.tracks import find_tracks
from backspot.commands import main
from backspot.errors import NoBackwardError, NotATraceError, OutputExistsError, UsageError
from backspot.formatting import percent
from backspot.render.labelled_trace import CATEGORY, label_in_place
from backspot.trace import read_events
from support.choice import slow_except
from support.h200 import WITH_BACKWARD, path_of, report_of
from support.synthetic import Trace
from support.tracks import (
    added_of,
    assert_nested,
    exactly,
    original_within,
    padded,
    slices_of,
    text_of,
)

pytestmark = pytest.mark.xdist_group("h200")  # one worker reads them

FOREIGN = Path(__file__).parents[1] / "data" / "foreign" / "hta_resnet.json.gz"


@cache
def annotated_text(name: str) -> bytes:
    with TemporaryDirectory() as folder:
        output = Path(folder) / "labelled.json"
        backspot.locate(path_of(name) if name != "foreign" else FOREIGN, trace=output)
        return output.read_bytes()


QUICK = ("fsdp2.rank0", "gpt2_checkpointed", "sync_in_backward", "two_streams")
EACH = slow_except(QUICK, WITH_BACKWARD)
ALL = slow_except((*QUICK, "foreign"), (*WITH_BACKWARD, "foreign"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("convert", [exactly, lambda ts: int(float(ts) * 1000), float])
def test_no_two_spans_of_a_track_overlap_unless_they_nest(name, convert):
    """Perfetto's rule, with exact times and as viewers round them."""
    assert_nested(annotated_text(name), convert)


@pytest.mark.parametrize("name", ALL)
def test_the_original_is_there_byte_for_byte(name):
    source = FOREIGN if name == "foreign" else path_of(name)
    rest, added = original_within(annotated_text(name))
    assert rest == text_of(source)
    assert added.count(b"\n") == len(added_of(annotated_text(name)))


@pytest.mark.parametrize("name", ALL)
def test_reading_it_again_gives_the_same_report(name, tmp_path):
    path = tmp_path / "labelled.json"
    path.write_bytes(annotated_text(name))
    source = FOREIGN if name == "foreign" else path_of(name)
    report = report_of(name) if name != "foreign" else backspot.locate(source)
    assert replace(backspot.locate(path), trace="") == replace(report, trace="")


@pytest.mark.parametrize("name", ALL)
def test_tracks_have_names_and_numbers_of_their_own(name):
    document = json.loads(annotated_text(name))
    events = document["traceEvents"]
    theirs = {(e.get("pid"), str(e.get("tid"))) for e in events if e.get("cat") != CATEGORY}
    mine = {(e["pid"], e["tid"]) for e in events if e.get("cat") == CATEGORY and e["ph"] in "BE"}
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e.get("cat") == CATEGORY and e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert set(named) == mine
    assert not theirs & {(pid, str(tid)) for pid, tid in mine}
    for (pid, tid), title in named.items():
        explained = int(title.rstrip(")").rpartition(" ")[2])
        between = {(pid, str(number)) for number in range(explained, tid)}
        assert between <= theirs | {(pid, str(number)) for _, number in mine}


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_a_span_lies_in_that_of_the_nearest_module_around_and_covers_its_time(name):
    ownership = attribute(read_events(path_of(name)))
    modules = {m.path: m for m in ownership.spans.modules if not m.is_region}
    own = {False: defaultdict(int), True: defaultdict(int)}
    document = json.loads(annotated_text(name))["traceEvents"]
    streams = {
        (e["pid"], e["tid"])
        for e in document
        if e.get("cat") == CATEGORY and e["ph"] == "M" and "stream" in e["args"].get("name", "")
    }
    for key, slices in slices_of(added_of(annotated_text(name))).items():
        for one in slices:
            own[key in streams][one.path] += one.own
            expected = None
            if one.path in modules:
                above, root = one.path, modules[one.path].root
                while above and expected is None:
                    above = above.rpartition(".")[0]
                    if above in modules and modules[above].root == root:
                        expected = above
            assert (one.around.path if one.around else None) == expected
    for row in report_of(name).modules:
        assert own[False][row.path] >= sum(row.cpu_ns_by_step)
    busy = defaultdict(int)
    work = ownership.work
    for start, end, run in zip(work.start, work.end, work.run, strict=True):
        busy[run >= 0] += int(end - start)
    assert sum(own[True].values()) >= sum(report_of(name).gpu_ns_by_step) == busy[True]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_each_node_starts_in_its_owners_span_and_no_span_leaves_its_pass(name):
    events = read_events(FOREIGN if name == "foreign" else path_of(name))
    o = attribute(events)
    tracks = slices_of(added_of(annotated_text(name)))
    by_title = {
        e["args"]["name"]: (e["pid"], e["tid"])
        for e in added_of(annotated_text(name))
        if e.get("name") == "thread_name"
    }
    for thread in o.passes.threads:
        tid = events.threads[thread][1]
        slices = tracks[by_title[f"backward (thread {tid})"]]
        starts = [one.start for one in slices]
        for one in slices:
            inside = [
                number
                for number, (begin, end) in enumerate(
                    zip(o.passes.start, o.passes.end, strict=True)
                )
                if begin + events.origin_ns < one.end and one.start < end + events.origin_ns
            ]
            assert len(inside) == 1
        nodes = [i for i in range(len(o.spans.start)) if o.spans.is_node[i]]
        for i in nodes:
            if o.spans.thread[i] != thread or o.spans.at(thread, o.spans.start[[i]])[0] != i:
                continue
            start = int(o.spans.start[i]) + events.origin_ns
            at = slices[bisect_right(starts, start) - 1]
            while at.end <= start:
                at = at.around
            assert at.path == o.owners.path(int(o.owner[i]))


@pytest.mark.parametrize("name", EACH)
def test_arrows_lead_from_a_modules_forward_to_its_backward(name):
    document = json.loads(annotated_text(name), parse_float=str)["traceEvents"]
    added = [e for e in document if e.get("cat") == CATEGORY]
    begins = {e["id"]: e for e in added if e["ph"] == "s"}
    ends = {e["id"]: e for e in added if e["ph"] == "f"}
    assert set(begins) == set(ends)
    spans = {(e["pid"], e["tid"], e["ts"], e["name"]) for e in added if e["ph"] == "B"}
    labels = defaultdict(list)
    for event in document:
        if event["ph"] == "X" and event["name"].startswith("forward: "):
            start = padded(event["ts"])
            end = start + padded(event["dur"])
            labels[event["pid"], event["tid"]].append((start, end, event["name"]))
    if report_of(name).source == "backspot":
        assert begins
    for number, begin in begins.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert exactly(begin["ts"]) < exactly(end["ts"])
        if report_of(name).source != "backspot":
            continue
        time = exactly(begin["ts"])
        around = [n for s, e, n in labels[begin["pid"], begin["tid"]] if s <= time <= e]
        back = {n.partition(" #")[0].replace("forward: ", "backward: ") for n in around}
        assert any((end["pid"], end["tid"], end["ts"], n) in spans for n in back)


# From a report.


@pytest.mark.parametrize("suffix", [".trace.json", ".trace.json.gz"])
def test_a_report_of_a_file_saves_as_the_labelled_trace(tmp_path, suffix):
    trace = small().save(tmp_path / "t.json")
    output = tmp_path / f"labelled{suffix}"
    report = backspot.locate(trace, depth=0)
    assert report.save(output) == output
    backspot.locate(trace, depth=0, trace=tmp_path / "same.json")
    assert text_of(output) == (tmp_path / "same.json").read_bytes()
    with pytest.raises(OutputExistsError):
        report.save(output)


def test_a_report_does_not_label_what_it_was_not_made_of(tmp_path):
    trace = small().save(tmp_path / "t.json")
    report = backspot.locate(trace)
    trace.write_bytes(text_of(path_of("vit_patch_drop")))
    with pytest.raises(UsageError, match="not the trace that this report was made of"):
        report.save(tmp_path / "o.trace.json")
    trace.unlink()
    with pytest.raises(UsageError, match="has no file to label"):
        report.save(tmp_path / "o.trace.json")
    assert not list(tmp_path.iterdir())


# Files.


def small() -> Trace:
    trace = Trace()
    trace.forward("", "Net", 0, 100_000)
    trace.forward("a", "A</script>", 1_000, 50_000)
    trace.operator("aten::mul", 2_000, 3_000, seq=0)
    trace.operator("aten::add", 60_000, 61_000, seq=1)
    trace.node("AddBackward0", 200_000, 210_000, seq=1)
    trace.node("MulBackward0", 220_000, 230_000, seq=0)
    return trace


def test_a_container_covers_its_own_work_and_what_is_inside(tmp_path):
    backspot.locate(small().save(tmp_path / "t.json"), trace=tmp_path / "o.json")
    ((outer, inner),) = slices_of(added_of((tmp_path / "o.json").read_bytes())).values()
    assert (outer.name, outer.start, outer.end) == ("backward: (Net)", 200_000, 230_000)
    assert (inner.path, inner.start, inner.end) == ("a", 220_000, 230_000)
    assert inner.around is outer


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("before", slow_except([""], ["", "\ufeff", " \n"]))
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(("source", "output"), [("t.json", "o.json.gz"), ("t.json.gz", "o.json")])
def test_every_form_of_trace_passes_through(tmp_path, bare, before, indent, source, output):
    document = small().document()
    text = (
        before + json.dumps(document["traceEvents"] if bare else document, indent=indent)
    ).encode()
    (tmp_path / source).write_bytes(gzip.compress(text) if source.endswith(".gz") else text)
    backspot.locate(tmp_path / source, trace=tmp_path / output)
    data = (tmp_path / output).read_bytes()
    assert (data[:2] == b"\x1f\x8b") == output.endswith(".gz")
    written = text_of(tmp_path / output)
    assert original_within(written)[0] == text
    json.loads(written.decode("utf-8-sig"))
    again, first = (backspot.locate(tmp_path / name) for name in (output, source))
    assert replace(again, trace="") == replace(first, trace="")


def test_each_call_of_a_module_that_is_used_again_leads_to_a_span_of_its_own(tmp_path):
    trace = Trace()
    trace.forward("", "Net", 0, 100_000)
    for call in range(3):
        start = 10_000 * call
        trace.forward("cell", "Cell", start + 1_000, start + 9_000)
        trace.forward("cell.fc", "Linear", start + 2_000, start + 8_000)
        trace.operator("aten::mul", start + 3_000, start + 4_000, seq=2 * call)
        trace.operator("aten::add", start + 5_000, start + 6_000, seq=2 * call + 1)
    for number in range(6):  # directly one after the other
        start = 200_000 + 10_000 * number
        name = "MulBackward0" if number % 2 else "AddBackward0"
        trace.node(name, start, start + 10_000, seq=5 - number)
    backspot.locate(trace.save(tmp_path / "t.json"), trace=tmp_path / "o.json")
    added = added_of((tmp_path / "o.json").read_bytes())
    (spans,) = slices_of(added).values()
    cells = [(one.path, one.start, one.end) for one in spans]
    expected = [(200_000 + 20_000 * call, 220_000 + 20_000 * call) for call in range(3)]
    assert cells == [("", 200_000, 260_000)] + [
        (path, *times) for times in expected for path in ("cell", "cell.fc")
    ]
    ends = {e["id"]: exactly(e["ts"]) for e in added if e["ph"] == "f"}
    begins = {e["id"]: exactly(e["ts"]) for e in added if e["ph"] == "s"}
    leads = sorted((begins[number] // 1000, ends[number]) for number in ends)
    assert leads == [
        *((0, 200_000),),
        *((1, 240_000), (2, 240_000)),
        *((11, 220_000), (12, 220_000)),
        *((21, 200_000), (22, 200_000)),
    ]


def test_a_span_shows_what_its_module_costs_and_which_line_made_it(tmp_path):
    report = backspot.locate(path_of("vit_patch_drop"), trace=tmp_path / "o.json")
    added = added_of((tmp_path / "o.json").read_bytes())
    shown = {e["name"]: e["args"] for e in added if e["ph"] == "B"}
    row = report["patch_drop"].row
    assert shown["backward: patch_drop (PatchDropout)"] == {
        "wall ms per step": f"{row.wall_ms:.3f}",
        "share of the backward": percent(report.share(row)),
        "GPU ms per step": f"{row.gpu_ns / 1e6:.3f}",
        "slowest node": "GatherBackward0",
    }
    attention = shown["backward: blocks.0.attn (Attention)"]
    whole = report["blocks.0.attn"].row
    assert attention["wall ms per step"] == "1.742"
    assert attention["wall ms of its own"] == f"{whole.wall_ms:.3f}"


def test_labelling_a_trace_without_labels_says_that_it_adds_little(tmp_path, capsys):
    assert main(["show", str(FOREIGN), "-o", str(tmp_path / "o.json.gz")]) == 0
    assert "without labels, the added tracks show little" in capsys.readouterr().err


def test_times_before_zero_keep_their_sign(tmp_path):
    trace = small()
    for event in trace.events:
        event["ts"] -= 1_000.0005
    backspot.locate(trace.save(tmp_path / "t.json"), trace=tmp_path / "o.json")
    times = [e["ts"] for e in added_of((tmp_path / "o.json").read_bytes()) if e["ph"] == "B"]
    assert [round(float(time)) for time in times] == [-800, -780]


@pytest.mark.posix
def test_what_cannot_be_is_refused_with_its_exit_code_and_nothing_is_written(tmp_path, capsys):
    trace = small().save(tmp_path / "t.trace.json")
    there = tmp_path / "there.trace.json"
    there.write_text("precious")
    link = tmp_path / "link.trace.json"
    link.symlink_to(trace)
    short = tmp_path / "short.json"
    short.write_bytes(trace.read_bytes()[:-200])
    packed = tmp_path / "short.json.gz"
    packed.write_bytes(path_of("vit_patch_drop").read_bytes()[:50_000])
    done = tmp_path / "done.trace.json"
    forward = Trace()
    forward.operator("aten::mul", 0, 10, seq=0)
    no_backward = forward.save(tmp_path / "forward.json")
    assert main(["show", str(trace), "-o", str(done)]) == 0
    assert capsys.readouterr().out == f"Wrote {done}\n"
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    out = tmp_path / "out.trace.json"
    for source, output, more, code, said in [
        (trace, there, [], 6, "--force"),
        (trace, trace, ["--force"], 2, "is the trace itself"),
        (trace, link, ["--force"], 2, "is the trace itself"),
        (trace, out, ["--depth", "1"], 2, "leave out --depth"),
        (trace, tmp_path / "no" / "out.trace.json", [], 3, "no folder"),
        (tmp_path / "missing.json", out, [], 3, "missing.json"),
        (short, out, [], 4, "cut short"),
        (packed, out, [], 4, "cut short"),
        (no_backward, out, [], 5, "no backward pass"),
        ("-", out, [], 2, "standard input"),
    ]:
        assert main(["show", str(source), "-o", str(output), *more]) == code
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert main(["show", str(trace), "-o", str(there), "--force"]) == 0
    assert there.read_bytes() == done.read_bytes()


@pytest.mark.parametrize("name", ["vit_patch_drop", "two_streams"])
def test_tracks_that_a_trace_has_already_are_replaced(name, tmp_path):
    """More than a piece of the file is added to the first, and some other line begins like that."""
    labelled, again = tmp_path / "labelled.json", tmp_path / "again.json"
    labelled.write_bytes(annotated_text(name))
    report = backspot.locate(labelled, trace=again)
    assert again.read_bytes() == labelled.read_bytes()
    # Tracks without costs, as an export has them, get costs.
    with_costs = added_of(again.read_bytes())
    assert any("args" in event for event in with_costs if event["ph"] == "B")
    plain = read_events(path_of(name))
    label_in_place(
        Path(shutil.copy(again, tmp_path / "in place.json")),
        plain,
        find_tracks(plain, attribute(plain)),
        check=lambda: None,
    )
    without = (tmp_path / "in place.json").read_bytes()
    assert not any("args" in event for event in added_of(without) if event["ph"] == "B")
    assert original_within(without)[0] == text_of(path_of(name))
    backspot.locate(tmp_path / "in place.json", trace=again, force=True)
    assert added_of(again.read_bytes()) == with_costs
    assert report.modules


def test_the_errors_have_their_types(tmp_path):
    trace = small().save(tmp_path / "t.json")
    with pytest.raises(UsageError):
        backspot.locate(trace, trace=trace, force=True)
    trace.write_bytes(trace.read_bytes()[:-100])
    with pytest.raises(NotATraceError):
        backspot.locate(trace, trace=tmp_path / "o.json")
    with pytest.raises(NoBackwardError):
        backspot.locate(path_of("cuda_graph_step"), trace=tmp_path / "o.json")


def test_a_saved_report_labels_the_trace_that_it_was_made_from(tmp_path, capsys):
    trace = small().save(tmp_path / "t.json")
    direct, again = tmp_path / "direct.trace.json", tmp_path / "again.trace.json"
    saved = backspot.locate(trace, trace=direct).save(tmp_path / "report.json")
    assert main(["show", str(saved), "-o", str(again)]) == 0
    assert capsys.readouterr().out == f"Wrote {again}\n"
    assert again.read_bytes() == direct.read_bytes()


def test_a_folder_gives_its_newest_trace(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    small().save(tmp_path / "runs" / "t.json")
    assert main(["show", str(tmp_path / "runs"), "-o", str(tmp_path / "o.json.gz")]) == 0
    assert "t.json, the newest" in capsys.readouterr().err
