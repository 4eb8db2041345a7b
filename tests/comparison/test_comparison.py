"""Two reports side by side."""

import csv
import io
import json
import random
import re
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, strategies as st

import backspot
from backspot import compare, locate
from backspot.comparison.judge import measured
from backspot.errors import OutputExistsError, UsageError
from backspot.render.comparison import render_comparison
from backspot.render.json import comparison_to_json
from backspot.render.markdown import comparison_to_markdown
from backspot.render.tables import comparison_to_csv
from backspot.render.view import View
from backspot.results.comparison import Change, Comparison, Move, Side
from support.recorded_steps import recorded, recordings
from support.sample_reports import node, odd, report, reports, row, unlabelled, vit, vit_rows

DATA = Path(__file__).parents[1] / "data"
DOCS = Path(__file__).parents[2] / "docs"


def renamed(rows, old, new):
    """The rows with ``old`` at the start of each path replaced."""
    made = []
    for one in rows:
        fits = one.path == old or one.path.startswith(f"{old}.")
        made.append(replace(one, path=new + one.path[len(old) :]) if fits else one)
    return made


def linear(path, wall=3_000_000, **more):
    return row(path, wall=wall, nodes=(node("AddmmBackward0", wall),), **more)


# What it claims, and what not.


def test_the_public_function_is_there():
    assert backspot.compare is compare
    assert backspot.Comparison is Comparison


def test_a_module_that_got_slower_is_named_first_and_its_change_told():
    found = compare(vit(drop=1_500_000), vit())
    assert found.whole.verdict == "longer"
    assert found.changes[0].path == "patch_drop"
    change = found["patch_drop"]
    assert change.verdict == "longer"
    assert (change.before_ms, change.after_ms) == (0.5, 5.23)
    assert change.change_ms == pytest.approx(4.73)
    assert change.percent == pytest.approx(946)
    assert change.low_ms <= change.change_ms <= change.high_ms
    assert {c.verdict for c in found.changes[1:]} == {"within the noise"}


def test_times_are_per_step_whatever_their_number():
    more = report([linear("fc", 10_000_000, steps=5)], step_ns=(9,) * 5)
    fewer = report([linear("fc", 4_000_000, steps=2)], step_ns=(9,) * 2)
    found = compare(more, fewer)
    assert found.whole.change_ms == 0
    assert found["fc"].before_ms == found["fc"].after_ms == 2
    assert (found.before.steps, found.after.steps) == (5, 2)


@pytest.mark.parametrize("steps", [(1, 3), (3, 1), (1, 1)])
def test_a_single_step_on_either_side_claims_nothing(steps):
    sides = [
        report([linear("fc", wall * n, steps=n)], step_ns=(9,) * n)
        for wall, n in zip((1_000_000, 9_000_000), steps, strict=True)
    ]
    found = compare(*sides)
    assert found.whole.verdict == found["fc"].verdict == "undecided"
    assert found["fc"].low_ms is None
    assert any("One step has no spread" in note for note in found.notes)
    assert "too few steps to tell it from noise" in str(found).replace("\n", " ")
    assert not found.slower_than(0)


def test_steps_that_vary_as_much_as_they_differ_are_noise():
    found = compare(recorded({"fc": (10, 30, 20)}), recorded({"fc": (20, 40, 30)}))
    assert found.whole.verdict == found["fc"].verdict == "within the noise"
    text = " ".join(str(found).split())
    assert text.startswith("Too noisy to tell: the step took 20 ns before, 30 ns after (+50%), and")
    assert "! The steps vary too much to compare: record more steps, on an idle machine" in text


def test_many_times_as_long_is_no_percentage():
    for factor, said in ((194, "×194"), (5, "+400%")):
        before, after = {"fc": (10, 10, 10)}, {"fc": (10 * factor,) * 3}
        found = compare(recorded(before), recorded(after))
        answer, table = str(found).split("\n", 1)
        assert said.lstrip("+") in answer
        assert said in table
        assert ("×" in said) == ("×" in answer) == ("×" in table)
        assert said in measured(found.whole)


def test_a_time_of_nearly_nothing_before_makes_no_number_of_hundreds_of_digits():
    found = compare(recorded({"fc": (10, 10, 10)}), recorded({"fc": (200, 100, 300)}))
    change = replace(found.step, before_ms=1e-290, percent=1e300, low_ms=-1e5, high_ms=1e5)
    text = str(replace(found, step=change))
    assert ">×1,000,000" in text
    texts = [
        *text.split(),
        *measured(replace(found.whole, before_ms=1e-290, percent=1e300)).split(),
    ]
    assert max(map(len, texts)) < 40


