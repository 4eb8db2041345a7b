"""Reports to share: nothing foreign that was planted is in them, and Backspot's words stay."""

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given, settings, strategies as st

from backspot import BackspotError, Report, locate
from backspot.commands import main
from backspot.errors import UsageError
from backspot.render import renderer_for
from backspot.render.anonymous import anonymous
from backspot.results.findings import Place
from backspot.results.plan import Plan, Rung
from backspot.results.rare import RareWork
from backspot.results.training import Apart, Training
from backspot.results.trials import Tried, Variant
from support.deaths import HISTORY
from support.h200 import DATA
from support.plans import LADDER
from support.recordings import IN_ONE_WORKER, report_of
from support.sample_reports import SAMPLES, diagnosed, line, node, report, row

RECORDINGS = sorted(
    str(path.relative_to(DATA.parent))
    for path in DATA.parent.rglob("*.json.gz")
    if "forward_only" not in path.name and path.name != "cuda_graph_step.trace.json.gz"
)
QUICK = [name for name in RECORDINGS if (DATA.parent / name).stat().st_size < 12_000]
SUFFIXES = (".html", ".json", ".txt", ".csv", ".md", ".speedscope.json")

SECRETS = (
    *("zaphod77", "heartofgold", "magrathea", "hunter2", "patientsqx", "jelinek", "qdoe"),
    *("acmequx", "10.41.7.3", "secret_recipe", "müllerqx", "klinikqx"),
)
FOREIGN = (
    "/home/zaphod77/train",
    "/data/Acmequx Corp/Qdoe Jelinek: it is full",
    r"C:\Users\Qdoe Jelinek\My Data\patientsqx.csv is slow",
    "ValueError: record (id 7) of Qdoe Jelinek has no label; see ACMEQUX-12",
    "RecordGone: Qdoe (born 1970) Jelinek",
    "KeyError: 'qdoe.jelinek@acmequx.com'",
    "It failed (FileNotFoundError: [Errno 2] (2) no file: '/home/zaphod77/patientsqx'), so left.",
    "lib.errors.Odd(Qdoe): Jelinek",
    "StopIteration: shard jelinek",
    "10.41.7.3:29500",
    "http://10.41.7.3/x",
    "heartofgold-3.magrathea.internal is slow",
    "on HeartOfGold-3, by Zaphod77",
    "~zaphod77/x",
    "s3://acmequx-bucket/jelinek",
    "acmequx.s3.amazonaws.com",
    "qdoe@acmequx.com",
    "https://pytorch.org/x?jelinek",
    "https://docs.pytorch.org/docs/stable/jelinek.html",
    "patientsqx.arrow patientsqx.mds patientsqx.lmdb patientsqx.PNG patientsqx.tar.bz2",
    "data/patientsqx",
    "waited at Klinikqx Nord/zz train.py:12",
    "zz jelinek.py:12-14",
    "<ipython-input-3-zaphod77>:12",
    "Jörg Müllerqx",
    "train.py --password hunter2",
    "x = secret_recipe(y)",
    "forward: QDOE",
    "nccl:jelinek",
)
own = st.sampled_from(("The step waits for", "3/4 of it,", "5 ms;", "(see", "step at", "'", ""))
foreign = st.builds(
    lambda before, text, between, more, after: f"{before} {text} {between} {more}{after}".strip(),
    own,
    st.sampled_from(FOREIGN),
    own,
    st.sampled_from(("", *FOREIGN)),
    st.sampled_from(("", ".", ")", "'", ": it is full")),
)
KEPT = {
    *("path", "paths", "class_name", "root", "peak_path", "function", "node", "nodes", "operator"),
    *("operators", "kernels", "rule", "link", "schema"),
}
"""Names of modules, classes, functions, operators and kernels, and what only Backspot writes."""
NAMED = {"NodeCost", "KernelCost", "OperatorCost", "FusedKernel"}
PLACES = {"line", "file", "lines", "waits"}
HOLDS_TEXT = {str, tuple[str, ...], dict[str, str]}


