"""Stable and preview rules: what depends on which, and who shows what."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import backspot
from backspot import Report
from backspot.analysis import findings as rules_of_time
from backspot.analysis.findings import all_rules, weighed
from backspot.commands import main
from backspot.registry import Registry
from backspot.render.text import render_text
from backspot.render.view import View
from backspot.results.findings import Finding, Place, ReplayedStep, Saving, in_order, stable
from backspot.results.trials import Tried, Variant

DATA = Path(__file__).parents[1] / "data"
WITH_BOTH = ("findings/masks_read_gpt", "ranks/parallel/cp.rank0", "h200/double_backward")
PREVIEW_ALONE = ("findings/distances_1_4", "findings/unused_lstm_recommender")


def trace(name: str) -> Path:
    return DATA / f"{name}.trace.json.gz"


@cache
def report(name: str) -> Report:
    return backspot.locate(trace(name))


def test_a_new_rule_is_preview() -> None:
    registry: Registry[None, None, None] = Registry("backspot.analysis.findings.rules")

    @registry.rule("new")
    def new(_: None) -> None:
        """Something new."""

    (rule,) = (one for one in registry.rules if one.name == "new")
    assert (rule.tier, rule.short) == ("preview", "Something new")


def test_a_rule_is_stable_if_two_sources_have_shown_it_right() -> None:
    shown = {rule.name for rule in all_rules() if len(set(rule.sources)) >= 2}
    assert {rule.name for rule in all_rules() if rule.tier == "stable"} == shown


@pytest.mark.parametrize("name", [*WITH_BOTH, *PREVIEW_ALONE])
def test_nothing_depends_on_what_preview_rules_find(name, monkeypatch) -> None:
    whole = report(name)
    kept = tuple(rule for rule in all_rules() if rule.tier == "stable")
    monkeypatch.setattr(rules_of_time, "all_rules", lambda: kept)
    without = backspot.locate(trace(name))
    assert len(without.findings) < len(whole.findings)
    kept_findings = tuple(one for one in whole.findings if one.tier != "preview")
    assert without.findings == kept_findings
    assert without.answer == whole.answer
    assert [row.saves for row in without.modules] == [row.saves for row in whole.modules]
    first, *_ = str(without).splitlines()
    assert str(whole).splitlines()[0] == first


TIERS = ("stable", "account", "preview")
kinds = st.sampled_from(TIERS)
gains = st.one_of(st.none(), st.integers(0, 10_000_000))


@given(st.lists(st.tuples(kinds, gains, st.integers(1, 10_000_000)), max_size=8))
def test_preview_findings_come_last_and_change_no_order(found) -> None:
    step = ReplayedStep(10_000_000, 9_000_000, 11_000_000, fitted=True)
    made = [
        Finding(
            rule=f"rule-{number}",
            title="",
            seen="",
            remedy="",
            wall_ns=ns,
            places=(Place("m", "M", 1, ns),),
            steps=1,
            saves=None if gain is None else Saving(gain, gain, gain),
            tier=tier,
        )
        for number, (tier, gain, ns) in enumerate(found)
    ]
    ordered = in_order(made, step)
    assert [one.tier for one in ordered] == sorted((one.tier for one in made), key=TIERS.index)
    assert stable(ordered) == in_order(stable(made), step)


def known(rule: str, saves: Saving | None, tried: Tried | None = None) -> Finding:
    place = Place("(optimizer)", "", 1, 1_000_000)
    return Finding(rule, "Title", "", "Do it.", 1_000_000, (place,), 3, saves=saves, tried=tried)


HELPS = Tried("work", (Variant("as it is", 10), Variant("other", 5, saves_ns=5, verdict="helps")))


@pytest.mark.parametrize(
    ("rule", "saves", "tried", "tier"),
    [
        ("optimizer-kernels", Saving(1_500_000, 1_000_000, 2_000_000), None, "stable"),
        ("optimizer-kernels", Saving(500_000, 100_000, 900_000), None, "account"),
        ("optimizer-kernels", Saving(500_000, 100_000, 900_000), HELPS, "stable"),
        ("launch-bound", None, None, "account"),
        ("casts", Saving(500_000, 100_000, 900_000), None, "stable"),
        ("casts", None, None, "stable"),
    ],
)
def test_what_nearly_every_step_has_is_a_finding_only_where_its_remedy_is_known_to_pay(
    rule, saves, tried, tier
) -> None:
    step = ReplayedStep(10_000_000, 9_000_000, 11_000_000, fitted=True)
    (found,) = weighed([known(rule, saves, tried)], step)
    assert found.tier == tier


def test_a_line_of_the_account_names_it_and_it_is_no_answer() -> None:
    whole = report("h200/double_backward")
    (found,) = (one for one in whole.findings if one.tier == "account")
    assert found.rule == "launch-bound" != whole.answer.rule
    text = " ".join(str(whole).split())
    assert f"{found.title}: " in text
    assert "no remedy is known to pay (backspot explain launch-bound)." in text
    assert found.remedy not in text


# Who shows them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PREVIEW_ALONE)
def test_text_page_and_markdown_count_them_and_show_them_if_asked(name, tmp_path) -> None:
    whole = report(name)
    title = whole.findings[-1].title
    for form in ("txt", "html", "md"):
        for preview in (False, True):
            path = whole.save(tmp_path / f"{preview}.{form}", preview=preview)
            text = " ".join(path.read_text("utf-8").split())
            assert (title in text) is preview, form
            assert ("1 finding of preview rules" in text) is not preview, form
    assert title not in str(whole)
    assert "1 finding of preview rules" in str(whole)
    assert title in render_text(whole, View(preview=True))
    assert title not in whole._repr_html_()


def test_the_frame_in_a_notebook_shows_them_on_demand(monkeypatch) -> None:
    ipython = pytest.importorskip("IPython")
    import IPython.display

    shown = []
    monkeypatch.setattr(ipython, "get_ipython", object)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    whole = report(PREVIEW_ALONE[0])
    whole.show()
    whole.show(preview=True)
    title = escape(escape(whole.findings[-1].title))
    assert [title in data["text/html"] for data in shown] == [False, True]


def test_json_has_both_with_their_tiers_and_reads_them_again(tmp_path) -> None:
    whole = report("findings/masks_read_gpt")
    again = Report.load(whole.save(tmp_path / "report.json"))
    assert {one.rule: one.tier for one in again.findings}["masked-indexing"] == "preview"
    assert again.findings == whole.findings


def test_show_shows_them_on_demand(capsys, tmp_path) -> None:
    name = str(trace("findings/distances_1_4"))
    title = report("findings/distances_1_4").findings[0].title
    for options, shown in (([], False), (["--preview"], True), (["--preview", "--full"], True)):
        assert main(["show", name, *options]) == 0
        assert (title in capsys.readouterr().out) is shown
    assert main(["show", name, "--preview", "--format", "md"]) == 0
    assert title in capsys.readouterr().out
    assert main(["show", name, "--preview", "-o", str(tmp_path / "page.html")]) == 0
    assert title in (tmp_path / "page.html").read_text("utf-8")


def test_without_another_finding_no_rule_is_said_to_have_found_nothing_that_did(tmp_path) -> None:
    whole = report("findings/distances_1_4")
    states = [*whole.rules.values()]
    looked = states.count("nothing")
    assert f"No cause found by {looked} rules" in str(whole)
    kept = replace(whole, findings=())
    assert f"No cause found by {looked + 1} rules" in str(kept)