def test_steps_that_hardly_vary_say_how_small_a_difference_would_show():
    found = compare(recorded(model(1)), recorded(model(2)))
    assert re.match(r"No difference beyond the noise of ±\d\.\d%: the step took", str(found))
    assert not found.step.is_noisy


def vary(mean, spread=0.007, steps=30, seed=0):
    """Steps of a module: their mean, and their relative spread."""
    chance = random.Random(f"{mean} {spread} {seed}")
    return [max(0, round(mean * chance.gauss(1, spread))) for _ in range(steps)]


def model(seed, scale=1.0, scatter=0.0, **other):
    """Twelve modules of a millisecond, and others; ``scale`` and ``scatter`` change all of them."""
    chance = random.Random(seed)
    wall = {
        f"blocks.{at}": vary(1e6 * scale * exp(chance.gauss(0, scatter)), seed=seed + at)
        for at in range(12)
    }
    return wall | other


def differing(comparison):
    changes = (comparison.step, *comparison.phases, comparison.whole, *comparison.changes)
    return {change.title for change in changes if change.differs}


def test_a_module_of_a_millisecond_that_gets_a_fifth_slower_is_found():
    found = compare(
        recorded(model(1, fc=vary(1e6, steps=30))), recorded(model(2, fc=vary(1.2e6, steps=30)))
    )
    assert [change.path for change in found.changes if change.differs] == ["fc"]


def test_a_module_that_takes_time_now_is_found():
    idle = [0] * 30
    found = compare(recorded(model(1, fc=idle)), recorded(model(2, fc=vary(1.65e6, 0.1))))
    assert found["fc"].verdict == "longer"
    assert found.changes[0].path == "fc"


def test_a_module_that_is_new_or_gone_is_claimed_if_it_takes_time():
    small, large = [10] * 30, vary(1.65e6)
    found = compare(recorded(model(1)), recorded(model(1, fc=large, act=small)))
    assert (found["fc"].verdict, found["fc"].differs) == ("new", True)
    assert (found["act"].verdict, found["act"].differs) == ("new", False)
    back = compare(recorded(model(1, fc=large)), recorded(model(1)))
    assert (back["fc"].verdict, back["fc"].differs) == ("gone", True)
    assert "fc is gone, 1.7 ms" in str(back).replace("\n", " ")


def test_a_step_that_sleeps_is_found_in_the_step_and_its_phase():
    phases = {"forward": vary(8e6), "idle": vary(1e5, 0.2)}
    before = recorded(model(1), None, phases)
    after = recorded(model(2), None, {**phases, "idle": vary(2e8, 0.001)})
    found = compare(before, after)
    assert differing(found) == {"the step", "idle"}
    assert found.step.verdict == "longer"
    assert "idle took 200 ms longer" in str(found).replace("\n", " ")
    assert found.slower_than(5)


def test_a_busy_machine_is_no_change_of_a_module():
    found = compare(recorded(model(1)), recorded(model(2, scale=1.12, scatter=0.01)))
    assert not [change for change in found.changes if change.differs]
    assert any(
        re.match("All modules alike are about 1[123]% slower: the machine", n) for n in found.notes
    )


def test_modules_are_compared_by_gpu_time_where_both_have_it():
    busy = model(2, scale=1.4, scatter=0.2)
    gpu = model(1)
    slower = {**gpu, "blocks.3": [round(time * 1.1) for time in gpu["blocks.3"]]}
    found = compare(recorded(model(1), gpu), recorded(busy, slower))
    assert differing(found) - {"the step", "backward", "the whole backward"} == {"blocks.3"}
    change = found["blocks.3"]
    assert change.judged_by == "gpu"
    assert change.judged_percent == pytest.approx(10, abs=0.1)
    assert change.low_ms <= change.judged_ms[2] <= change.high_ms
    assert "of GPU time" in str(found)
    alone = compare(recorded(model(1), gpu), recorded(busy))
    assert {one.judged_by for one in alone.changes} == {"wall"}
    assert "Only the recording before has GPU work." in alone.notes


def test_a_module_that_the_host_holds_up_is_found_though_the_gpu_does_the_same():
    gpu = model(1)
    found = compare(recorded(model(1), gpu), recorded(model(2) | {"blocks.3": vary(5e6)}, gpu))
    assert (found["blocks.3"].verdict, found["blocks.3"].judged_by) == ("longer", "wall")


def test_reports_that_share_no_module_say_so():
    other = {f"layers.{at}.x": times for at, times in enumerate(model(1).values())}
    found = compare(recorded(model(1)), recorded(other))
    assert found.notes[0].startswith("The two reports share no module")