@cache
def rich() -> Report:
    """A report of a recording with stacks, with everything beside it that a report can have."""
    ms = 1_000_000
    of = locate(DATA / "python_stack.trace.json.gz")
    first, *others = of.findings or diagnosed().findings
    fails = Variant("sparse", verdict="fails", note="ValueError: bad")
    first = replace(
        first,
        places=(Place("net", "Net", 1, ms, line="train.py:3"),),
        tried=Tried("it", (Variant("as it is", 5, note="as it is"), fails), 3),
    )
    unable = replace(first, tried=Tried("it", why_not="ValueError: bad"))
    made = node("GatherBackward0", ms)
    lines = (line(made, "train.py", 12, "y = f(x)"),)
    most, *rest = of.modules
    return replace(
        of,
        modules=(replace(most, lines=lines), *rest),
        findings=(first, unable, *others),
        warnings=("Beware.",),
        not_replayed="It has no device.",
        recorded={"command": "train.py", "host": "busy", "torch": "2.14"},
        rules={"sorted-indexing": "needs a GPU"},
        out_of_memory=HISTORY,
        rare=(RareWork("saving a checkpoint", 100.0, ms, ms, 0.04),),
        plan=Plan(
            "a copy of Net",
            94 * ms,
            (*LADDER, Rung("cuda graphs", "graph", code="x", note="ValueError: bad")),
            next_limit="The host.",
            earlier="From before.",
            inputs=("256x3 float32",),
            why_not="",
        ),
        training=Training(
            *(9, 9, 9 * ms, 0, 3 * ms, 3 * ms, 3 * ms, 9 * ms, 9 * ms),
            apart=(Apart("start", 1, ms),),
        ),
    )


hints_of = cache(get_type_hints)


def planted(value, text: str, name: str = "", hint=None, owner: str = ""):
    """The same result with a foreign text in each field that is free text, or a place."""
    if name in KEPT or (name == "name" and owner in NAMED):
        return value
    if isinstance(value, str):
        if hint is not None and hint not in HOLDS_TEXT and name not in PLACES:
            return value  # one of a few words, which code looks at
        if name in PLACES and name != "file":
            return f"{text}:12" if value else value
        return text if value else value
    if isinstance(value, tuple):
        return tuple(planted(one, text, name, hint, owner) for one in value)
    if isinstance(value, Mapping):
        return {key: planted(one, text, name, hint, owner) for key, one in value.items()}
    if is_dataclass(value):
        hints = hints_of(type(value))
        changes = {
            one.name: planted(
                getattr(value, one.name), text, one.name, hints[one.name], type(value).__name__
            )
            for one in fields(value)
            if one.init
        }
        return replace(value, **changes)
    return value


def unpacked(name: str, content: bytes) -> str:
    """The bytes of an output as text, with the data of a page."""
    text = content.decode()
    if name.endswith(".html"):
        packed = text.split('id="report">')[1].split("<")[0]
        text += zlib.decompress(b64decode(packed)).decode() if packed.strip() else ""
    if name.endswith(".json"):
        text += json.dumps(json.loads(text), ensure_ascii=False)
    return text


def leaked(text: str) -> list[str]:
    text = text.lower()
    return [secret for secret in SECRETS if secret in text]


