"""Every benchmark runs at a small size, says what it does, and writes only where it is told to.

The benchmarks are those of ``benchmarks/questions.py``: a new one is tested without a line here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import warnings
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

from backspot import MissingDependencyError
from backspot.results import Plan, Rung
from benchmarks import evidence, harness, kept
from benchmarks.__main__ import main as answer
from benchmarks.causes import published
from benchmarks.measuring import Budget, busy
from benchmarks.questions import QUESTIONS, table
from benchmarks.robustness import plan_scripts, unedited
from benchmarks.robustness.public_scripts import Script
from benchmarks.workers import NO_TIME, Phase, do_alone, run_jobs
from support import preloaded, report_parts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
TESTED_ELSEWHERE = {
    "planted": "training/test_planted.py",
    "timm_sweep": "training/test_timm_families.py",
    "fuzz_traces": "trace/test_fuzzed_traces.py",
    "fuzz_reports": "render/test_fuzzed_reports.py",
    "unedited": "commands/test_run.py",
    "plan_scripts": "test_benchmarks.py",
}
"""Other tests run what these run; here, only their command line is looked at."""


@pytest.fixture
def preloaded_python(tmp_path, monkeypatch):
    """Processes that benchmarks start have PyTorch already, also the one that forks their ranks."""
    if sys.platform == "linux":
        python = str(preloaded.executable(tmp_path))
        monkeypatch.setattr(sys, "executable", python)
        monkeypatch.setattr(spawn, "_python_exe", os.fsencode(python))


@pytest.fixture
def settings(monkeypatch, preloaded_python):
    """Benchmarks set PyTorch's global settings; the next test must not see them."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    state, path = random.getstate(), list(sys.path)
    with warnings.catch_warnings():
        yield
    sys.path[:] = path
    random.setstate(state)
    torch.utils.deterministic.fill_uninitialized_memory = filling
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


def ask(*argv: str) -> int:
    """Answer a question, or skip where it needs a package that is missing."""
    try:
        return answer(list(argv))
    except MissingDependencyError as error:
        pytest.skip(str(error))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "timm"):
            raise
        pytest.skip(f"needs {error.name}")


@pytest.fixture
def commit_of_now():
    """The commit is asked for again: the checkout may have moved on since another test asked.

    The processes that a test starts would see the new one.
    """
    harness.commit.cache_clear()
    yield
    harness.commit.cache_clear()