@given(recordings())
def test_a_recording_does_not_differ_from_itself(one):
    found = compare(one, one)
    changes = (found.step, found.whole, *found.phases, *found.changes)
    assert {change.verdict for change in changes} == {"within the noise"}
    assert not any("alike" in note for note in found.notes)


@given(recordings(), recordings())
def test_every_change_of_two_recordings_turns_around_with_the_sides(one, other):
    turned = {"longer": "shorter", "shorter": "longer", "new": "gone", "gone": "new"}
    there, back = compare(one, other), compare(other, one)

    def seen(comparison, turn):
        changes = (comparison.step, *comparison.phases, comparison.whole, *comparison.changes)
        return sorted(
            (
                change.kind,
                change.path,
                -change.change_ms if turn else change.change_ms,
                turned.get(change.verdict, change.verdict) if turn else change.verdict,
                change.differs,
                change.judged_by,
            )
            for change in changes
            if change.before_path == change.path or change.verdict in ("new", "gone")
        )

    if not there.moves:
        assert seen(there, turn=False) == seen(back, turn=True)


@pytest.mark.slow
@given(recordings(), recordings())
def test_the_parts_of_two_recordings_sum_to_the_wholes(one, other):
    found = compare(one, other)
    for column in ("before_ms", "after_ms", "change_ms", "before_gpu_ms", "after_gpu_ms"):
        if getattr(found.whole, column) is not None:
            parts = sum(getattr(change, column) for change in found.changes)
            assert parts == pytest.approx(getattr(found.whole, column), rel=1e-9, abs=1e-5)
    phases = sum(change.change_ms for change in found.phases)
    assert phases == pytest.approx(found.step.change_ms, rel=1e-9, abs=1e-5)


def all_changes(comparison):
    return (comparison.step, *comparison.phases, comparison.whole, *comparison.changes)


@given(recordings(), recordings())
def test_what_is_within_the_noise_is_never_more_than_the_noise(one, other):
    for change in all_changes(compare(one, other)):
        if change.verdict == "within the noise":
            change_ms = abs(change.judged_ms[2])
            assert change_ms <= (change.noise_ms or 0) + 1e-9


@given(recordings(), recordings(), st.floats(0, 1e4))
def test_a_limit_is_exceeded_or_unknown_or_kept(one, other, percent):
    found = compare(one, other)
    for change in all_changes(found):
        unknown = change.too_noisy_for(percent)
        assert not (change.exceeds(percent) and unknown)
        if change.noise_ms is None:
            continue
        before, _, by = change.judged_ms
        limit = before * percent / 100
        assert unknown or change.exceeds(percent) or by <= limit
        if max(by, change.noise_ms) <= limit:
            assert not unknown
    assert found.slower_than(percent) == (
        found.step.exceeds(percent) or found.whole.exceeds(percent)
    )


def test_the_answer_names_first_what_changed_most():
    quiet = {f"blocks.{at}": [1_000_000 + at] * 12 for at in range(12)}
    idle = {"idle": [1_000_000] * 12}
    slow = {**quiet, "blocks.3": [9_000_000] * 12}
    both = compare(recorded(quiet, None, idle), recorded(slow, None, {"idle": [4_000_000] * 12}))
    text = " ".join(str(both).split())
    assert "; blocks.3 took 8.0 ms longer; idle took 3.0 ms longer. Recorded times" in text


def test_more_calls_of_most_modules_are_not_what_all_modules_have_in_common():
    def called(made, times):
        rows = (replace(row, calls=times if "blocks" in row.path else 1) for row in made.modules)
        return replace(made, modules=tuple(rows))

    few = {"inp": vary(1e6), "norm": vary(1.1e6), "head": vary(1.2e6)}
    found = compare(
        called(recorded({**model(1), **few}), 1), called(recorded({**model(2, scale=4), **few}), 4)
    )
    assert found.whole.verdict == "longer"
    assert found["blocks.3"].verdict == "longer"
    assert not any("alike" in note for note in found.notes)
    assert any("11 more modules with other calls" in note for note in found.notes)


def test_modules_that_are_called_more_often_or_are_new_are_told():
    def called(made, times):
        rows = (replace(row, calls=times if row.path == "fc" else 1) for row in made.modules)
        return replace(made, modules=tuple(rows))

    before = called(recorded(model(1, fc=vary(1e6))), 1)
    found = compare(before, called(recorded(model(2, fc=vary(7e6), extra=vary(1e6))), 7))
    assert (
        "The work differs: fc (Linear) is called 7 times per step, 1 before; 1 module is new."
        in found.notes
    )
    assert not any("work differs" in note for note in compare(before, before).notes)


