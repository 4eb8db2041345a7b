"""The page as a file: whole, small, safe, and of use without a script."""

import base64
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given

from backspot import locate
from backspot.render.html import asset, to_html
from backspot.results.trials import Tried, Variant
from support.report_parts import phases
from support.sample_reports import (
    SAMPLES,
    diagnosed,
    large,
    odd,
    report,
    reports,
    row,
    unlabelled,
    vit,
    vit_on_a_cpu,
    vit_with_lines,
)

DATA = Path(__file__).parents[1] / "data"


class Page(HTMLParser):
    """What a browser would make of the markup: its elements, their attributes, and its text."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._raw = ""
        self.data = ""
        self.feed(content.decode())

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._raw = tag if tag in ("script", "style") else ""
        self._json = dict(attrs).get("id") == "report"

    def handle_endtag(self, tag):
        self._raw = ""

    def handle_data(self, data):
        if self._raw == "script" and self._json:
            self.data += data
        elif not self._raw:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def data_of(page: Page):
    return json.loads(zlib.decompress(base64.b64decode(page.data)))


def page_of(report) -> Page:
    return Page(to_html(report))


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_page_says_the_answer_without_a_script(name):
    page = page_of(SAMPLES[name]())
    assert any(tag == "h1" for tag, _ in page.elements)
    assert "the backward" in page.words or "The trace names no modules" in page.words


def test_the_page_holds_the_table_the_findings_and_the_phases_without_a_script():
    words = page_of(diagnosed()).words
    assert "patch_drop (PatchDropout) takes 18% of the backward" in words
    assert "1patch_dropPatchDropout5.2318%" in words
    assert "5.1 ms11% of the stepIndexing backward sorts its indices" in words
    assert "Index whole rows instead" in words
    assert "patch_drop (PatchDropout) patch_dropout.py:47" in words
    assert "9 more places" in words
    assert "forward 10.1 ms 22%" in words


def test_the_page_says_how_to_read_the_columns_that_it_has():
    def told(made):
        return to_html(made).decode().partition("How to read this")[2].partition("</details>")[0]

    assert "<b>wall</b>: the clock time" in told(vit())
    assert "<b>GPU</b>" in told(vit())
    assert "<b>wall</b>" in told(vit_on_a_cpu())
    assert "<b>GPU</b>" not in told(vit_on_a_cpu())
    assert not told(unlabelled())


def test_the_page_asks_for_nothing():
    content = to_html(diagnosed()).decode()
    page = Page(content.encode())
    assert not [a for tag, a in page.elements if tag != "a" and {"src", "href"} & a.keys()]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", content)
    policy = next(a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "limit"), [(1, 80), (1_000, 200), (5_000, 400)])
def test_the_page_stays_small(modules, limit):
    content = to_html(large(modules))
    assert len(content) < 1_000 * limit


@pytest.mark.slow
def test_very_many_steps_do_not_make_the_page_large():
    steps = 5_000
    rows = [row(f"layers.{index}", wall=steps * (index + 9), steps=steps) for index in range(200)]
    many = report(rows, step_ns=(50_000_000,) * steps)
    assert len(to_html(many)) < 300_000


@pytest.mark.slow
def test_of_very_many_modules_the_small_ones_are_added_up_and_nothing_is_lost():
    whole = large(5_000)
    rows = [one["row"] for one in data_of(page_of(whole))["rows"]]
    assert len(rows) < 3_000
    for cost in ("wall_ns", "gpu_ns", "cpu_ns"):
        assert sum(one[cost] for one in rows) == getattr(whole, cost)


def test_shares_of_memory_are_of_all_gpus_together():
    made = locate(DATA / "memory" / "vit.trace.json.gz")
    (gpu,) = made.memory
    host = replace(gpu, device=-1)
    two = replace(made, memory=(gpu, replace(gpu, device=1), host))
    assert data_of(page_of(two))["amounts"][0]["whole"] == 2 * gpu.peak_bytes


@pytest.mark.slow
@given(reports())
def test_no_name_becomes_markup(any_report):
    page = page_of(any_report)
    quiet = page_of(vit())
    known = (
        {tag for tag, _ in quiet.elements} | {"a"} | {t for t, _ in page_of(diagnosed()).elements}
    )
    assert {tag for tag, _ in page.elements} <= known
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith(("#", "https://"))
    assert "".join(page.text).replace("\n", "").isprintable()
    assert not page.data or data_of(page)


def test_names_that_look_like_markup_stand_there_as_text():
    content = to_html(odd()).decode()
    assert "<img" not in content
    assert "</script><img src=x onerror=alert(1)>" in page_of(odd()).words
    assert "\\x1b[31malert" in content
    assert "\u202e" not in content


def test_without_labels_the_page_ranks_nodes_and_names_the_remedy():
    page = page_of(unlabelled())
    assert "Autograd nodes" in page.words
    assert "backspot.instrument(model)" in page.words
    assert not any(attributes.get("id") == "explorer" for _, attributes in page.elements)


def test_where_nothing_was_found_the_page_says_so():
    words = page_of(SAMPLES["vit_on_a_cpu"]()).words
    assert "No cause found by 9 rules; of others, 14 need a GPU." in words
    assert "No cause found" not in page_of(diagnosed()).words


def test_the_heading_of_the_page_is_what_costs_most_in_the_step():
    found = diagnosed()
    waiting = [
        replace(one, wall_ns=60_000_000) if one.name == "data" else one for one in found.phases
    ]
    words = page_of(replace(found, phases=tuple(waiting))).words
    said = "Waiting for data takes 58% of the step: 60.0 ms, more than the backward of any module."
    assert said in words
    assert words.index(said) < words.index("patch_drop (PatchDropout) takes")
    assert words.index(said) < words.index("Time in a step")
    assert "more than the backward" not in page_of(found).words


def test_what_a_trial_of_the_remedy_says_stands_below_the_heading():
    found = diagnosed()
    first, *rest = found.findings
    now, indexed = Variant("as it is", 5_000_000), Variant("rows", 1_000_000, verdict="helps")
    tried = replace(first, tried=Tried("it", (now, indexed), 15))
    words = page_of(replace(found, findings=(tried, *rest))).words
    assert words.index("✓ Tried here") < words.index("Time in a step")
    assert words.count("✓ Tried here") == 2  # and beside the finding
    assert "Tried here" not in page_of(found).words


def test_phases_that_take_little_have_one_entry_of_the_legend_together():
    spent = {"forward": (60_000,), "backward": (90_000,), "metrics": (90,), "clipping": (80,)}
    made = report([row("fc", wall=90_000)], phases=phases(spent), step_ns=150_170)
    assert "metrics, gradient clipping: 170 ns together" in page_of(made).words
    alone = replace(made, phases=phases({**spent, "clipping": (0,)}))
    assert "together" not in page_of(alone).words


def test_each_phase_between_backward_and_optimizer_has_a_colour_of_its_own():
    style = asset("report.css")
    named = ("clipping", "scaler", "zero_grad", "averaging", "optimizer", "metrics", "copy")
    colours = [re.search(rf"\.p-{name} {{ --strong: (.*?); }}", style) for name in named]
    assert len({found[1] for found in colours if found}) == len(named)


def test_a_share_names_what_it_is_a_share_of():
    by_pass = replace(diagnosed(), step_unit="backward pass")
    assert "5.1 ms11% of the pass" in page_of(by_pass).words  # with its forward
    alone = replace(by_pass, step_ns=by_pass.wall_ns, phases=())
    assert "5.1 ms18% of the backward" in page_of(alone).words


def test_findings_that_count_the_same_time_say_so():
    found = diagnosed()
    first, second = found.findings
    again = replace(second, places=first.places, wall_ns=first.wall_ns)
    words = page_of(replace(found, findings=(first, again))).words
    assert "Can be partly the same time as “Indexing backward sorts its indices”" in words
    assert "partly the same time" not in page_of(found).words


def test_the_page_names_the_line_of_source_below_the_answer():
    words = page_of(vit_with_lines()).words
    assert "mostly GatherBackward0 ← timm/layers/patch_dropout.py:45 x = x.gather(1," in words


def test_a_link_that_is_no_web_address_is_left_out():
    assert any(one.link == "javascript:alert(1)" for one in odd().findings)
    assert "javascript:" not in to_html(odd()).decode()


def test_the_page_is_a_form_that_a_name_can_ask_for(tmp_path):
    path = vit().save(tmp_path / "report.HTML")
    assert path.read_bytes() == to_html(vit())


def test_what_the_page_is_made_of_is_installed():
    names = {entry.name for entry in files("backspot.render.html").iterdir()}
    assert {"page.html", "report.html", "explorer.html", "report.css", "job.css"} <= names
    assert {"theme.js", "report.js", "model.js"} <= names


def test_the_page_draws_a_step_with_its_waits_and_lists_the_lines_of_the_host():
    found = locate(DATA / "host" / "clip_each.trace.json.gz")
    page = page_of(found)
    assert "One step as it was recorded with stacks, 33.8 ms" in page.words
    assert "The host waits for the GPU in train.py:62, " in page.words
    assert "The host waits for the GPU 52 times per step" in page.words
    assert "train.py:59 clip_each()gradient clipping6.49" in page.words
    (drawing,) = [more for tag, more in page.elements if tag == "svg" and "height" in more]
    assert drawing["role"] == "img"
    assert "29 waits for the GPU" in drawing["aria-label"]
    waits = [more for tag, more in page.elements if (tag, more.get("class")) == ("line", "wait")]
    assert len(waits) == len(found.picture.waits)
    without = page_of(replace(found, picture=None, waits=(), host=())).words
    assert "as it was recorded with" not in without
    assert "Lines of the step" not in without


def test_lines_and_functions_that_look_like_markup_stand_on_the_page_as_text():
    found = locate(DATA / "host" / "clip_each.trace.json.gz")
    evil = "<script>alert(1)</script>"
    drawn = replace(found.picture, lines=((0, 9_000_000, evil),), waits=((1, 9, 2, 8, evil),))
    changed = replace(found, picture=drawn, host=(replace(found.host[0], function=evil),))
    page = page_of(changed)
    assert page.words.count(evil) >= 4
    assert b"<script>alert" not in to_html(changed)
