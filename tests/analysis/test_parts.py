"""The parts of a report, and how one more is added."""

from dataclasses import replace

import numpy as np
import pytest

import backspot
from backspot import Report
from backspot.analysis.attribution.ownership import Ownership, attribute
from backspot.analysis.parts import PARTS, ranking
from backspot.analysis.recording import Options, Recording
from backspot.pipeline import report_of
from backspot.results.report import changed
from backspot.trace import Events, read_events
from backspot.trace.events import Ints
from support.choice import slow_except
from support.recordings import DATA, IN_ONE_WORKER, recording_of, report_of as known_report
from support.replays import PATHS

pytestmark = IN_ONE_WORKER

VIT = PATHS["vit_patch_drop"]


def with_dropouts(report: Report, recording: Recording, _: Options) -> Report:
    """Say how many dropout layers the step calls, as CONTRIBUTING.md tells to."""
    modules = recording.ownership.spans.modules
    found = sum(one.class_name == "Dropout" for one in modules)
    return (
        changed(report, warnings=(*report.warnings, f"{found} dropout layers."))
        if found
        else report
    )


def test_a_new_part_is_a_function_and_an_entry_in_the_list(monkeypatch, tmp_path):
    plain = known_report(VIT)
    monkeypatch.setattr("backspot.pipeline.PARTS", (*PARTS, with_dropouts))
    report = backspot.locate(VIT)
    assert report == replace(plain, warnings=(*plain.warnings, "11 dropout layers."))
    assert "11 dropout layers." in str(report)
    assert Report.load(report.save(tmp_path / "report.json")) == report


@pytest.mark.parametrize("at", range(len(PARTS) + 1))
def test_a_part_at_any_place_in_the_list_leaves_the_others_their_own(monkeypatch, at):
    plain = known_report(VIT)
    monkeypatch.setattr("backspot.pipeline.PARTS", (*PARTS[:at], with_dropouts, *PARTS[at:]))
    report = backspot.locate(VIT)
    assert replace(report, warnings=plain.warnings) == plain
    factors = {"patch_drop": 0.5}
    assert report.what_if(factors) == plain.what_if(factors)


def test_a_recording_can_have_parts_of_its_own():
    recording = Recording.of(read_events(VIT))
    assert "11 dropout layers." in report_of(recording, parts=[with_dropouts]).warnings


def test_a_part_that_has_nothing_to_say_returns_the_report_as_it_is():
    recording, options = Recording.of(read_events(VIT)), Options()
    report = ranking(recording, options)
    silent = [part.__name__ for part in PARTS if part(report, recording, options) is report]
    # Nothing has replayed this report, and no depth was asked for.
    assert silent == ["with_savings_of_waits", "folded"]


def test_memory_and_shapes_can_come_from_another_recording():
    events, detail = read_events(VIT), read_events(DATA / "memory" / "vit.trace.json.gz")
    plain, alone = report_of(Recording.of(events)), report_of(Recording.of(detail))
    report = report_of(Recording.of(events, detail))
    assert report.memory == alone.memory
    assert report.wall_ns_by_step == plain.wall_ns_by_step
    held = {row.path: row.memory for row in alone.modules}
    known = [row for row in report.modules if row.memory is not None]
    assert known
    assert all(row.memory == held[row.path] for row in known if row.path in held)


@pytest.mark.parametrize("name", ["gradient_accumulation", "two_streams", "vit"])
def test_a_trace_is_attributed_once_whatever_parts_need_some_of_its_steps(monkeypatch, name):
    attributed = []

    def counting(events: Events) -> Ownership:
        attributed.append(events)
        return attribute(events)

    monkeypatch.setattr("backspot.analysis.recording.attribute", counting)
    monkeypatch.setattr("backspot.analysis.replay.predict._ENOUGH", 1)
    monkeypatch.setattr("backspot.analysis.replay.predict._FEWEST", 1)
    report = backspot.locate(PATHS[name])
    assert report.replayed_step is not None
    assert len(attributed) == 1


COMPARED = {
    "spans": "start end thread module node marked caller parent",
    "join": "sequence builder operator unseen captured ambiguous feeder",
    "passes": "of_span start end",
    "windows": "start end device",
    "work": "start end launch queued span run event",
    "waits": "start end span event",
    "steps": "of_pass start end",
}
SOME = ("gpt2_checkpointed", "compiled_whole", "double_backward", "two_streams", "llama")


@pytest.mark.parametrize("name", slow_except(SOME, PATHS))
def test_steps_have_the_owners_that_attribution_finds_in_them_alone(name):
    recording = recording_of(PATHS[name])
    for step in range(recording.ownership.steps.count):
        part = recording.steps(step, step)
        ours, alone = part.ownership, attribute(part.events)
        for table, columns in COMPARED.items():
            for column in columns.split():
                one, other = (getattr(getattr(found, table), column) for found in (ours, alone))
                np.testing.assert_array_equal(one, other, f"{table}.{column}")
        assert owners(ours, ours.owner) == owners(alone, alone.owner)
        # The whole trace knows more of work that was launched before these steps.
        here = ours.work.span >= 0
        assert owners(ours, ours.work_owner[here]) == owners(alone, alone.work_owner[here])


@pytest.mark.parametrize("name", ["ddp.rank0", "fp32_convnet", "vit_patch_drop"])
def test_the_host_does_in_a_step_what_it_does_there_in_the_whole_trace(name):
    recording = recording_of(PATHS[name])
    window, part = recording.step_windows, recording.steps(0, 0)
    times = np.linspace(window.start[0], window.end[0] - 1, 1000).astype(np.int64)
    phase = part.activity.host.at(times)
    np.testing.assert_array_equal(phase, recording.activity.host.at(times))


def owners(ownership: Ownership, index: Ints) -> list[tuple[str, str]]:
    return [ownership.owners.named(owner) for owner in index.tolist()]