@given(reports())
def test_a_report_does_not_differ_from_itself(one):
    found = compare(one, one)
    assert found.whole.verdict == "within the noise"
    assert {change.verdict for change in found.changes} <= {"within the noise"}
    assert all(change.change_ms == 0 for change in found.changes)
    assert found.moves == ()


@given(reports(), reports())
def test_the_changes_turn_around_with_the_sides(one, other):
    turned = {"longer": "shorter", "shorter": "longer", "new": "gone", "gone": "new"}
    there, back = compare(one, other), compare(other, one)

    def seen(comparison, by_name=False):
        return sorted(
            (
                -c.change_ms if by_name else c.change_ms,
                turned.get(c.verdict, c.verdict) if by_name else c.verdict,
            )
            for c in (comparison.whole, *comparison.changes)
        )

    assert seen(there) == seen(back, by_name=True)


@given(reports(), reports())
def test_the_parts_sum_to_the_whole(one, other):
    for found in (compare(one, other), compare(other, other)):
        for column in ("before_ms", "after_ms", "change_ms"):
            parts = sum(getattr(change, column) for change in found.changes)
            assert parts == pytest.approx(getattr(found.whole, column), rel=1e-9, abs=1e-5)
        assert found.whole.change_ms == found.whole.after_ms - found.whole.before_ms


def test_rows_that_a_report_was_saved_without_are_a_part_of_their_own():
    some = replace(vit(), modules=vit().top(3))
    found = compare(some, vit())
    assert found["(rows left out)"].kind == "unowned"
    assert parts_of(found) == pytest.approx(found.whole.change_ms, abs=1e-9)
    assert found.whole.change_ms == pytest.approx(0)


def test_a_module_that_bears_the_name_of_what_no_module_owns_takes_nothing_from_it():
    unowned = next(row for row in vit().modules if not row.is_module and row.wall_ns)
    renamed = with_a_module(unowned.path, "")
    for found in (compare(renamed, vit()), compare(vit(), renamed)):
        assert parts_of(found) == pytest.approx(found.whole.change_ms, abs=1e-9)
        assert all(change.path != "(rows left out)" for change in found.changes)


@pytest.mark.parametrize("odd", [("(rows left out)", ""), ("blocks.0.norm1", "norm1")], ids=str)
def test_the_parts_sum_to_the_whole_whatever_a_module_is_called(odd):
    for found in (compare(with_a_module(*odd), vit()), compare(vit(), with_a_module(*odd))):
        assert parts_of(found) == pytest.approx(found.whole.change_ms, abs=1e-9)


def with_a_module(path, class_name):
    """A report whose slow module is called so."""
    renamed = {"path": path, "root": path.partition(".")[0], "class_name": class_name}
    rows = [replace(row, **renamed) if row.path == "patch_drop" else row for row in vit().modules]
    return replace(vit(), modules=tuple(rows))


def parts_of(found):
    return sum(change.change_ms for change in found.changes)


def test_what_is_no_report_is_refused():
    with pytest.raises(UsageError, match=r"two reports, or two lists of them, not int: .*Report"):
        compare(3, vit())


def test_steps_of_another_kind_are_told():
    notes = compare(vit(), replace(vit(), step_unit="backward pass")).notes
    assert any("The steps differ in kind" in note for note in notes)
    warned = compare(replace(vit(), warnings=("only warm-up",)), vit()).notes
    assert "Before: only warm-up" in warned


def test_a_warning_of_both_recordings_is_told_once():
    cut, short = (replace(vit(), warnings=told) for told in (("cut", "old"), ("new", "cut")))
    notes = compare(cut, short).notes
    assert [note for note in notes if ": " in note][:3] == [
        "Both: cut",
        "Before: old",
        "After: new",
    ]


# Several recordings a side.


def runs(seed, number=3, loads=(1.0, 1.01, 0.995, 1.005, 0.99), **other):
    """Recordings of the same code: what each takes differs by its load."""
    return [
        recorded(
            model(seed + run, scale=loads[run]),
            None,
            {"forward": vary(8e6 * loads[run], seed=seed + run), **other},
        )
        for run in range(number)
    ]


def test_one_recording_a_side_says_nothing_of_the_code():
    found = compare(recorded(model(1, fc=vary(1e6))), recorded(model(2, fc=vary(9e6))))
    assert found.about == "recordings"
    assert found.step.verdict == found["fc"].verdict == "longer"
    assert not any(change.claimed for change in all_changes(found))
    text = " ".join(str(found).split())
    assert re.match(r"These two recordings differ by \+[\d.]+% ± \d", text)
    assert text.endswith("run backspot diff before*.json -- after*.json.")


