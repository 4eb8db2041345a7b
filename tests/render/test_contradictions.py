"""A saved report that does not add up is refused in one line when it is read."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from backspot import Report, compare
from backspot.commands import main
from backspot.errors import NotATraceError
from backspot.render.json import to_json
from support.sample_reports import SAMPLES, report as report_of, reports, row, vit, vit_with_lines

TOO_MUCH = 1 << 63


def first(data):
    return data["modules"][0]


def twice(parts):
    parts.append(parts[0])


def idle(data):
    """All of each step, as one phase."""
    times = {
        "wall_ns": data["step_ns"],
        "recorded_wall_ns": data["step_ns"],
        "wall_ns_by_step": data["step_ns_by_step"],
    }
    return {"name": "idle", "busy_ns": 0, **times}


def drawn(wall_ns):
    return {
        "recorded_wall_ns": wall_ns,
        "host": [[0, 3, "idle"]],
        "lines": [],
        "device": [],
        "waits": [],
    }


FOUND = {
    "rule": "r",
    "title": "",
    "seen": "",
    "remedy": "",
    "wall_ns": 1,
    "steps": 3,
    "places": [{"path": "", "class_name": "", "count": 1, "wall_ns": 1}],
}

CHANGES = {
    "a picture of no step": lambda data: data.update(picture=drawn(0)),
    "a picture longer than its step": lambda data: data.update(picture=drawn(2)),
    "other steps": lambda data: data.update(step_ns_by_step=[]),
    "a step too many": lambda data: first(data)["wall_ns_by_step"].append(0),
    "all rows of other steps": lambda data: [
        one.update(wall_ns_by_step=[one["wall_ns"]]) for one in data["modules"]
    ],
    "rows beyond the whole in one step": lambda data: first(data)["wall_ns_by_step"].__setitem__(
        1, first(data)["wall_ns_by_step"][1] + 1
    ),
    "device time beyond the whole in one step": lambda data: data["gpu_ns_by_step"].__setitem__(
        2, data["gpu_ns_by_step"][2] - 1
    ),
    "a row without the steps of its host time": lambda data: first(data).update(cpu_ns_by_step=[]),
    "a row without the steps of its forward": lambda data: first(data).update(
        forward_ns_by_step=[]
    ),
    "passes of another whole": lambda data: data["wall_ns_by_step"].__setitem__(0, 1 << 40),
    "a kind beyond its row": lambda data: first(data)["wall_on"].update(host_ns=1 << 50),
    "a node that takes more than its row": lambda data: first(data)["nodes"][0].update(
        wall_ns=1 << 50
    ),
    "a line that takes more than its row": lambda data: first(data)["lines"][0].update(
        wall_ns=1 << 50
    ),
    "a total below its own": lambda data: first(data).update(total_gpu_ns=0),
    "rows beyond the whole": lambda data: data.update(cpu_ns=1),
    "operators beyond the whole": lambda data: data["operators"][0].update(wall_ns=1 << 50),
    "passes that are not the whole": lambda data: data["passes"].pop(),
    "a pass that is not its parts": lambda data: data["passes"][0].update(other_ns=1),
    "a pass of no step": lambda data: data["passes"][0].update(step=3),
    "phases that are not the steps": lambda data: data.update(
        phases=[idle(data) | {"wall_ns": 1, "wall_ns_by_step": [1, 1, 1]}]
    ),
    "phases that are not the steps in one step": lambda data: data.update(
        phases=[idle(data) | {"wall_ns_by_step": [1, 1, 1]}]
    ),
    "a phase of other steps": lambda data: data.update(
        phases=[idle(data) | {"wall_ns_by_step": []}]
    ),
    "a phase busier than long": lambda data: data.update(
        phases=[idle(data) | {"busy_ns": 1 << 50}]
    ),
    "a group of nothing": lambda data: first(data).update(members=0),
    "a row twice": lambda data: data["modules"].append(
        {**data["modules"][-1], "wall_ns": 0, "gpu_ns": 0, "cpu_ns": 0}
        | {f"{cost}_ns_by_step": [0, 0, 0] for cost in ("wall", "gpu", "cpu")}
        | {"wall_on": {}, "nodes": [], "lines": []}
    ),
    "what no module owns twice": lambda data: [
        one.update(is_module=False, path="(outside model)") for one in data["modules"][:2]
    ],
    "a device twice": lambda data: twice(data["devices"]),
    "a finding without a place": lambda data: data.update(findings=[FOUND | {"places": []}]),
    "a finding in more steps than there are": lambda data: data.update(
        findings=[FOUND | {"steps": 4}]
    ),
}

NUMBERS = {
    "a negative kind": lambda data: first(data)["wall_on"].update(sync_ns=-1),
    "calls of no number": lambda data: first(data).update(calls=float("nan")),
    "a pass before all steps": lambda data: data["passes"][0].update(step=-1),
    "a share of more than all": lambda data: data["coverage"].update(wall=1.5),
    "a share of no number": lambda data: data["coverage"].update(gpu=float("nan")),
    "a share without end": lambda data: data["coverage"].update(cpu=float("inf")),
    "a negative time": lambda data: first(data).update(forward_ns=-1),
    "a negative count": lambda data: first(data)["nodes"][0].update(count=-1),
    "a negative step": lambda data: data["step_ns_by_step"].__setitem__(0, -1),
    "a time beyond 63 bits": lambda data: first(data).update(forward_ns=TOO_MUCH),
    "a device's time beyond 63 bits": lambda data: data["devices"][0]["gpu_ns"].update(a=TOO_MUCH),
    "a finding of negative cost": lambda data: data.update(findings=[FOUND | {"wall_ns": -1}]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_report_that_contradicts_itself_is_refused_in_one_line(tmp_path, change):
    data = json.loads(to_json(vit_with_lines()))
    change(data)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    with pytest.raises(NotATraceError, match="contradicts itself") as caught:
        Report.load(path)
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_no_report_has_is_refused_in_one_line_with_its_place(tmp_path, change):
    data = json.loads(to_json(vit_with_lines()))
    change(data)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    place = r"Expected `(int|float)` (>=|<=|<) .* - at `\$\."
    with pytest.raises(NotATraceError, match=place) as caught:
        Report.load(path)
    assert str(caught.value).count("\n") == 0
    assert str(caught.value).startswith(str(path))


def test_the_command_refuses_such_a_report_in_one_line_too(tmp_path, capsys):
    data = json.loads(to_json(vit_with_lines()))
    next(iter(CHANGES.values()))(data)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(data))
    vit().save(tmp_path / "other.json")
    assert main(["diff", str(path), str(tmp_path / "other.json")]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_a_long_name_does_not_fill_the_line(tmp_path):
    made = report_of([row("a" * 100_000, wall=3)])
    bad = replace(made, step_ns_by_step=(1,))
    (tmp_path / "report.json").write_bytes(to_json(bad))
    with pytest.raises(NotATraceError) as caught:
        Report.load(tmp_path / "report.json")
    assert len(str(caught.value)) < 400


def test_what_a_finding_names_need_not_be_a_row(tmp_path):
    """A report can be saved with some of its rows only."""
    made = SAMPLES["diagnosed"]()
    some = replace(made, modules=made.top(1))
    loaded = Report.load(some.save(tmp_path / "report.json"))
    assert loaded == some
    assert compare(loaded, made).changes


@pytest.mark.slow
@settings(max_examples=60)
@given(
    any_report=reports(),
    depth=st.sampled_from([None, 0, 2]),
    by=st.sampled_from(["path", "class", "pattern"]),
)
def test_what_backspot_saves_it_reads(tmp_path, any_report, depth, by):
    some = replace(any_report, modules=any_report.top(depth=depth, by=by))
    assert Report.load(some.save(tmp_path / "report.json", force=True)) == some