def texts(value) -> list[str]:
    """All texts of a result."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.items() for one in item for text in texts(one)]
    if isinstance(value, tuple):
        return [text for one in value for text in texts(one)]
    return (
        [text for one in fields(value) for text in texts(getattr(value, one.name))]
        if is_dataclass(value)
        else []
    )


@pytest.mark.parametrize("text", FOREIGN)
def test_no_foreign_text_is_in_any_field_or_output(text):
    of = planted(rich(), text)
    assert len(leaked(" ".join(texts(of)))) >= 1
    hidden = anonymous(of)
    assert leaked(" ".join(texts(hidden))) == []
    shown = unpacked("x.json", renderer_for("x.json")(hidden))
    assert leaked(shown) == []


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_foreign_text_is_in_the_bytes_of_an_output(suffix):
    write = renderer_for(f"x{suffix}")
    before = planted(rich(), " ".join(FOREIGN[:2]))
    if suffix not in (".csv", ".speedscope.json"):
        assert leaked(unpacked(f"x{suffix}", write(before))) != []
    for number in range(0, len(FOREIGN), 3):
        hidden = anonymous(planted(rich(), "; ".join(FOREIGN[number : number + 3])))
        output = unpacked(f"x{suffix}", write(hidden))
        assert leaked(output) == []
        assert rich().modules[1].path in output


@settings(max_examples=40)
@given(foreign)
def test_no_foreign_text_is_left_whatever_is_around_it(text):
    hidden = anonymous(planted(diagnosed(), text))
    assert leaked(" ".join(texts(hidden))) == []


@pytest.mark.parametrize(
    ("said", "class_name"),
    [
        ("ValueError: bad (id 7) step; see the loss", "ValueError"),
        ("torch.OutOfMemoryError: the step (3) is full", "torch.OutOfMemoryError"),
        ("RecordGone: the model", "RecordGone"),
        ("KeyError: 'step'", "KeyError"),
        ("RuntimeError", "RuntimeError"),
        ("RecordGone: the step\nof the model", "RecordGone"),
        ("jelinek: bad step", "…: bad step"),
        ("jelinek.s3.amazonaws.com", "…"),
        ("out of memory", "out of memory"),
        ("no time was left", "no time was left"),
    ],
)
def test_of_an_error_the_class_stays_alone(said, class_name):
    first, *_ = diagnosed().findings
    found = replace(first, tried=Tried("it", (Variant("x", note=said),), why_not=said))
    plan = Plan("a copy", rungs=(Rung("bf16", "precision", note=said),), why_not=said)
    died = replace(HISTORY, error=said)
    hidden = anonymous(replace(diagnosed(), findings=(found,), plan=plan, out_of_memory=died))
    tried = hidden.findings[0].tried
    assert [
        tried.why_not,
        tried.variants[0].note,
        hidden.plan.why_not,
        hidden.plan.rungs[0].note,
        hidden.out_of_memory.error,
    ] == [class_name] * 5


def recorded(name: str) -> Report:
    try:
        return report_of(DATA.parent / name)
    except BackspotError:
        pytest.skip("this trace has no report")


@IN_ONE_WORKER
@pytest.mark.parametrize(
    ("name", "user"),
    # A user without a name, and one who is called as a word that is everywhere.
    [
        *((name, "") for name in QUICK),
        *(
            pytest.param(name, "step", marks=() if name in QUICK else pytest.mark.slow)
            for name in RECORDINGS
        ),
    ],
)
def test_words_of_backspot_and_names_and_numbers_stay(name, user, monkeypatch):
    monkeypatch.setenv("USER", user)
    before = recorded(name)
    after = anonymous(before)
    keeps = ("title", "remedy", "rule", "link", "wall_ns", "saves", "nodes", "kernels", "operators")
    assert [[getattr(one, kept) for kept in keeps] for one in after.findings] == [
        [getattr(one, kept) for kept in keeps] for one in before.findings
    ]
    for one, was in zip(after.findings, before.findings, strict=True):
        if not re.search(r"\.py\b", was.seen):
            assert one.seen == was.seen
    assert after.warnings == before.warnings
    assert after.rules == before.rules
    assert after.not_replayed == before.not_replayed
    assert after.phases == before.phases
    assert [(one.path, one.class_name, one.nodes, one.kernels) for one in after.modules] == [
        (one.path, one.class_name, one.nodes, one.kernels) for one in before.modules
    ]
    assert after.answer.wall_ns == before.answer.wall_ns


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_shared_report_is_one_that_can_be_read_again(name, tmp_path):
    after = anonymous(SAMPLES[name]())
    path = tmp_path / "report.json"
    after.save(path)
    assert Report.load(path) == after


def test_settings_code_and_numbers_stay():
    plan = Plan("a copy of ResNet, forward and backward", rungs=LADDER, inputs=("256x3 float32",))
    told = "It is 3/4 of the step, ~5 ms at 4.2 GB/s or 1.5x; write loss /= 4, a // b."
    first, *_ = diagnosed().findings
    before = replace(diagnosed(), plan=plan, findings=(replace(first, remedy=told),))
    after = anonymous(replace(before, modules=before.modules[:5]))
    assert after.plan.rungs == LADDER
    assert after.plan.inputs == plan.inputs
    assert after.findings[0].remedy == told


def test_of_the_recording_device_version_and_time_stay():
    stays = {
        "device": "2 × NVIDIA H100 80GB HBM3",
        "time": "2026-11-24 19:01 UTC",
        "torch": "2.14.1+cu126",
        "memory": "12.3 of 79.6 GB",
    }
    goes = {"command": "train.py", "host": "load 3.1, 4 threads of PyTorch, 8 CPUs"}
    assert anonymous(replace(diagnosed(), recorded=stays | goes)).recorded == stays


def test_a_line_can_still_be_told_from_another_one():
    lines = ["/home/z/train.py:12", "/home/z/train.py:13-14", "/home/z/model.py:12", "my own.py:2"]
    first, *_ = diagnosed().findings
    told = "It waits at my own.py:2."
    found = replace(
        first, seen=told, places=tuple(Place("a", "A", 1, 5, line=one) for one in lines)
    )
    hidden = anonymous(report([row("a", wall=9)], findings=(found,)))
    named = [place.line for place in hidden.findings[0].places]
    files = [one.partition(":")[0] for one in named]
    assert [one.partition(":")[2] for one in named] == ["12", "13-14", "12", "2"]
    assert files[0] == files[1]
    assert len(set(files)) == 3
    assert all(re.fullmatch(r"source-\d\.py", file) for file in files)
    assert hidden.findings[0].seen == f"It waits at {named[3]}."


def secret_report(folder: Path) -> Path:
    path = folder / "Acmequx Corp" / "report.json"
    path.parent.mkdir()
    replace(rich(), warnings=FOREIGN, trace="/home/zaphod77/t.json").save(path)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_show_writes_it(tmp_path, suffix):
    output = tmp_path / f"shared{suffix}"
    assert main(["show", str(secret_report(tmp_path)), "-o", str(output), "--anonymous"]) == 0
    assert leaked(unpacked(output.name, output.read_bytes())) == []


def test_reports_on_a_screen_are_named_by_number(tmp_path, capsys):
    path = str(secret_report(tmp_path))
    assert main(["show", path, path, "--anonymous", "--full"]) == 0
    shown = capsys.readouterr().out
    assert leaked(shown) == []
    assert "── recording 2" in shown


@pytest.mark.parametrize("name", ["x.trace.json", "x.trace.json.gz", "x.json.gz"])
def test_a_trace_is_refused_before_it_is_read(tmp_path, name, capsys):
    trace = DATA / "python_stack.trace.json.gz"
    output = tmp_path / name
    assert main(["show", str(trace), "-o", str(output), "--anonymous"]) == UsageError.exit_code
    assert "--anonymous writes reports" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_shows_lines_of_source_is_refused(tmp_path, capsys):
    trace = str(DATA / "python_stack.trace.json.gz")
    assert main(["show", trace, "--by", "line", "--anonymous"]) == UsageError.exit_code
    assert "leave out --anonymous" in capsys.readouterr().err


def test_a_training_that_died_of_memory_is_refused(tmp_path, capsys):
    path = tmp_path / "died.json"
    replace(HISTORY, limit="heartofgold-3").save(path)
    assert main(["show", str(path), "--anonymous"]) == UsageError.exit_code
    shown = capsys.readouterr()
    assert leaked(shown.out + shown.err.replace(str(path), "")) == []