def test_the_answer_and_the_table_say_the_same_of_what_takes_many_times_as_long():
    before = [recorded({"fc": vary(1e6, seed=seed)}) for seed in (1, 2, 3)]
    after = [recorded({"fc": vary(5e7, seed=seed)}) for seed in (4, 5, 6)]
    answer, table = str(compare(before, after)).split("\n", 1)
    said = re.match(r"The step got slower, (×\d+) as long: 1\.\d ms before", answer)
    assert said
    assert said[1] in table
    assert "%" not in answer


def test_three_recordings_a_side_tell_that_the_code_is_slower():
    before = [recorded(model(seed, fc=vary(1e6, seed=seed))) for seed in (1, 2, 3)]
    after = [recorded(model(seed, fc=vary(3e6, seed=seed))) for seed in (4, 5, 6)]
    found = compare(before, after)
    assert found.about == "code"
    assert [change.path for change in found.changes if change.claimed] == ["fc"]
    assert found.step.verdict == found.whole.verdict == "slower"
    assert found.step.low_ms <= found.step.change_ms <= found.step.high_ms
    assert found["fc"].before_ms == pytest.approx(fmean(found["fc"].before_ms_by_recording))
    assert len(found["fc"].after_ms_by_recording) == 3
    assert len(found["fc"].after_ns_by_step) == 90
    assert (found.before.recordings, found.before.steps) == (3, 90)
    text = " ".join(str(found).split())
    assert re.match(r"The step got slower by [\d.]+% ± \d", text)
    assert "3 recordings, 90 steps" in text
    assert "one recording on each side cannot tell" not in text


def test_a_load_that_makes_recordings_of_the_same_code_differ_is_no_change_of_it():
    quiet, busy = runs(1), runs(20, loads=(1.0, 1.3, 0.9))
    found = compare(quiet, busy)
    assert not any(change.claimed for change in all_changes(found))
    assert compare(quiet[0], busy[1]).step.verdict == "longer"


def test_a_module_is_found_though_the_machine_changes_more_than_the_module():
    loads = (1.0, 1.4, 0.8, 1.2, 0.9, 1.5)
    before = [recorded(model(seed, scale=load)) for seed, load in enumerate(loads[:3])]
    after = []
    for seed, load in enumerate(loads[3:], 9):
        made = model(seed, scale=load)
        after.append(recorded(made | {"blocks.3": [2 * time for time in made["blocks.3"]]}))
    found = compare(before, after)
    assert [change.path for change in found.changes if change.claimed] == ["blocks.3"]
    assert found.step.verdict == "within the noise"


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_fewer_than_three_on_a_side_say_so(before, after):
    found = compare(runs(1, before), runs(9, after))
    assert found.about == "recordings"
    assert "3 recordings or more on each side tell what is the code." in found.notes


def numbered(some, **fields):
    """Recordings as of several runs, even if their times are equal."""
    return [
        replace(one, recorded={**one.recorded, "run": str(run)}, **fields)
        for run, one in enumerate(some)
    ]


@given(st.lists(recordings(), min_size=1, max_size=4))
def test_a_set_of_recordings_does_not_differ_from_itself(some):
    if len({one.has_gpu for one in some}) > 1:
        some = [replace(one, has_gpu=False) for one in some]
    some = numbered(some)
    found = compare(some, some)
    verdicts = {change.verdict for change in all_changes(found)}
    assert verdicts <= {"within the noise"}


@given(*[st.lists(recordings(), min_size=3, max_size=4)] * 2)
def test_swapping_sets_turns_every_change_around(some, others):
    some, others = (numbered(side, has_gpu=False) for side in (some, others))
    turned = {"slower": "faster", "faster": "slower", "new": "gone", "gone": "new"}
    there, back = compare(some, others), compare(others, some)
    if there.moves:
        return
    verdicts = {
        (one.kind, one.path): turned.get(one.verdict, one.verdict) for one in all_changes(back)
    }
    for change in all_changes(there):
        assert verdicts[change.kind, change.path] == change.verdict


