"""The page in a browser: what a person can do there, by mouse, by keyboard and by ear."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from backspot.formatting import decimals_for, duration, milliseconds, percent, size, visible
from backspot.results.costs import LineCost
from backspot.results.findings import ReplayedStep, Saving
from backspot.results.trials import Tried, Variant
from support.sample_reports import (
    SAMPLES,
    checkpointed,
    detailed,
    diagnosed,
    even_vit,
    large,
    odd,
    report,
    reports,
    row,
    vit,
)

SCHEMES = ("light", "dark")


def names(page) -> list[str]:
    return page.locator("#table-box tbody").first.locator("tr th").all_inner_texts()


def column(page, head: str) -> list[str]:
    heads = [text.strip("↑↓") for text in page.locator("#table-box thead tr > *").all_inner_texts()]
    rows = page.locator("#table-box tbody").first.locator("tr")
    return rows.evaluate_all(
        f"rows => rows.map(row => row.children[{heads.index(head)}].innerText)"
    )


def block(page, label: str):
    return page.locator(f'#icicle [role=treeitem][aria-label^="{label}"]')


@pytest.mark.slow
def test_the_scripts_table_says_what_the_static_one_says(opened):
    of = diagnosed()
    static = opened(of, java_script_enabled=False)
    live = opened(of)
    for head in ("module", "wall", "GPU", "CPU"):
        expected = column(static, head)
        assert len(expected) == 25
        assert column(live, head)[:25] == expected


@pytest.mark.slow
def test_numbers_look_as_in_every_other_form(opened):
    page = opened(vit())
    values = [0, 1, 994, 995, 83_210, 99_499, 99_500, 995_000, 5_230_000, 99_949_999, 99_950_000]
    values += [1_234_567_890, 9_994_999_999, 9_995_000_000, 61_000_000_000]
    assert page.evaluate("values => values.map(duration)", values) == list(map(duration, values))
    shares = [0, 0.0009, 0.001, 0.042, 0.0994, 0.0995, 0.21, 0.9899, 0.99, 0.9996, 1, 1.4]
    assert page.evaluate("values => values.map(percent)", shares) == list(map(percent, shares))
    assert page.evaluate("values => values.map(decimalsFor)", values) == [
        decimals_for(value) for value in values
    ]
    for decimals in range(4):
        shown = page.evaluate(f"values => values.map(v => milliseconds(v, {decimals}))", values)
        assert shown == [milliseconds(value, decimals) for value in values]


@pytest.mark.slow
def test_characters_that_cannot_be_printed_are_escaped_as_in_every_other_form(opened):
    page = opened(vit())
    texts = [
        "ä ő 漢 🦀",
        "\x1b[31m",
        "a\n\r\tb",
        "\u202eabc",
        "\u00a0\u00ad",
        "\U000e0001",
        "\ufeff",
    ]
    assert page.evaluate("texts => texts.map(visible)", texts) == list(map(visible, texts))


@pytest.mark.slow
def test_what_a_module_saves_has_a_column_where_a_replay_was_tried_and_a_dash_where_it_failed(
    opened,
):
    known = replace(row("a", wall=9_000_000), saves=Saving(5_000_000, 4_000_000, 6_000_000))
    replayed = report([known, row("b", wall=8_000_000)])
    replayed = replace(replayed, replayed_step=ReplayedStep(9_000_000, 8_000_000, 9_000_000, True))
    assert column(opened(replayed), "saves") == ["5.00", "–"]
    page = opened(vit())
    assert page.get_by_role("button", name="saves", exact=True).count() == 0
    assert "saves" not in page.locator("#details").inner_text()
    failed = replace(vit(), not_replayed="Its launches are not in the trace.")
    assert "saves\t–" in opened(failed).locator("#details").inner_text()


@pytest.mark.slow
def test_a_click_on_a_columns_head_sorts_by_it_and_another_turns_it_around(opened):
    page = opened(vit())
    head = page.get_by_role("button", name="CPU", exact=True)
    head.click()
    times = [float(text) for text in column(page, "CPU")]
    assert times == sorted(times, reverse=True)
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("CPU")
    head.press("Enter")
    times = [float(text) for text in column(page, "CPU")]
    assert times == sorted(times)
    page.get_by_role("button", name="module", exact=True).click()
    assert names(page)[:3] == ["blocks.0", "blocks.0.attn", "blocks.0.attn.proj"]


@pytest.mark.slow
def test_numbers_in_paths_are_sorted_as_numbers(opened):
    page = opened(vit())
    page.get_by_role("button", name="module", exact=True).click()
    found = names(page)
    assert found.index("blocks.2") < found.index("blocks.10")


@pytest.mark.slow
def test_the_filter_takes_paths_and_classes_and_tells_what_is_left(opened):
    page = opened(vit())
    page.get_by_label("Filter").fill("gelu")
    assert len(names(page)) == 12
    assert all(name.endswith("mlp.act") for name in names(page))
    assert page.locator("#status").inner_text().startswith("12 of 128 rows")
    page.get_by_label("Filter").fill("blocks.1 attention")
    assert names(page) == ["blocks.11.attn", "blocks.10.attn", "blocks.1.attn"]
    page.get_by_label("Filter").press("Escape")
    assert len(names(page)) == 100


@pytest.mark.slow
def test_the_depth_folds_what_is_deeper_as_the_command_does(opened):
    of = vit()
    page = opened(of)
    slider = page.get_by_role("slider", name="Depth")
    slider.focus()
    for depth in (2, 1, 0):
        slider.press("ArrowLeft")
        expected = [one.name for one in of.top(depth=depth) if one.is_module and one.wall_ns]
        assert names(page) == expected[:100]
    slider.press("End")
    assert names(page)[0] == "patch_drop"


@pytest.mark.slow
def test_measures_switch_what_is_ranked(opened):
    of = vit()
    page = opened(of)
    page.get_by_role("radio", name="GPU").check()
    ranked = [one.name for one in of.top(sort="gpu") if one.is_module and one.wall_ns]
    assert names(page) == ranked[:100]
    page.get_by_role("radio", name="Backward ÷ forward").check()
    assert column(page, "bwd ÷ fwd")[0] == "2.0×"
    assert page.locator("#legend").inner_text().split("\n")[0] == "up to 3×"


@pytest.mark.slow
def test_a_ratio_of_next_to_nothing_does_not_come_first(opened):
    rows = [
        row("big", wall=90_000_000, forward=30_000_000),
        row("tiny", wall=90_000, forward=3),
        row("none", wall=9_000_000),
    ]
    page = opened(report(rows))
    page.get_by_role("radio", name="Backward ÷ forward").check()
    assert names(page) == ["big", "tiny", "none"]
    assert column(page, "bwd ÷ fwd") == ["3.0×", "30000×", "–"]


@pytest.mark.slow
def test_a_click_zooms_and_the_trail_leads_back(opened):
    page = opened(vit())
    before = block(page, "blocks.3 (Block)").bounding_box()["width"]
    block(page, "blocks.3 (Block)").click()
    page.wait_for_timeout(300)
    assert block(page, "blocks.3 (Block)").bounding_box()["width"] > 5 * before
    assert block(page, "blocks.4 (Block)").count() == 0
    assert page.locator("#details h3").inner_text() == "blocks.3"
    page.locator("#trail button").first.click()
    assert block(page, "blocks.4 (Block)").count() == 1


@pytest.mark.slow
def test_the_tree_is_walked_with_the_keyboard(opened):
    page = opened(vit())
    block(page, "the whole backward").focus()
    focused = lambda: page.evaluate("document.activeElement.getAttribute('aria-label')")  # noqa: E731
    page.keyboard.press("ArrowDown")
    assert focused().startswith("VisionTransformer")
    page.keyboard.press("ArrowDown")
    first = focused()
    page.keyboard.press("ArrowRight")
    assert focused() != first
    page.keyboard.press("ArrowLeft")
    assert focused() == first
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert page.locator("#trail [aria-current]").inner_text() == "VisionTransformer"
    page.keyboard.press("Escape")
    assert page.locator("#trail [aria-current]").inner_text() == "the whole backward"
    assert page.locator("#icicle [tabindex='0']").count() == 1


@pytest.mark.slow
def test_a_block_is_as_wide_as_its_part_of_the_whole(opened):
    of = vit()
    page = opened(of)
    whole = block(page, "the whole backward").bounding_box()["width"]
    found = block(page, "patch_drop (PatchDropout)").bounding_box()["width"]
    assert found / whole == pytest.approx(of.share(of["patch_drop"].row), abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("scripted", [True, False])
def test_a_bar_is_as_long_as_its_rows_time(opened, scripted):
    page = opened(
        report(
            [row(name, wall=ms * 1_000_000) for name, ms in zip("abc", (80, 60, 20), strict=True)]
        ),
        java_script_enabled=scripted,
    )
    lengths = [bar.bounding_box()["width"] for bar in page.locator("#table-box .mix").all()]
    assert [length / lengths[0] for length in lengths] == pytest.approx([1, 0.75, 0.25], abs=0.02)


@pytest.mark.slow
def test_the_keyboard_alone_reaches_a_modules_details(opened):
    page = opened(vit())
    button = page.get_by_role("button", name="patch_embed.proj", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    details = page.get_by_role("complementary", name="Selected module")
    text = details.inner_text()
    assert "Conv2d" in text
    assert "1 call per step" in text
    assert "ConvolutionBackward0" in text
    assert page.evaluate("document.activeElement.innerText") == "patch_embed.proj"
    assert button.get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_the_label_to_search_for_is_copied(opened):
    page = opened(vit(), permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied", exact=True).wait_for()
    expected = "backward: patch_drop (PatchDropout)"
    assert page.evaluate("navigator.clipboard.readText()") == expected
    assert page.locator("#status").inner_text() == f"Copied {expected}"


@pytest.mark.slow
def test_a_label_is_written_as_the_trace_has_it(opened):
    page = opened(report([row("a b", "Odd(Class)", wall=9_000)]))
    assert page.locator(".to-search").inner_text() == "backward: a%20b (Odd%28Class%29)"


@pytest.mark.slow
def test_the_source_lines_that_made_the_nodes_are_shown(opened):
    line = LineCost(
        "vit.py", 47, "forward", "x = x.gather(1, keep)", "GatherBackward0", True, 3, 9, 9, 1
    )
    page = opened(report([row("drop", wall=9_000_000, lines=(line,))]))
    text = page.locator("#details .lines").inner_text()
    assert "vit.py:47" in text
    assert "x = x.gather(1, keep)" in text
    assert "GatherBackward0" in text


@pytest.mark.slow
def test_a_block_whose_name_is_a_number_shows_its_class(opened):
    rows = [row("layers", "Block"), row("layers.0", "Conv2d", wall=60_000_000)]
    rows.append(row("layers.head", wall=40_000_000))
    page = opened(report(rows))
    assert block(page, "layers.0").inner_text().startswith("Conv2d 0")
    assert block(page, "layers.head").inner_text().startswith("head")


@pytest.mark.slow
def test_on_a_narrow_screen_a_trial_shows_its_bars_and_its_verdict(opened):
    of = diagnosed()
    variants = (
        Variant("as it is", 5_000_000, 4_900_000, 5_100_000),
        Variant("a variant with a long name", 4_800_000, 4_700_000, 5_200_000, verdict="undecided"),
    )
    tried = replace(of.findings[0], tried=Tried("it", variants, 15))
    page = opened(
        replace(of, findings=(tried, *of.findings[1:])), viewport={"width": 390, "height": 800}
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    verdict = page.locator(".bars").get_by_text("undecided").bounding_box()
    assert verdict["x"] + verdict["width"] <= 390


@pytest.mark.slow
def test_ticked_fixes_say_what_the_step_takes_between_the_largest_and_all_of_them(opened):
    of = diagnosed()
    step, ms = 40_000_000, 1_000_000
    first, second, *rest = of.findings
    of = replace(
        of,
        replayed_step=ReplayedStep(step, step, step, fitted=True),
        findings=(
            replace(first, saves=Saving(8 * ms, 0, 9 * ms)),
            replace(second, saves=Saving(5 * ms, 0, 9 * ms, at_best=True)),
            *rest,
        ),
    )
    page = opened(of)
    boxes, told = page.locator(".fix input"), page.locator("#together")
    assert told.is_hidden()
    boxes.nth(0).check()
    assert (
        "Without what 1 finding names, a step would take 32.0 ms instead of 40.0 ms."
        in told.inner_text()
    )
    boxes.nth(1).check()
    assert "Without what 2 findings name, a step would take 27.0 ms to 32.0 ms" in told.inner_text()
    boxes.nth(0).uncheck()
    assert "Without what 1 finding names, a step would take 35.0 ms to 40.0 ms" in told.inner_text()


@pytest.mark.slow
def test_a_finding_leads_to_its_module(opened):
    page = opened(diagnosed())
    page.get_by_role("button", name="blocks.0.attn (Attention)").click()
    assert page.locator("#details h3").inner_text() == "blocks.0.attn"


@pytest.mark.slow
def test_what_is_run_again_and_what_no_module_owns_have_their_place(opened):
    page = opened(checkpointed())
    assert "recompute" in page.locator("#details").inner_text()
    page = opened(vit())
    page.get_by_role("button", name="(outside model)").click()
    assert "owned by no module" in page.locator("#details").inner_text()


@pytest.mark.slow
def test_names_that_look_like_markup_stay_text_wherever_they_are_shown(opened):
    page = opened(odd())
    elements = "document.querySelectorAll('img, iframe, object, embed').length"
    for index in range(page.locator("#table-box button.name").count()):
        page.locator("#table-box button.name").nth(index).click()
        assert page.evaluate(elements) == 0
    assert "</script><img src=x onerror=alert(1)>" in names(page)
    assert page.evaluate("document.body.innerText.includes('\\u202e')") is False


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_kind_of_report_opens_and_shows_nothing_undefined(opened, name):
    page = opened(SAMPLES[name]())
    assert page.locator("h1").inner_text()
    rows = page.locator("#table-box button.name").count()
    for index in sorted({0, 1, rows - 1} & {*range(rows)}):
        page.locator("#table-box button.name").nth(index).click()
        shown = page.evaluate("document.body.innerText")
        assert not re.search(r"\b(null|undefined|NaN|Infinity)\b", shown)


@pytest.mark.slow
@settings(max_examples=12)  # each is a page of its own
@given(reports())
def test_any_report_opens_and_no_name_of_it_becomes_an_element(browser, tmp_path, any_report):
    path = any_report.save(tmp_path / "any.html", force=True)
    with browser.open(path) as opened:
        page = opened.page
        button = page.locator("#table-box button.name")
        if button.count():
            button.last.click()
        kinds = page.evaluate(
            "[...new Set([...document.querySelectorAll('body *')].map(x => x.tagName))]"
        )
        assert not {"IMG", "IFRAME", "OBJECT", "SVG", "STYLE"} & set(kinds)
        assert page.locator("script").count() == 2
        assert opened.said == []
        assert len(opened.asked) == 1


@pytest.mark.slow
def test_very_many_modules_are_shown_a_hundred_at_a_time(opened):
    page = opened(large(3_000))
    assert len(names(page)) == 100
    page.get_by_role("button", name=re.compile("^Show 100 more of ")).click()
    assert len(names(page)) == 200
    assert "most expensive of 3,000 modules" in page.locator("#folded").inner_text()


@pytest.mark.slow
def test_layers_that_repeat_are_the_answer_and_open_at_first(opened):
    of = even_vit()
    page = opened(of)
    assert page.locator("h1").inner_text().startswith("12 × blocks.*.mlp.fc1 (Linear)")
    assert page.get_by_role("radio", name="Layers").is_checked()
    assert page.locator("#details h3").inner_text() == "blocks.*.mlp.fc1"
    for by, radio in (("pattern", "Layers"), ("class", "Classes"), ("path", "Modules")):
        page.get_by_role("radio", name=radio).check()
        ranked = [one for one in of.top(by=by) if one.is_module and one.wall_ns]
        assert names(page) == [one.name for one in ranked][:100]
        decimals = decimals_for(ranked[0].wall_ns)
        assert column(page, "wall") == [milliseconds(one.wall_ns, decimals) for one in ranked][:100]
    assert page.locator("#details h3").inner_text().startswith("blocks.")


@pytest.mark.slow
def test_memory_and_limits_have_columns_and_rank(opened):
    of = detailed()
    page = opened(of, viewport={"width": 2000, "height": 900})
    limits = [of.limit(one) for one in of.top() if one.is_module]
    assert column(page, "of peak") == [percent(one.of_peak) for one in limits]
    assert column(page, "TFLOP/s") == [f"{one.tflops:.1f}" for one in limits]
    page.get_by_role("radio", name="Memory").check()
    ranked = [one for one in of.top(sort="memory") if one.is_module]
    assert names(page) == [visible(one.name) for one in ranked]
    held = [f"{one.memory.at_peak_bytes / 1e6:,.0f}" for one in ranked]
    assert column(page, "memory") == held
    (device,) = of.memory
    whole = f"memory at the peak, {size(device.peak_bytes)}, 100%"
    assert block(page, "memory at the peak").get_attribute("aria-label") == whole
    page.get_by_role("radio", name="Headroom").check()
    ranked = [one for one in of.top(sort="headroom") if one.is_module]
    assert names(page)[0] == visible(ranked[0].name)


@pytest.mark.slow
def test_the_module_of_the_answer_is_open_at_first_with_its_findings(opened):
    details = opened(diagnosed()).locator("#details")
    assert details.locator("h3").inner_text() == "patch_drop"
    assert "Indexing backward sorts its indices 5.1 ms" in details.inner_text()


@pytest.mark.slow
def test_of_very_many_steps_the_first_are_drawn_and_all_are_told(opened):
    slow = row("fc", wall=400_000_000, steps=200)
    slow = replace(slow, wall_ns_by_step=(*[1_990_000] * 199, 3_990_000))
    page = opened(report([slow], step_ns=(5_000_000,) * 200))
    text = page.locator("#details").inner_text()
    assert "2.0 ms to 4.0 ms over 200 steps; the first 60 are drawn" in text
    assert page.locator("#details .steps i").count() == 60
