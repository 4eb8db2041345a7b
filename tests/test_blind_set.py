"""The third blind set stays as it was before its first run, its cases train, and it is judged so.

Backspot does not meet its cases here: they are to be seen once.
"""

import hashlib
import math

import pytest

from benchmarks.causes import published
from benchmarks.causes.published import Published, judge

torch = pytest.importorskip("torch")

FOLDER = published.Path(published.__file__).parent
SUMS = FOLDER / published.THIRD / "SHA256SUMS"
NAMES = published.names(published.THIRD)


def hashes() -> dict[str, str]:
    lines = SUMS.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split(maxsplit=1) for line in lines)}


def test_the_cases_and_their_judging_are_those_of_before_the_first_run():
    known = hashes()
    for name, digest in known.items():
        text = (SUMS.parent / name).read_text(encoding="utf-8")  # whatever ends its lines
        assert hashlib.sha256(text.encode()).hexdigest() == digest, name
    assert {f"{name}.py" for name in NAMES} <= set(known)
    assert {"JUDGING.md", "../judge.py", "../parts.py"} <= set(known)


def test_the_set_is_large_and_shares_no_source_with_the_others():
    sources = [published.load(name)[0].source for name in NAMES]
    assert len(sources) == len(set(sources)) >= 24
    assert not set(sources) & {published.load(name)[0].source for name in published.names()}


@pytest.mark.parametrize("name", NAMES)
def test_a_case_says_in_advance_what_is_to_be_named(name):
    case, _ = published.load(name)
    assert published.title(name)
    assert all((case.cause, case.half, case.place, case.because, case.fix, case.gain))
    assert case.source.count("/") == case.source.count("#") == 1


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore")
def test_a_case_trains_two_steps_and_its_fix_leaves_the_loss(name, one_thread):
    from benchmarks.models import Context

    case, build = published.load(name)
    losses = []
    for fixed in (False, True):
        torch.manual_seed(0)
        step, models = build(fixed, Context("cpu", small=True))
        assert models
        losses.append([float(step()) for _ in range(2)])
    assert all(map(math.isfinite, losses[0] + losses[1]))
    assert losses[0][0] != losses[0][1], "it learns"
    if case.same:
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


CASE = Published(
    "a/b#1", cause=("loop rows",), half=("launch",), place=("h.*.mlp",), fix="", gain=""
)
TIMES = [[10.0] * 5, [6.0] * 5]


def finding(text: str, path: str, promised: float, tier: str = "stable") -> judge.Said:
    about = {"rule": "a", "title": "", "remedy": "", "tried": "", "tier": tier}
    return {**about, "seen": text, "places": [{"path": path}], "promised": promised}


def report(*findings: judge.Said) -> judge.Said:
    return {"findings": list(findings), "answer": "h.0.mlp", "answer_saves": 1.0, "rows": []}


def test_a_cause_is_whole_half_or_none_by_the_words_of_the_case():
    def verdict(text: str) -> judge.Said:
        return judge.judged(CASE, report(finding(text, "h.0.mlp", 4)), report(), TIMES)

    assert [verdict("a loop over rows")[what] for what in ("cause", "half")] == [True, False]
    assert [verdict("many launches")[what] for what in ("cause", "half")] == [False, True]
    assert [verdict("a cast")[what] for what in ("cause", "half")] == [False, False]


@pytest.mark.parametrize(("promised", "right"), [(3.0, True), (5.0, True), (2.9, False)])
def test_a_price_is_right_within_a_quarter_of_the_gain(promised, right):
    found = judge.judged(CASE, report(finding("loop rows", "h.1.mlp", promised)), report(), TIMES)
    assert found["right"] is right


def test_a_promise_for_a_fix_that_gains_nothing_is_wrong():
    same = [[10.0] * 5, [9.9] * 5]
    said = report(finding("loop rows", "h.0.mlp", 1.0))
    found = judge.judged(CASE, said, report(), same)
    assert (found["nothing"], found["right"], found["half"]) == (True, False, None)
    assert judge.judged(CASE, report(), report(), same)["right"]


def test_stable_rules_and_those_in_preview_are_judged_apart():
    said = report(
        finding("many launches", "h.0.mlp", 1.0),
        finding("a loop over rows", "h.0.mlp", 4.0, "preview"),
    )
    stable, preview = (judge.of_tier(said, tier) for tier in ("stable", "preview"))
    by_stable, by_preview = (judge.judged(CASE, one, report(), TIMES) for one in (stable, preview))
    assert [by_stable[what] for what in ("cause", "half", "right")] == [False, True, False]
    assert [by_preview[what] for what in ("cause", "half", "right")] == [True, False, True]
    silent = judge.judged(CASE, judge.of_tier(report(), "preview"), report(), TIMES)
    assert [silent[what] for what in ("place", "cause", "half")] == [False, False, False]