@given(st.integers(1, 50))
def test_times_of_a_slower_machine_scale_the_difference(factor):
    def scaled(seed, fc):
        made = model(seed, fc=vary(fc, seed=seed))
        return recorded({path: [factor * ns for ns in times] for path, times in made.items()})

    def sides(make):
        return [make(seed, 1e6) for seed in (1, 2, 3)], [make(seed, 2e6) for seed in (4, 5, 6)]

    plain = compare(*sides(lambda seed, fc: recorded(model(seed, fc=vary(fc, seed=seed)))))
    found = compare(*sides(scaled))
    for name in ("change_ms", "low_ms", "high_ms"):
        expected = factor * getattr(plain.whole, name)
        assert getattr(found.whole, name) == pytest.approx(expected, rel=1e-3)
    assert [one.verdict for one in found.changes] == [one.verdict for one in plain.changes]


def test_reports_can_be_given_by_their_paths(tmp_path):
    paths = [str(one.save(tmp_path / f"{at}.json")) for at, one in enumerate(runs(1, 4))]
    assert compare(paths[:2], paths[2:]).before.recordings == 2
    assert compare(paths[0], Path(paths[1])).before.recordings == 1


def test_sides_that_cannot_be_compared_are_refused_in_one_line():
    plain, busy = recorded(model(1)), recorded(model(1), model(1))
    with pytest.raises(UsageError, match="before is empty: give a report"):
        compare([], plain)
    with pytest.raises(UsageError, match=r"after has one recording twice, .* as number 3: "):
        compare([plain], [plain, recorded(model(2)), replace(plain, trace="a copy of it")])
    with pytest.raises(
        UsageError, match=r"of a CPU and .* of a GPU: several recordings a side must"
    ):
        compare([plain, busy], [plain])
    slower_gpu = replace(busy, recorded={"device": "NVIDIA A100"})
    faster_gpu = replace(busy, recorded={"device": "NVIDIA H200"})
    with pytest.raises(UsageError, match=r"NVIDIA A100 and .* NVIDIA H200"):
        compare([slower_gpu, *numbered([slower_gpu])], [faster_gpu])


def test_sides_that_were_not_recorded_in_turns_are_warned_of():
    def at(minute):
        return [
            replace(one, recorded={"time": f"2026-11-27 09:{minute + run:02} UTC"})
            for run, one in enumerate(runs(minute))
        ]

    one_by_one, turns = compare(at(0), at(30)), compare(at(0)[:2] + at(30)[:1], at(10))
    assert any("record in turns" in note for note in one_by_one.notes)
    assert not any("record in turns" in note for note in turns.notes)


def test_real_times_are_compared_where_all_recordings_have_them():
    plain = recorded(model(1), None, {"idle": vary(1e6)})
    real = in_half_the_time(plain)
    thrice = numbered([real] * 3)
    found = compare(thrice, thrice)
    assert found.clock == "real"
    assert found.step.before_ms == pytest.approx(plain.step_ns / 2e6, rel=1e-3)
    mixed = compare([real, plain], [real])
    assert mixed.clock == "recorded"
    assert mixed.step.change_ms == pytest.approx(0, abs=1e-3)
    assert any(note.startswith("Some recordings have no times without") for note in mixed.notes)
    assert "recorded times in ms per step" in str(mixed).casefold()


def test_the_noise_of_a_real_step_is_that_of_the_real_steps():
    real = in_half_the_time(recorded(model(1), None, {"idle": vary(1e6)}))
    unsteady = replace(real, unprofiled_step_ns_by_step=(5_000_000, 9_000_000) * 10)
    assert compare(unsteady, unsteady).step.noise_ms > 3 * compare(real, real).step.noise_ms


# How it reads.


def test_the_text_reads_as_it_did(golden):
    after = vit_rows(drop=1_500_000)
    after = renamed(after, "blocks.11", "tail")
    after.append(linear("extra", 700_000))
    golden(
        "comparison.80.txt",
        render_comparison(compare(vit(), report(after)), View(top=6), width=80) + "\n",
    )
    sets = [
        [recorded(model(seed, fc=vary(1e6 * by, seed=seed))) for seed in (1, 2, 3)] for by in (1, 3)
    ]
    several = compare(*sets, names=("main", "branch"))
    golden("comparison.several.80.txt", render_comparison(several, View(top=4), width=80) + "\n")
    golden("comparison.several.md", comparison_to_markdown(several, View(top=4)).decode())
    golden(
        "comparison.same.txt",
        render_comparison(compare(vit(), vit()), View(top=2), width=80) + "\n",
    )
    nodes = compare(unlabelled(), unlabelled())
    golden("comparison.nodes.txt", render_comparison(nodes, width=80) + "\n")
    golden("comparison.nodes.md", comparison_to_markdown(nodes).decode())
    golden(
        "comparison.md", comparison_to_markdown(compare(vit(), report(after)), View(top=6)).decode()
    )


