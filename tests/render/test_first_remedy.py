"""What to do first: the remedy that every output says beside what costs most."""

import json
import re
from dataclasses import replace
from html import unescape

import pytest

from backspot.render.html import to_html
from backspot.render.json import to_json
from backspot.render.markdown import to_markdown
from backspot.render.notebook import report_html
from backspot.render.text import render_text
from backspot.results.findings import Place, ReplayedStep, Saving
from backspot.results.plan import Plan, Rung
from backspot.results.trials import Tried, Variant
from support.report_parts import phases, report, row
from support.sample_reports import diagnosed

STEP = 100_000_000


def cause(rule, saves_ms, *places, at_best=False, tier="stable", remedy="Do it otherwise. Or not."):
    """A finding in these places, without which a step would take so much less."""
    ns = int(saves_ms * 1e6)
    where = tuple(Place(place, "Linear", 1, ns // len(places)) for place in places)
    priced = Saving(ns, ns // 2, 2 * ns, at_best=at_best)
    made = replace(diagnosed().findings[0], rule=rule, title=f"Of {rule}", wall_ns=ns, tier=tier)
    return replace(made, places=where, saves=priced, remedy=remedy)


def step_of(*causes, plan=None):
    """A step of 100 ms, in which ``fc`` takes most."""
    times = {"forward": [STEP * 6 // 10] * 3, "backward": [STEP * 4 // 10] * 3}
    rows = [row("fc", wall=3 * STEP * 3 // 10), row("conv", wall=3 * STEP // 10)]
    made = report(rows, phases=phases(times), findings=causes)
    return replace(made, replayed_step=ReplayedStep(STEP, STEP, STEP, True), plan=plan)


def tried(finding, saves_ms, name="another way", *, changes=False, first="another way"):
    ns = int(saves_ms * 1e6)
    ways = {first: Variant(first, 5, verdict="does not help")} if first != name else {}
    ways[name] = Variant(name, ns, ns, ns, ns, ns, ns, "helps", "", changes)
    now = Variant("as it is", 2 * ns)
    return replace(finding, tried=Tried("copies", (now, *ways.values()), 15))


def plan_of(*rungs, **fields):
    ladder = [
        Rung(name, "precision", before_ns=before, step_ns=after, verdict="helps", kept=True)
        for name, before, after in rungs
    ]
    return Plan("a copy", STEP, tuple(ladder), **fields)


def rules_of(*causes):
    """The rules whose remedies come first, for these findings in any order."""
    orders = (causes, causes[::-1])
    return [remedy.rule if (remedy := step_of(*order).answer.remedy) else None for order in orders]


def test_the_remedy_that_saves_most_comes_first_and_the_place_stays_what_costs_most():
    made = step_of(cause("large", 20, "conv"), cause("small", 4, "fc"))
    assert made.answer.path == "fc"
    remedy = made.answer.remedy
    assert (remedy.rule, remedy.saves.ns, remedy.share) == ("large", 20_000_000, 0.2)
    assert (remedy.measured, remedy.changes_training) == (False, False)


def test_of_remedies_that_save_about_as_much_the_same_one_comes_first_whatever_the_order():
    assert rules_of(cause("a", 10, "conv"), cause("b", 11, "conv")) == ["a", "a"]
    assert rules_of(cause("a", 11, "conv"), cause("b", 10, "conv")) == ["a", "a"]
    about = cause("b", 10, "fc")
    assert rules_of(cause("a", 11, "conv"), about) == ["b", "b"]
    assert rules_of(cause("a", 20, "conv"), about) == ["a", "a"]


def test_what_was_measured_counts_more_than_what_is_predicted():
    predicted = cause("predicted", 15, "conv")
    measured = tried(cause("measured", 10, "conv"), 12)
    assert rules_of(predicted, measured) == ["measured"] * 2
    assert step_of(predicted, measured).answer.remedy.measured


def test_no_remedy_comes_first_that_saves_less_than_a_fiftieth_or_has_no_price():
    assert rules_of(cause("little", 1.9, "fc")) == [None, None]
    unpriced = replace(cause("unpriced", 30, "fc"), saves=None)
    assert rules_of(unpriced) == [None, None]
    everywhere = cause("bound", 7, "fc", "conv", at_best=True)
    assert rules_of(everywhere) == [None, None]
    text = render_text(step_of(cause("little", 1.9, "fc")), width=80)
    assert "First:" not in text


def test_a_remedy_that_does_not_help_here_or_is_of_a_preview_rule_is_none():
    now, other = Variant("as it is", 4_000_000), Variant("other", verdict="does not help")
    refuted = replace(cause("refuted", 30, "fc"), tried=Tried("it", (now, other), 15))
    assert rules_of(refuted, cause("new", 30, "fc", tier="preview")) == [None, None]


def test_what_trains_something_else_comes_after_what_does_not_and_says_so():
    changing = tried(cause("dropout", 10, "fc"), 30, "dropout_p=0", changes=True)
    assert rules_of(changing, cause("other", 5, "conv")) == ["other"] * 2
    made = step_of(changing)
    assert made.answer.remedy.changes_training
    for said in (render_text(made, width=200), to_html(made).decode(), to_markdown(made).decode()):
        assert "but it changes what is trained" in said
        assert "✓" not in said
    assert "≠ Tried here, changes what is trained" in render_text(made, width=200)
    assert json.loads(to_json(made))["findings"][0]["tried"]["variants"][-1]["changes_training"]


def test_a_remedy_that_trains_something_else_says_so_before_it_was_tried():
    changing = replace(cause("batch", 30, "fc"), changes_training=True)
    assert rules_of(changing, cause("other", 5, "conv")) == ["other"] * 2
    made = step_of(changing)
    for said in (render_text(made, width=200), to_html(made).decode(), to_markdown(made).decode()):
        assert "(predicted, but it changes what is trained)" in said
        assert "Do it otherwise. Or not. This changes what is trained." in said
    assert json.loads(to_json(made))["findings"][0]["changes_training"]
    assert (
        "changes_training" not in json.loads(to_json(step_of(cause("a", 5, "fc"))))["findings"][0]
    )


def test_the_way_that_helps_is_named_where_it_is_not_the_first_one():
    helps = tried(cause("loss", 10, "fc"), 10, "labels alone", first="compiled")
    assert step_of(helps).answer.remedy.what == "labels alone"
    assert step_of(tried(cause("loss", 10, "fc"), 10)).answer.remedy.what == "Do it otherwise"


def test_a_setting_of_the_plan_comes_first_where_it_saves_more():
    plan = plan_of(("bf16", STEP, 70_000_000), ("channels_last", 70_000_000, 60_000_000))
    remedy = step_of(cause("small", 10, "fc"), plan=plan).answer.remedy
    assert (remedy.what, remedy.saves.ns, remedy.rule, remedy.measured) == (
        *("bf16", 30_000_000),
        *("", True),
    )
    assert step_of(cause("large", 70, "fc"), plan=plan).answer.remedy.rule == "large"


def test_a_setting_saves_no_more_than_the_loader_allows():
    plan = plan_of(("bf16", STEP, 40_000_000), loader_ns=99_000_000)
    assert step_of(plan=plan).answer.remedy is None
    free = plan_of(("bf16", STEP, 40_000_000), loader_ns=90_000_000)
    assert step_of(plan=free).answer.remedy.saves.ns == 10_000_000


@pytest.mark.parametrize(
    ("remedy", "first"),
    [
        ("Use a.b (as c, e.g. d) for it. Or not.", "Use a.b (as c, e.g. d) for it"),
        ("Set x = 0.5, y=…. Then z.", "Set x = 0.5, y=…"),
        ("Use DataLoader(num_workers=…, …).", "Use DataLoader(num_workers=…, …)"),
        ("Compile it (all): one kernel is faster. Or not.", "Compile it (all)"),
        ("Pass {'a': 1} and torch.a::b. Or not.", "Pass {'a': 1} and torch.a::b"),
    ],
)
def test_a_remedy_is_said_in_few_words(remedy, first):
    assert step_of(cause("any", 10, "fc", remedy=remedy)).answer.remedy.what == first


def test_every_output_says_the_same():
    made = step_of(cause("other", 20, "conv", remedy="Use <another> layer. Or none."))
    said = "First: Use <another> layer: 20.0 ms less, 20% of the step (predicted)."
    text = render_text(made, width=80)
    assert f"→ {said}" in text
    pages = [to_html(made).decode(), report_html(made), to_markdown(made).decode()]
    for page in pages:
        plain = re.sub(r"</?(b|p|code|span)[^>]*>|\*\*|\\", "", page)
        assert said in unescape(plain)
    assert json.loads(to_json(made))["answer"]["remedy"]["rule"] == "other"


def test_a_long_remedy_is_broken_into_lines_and_none_of_it_is_cut():
    ways = [f"Way number {number} is another one to write it." for number in range(9)]
    made = step_of(cause("ways", 20, "conv", remedy=" ".join(ways)))
    screen = render_text(made, width=80)
    assert max(map(len, screen.splitlines())) <= 80
    joined = " ".join(screen.split())
    assert all(way in joined for way in ways)


def test_what_was_measured_is_the_least_that_a_step_saves():
    text = " ".join(render_text(step_of(tried(cause("one", 10, "fc"), 9))).split())
    assert "First: Do it otherwise: at least 9.0 ms less, 9.0% of the step (measured)." in text


def test_a_step_outside_of_those_beside_the_recording_says_what_these_took():
    made = replace(
        step_of(),
        clock="real",
        unprofiled_step_ns=STEP,
        unprofiled_step_ns_by_step=(STEP // 2, STEP * 3 // 4),
    )
    assert "A step takes 100 ms (50.0 ms to 75.0 ms beside the recording)" in render_text(made)
    among = replace(made, unprofiled_step_ns_by_step=(STEP // 2, 2 * STEP))
    assert "beside the recording" not in render_text(among)


def test_what_saves_more_than_the_step_or_has_no_words_is_not_first():
    assert step_of(tried(cause("one", 10, "fc"), 101)).answer.remedy is None
    assert step_of(cause("one", 10, "fc", remedy="")).answer.remedy is None


def test_a_trial_of_one_way_alone_has_an_answer():
    alone = replace(
        tried(cause("one", 10, "fc"), 9),
        tried=Tried("copies", (Variant("way", 9, 9, 9, 9, 9, 9, "helps"),)),
    )
    assert step_of(alone).answer.remedy is None
    assert "fc" in render_text(step_of(alone))
