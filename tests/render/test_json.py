import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from backspot.errors import NotATraceError, SourceNotFoundError
from backspot.render.json import schema, to_json
from backspot.results.report import Report
from support.sample_reports import SAMPLES, odd, reports, vit

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_saved_report_loads_equal(tmp_path, name):
    report = SAMPLES[name]()
    assert Report.load(report.save(tmp_path / "report.json")) == report


def test_two_halves_in_a_row_come_back_as_the_character_that_they_make(tmp_path):
    report = replace(vit(), trace="\ud83d\ude00")
    assert Report.load(report.save(tmp_path / "report.json")).trace == "\U0001f600"


@given(reports())
def test_any_report_survives_saving_whatever_its_names(tmp_path, any_report):
    path = any_report.save(tmp_path / "report.json", force=True)
    assert Report.load(path) == any_report
    # A terminal may be shown the file: nothing in it can act on it.
    assert re.sub(r"[\n ]", "", path.read_text("utf-8")).isprintable()


def test_other_readers_of_json_can_read_it():
    found = json.loads(to_json(vit()))
    assert found["schema"] == "backspot.report/3"
    assert found["modules"][0]["path"] == "patch_drop"
    assert json.loads(to_json(odd()))["modules"][5]["path"] == "half \ud800 pair"


def test_fields_of_a_later_minor_form_are_ignored(tmp_path):
    data = json.loads(to_json(vit()))
    data["colour"] = data["modules"][0]["colour"] = "red"
    (tmp_path / "report.json").write_text(json.dumps(data))
    assert Report.load(tmp_path / "report.json") == vit()


def broken(change) -> bytes:
    data = json.loads(to_json(vit()))
    change(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is not JSON, or is broken"),
        (b"<html>", "is not JSON, or is broken"),
        (b"\xff\xfe\x00", "is not JSON, or is broken"),
        (b'{"schema": "backspot.report/3", ' + b"[" * 100_000, "is not JSON, or is broken"),
        (to_json(vit())[:-90], "is not JSON, or is broken"),
        (to_json(odd())[:-90], "is not JSON, or is broken"),
        (b"[]", "is not a report that Backspot saved"),
        (b"{}", "is not a report that Backspot saved"),
        (b'{"schema": 1}', "is not a report that Backspot saved"),
        (b'{"traceEvents": []}', "is not a report that Backspot saved"),
        (b'{"schema": "backspot.report/4"}', r"newer Backspot \(schema backspot.report/4"),
        (b'{"schema": "backspot.report/2"}', r"older Backspot \(schema backspot.report/2"),
        (b'{"schema": "backspot.report/3"}', "not a complete Backspot report: .*modules"),
        (
            broken(lambda data: data.update(wall_ns="long")),
            r"not a complete Backspot report: .*wall_ns",
        ),
        (
            broken(lambda data: data["modules"][0].update(wall_ns_by_step=[1])),
            r"contradicts itself: wall_ns_by_step of the row .patch_drop. has 1 step, "
            r"step_ns_by_step has 3",
        ),
    ],
)
def test_what_is_no_report_gets_one_clear_line(tmp_path, data, complaint):
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(NotATraceError, match=complaint) as caught:
        Report.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    with pytest.raises(SourceNotFoundError, match="there is no such file"):
        Report.load(tmp_path / "report.json")
    with pytest.raises(SourceNotFoundError, match="cannot be read"):
        Report.load(tmp_path)


def test_the_published_schema_is_current():
    """``python -m backspot.render.json > docs/report.schema.json`` makes it so."""
    assert (DOCS / "report.schema.json").read_bytes() == schema()


def test_every_field_is_described_in_the_schema_and_in_the_reference():
    page, about = ((DOCS / name).read_text("utf-8") for name in ("api.md", "json.md"))
    for name, definition in json.loads(schema())["$defs"].items():
        assert definition["description"]
        section = page.partition(f"\n### {name}\n")[2].partition("\n##")[0]
        for field, meaning in definition["properties"].items():
            assert meaning.get("description"), f"{name}.{field} has no meaning in its docstring"
            is_there = re.search(rf"(?m)^- .*`{field}`|^{field}: ", section)
            assert is_there or f"`{field}`" in about, f"{name}.{field} is not in its section"


def test_the_form_tells_its_version():
    assert replace(vit()).schema == "backspot.report/3"