def test_a_change_that_is_too_small_to_show_has_no_sign():
    text = render_comparison(compare(vit(), vit(drop=15_690_300)), width=120)
    assert not re.search(r"[+−]0(\.0*)?(%|\s|$)", text)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_asked_and_no_name_steers_the_terminal(width):
    text = render_comparison(compare(odd(), vit()), width=width)
    assert all(len(line) <= width for line in text.splitlines() if "漢" not in line)
    assert "\x1b" not in text


def test_what_to_mistrust_stands_before_the_numbers_that_of_the_recordings_first():
    cut = replace(vit(), warnings=("The trace is cut short.",))
    lines = render_comparison(compare(vit(), cut), width=120).splitlines()
    first = lines.index("! After: The trace is cut short.")
    assert lines[first + 1].startswith("! Two or three steps")
    assert lines[first + 3].split()[:3] == ["module", "class", "time"]


def test_json_and_csv_hold_the_same(tmp_path):
    found = compare(vit(drop=1_500_000), vit())
    data = json.loads(found.save(tmp_path / "c.json").read_bytes())
    assert data["schema"] == "backspot.comparison/3"
    assert data["whole"]["verdict"] == "longer"
    assert data["changes"][0]["path"] == "patch_drop"
    lines = list(csv.DictReader(io.StringIO(found.save(tmp_path / "c.csv").read_text())))
    assert [line["kind"] for line in lines[:3]] == ["step", "whole", "module"]
    assert float(lines[2]["change_ms"]) == pytest.approx(data["changes"][0]["change_ms"], abs=1e-6)
    assert len(lines) == 2 + len(data["changes"])
    assert found.save(tmp_path / "c.txt").read_text().startswith("These two recordings differ by +")


def test_odd_names_are_harmless_in_every_form():
    found = compare(odd(), vit(), names=("<b>@all", "x|y`"))
    text = comparison_to_markdown(found).decode()
    assert not re.search(r"[<@\x1b]|&(?!#\d+;)", text)
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in table}) == 1
    assert b"\x1b" not in comparison_to_json(found) + comparison_to_csv(found)
    assert "'=cmd|' /C calc'!A0" in {
        r[1] for r in csv.reader(io.StringIO(comparison_to_csv(found).decode()))
    }


@pytest.mark.slow
@given(reports(), reports())
def test_any_two_reports_make_markdown_without_markup_of_theirs(one, other):
    text = comparison_to_markdown(compare(one, other)).decode()
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert not re.search(r"<|&(?!#\d+;)", text)


def test_the_page_shows_each_recording_and_every_change(tmp_path):
    before = [recorded(model(seed, fc=vary(1e6, seed=seed))) for seed in (1, 2, 3)]
    after = [recorded(model(seed, fc=vary(3e6, seed=seed))) for seed in (4, 5, 6)]
    page = compare(before, after).save(tmp_path / "c.html").read_text()
    assert "<h1>The step got slower by" in page
    assert page.count('<circle class="before"') == page.count('<circle class="after"') >= 9
    assert '<tr class="slower"><th scope="row"><code>fc</code></th>' in page
    alone = compare(before[0], after[0]).save(tmp_path / "alone.html").read_text()
    assert "<circle" not in alone
    assert '<tr class="slower"><th scope="row"><code>fc</code></th>' in alone
    sides = [numbered([one] * 2) for one in (odd(), vit())]
    odd_page = compare(*sides, names=("<b>@all", "x")).save(tmp_path / "o.html")
    assert "<b>@all" not in odd_page.read_text()


def test_two_reports_can_be_given_names():
    found = compare(vit(), vit(drop=9_000), names=("main", "branch"))
    text = render_comparison(found, width=120)
    assert "before: main (trace.json.gz), 3 steps · after: branch (trace.json.gz), 3 steps" in text
    assert "`main (trace.json.gz)`" in comparison_to_markdown(found).decode()
    assert "main (trace.json.gz)" in found._repr_html_()
    assert json.loads(comparison_to_json(found))["before"]["name"] == "main"
    plain = compare(vit(), vit())
    assert "before: trace.json.gz, 3 steps" in render_comparison(plain, width=120)
    for names in (("one",), "ab", (1, 2), ("a", "b", "c")):
        with pytest.raises(UsageError, match="what to call before and after"):
            compare(vit(), vit(), names=names)


def test_saving_overwrites_only_by_force_and_knows_its_forms(tmp_path):
    found = compare(vit(), vit())
    (tmp_path / "c.json").write_text("precious")
    with pytest.raises(OutputExistsError):
        found.save(tmp_path / "c.json")
    found.save(tmp_path / "c.json", force=True)
    with pytest.raises(
        UsageError, match=r"c\.png.*use one of \.csv, \.html, \.json, \.md or \.txt"
    ):
        found.save(tmp_path / "c.png")


