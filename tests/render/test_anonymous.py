"""Results to share: no planted user, machine, folder, argument or source line is in them."""

import gzip
import json
import zlib
from base64 import b64decode
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from backspot import Report, locate
from backspot.commands import main
from backspot.errors import UsageError
from backspot.render import renderer_for
from backspot.render.anonymous import anonymous, write_anonymous_trace
from backspot.results.findings import Place
from backspot.results.trials import Tried, Variant
from support.h200 import DATA
from support.sample_reports import SAMPLES, diagnosed, line, node, report, row

USER, HOST = "zaphod77", "heartofgold-3"
HOME = f"/home/{USER}"
SECRETS = (USER, HOST, HOME, "hunter2", "patients", "x = secret_recipe(y)")
letters = st.text("abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=1, max_size=12)
paths = st.builds(lambda names: "/".join((HOME, *names, "patients")), st.lists(letters, max_size=3))
places = st.builds(lambda path, number: f"{path}/train.py:{number}", paths, st.integers(1, 999))
sentences = st.one_of(
    st.builds(lambda path: f"Reading {path} takes long: use a faster disk.", paths),
    st.builds(lambda place: f"Waits in <lambda> ({place}), each step.", places),
    st.builds(
        lambda path: f"It failed (FileNotFoundError: no such file: '{path}'), so left out.", paths
    ),
    st.builds(lambda path: f"data{path[5:]} was read; on {HOST} by {USER}.", paths),
    st.builds(lambda path: f"C:\\Users\\{USER}\\{path.rpartition('/')[2]}.csv is large.", paths),
)


@pytest.fixture(autouse=True)
def _planted(monkeypatch):
    monkeypatch.setenv("USER", USER)
    monkeypatch.setenv("LOGNAME", USER)
    monkeypatch.setattr("socket.gethostname", lambda: HOST)


def unpacked(name: str, content: bytes) -> str:
    """The bytes of an output as text, with the data of a page."""
    text = content.decode()
    if name.endswith(".html"):
        packed = text.split('id="report">')[1].split("<")[0]
        text += zlib.decompress(b64decode(packed)).decode() if packed.strip() else ""
    return text


def leaked(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


@settings(max_examples=60, deadline=None)
@given(told=sentences, place=places, path=paths)
def test_nothing_that_was_planted_is_in_the_bytes_of_an_output(told, place, path):
    first, *_ = diagnosed().findings
    file, _, number = place.rpartition(":")
    made = node("GatherBackward0", 5_000_000)
    of = line(made, file, int(number), "x = secret_recipe(y)")
    rows = [row("patch_drop", "PatchDropout", wall=5_000_000, nodes=(made,), lines=(of,))]
    fails = Variant("sparse", verdict="fails", note=f"ValueError: bad {path}, hunter2 {USER}")
    found = replace(
        first,
        seen=told,
        remedy=told,
        places=(Place("patch_drop", "PatchDropout", 1, 5_000_000, line=place),),
        tried=Tried("it", (Variant("as it is", 5), fails), 3),
    )
    planted = replace(
        report(rows, findings=(found,), warnings=(told,)),
        trace=f"{path}/trace.json",
        recorded={"command": f"train.py --password hunter2 {path}", "host": HOST, "torch": "2.14"},
    )
    hidden = anonymous(planted)
    for suffix in (".html", ".json", ".txt", ".csv", ".md"):
        output = unpacked(f"x{suffix}", renderer_for(f"x{suffix}")(hidden))
        assert leaked(output) == []
        assert "patch_drop" in output
    assert leaked(renderer_for("x.json")(planted).decode()) != []


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_numbers_modules_and_findings_stay(name, tmp_path):
    before = SAMPLES[name]()
    after = anonymous(before)
    assert [(one.path, one.class_name, one.wall_ns) for one in after.modules] == [
        (one.path, one.class_name, one.wall_ns) for one in before.modules
    ]
    assert [(one.rule, one.wall_ns, one.saves) for one in after.findings] == [
        (one.rule, one.wall_ns, one.saves) for one in before.findings
    ]
    assert after.answer.wall_ns == before.answer.wall_ns
    path = tmp_path / "report.json"
    after.save(path)
    assert Report.load(path) == after


def test_a_line_can_still_be_told_from_another_one():
    lines = [f"{HOME}/train.py:12", f"{HOME}/train.py:13", f"{HOME}/model.py:12"]
    first, *_ = diagnosed().findings
    found = replace(first, places=tuple(Place("a", "A", 1, 5, line=one) for one in lines))
    hidden = anonymous(report([row("a", wall=9)], findings=(found,)))
    assert [place.line for place in hidden.findings[0].places] == [
        "source-1.py:12",
        "source-1.py:13",
        "source-2.py:12",
    ]


def test_advice_stays_readable():
    before = diagnosed()
    assert [one.remedy for one in anonymous(before).findings] == [
        one.remedy for one in before.findings
    ]


def planted_trace(folder):
    """A recorded trace, with names of a user wherever a trace can have them."""
    trace = json.loads(gzip.decompress((DATA / "python_stack.trace.json.gz").read_bytes()))
    trace |= {"host_name": HOST, "traceName": f"{HOME}/t.json", "command": "train.py hunter2"}
    trace["backspot.lines"] = {"table": "x = secret_recipe(y)"}
    events = trace["traceEvents"]
    about = {"pid": 1, "tid": 1, "ts": events[-1]["ts"], "dur": 1, "ph": "X"}
    events += [
        {**about, "cat": "user_annotation", "name": f"read {HOME}/patients.csv"},
        {**about, "cat": "user_annotation", "name": "hunter2"},
        {**about, "cat": "cpu_op", "name": "x = secret_recipe(y)"},
        {**about, "cat": "python_function", "name": f"{HOME}/train.py(12): step"},
        {**about, "cat": "cpu_op", "name": "aten::add", "args": {"Call stack": HOME, USER: HOST}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": f"{HOME}/bin/py"}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": f"{USER}-loader"}},
    ]
    path = folder / "planted.json"
    path.write_text(json.dumps(trace))
    return path


def test_an_anonymous_trace_has_nothing_that_was_planted_and_the_same_answer(tmp_path):
    planted, hidden = planted_trace(tmp_path), tmp_path / "hidden.json.gz"
    write_anonymous_trace(planted, hidden)
    text = gzip.decompress(hidden.read_bytes()).decode()
    assert leaked(planted.read_text()) != []
    assert leaked(text) == []
    assert "source-1.py(" in text
    before, after = locate(planted), locate(hidden)
    assert [(one.path, one.wall_ns, one.gpu_ns) for one in after.modules] == [
        (one.path, one.wall_ns, one.gpu_ns) for one in before.modules
    ]


@pytest.mark.parametrize("suffix", [".html", ".json", ".trace.json.gz"])
def test_show_writes_it(tmp_path, suffix, capsys):
    planted, output = planted_trace(tmp_path), tmp_path / f"shared{suffix}"
    assert main(["show", str(planted), "-o", str(output), "--anonymous"]) == 0
    content = output.read_bytes()
    content = gzip.decompress(content) if suffix.endswith(".gz") else content
    assert leaked(unpacked(output.name, content)) == []
    if suffix.endswith(".gz"):  # of a trace that has tracks already, too
        again = tmp_path / "again.trace.json"
        assert main(["show", str(output), "-o", str(again), "--anonymous"]) == 0
        assert b'"backward: ' in again.read_bytes()


def test_what_shows_lines_of_source_is_refused(tmp_path, capsys):
    assert main(["show", str(planted_trace(tmp_path)), "--by", "line", "--anonymous"]) == (
        UsageError.exit_code
    )
    assert "leave out --anonymous" in capsys.readouterr().err
