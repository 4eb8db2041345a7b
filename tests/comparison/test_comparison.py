"""Two reports side by side."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

import backspot
from backspot import compare, locate
from backspot.comparison.changes import Change, Comparison, Move, Side
from backspot.errors import OutputExistsError, UsageError
from backspot.render.json import comparison_to_json
from backspot.render.markdown import comparison_to_markdown
from backspot.render.tables import comparison_to_csv
from backspot.render.text import render_comparison
from backspot.render.view import View
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
    assert found.whole.verdict == "slower"
    assert found.changes[0].path == "patch_drop"
    change = found["patch_drop"]
    assert change.verdict == "slower"
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
    def made(*steps):
        wall = sum(steps)
        noisy = replace(row("fc", wall=wall), wall_ns_by_step=steps)
        return report([noisy])

    found = compare(made(10, 30, 20), made(20, 40, 30))
    assert found.whole.verdict == found["fc"].verdict == "within the noise"
    assert "No difference beyond the noise" in str(found)


def test_tiny_modules_that_vary_do_not_hide_a_clear_change():
    steady = (1_003_000, 995_000, 1_001_000, 1_004_000, 991_000) * 2
    small = tuple(20_000 + (index * 7_919) % 9_000 for index in range(10))

    def made(factor):
        rows = [("fc", tuple(factor * time // 10 for time in steady))]
        rows += [
            (f"small.{index}", (*small[index % 10 :], *small[: index % 10])) for index in range(20)
        ]
        return report(
            [
                replace(row(path, wall=sum(times), steps=10), wall_ns_by_step=times)
                for path, times in rows
            ],
            step_ns=(9,) * 10,
        )

    found = compare(made(10), made(12))
    assert [change.path for change in found.changes if change.claimed] == ["fc"]
    assert found["fc"].verdict == "slower"


@given(reports())
def test_a_report_does_not_differ_from_itself(one):
    found = compare(one, one)
    assert found.whole.verdict == "within the noise"
    assert {change.verdict for change in found.changes} <= {"within the noise"}
    assert all(change.change_ms == 0 for change in found.changes)
    assert found.moves == ()


@given(reports(), reports())
def test_the_changes_turn_around_with_the_sides(one, other):
    turned = {"slower": "faster", "faster": "slower", "new": "gone", "gone": "new"}
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
    assert sum(c.change_ms for c in found.changes) == pytest.approx(found.whole.change_ms, abs=1e-9)
    assert found.whole.change_ms == pytest.approx(0)


def test_what_is_no_report_is_refused():
    with pytest.raises(UsageError, match=r"two reports, not str: .*Report\.load"):
        compare("trace.json", vit())


def test_where_everything_changed_alike_the_load_is_suspected():
    rows = [linear(f"fc{number}", 1_000_000 + number) for number in range(9)]
    slower = [linear(f"fc{number}", 1_300_000 + number) for number in range(9)]
    told = "Most modules changed alike, half of them by +30% or more"
    assert any(told in note for note in compare(report(rows), report(slower)).notes)
    one = [linear("fc0", 9_000_000), *rows[1:]]
    assert not any("alike" in note for note in compare(report(rows), report(one)).notes)


def test_steps_of_another_kind_are_told():
    notes = compare(vit(), replace(vit(), step_unit="backward pass")).notes
    assert any("The steps differ in kind" in note for note in notes)
    warned = compare(replace(vit(), warnings=("only warm-up",)), vit()).notes
    assert "Before: only warm-up" in warned


# How it reads.


def test_the_text_reads_as_it_did(golden):
    after = vit_rows(drop=1_500_000)
    after = renamed(after, "blocks.11", "tail")
    after.append(linear("extra", 700_000))
    golden(
        "comparison.80.txt",
        render_comparison(compare(vit(), report(after)), View(top=6), width=80) + "\n",
    )
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
    assert lines[first + 3].split()[:3] == ["module", "class", "before"]


def test_json_and_csv_hold_the_same(tmp_path):
    found = compare(vit(drop=1_500_000), vit())
    data = json.loads(found.save(tmp_path / "c.json").read_bytes())
    assert data["schema"] == "backspot.comparison/1"
    assert data["whole"]["verdict"] == "slower"
    assert data["changes"][0]["path"] == "patch_drop"
    lines = list(csv.DictReader(io.StringIO(found.save(tmp_path / "c.csv").read_text())))
    assert [line["kind"] for line in lines[:2]] == ["whole", "module"]
    assert float(lines[1]["change_ms"]) == pytest.approx(data["changes"][0]["change_ms"], abs=1e-6)
    assert len(lines) == 1 + len(data["changes"])
    assert found.save(tmp_path / "c.txt").read_text().startswith("The backward got slower by")


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


@given(reports(), reports())
def test_any_two_reports_make_markdown_without_markup_of_theirs(one, other):
    text = comparison_to_markdown(compare(one, other)).decode()
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in table}) == 1
    assert not re.search(r"<|&(?!#\d+;)", text)


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
    with pytest.raises(UsageError, match=r"c\.png.*use one of \.csv, \.json, \.md or \.txt"):
        found.save(tmp_path / "c.png")


def test_every_field_is_on_the_page():
    page = (DOCS / "json.md").read_text("utf-8").partition("JSON form of a comparison")[2]
    for kind in (Comparison, Change, Move, Side):
        for field in kind.__dataclass_fields__:
            assert f"`{field}`" in page, f"{kind.__name__}.{field}"


# Real traces.


def test_a_trace_against_itself_claims_nothing():
    one = locate(DATA / "h200" / "vit_patch_drop.trace.json.gz")
    found = compare(one, one)
    assert found.by == "module"
    assert {change.verdict for change in (found.whole, *found.changes)} == {"within the noise"}


def test_traces_without_labels_are_compared_by_node():
    found = compare(
        locate(DATA / "foreign" / "hta_recommender_control.json.gz"),
        locate(DATA / "foreign" / "hta_recommender_test.json.gz"),
    )
    assert found.by == "node"
    assert found.whole.verdict == "slower"
    assert found.whole.percent == pytest.approx(64.7, abs=0.1)
    assert found["CompiledFunctionBackward"].verdict == "new"
    assert found["AddmmBackward0"].verdict == "undecided"
    assert not any(change.claimed for change in found.changes)
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