def test_every_field_is_in_the_reference():
    page = (DOCS / "api.md").read_text("utf-8")
    for kind in (Comparison, Change, Move, Side):
        section = page.partition(f"### {kind.__name__}\n")[2].partition("\n###")[0]
        for field in kind.__dataclass_fields__:
            assert re.search(rf"\b{field}\b", section), f"{kind.__name__}.{field}"


# Real traces.


def test_a_trace_against_itself_claims_nothing():
    one = locate(DATA / "h200" / "vit_patch_drop.trace.json.gz")
    found = compare(one, one)
    assert found.by == "module"
    assert {change.verdict for change in (found.whole, *found.changes)} == {"within the noise"}


@pytest.mark.slow
def test_traces_without_labels_are_compared_by_node():
    found = compare(
        locate(DATA / "foreign" / "hta_recommender_control.json.gz"),
        locate(DATA / "foreign" / "hta_recommender_test.json.gz"),
    )
    assert found.by == "node"
    assert found.whole.verdict == "longer"
    assert found.whole.percent == pytest.approx(64.7, abs=0.1)
    assert found["CompiledFunctionBackward"].verdict == "new"
    assert found["AddmmBackward0"].verdict == "undecided"
    assert not any(change.differs for change in found.changes)
    assert sum(c.change_ms for c in found.changes) == pytest.approx(found.whole.change_ms)
    assert "autograd nodes are compared by name" in str(found).replace("\n", " ")


def test_groups_of_one_pattern_and_several_classes_are_compared_each_with_its_like(tmp_path):
    rows = [
        row("f.0", "Conv2d", wall=9_000_000),
        row("f.1", "ReLU", wall=3_000_000),
        row("f.2", "Conv2d", wall=7_000_000),
        row("f.3", "ReLU", wall=2_000_000),
    ]
    slower = [*rows[:3], row("f.3", "ReLU", wall=32_000_000)]
    grouped = [
        replace(one, modules=one.top(by="pattern")) for one in (report(rows), report(slower))
    ]
    saved = [
        backspot.Report.load(one.save(tmp_path / f"{index}.json"))
        for index, one in enumerate(grouped)
    ]
    found = compare(*saved)
    assert {(c.path, c.class_name, c.change_ms) for c in found.changes} == {
        ("f.*", "ReLU", 10.0),
        ("f.*", "Conv2d", 0.0),
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_clear_change_is_claimed_beside_tiny_modules_that_vary_widely(seed):
    draw = random.Random(seed)

    def steps(mean, spread):
        return [int(draw.gauss(mean, spread * mean)) for _ in range(10)]

    def side(slow):
        tiny = {f"tiny.{number}": steps(20_000, 0.25) for number in range(20)}
        return recorded({"slow": steps(slow, 0.007), "rest": steps(600_000, 0.007), **tiny})

    found = compare(side(1_000_000), side(1_200_000))
    assert [change.path for change in found.changes if change.differs] == ["slow"]
    assert not any(change.differs for change in compare(side(10**6), side(10**6)).changes)


def in_half_the_time(report):
    """The report as one of steps that take half as long while nothing is recorded."""

    def half(cost, *times):
        changes = {time: getattr(cost, time) // 2 for time in times}
        for time in times:
            by_step = f"{time}_by_step"
            changes[by_step] = tuple(ns // 2 for ns in getattr(cost, by_step))
        return replace(cost, **changes)

    return replace(
        half(report, "step_ns", "wall_ns"),
        clock="real",
        modules=tuple(half(row, "wall_ns") for row in report.modules),
        phases=tuple(half(phase, "wall_ns") for phase in report.phases),
    )


def test_a_report_with_real_times_is_compared_with_a_trace_by_the_recorded_ones():
    trace = locate(DATA / "h200" / "launch_bound.trace.json.gz")
    real = in_half_the_time(trace)
    note = "Only the report {} has times without the profiler"
    for before, after, side in ((real, trace, "before"), (trace, real, "after")):
        found = compare(before, after)
        assert any(one.startswith(note.format(side)) for one in found.notes)
        for change in (found.step, found.whole, *found.phases, *found.changes):
            assert not change.differs
            assert change.before_ms == pytest.approx(change.after_ms, rel=1e-3)
    for one in (trace, real):
        assert not any("without the profiler" in note for note in compare(one, one).notes)
    assert compare(real, real).step.before_ms == pytest.approx(trace.step_ns / 2e6, rel=1e-3)