def help_of(name: str, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        ask(name, "--help")
    assert ended.value.code == 0
    return capsys.readouterr().out


def written() -> dict[Path, int]:
    folders = (harness.RESULTS, harness.OUT)
    return {path: path.stat().st_mtime_ns for where in folders for path in where.glob("*")}


def test_the_readme_has_the_table_of_questions():
    assert table() in (ROOT / "benchmarks" / "README.md").read_text()


def test_what_is_left_to_other_tests_is_there():
    assert set(QUESTIONS) >= set(TESTED_ELSEWHERE)
    assert all((ROOT / "tests" / test).exists() for test in TESTED_ELSEWHERE.values())


def test_without_a_name_all_questions_are_listed(capsys):
    assert answer([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in QUESTIONS)
    assert answer(["no_such_benchmark"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_benchmark_says_what_it_does(name, capsys):
    said = help_of(name, capsys)
    assert "--small" in said
    assert "--out" in said


SHORTER = {
    "after_fix": ["--cases", "blind:gae_loop"],
    "blind_set_3": ["--cases", "zeroed_gradients"],  # published_causes has both
    "plan_ladder": ["--plan", "1"],
    "price_truth": ["--cases", "loop-product"],
    "steady_answer": ["--cases", "small operators,5% apart"],
    "step_truth": ["--cases", "perceptron", "--repeats", "1"],
    "what_if": ["--cases", "vit_tiny", "--steps", "3"],
}
"""Options of a small run: it goes through all of the benchmark, with one case of a kind."""
KEPT = {"compare_runs": "rows", "false_alarms": "recorded", "what_if": "rows"}
"""Their recordings can be kept, and judged again; and what of the result has all that was judged.
Of healthy models that may be more than the rows, which say what is found."""
OF_RANKS = ("memory_ranks", "overhead_ranks", "planted_ranks", "planted_transfers")
"""They fork their ranks off one process, which one worker has: it imports what ranks need."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.xdist_group("ranks")] if name in OF_RANKS else [])
        for name in sorted(QUESTIONS.keys() - TESTED_ELSEWHERE.keys() - {*KEPT})
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_small_run_works_and_leaves_the_results_alone(
    name, tmp_path, monkeypatch, capsys, settings
):
    monkeypatch.chdir(tmp_path)
    before = written()
    device = ["--device", "cpu"] if "--device" in help_of(name, capsys) else []
    out = tmp_path / "out.json"
    code = ask(name, "--small", *device, *SHORTER.get(name, ()), "-o", str(out))
    said = capsys.readouterr()
    if code == harness.CannotRunError.code:
        assert said.err.count("\n") == 1
        pytest.skip(said.err.strip())
    assert code == 0, said.out + said.err
    assert out.exists()
    if name != "trim":
        document = json.loads(out.read_text())
        assert document["small"]
        assert document["hardware"]["python"]
        assert not out.with_suffix(".jsonl").exists()
    assert written() == before


def test_all_questions_are_answered_once_a_commit_and_what_did_not_run_says_why(
    tmp_path, monkeypatch, capsys, commit_of_now
):
    monkeypatch.setenv("BENCHMARKS_COMMIT", "a commit")
    plan = {"startup": "--small", "ranks": "--small", "published_jobs": ""}
    monkeypatch.setattr(evidence, "PLAN", {"cpu": plan})
    # What the project has answered at this commit is not known here.
    monkeypatch.setattr(evidence, "path_of", lambda device, _=None: tmp_path / f"{device}.json")
    ask = ["all", "--device", "cpu", "--folder", str(tmp_path), "--minutes", "2"]
    assert answer([*ask, "--only", "startup"]) == 0
    path = evidence.path_of("cpu", tmp_path)
    first = kept.read_evidence(path)["questions"]["startup"]
    assert (first["end"], first["cases"], first["commit"]) == ("done", [1, 1], harness.commit())
    assert kept.figures_of(first)["rows"]["import backspot"]["median"] > 0
    assert answer(ask) == 0
    found = kept.read_evidence(path)
    assert found["questions"]["startup"] == first
    assert found["questions"]["ranks"]["end"] == "done"
    said = found["questions"]["published_jobs"]
    assert "needs the folder" in said.get("why", said.get("not again"))
    assert found["commit"] == harness.commit()
    assert "startup" not in capsys.readouterr().out.split("ranks: ")[1]
    assert answer([*ask, "--minutes", "0", "--only", "ranks"]) == 0
    assert answer([*ask, "--only", "no_such"]) == 2


def test_on_several_gpus_what_is_timed_and_what_is_counted_are_asked_apart(
    tmp_path, monkeypatch, commit_of_now
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    over = {"commit": harness.commit(), "end": "done", "hardware": {}}
    known = {"commit": "", "date": "", "questions": {"trial_truth": over, "startup": over}}
    kept.write_evidence(kept.path_of("cpu", tmp_path), known)
    ask = ["all", "--device", "cpu", "--gpus", "2", "--minutes", "0", "--folder", str(tmp_path)]
    assert answer([*ask, "--only", "trial_truth,startup,ranks", "--skip", "ranks"]) == 0
    assert answer([*ask, "--only", "trial_truth,ranks"]) == 3


@pytest.mark.parametrize("name", ["gpu_truth", "causes", "overhead"])
def test_a_case_that_does_not_exist_is_one_line(name, capsys):
    assert ask(name, "--small", "--device", "cpu", "--cases", "no_such_case") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.filterwarnings("ignore")
def test_kept_recordings_are_judged_again(name, tmp_path, capsys, settings):
    kept, first, again = str(tmp_path / "kept"), tmp_path / "first.json", tmp_path / "again.json"
    asked = [name, "--small", "--device", "cpu", *SHORTER.get(name, ())]
    assert ask(*asked, "--keep", kept, "-o", str(first)) == 0
    assert ask(name, "judge", kept, "--small", "-o", str(again)) == 0
    found, found_again = (json.loads(path.read_text()) for path in (first, again))
    assert sorted(found["rows"], key=str) == sorted(found_again["rows"], key=str)
    assert found["summary"] == found_again["summary"]
    judged, judged_again = found[KEPT[name]], found_again[KEPT[name]]
    assert sorted(judged, key=str) == sorted(judged_again, key=str) != []
    capsys.readouterr()
    assert ask(name, "judge", str(tmp_path / "none")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_that_was_ended_goes_on_with_the_cases_that_it_has_not_done(tmp_path):
    run = harness.Run(
        **harness.DEFAULTS, question="what_if", argv=[], small=True, out=tmp_path / "out.json"
    )
    asked = []

    def handle(job, _):
        asked.append(job["name"])
        if job["name"] == "b" and asked.count("b") == 1:
            raise KeyboardInterrupt
        return {"known": len(asked)}

    def cases():
        return harness.each(run, lambda: {"a": "", "b": "", "c": ""}, handle)

    with pytest.raises(KeyboardInterrupt):
        cases()
    found = cases()
    assert asked == ["a", "b", "b", "c"]
    assert [record["end"] for record in found.values()] == ["done"] * 3
    assert found["a"]["known"] == 1


def test_a_machine_is_busy_until_the_measurement_ends(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    with busy(2):
        assert [process.poll() for process in started] == [None, None]
    assert all(process.poll() is not None for process in started)


# Prices ------------------------------------------------------------------------------------------


def record_of(*, gain: float, price: float | None, tried: str = "", after: dict | None = None):
    """A case whose step takes 100 ms, its cause 12, and what its finding names 20."""
    finding = {
        "rule": "operator-loop", "tier": "stable", "path": "", "bound": "", "tried": tried,
        "price": price, "takes": 0.2,
    }  # fmt: skip
    return {
        "times": [[100.0] * 5, [100.0 - gain] * 5],
        "alone": [12.0, 1.0],
        "slow": {"findings": [finding], "step_ms": 200.0, "not_replayed": ""},
        "fixed": {"findings": [finding | after] if after else [], "step_ms": 100.0},
    }


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (record_of(gain=11, price=0.10), {"verdict": "right", "above": False}),
        (record_of(gain=11, price=0.30), {"verdict": "too high", "above": True}),
        (record_of(gain=11, price=0.30, tried="helps"), {"verdict": "too high", "above": False}),
        (record_of(gain=11, price=0.06, tried="helps"), {"verdict": "right", "said_ms": 12}),
        (record_of(gain=11, price=0.24), {"above_named": True}),
        (record_of(gain=11, price=0.22), {"above_named": False}),
        (record_of(gain=11, price=0.02), {"verdict": "too low", "above": False}),
        (record_of(gain=11, price=None), {"verdict": "no price", "said_ms": None}),
        (record_of(gain=1, price=None), {"verdict": "right"}),
        (record_of(gain=0, price=0.08), {"verdict": "too high"}),
        (record_of(gain=-20, price=0.04), {"verdict": "too high"}),
        (record_of(gain=-20, price=0.0, tried="does not help"), {"verdict": "right"}),
        (record_of(gain=-20, price=None), {"verdict": "right"}),
        (record_of(gain=11, price=0.1, after={"price": 0.01}), {"new": "", "promised": ""}),
        (record_of(gain=11, price=0.1, after={"price": 0.03}), {"promised": "operator-loop"}),
        (record_of(gain=11, price=0.1, after={"rule": "casts", "price": None}), {"new": "casts"}),
        (record_of(gain=11, price=0.1, after={"rule": "casts", "tier": "account"}), {"new": ""}),
    ],
)
def test_a_price_is_held_against_the_gain_and_what_the_cause_takes(record, found):
    pytest.importorskip("torch")
    from benchmarks.accuracy.price_causes import CASES
    from benchmarks.accuracy.price_truth import judged

    verdict = judged(CASES["loop-product"], record)
    assert {key: verdict[key] for key in found} == found


def layout(price: float, takes: float = 0.09) -> dict:
    """A finding of an innocent operator."""
    return {
        "rule": "layout-copies", "tier": "stable", "path": "blocks.0", "bound": "least",
        "tried": "", "price": price, "takes": takes,
    }  # fmt: skip


def test_what_most_fixed_trainings_have_is_of_their_innocent_operator():
    pytest.importorskip("torch")
    from benchmarks.accuracy.price_causes import CASES
    from benchmarks.accuracy.price_truth import judged, of_neighbours

    beside = [name for name, case in CASES.items() if case.neighbour == "convolution"][:9]
    measured = {
        name: (CASES[name], record_of(gain=11, price=0.1, after=layout(0.05))) for name in beside
    }
    usual = of_neighbours(measured)
    assert usual == {"convolution": {"layout-copies": pytest.approx(9.0)}}
    case = CASES["loop-convolution"]
    keys = ("new", "promised", "of_neighbour")
    for takes, found in ((0.09, ("", "", "layout-copies")), (0.2, ("layout-copies",) * 2 + ("",))):
        record = record_of(gain=11, price=0.1, after=layout(0.05, takes))
        verdict = judged(case, record, usual["convolution"])
        assert tuple(verdict[key] for key in keys) == found
    # Of the rule that is asked for it is never excused, and few trainings show nothing.
    cause = judged(CASES["columns-convolution"], record, usual["convolution"])
    assert cause["promised"] == "layout-copies"
    few = dict([*measured.items()][:3])
    assert of_neighbours(few) == {"convolution": {}}


def test_a_promise_that_was_there_before_the_fix_is_not_new():
    pytest.importorskip("torch")
    from benchmarks.accuracy.price_causes import CASES
    from benchmarks.accuracy.price_truth import judged

    cases = ((0.025, ""), (0.09, ""), (0.01, "layout-copies"))  # of 200 ms, and 0.05 of 100
    for before, promised in cases:
        record = record_of(gain=11, price=0.1, after=layout(0.05))
        record["slow"]["findings"].append(layout(before))
        assert judged(CASES["loop-product"], record)["promised"] == promised


def test_what_is_true_of_nearly_every_step_is_of_no_fix_and_a_remedy_can_say_what_comes_next():
    pytest.importorskip("torch")
    from benchmarks.accuracy.price_causes import CASES
    from benchmarks.accuracy.price_truth import judged

    late = layout(0.3) | {"rule": "launch-bound"}
    for before, promised in ((0.025, ""), (0.01, "launch-bound")):
        record = record_of(gain=11, price=0.1, after=late)
        record["slow"]["findings"].append(late | {"price": before, "path": "blocks.1"})
        assert judged(CASES["loop-product"], record)["promised"] == promised
    record = record_of(gain=11, price=0.1, after=layout(0.3) | {"rule": "pointwise-chain"})
    for name, new in (("distances-product", ""), ("loop-product", "pointwise-chain")):
        verdict = judged(CASES[name], record)
        assert (verdict["new"], verdict["promised"]) == (new, new)


def test_a_cause_that_is_not_found_is_missing():
    pytest.importorskip("torch")
    from benchmarks.accuracy.price_causes import CASES
    from benchmarks.accuracy.price_truth import judged

    verdict = judged(CASES["gelu-product"], record_of(gain=11, price=0.1))
    assert (verdict["verdict"], verdict["rule"]) == ("missing", "pointwise-chain")


def test_causes_of_many_rules_stand_beside_innocent_operators():
    pytest.importorskip("torch")
    from backspot.analysis.findings import all_rules
    from benchmarks.accuracy.price_causes import CASES, cases_on

    rules = {case.cause.rule[0] for case in CASES.values()}
    assert len(CASES) >= 60
    assert len(rules) >= 25
    assert rules <= {rule.name for rule in all_rules()}
    assert len(cases_on("cpu")) >= 30


@pytest.mark.filterwarnings("ignore")
def test_each_cause_and_its_fix_train_and_a_clock_is_around_the_cause(settings):
    torch = pytest.importorskip("torch")
    from benchmarks.accuracy.price_causes import CASES
    from benchmarks.accuracy.price_models import NEIGHBOURS, alone, built, size_of
    from benchmarks.models import Context

    torch.set_num_threads(1)
    size = size_of(Context("cpu", small=True))
    for name, case in CASES.items():
        for training in (case.cause.slow, case.cause.fixed):
            made = built(training, NEIGHBOURS[case.neighbour], size, clocked=True)
            weights = [weight for model in made.models.values() for weight in model.parameters()]
            before = [weight.detach().clone() for weight in weights]
            (spent,) = alone([made], rounds=2)
            assert any(map(lambda a, b: not torch.equal(a, b), before, weights)), name
            if training is case.cause.slow and case.cause.whole:
                assert spent is not None, name


@pytest.mark.filterwarnings("ignore")
def test_what_was_measured_of_prices_is_judged_again_and_not_measured_twice(
    tmp_path, capsys, settings
):
    kept, first, again = str(tmp_path / "kept"), tmp_path / "first.json", tmp_path / "again.json"
    ask_small = ["price_truth", "--small", "--device", "cpu", "--cases", "keys-product"]
    assert ask(*ask_small, "--keep", kept, "-o", str(first)) == 0
    files = {path: path.stat().st_mtime_ns for path in Path(kept).iterdir()}
    assert ask("price_truth", "judge", kept, "--small", "-o", str(again)) == 0
    assert ask(*ask_small, "--keep", kept) == 0
    assert {path: path.stat().st_mtime_ns for path in Path(kept).iterdir()} == files != {}
    cases = [json.loads(path.read_text())["cases"] for path in (first, again)]
    assert cases[0] == cases[1]
    capsys.readouterr()
    assert ask("price_truth", "judge", str(tmp_path / "none")) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_rules_of_today_are_asked_about_a_recording_of_prices_that_is_kept(tmp_path, settings):
    kept, out = tmp_path / "kept", tmp_path / "judged.json"
    of_loop = ["--small", "--device", "cpu", "--cases", "loop-product"]
    assert ask("price_truth", *of_loop, "--keep", str(kept)) == 0

    def judged_again() -> dict:
        assert ask("price_truth", "judge", str(kept), "--small", "-o", str(out)) == 0
        return json.loads(out.read_text())["cases"]

    path = kept / "loop-product.json"
    said, cases = json.loads(path.read_text()), judged_again()
    said["slow"]["findings"] = [
        {"rule": "operator-loop", "tier": "stable", "path": "blocks.0", "takes": 0.9, "price": 0.77,
         "bound": "", "tried": ""}
    ]  # fmt: skip
    path.write_text(json.dumps(said))
    assert judged_again() == cases
    for recording in kept.glob("*.trace.json.gz"):
        recording.unlink()
    assert judged_again() != cases  # what was said is all that is known


# Scripts of others -------------------------------------------------------------------------------

SCRIPT = """
import sys, time, torch
from torch import nn

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        for _ in range(40):
            torch.ones(200, 200) @ torch.ones(200, 200)
        return gradient

class Middle(nn.Module):
    def forward(self, x):
        return Slow.apply(x)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Middle(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters())
for step in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print("loss", loss.item().hex(), f"{time.perf_counter()} s", flush=True)
sys.exit(int(sys.argv[1]))
"""


FLIP = """
class Flip(nn.Module):
    def _apply(self, change, recurse=True):
        raise AssertionError("a transform is changed")

    def forward(self, images):
        return images.flip(0)

Flip()(torch.ones(4))
"""


@pytest.fixture
def place(tmp_path, preloaded_python):
    pytest.importorskip("torch")
    checkout = tmp_path / "checkouts" / "owner" / "name"
    checkout.mkdir(parents=True)
    (checkout / "train.py").write_text(SCRIPT)

    def make(ends: str, **more: Any) -> unedited.Place:
        what = Script("owner/name", "train.py", "", (ends,), options=("--steps", "3"), **more)
        return unedited.Place(what, tmp_path / "checkouts", tmp_path / "work", "cpu")

    return make


def test_a_script_of_others_is_judged_by_a_second_clock(place):
    there = place("0")
    found, reports = unedited.run_script(there, 1)
    assert (found.same, found.seeded, len(reports)) == ("", True, 1)
    unedited.judge_places(there, found, reports)
    assert found.clocked[0].startswith("1 (Middle)")
    assert not unedited.is_wrong(vars(found))
    timed = unedited.compared(there, {"foreach=True", "num_workers=2"}, 2)
    assert re.fullmatch(r"[\d.]+ ms a step, saves -?[\d.]+ ± [\d.]+", timed["foreach=True"][1])
    assert timed["num_workers=2"][0] == "not judged"  # there is no loader


def test_a_remedy_with_which_a_script_fails_is_told_from_one_that_changes_nothing(place):
    there = place("0")
    without_fused = SCRIPT.replace("for step", "assert not optimizer.defaults['fused']\nfor step")
    there.patches = {Path("train.py"): without_fused}
    timed = unedited.compared(there, {"fused=True", "foreach=True", "num_workers=2"}, 2)
    assert timed["fused=True"] == ("fails", "the script fails: AssertionError")
    assert timed["num_workers=2"][0] == "not judged"
    assert timed["foreach=True"][0] in {"helps", "hurts", "undecided"}
    there.patches = {Path("train.py"): SCRIPT.replace("for step", "1 / 0\nfor step")}
    verdict, why = unedited.compared(there, {"fused=True"}, 2)["fused=True"]
    assert verdict == "not judged"  # it is not the remedy's fault
    assert "ZeroDivisionError" in why


def test_a_remedy_changes_models_and_not_what_makes_their_batches(place):
    there = place("0")
    there.patches = {Path("train.py"): SCRIPT.replace("for step", f"{FLIP}for step", 1)}
    timed = unedited.compared(there, {"channels_last"}, 2)
    assert timed["channels_last"][0] in {"helps", "hurts", "undecided"}


@pytest.mark.parametrize(
    ("clocked", "share"),
    [
        ([("1", "Middle", "Model", 2.0), ("0", "Linear", "Model", 1.0)], 1.0),
        ([("0", "Linear", "Model", 4.0), ("model.1", "Middle", "Trainer", 1.0)], 0.25),
        ([("_forward_module._orig_mod.1", "Middle", "Wrapper", 2.0)], 1.0),
        ([("0.1", "Middle", "Model", 2.0), ("0.2", "Middle", "Model", 1.0)], 1.0),
        ([("2", "Middle", "Model", 2.0), ("1", "Other", "Model", 2.0)], 0.0),
    ],
)
def test_a_place_is_found_again_below_whatever_wraps_the_model(clocked, share):
    first = report_parts.report([report_parts.row("1", "Middle")])
    assert unedited.true_share(first, clocked) == share


def test_a_whole_model_is_found_by_the_name_that_a_wrapper_has_for_it():
    first = report_parts.report([report_parts.row("", "Linear")])
    wrapped = [("module", "Linear", "Wrapper", 2.0), ("module.0", "Linear", "Wrapper", 1.0)]
    assert unedited.true_share(first, wrapped) == 1.0
    assert unedited.true_share(first, [("", "Model", "Model", 2.0)]) == 0.0


@pytest.mark.parametrize("passes", [[1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 9.0, 1.0]])
def test_a_pause_of_the_machine_is_no_work_of_a_module(passes):
    second_clock = pytest.importorskip("benchmarks.robustness.second_clock")
    assert second_clock.without_longest(passes) == pytest.approx(len(passes))


def test_a_script_of_others_that_fails_by_itself_is_no_fault_of_backspot(place):
    found, reports = unedited.run_script(place("3"), 1)
    assert found.same.startswith("the script itself fails")
    assert not reports


WAYS = {
    "bf16": {"patches": [["train.py", "loss = model", "loss = 1 * model"]]},
    "channels_last": {"arguments": "--channels-last"},
    "num_workers": {"arguments": "--workers {}"},
    "torch.compile": {"patches": [["train.py", "torch", "no such text only once"]]},
}
LADDER = (
    Rung("bf16", "precision", step_ns=900_000, kept=True),
    Rung("TF32", "precision", step_ns=950_000),
    Rung("num_workers=3", "loader", step_ns=800_000, kept=True),
    Rung("SGD with foreach=True", "optimizer", step_ns=700_000, kept=True),
    Rung("torch.compile", "compile", step_ns=600_000, kept=True),
    Rung("channels_last", "layout", step_ns=500_000, kept=True),
)


def test_a_plan_is_followed_up_to_the_rung_that_cannot_be_made(place):
    there, found = place("0", follow=WAYS), plan_scripts.Followed()
    change = plan_scripts.follow(there, Plan("a copy", step_ns=10**6, rungs=LADDER), found)
    assert change.arguments == ("--workers", "3")
    assert change.remedies == ("foreach=True",)
    assert [file for file, *_ in change.patches] == ["train.py"]
    assert found.said_ms == (1.0, 0.7)  # of what was followed
    bf16, tf32, workers, optimizer, compiled, layout = (one["followed"] for one in found.rungs)
    assert (bf16, tf32, workers, optimizer) == ("", None, "", "")
    assert "times, not once" in compiled
    assert layout == "torch.compile below it was not"


def test_the_plan_of_a_script_of_others_is_followed_in_turns(place):
    there = place("0", follow=WAYS)
    asked = argparse.Namespace(plan=3, rounds=1, keep=None)
    found = plan_scripts.judge(there, asked, Budget(300))
    assert (found.end, found.why_not) == ("done", "")
    assert "bf16" in {one["setting"] for one in found.rungs}  # tried or not, as time allows
    assert bool(found.changed) == (found.real_ms is not None)
    patched = plan_scripts.Change(patches=(("train.py", "loss = model", "loss = 1 * model"),))
    assert plan_scripts.step_ms(there, patched) > 0
    assert there.patches == {}  # and the next run is as it is
    broken = plan_scripts.Change(patches=(("train.py", "loss = model", "loss = no_model"),))
    assert plan_scripts.step_ms(there, broken) is None


@pytest.mark.parametrize(
    ("plain", "observed", "found"),
    [
        (["loss 0.5 in 3 ms", "loss 0.5 in 4 ms"], "loss 0.5 in 9 ms", ("", True)),
        (["loss 0.5", "loss 0.5"], "loss 0.6", ("word 1 is '0.6', not '0.5'", True)),
        (["loss 0.5", "loss 0.5"], "loss 0.5 more", ("3 words in place of 2", True)),
        (["loss 0.5", "loss 0.4"], "loss 0.3", ("", False)),
        (["loss 0.5", "loss 0.4"], "lost 0.3", ("word 0 is 'lost', not 'loss'", False)),
        (["one", "one two"], "three", ("", False)),
    ],
)
def test_what_plain_runs_print_alike_is_compared(plain, observed, found):
    assert unedited.difference(plain, observed, ()) == found


def test_processes_that_print_together_print_the_same_in_any_order():
    plain = ["rank 0 rank 1", "rank 0 rank 1"]
    assert unedited.difference(plain, "rank rank 1 0", ())[0]
    assert unedited.difference(plain, "rank rank 1 0", (), together=True) == ("", True)
    assert unedited.difference(plain, "rank rank 1 1", (), together=True)[0]


# Worker processes --------------------------------------------------------------------------------

WORKER = """
import os, sys, time
sys.path.insert(0, {root!r})
from benchmarks.workers import serve

def handle(job, stage):
    stage("first", {{"known": job["name"]}})
    print("a library prints this")
    if job.get("does") == "crash":
        os._exit(7)
    if job.get("does") == "hang":
        time.sleep(60)
    if job.get("does") == "error":
        raise ValueError("no\\nsuch thing")
    if job.get("does") == "crowd" and sys.argv[1] != "1":
        os._exit(7)
    if job.get("does") == "grow":
        held = bytearray(400 << 20)
        time.sleep(60)
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if job.get("does") == "other rank" and rank == "1":
        os._exit(9)
    if job.get("does") == "other rank":
        time.sleep(60)
    time.sleep(job.get("seconds", 0))
    return {{"pid": os.getpid(), "world": world}}

serve(handle)
"""


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER.format(root=str(ROOT)))
    return [sys.executable, str(path)]


def no_handler():
    raise AssertionError("only a run without workers needs one")


def test_records_come_back_in_the_order_of_the_jobs(worker):
    jobs = [{"name": str(n), "seconds": 0.3 if n == 0 else 0.0} for n in range(6)]
    heard = []
    found = run_jobs(
        jobs, worker, no_handler, [Phase(2, 20)], ended=lambda job, _: heard.append(job["name"])
    )
    assert [record["end"] for record in found] == ["done"] * 6
    assert len({record["pid"] for record in found}) == 2
    assert sorted(heard) == [job["name"] for job in jobs]
    assert found[0]["pid"] != found[1]["pid"]


@pytest.mark.parametrize(
    ("does", "end"),
    [("crash", "crash"), ("hang", "timeout"), ("error", "error"), ("grow", "memory")],
)
def test_a_worker_that_fails_costs_one_job(worker, does, end, capsys):
    jobs = [{"name": "a"}, {"name": "b", "does": does}, {"name": "c"}]
    # The others end by themselves, and are slow on a busy machine.
    phase = Phase(1, 1.5 if does == "hang" else 30, host_gib=0.3, start_s=10)
    first, failed, last = run_jobs(jobs, worker, no_handler, [phase])
    assert (first["end"], failed["end"], last["end"]) == ("done", end, "done")
    assert failed["known"] == "b"
    assert failed["stage"] == "first"
    assert "\n" not in failed["error"]
    assert f"b {end}: {failed['error']}" in capsys.readouterr().out


def test_a_job_that_failed_is_tried_again_in_the_lonely_phase(worker):
    jobs = [{"name": "a", "does": "crowd"}, {"name": "b"}]
    found = run_jobs(jobs, worker, no_handler, [Phase(2, 20), Phase(1, 20)])
    assert [record["end"] for record in found] == ["done", "done"]


def test_each_job_can_have_a_process_of_its_own(worker):
    found = run_jobs([{"name": "a"}, {"name": "b"}], worker, no_handler, [Phase(1, 20)], fresh=True)
    assert len({record["pid"] for record in found}) == 2


def test_ranks_do_a_job_together_and_fail_together(worker):
    jobs = [{"name": "a"}, {"name": "b", "does": "other rank"}, {"name": "c"}]
    found = run_jobs(jobs, worker, no_handler, [Phase(1, 20)], ranks=2)
    assert [record["end"] for record in found] == ["done", "crash", "done"]
    assert found[0]["world"] == "2"
    assert "exit 9" in found[1]["error"]


def test_jobs_for_which_no_time_is_left_are_reported(worker):
    found = run_jobs([{"name": "a"}], worker, no_handler, [Phase(1, 20)], seconds=0)
    assert found == [{"end": NO_TIME}]


def test_a_run_without_workers_does_the_jobs_itself():
    def start():
        def handle(job, stage):
            stage("first", {"known": 1})
            if job["name"] == "b":
                raise ValueError("no such thing")
            return {"known": 2}

        return handle

    found = run_jobs([{"name": "a"}, {"name": "b"}], [], start, [Phase(0, 1)])
    assert found[0] == {"known": 2, "end": "done"}
    assert found[1]["known"] == 1
    assert found[1]["error"] == "ValueError: no such thing"


def test_one_job_alone_has_a_time_limit(worker):
    assert do_alone({"name": "a", "does": "hang"}, worker, 1)["end"] == "timeout"
    assert do_alone({"name": "a"}, worker, 20)["end"] == "done"


@pytest.mark.parametrize("name", published.names())
@pytest.mark.filterwarnings("ignore")
def test_the_fix_of_a_published_case_leaves_its_loss(name, settings):
    torch = pytest.importorskip("torch")
    from benchmarks.models import Context

    case, build = published.load(name)
    losses = []
    for fixed in (False, True):
        torch.manual_seed(0)
        step, models = build(fixed, Context("cpu", small=True))
        assert models
        losses.append([float(step()) for _ in range(2)])
    assert all(map(math.isfinite, losses[0] + losses[1]))
    if case.same:
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] != losses[0][1], "it learns"
