"""What a notebook shows of a report and of a comparison."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given

import backspot
from backspot.errors import UsageError
from support.sample_reports import (
    SAMPLES,
    diagnosed,
    report,
    reports,
    vit,
    vit_rows,
    vit_with_call_sites,
    vit_with_lines,
)


class Markup(HTMLParser):
    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_report_shows_itself_in_a_notebook_without_a_script(name):
    found = Markup(SAMPLES[name]()._repr_html_())
    assert found.open == []
    assert not {"script", "iframe", "link", "img"} & set(found.tags)


def test_a_notebook_shows_the_answer_the_first_rows_and_what_to_do():
    text = Markup(diagnosed()._repr_html_()).text
    assert "patch_drop (PatchDropout) takes 18% of the backward" in text
    assert "105 more modules: see report.show()." in text
    assert "Index whole rows instead" in text


def test_a_notebook_names_the_lines_of_source_below_the_answer_and_in_the_rows():
    content = vit_with_lines()._repr_html_()
    text = Markup(content).text
    gather = "timm/layers/patch_dropout.py:45"
    source = "x = x.gather(1, keep_indices.unsqueeze(-1)"
    assert f"← {gather} {source}Backward" in text  # the facts follow
    assert text.count(gather) == 2
    assert text.count("timm/layers/mlp.py:48") == 8
    assert "made by" in text
    assert "made by" not in Markup(vit()._repr_html_()).text


def test_a_notebook_says_of_a_line_that_it_only_called_the_module():
    text = Markup(vit_with_call_sites()._repr_html_()).text
    assert "← called at timm/layers/mlp.py:48 x = self.fc1(x)" in text


def test_a_notebook_names_the_line_of_a_finding():
    assert "patch_dropout.py:47" in Markup(diagnosed()._repr_html_()).text


def test_a_notebooks_output_styles_nothing_but_itself():
    content = vit()._repr_html_()
    style = re.search(r"<style>(.*?)</style>", content, re.DOTALL)[1]
    style = re.sub(r"@container [^{}]+\{", "", style)
    for rule in re.findall(r"([^{}]+)\{", style):
        assert all(part.strip().startswith(".backspot") for part in rule.split(","))
    assert len(content) < 30_000


def test_a_notebook_shows_the_page_in_a_frame(monkeypatch):
    pytest.importorskip("IPython")
    import IPython
    import IPython.display

    with pytest.raises(UsageError, match="show\\(\\) is for notebooks"):
        vit().show()
    shown = []
    monkeypatch.setattr(IPython, "get_ipython", object)
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    vit().show(height=500)
    found = Markup(shown[0]["text/html"])
    assert found.tags == ["iframe"]
    assert 'height="500"' in shown[0]["text/html"]
    assert shown[0]["text/plain"] == str(vit())
    with pytest.raises(UsageError, match="height=0"):
        vit().show(height=0)


JUPYTER = """
.jp-RenderedHTMLCommon :not(pre) > code { background-color: #eee; padding: 1px 5px; }
.jp-RenderedHTMLCommon ul:not(.list-inline) { padding-left: 2em; }
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: #f5f5f5; }
.output-html code { white-space: pre-wrap; word-break: break-word; }
"""


@pytest.mark.slow
def test_a_notebooks_own_styles_neither_grey_names_nor_break_them(browser, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(
        f'<meta charset="utf-8"><style>{JUPYTER}</style>'
        f'<div class="jp-RenderedHTMLCommon output-html">{vit()._repr_html_()}</div>',
        encoding="utf-8",
    )
    with browser.open(path, viewport={"width": 500, "height": 800}) as opened:
        grounds = opened.page.evaluate(
            "[...document.querySelectorAll('code, tr, ul')].map((one) => getComputedStyle(one))"
            ".map((style) => [style.backgroundColor, style.paddingLeft])"
        )
        assert {tuple(one) for one in grounds} == {("rgba(0, 0, 0, 0)", "0px")}
        lines = opened.page.evaluate(
            "[...document.querySelectorAll('code')].map((one) => one.getClientRects().length)"
        )
        assert set(lines) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 560, 800])
def test_a_narrow_cell_shows_the_heaviest_nodes_without_scrolling(browser, tmp_path, width):
    path = tmp_path / "notebook.html"
    path.write_text(f'<meta charset="utf-8">{vit()._repr_html_()}', encoding="utf-8")
    with browser.open(path, viewport={"width": width, "height": 800}) as opened:
        assert opened.page.evaluate(
            "[...document.querySelectorAll('.scroll, .backspot')]"
            ".every((one) => one.scrollWidth <= one.clientWidth)"
        )
        assert opened.page.locator("td.node code").first.is_visible()


@given(reports(), reports())
def test_no_name_becomes_markup_in_a_notebook(before, after):
    for content in (before._repr_html_(), backspot.compare(before, after)._repr_html_()):
        found = Markup(content)
        assert found.open == []
        assert not {"script", "img", "iframe"} & set(found.tags)
        assert found.text.isprintable()


def test_a_comparison_shows_itself_in_a_notebook():
    slower = report(vit_rows(drop=18_000_000))
    text = Markup(backspot.compare(vit(), slower)._repr_html_()).text
    assert "These two recordings differ by +" in text
    assert "patch_drop" in text
    assert "the whole backward" in text


def test_a_prompt_of_ipython_shows_the_list():
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    before, after = vit(), diagnosed()
    assert pretty(before) == str(before)
    assert pretty(backspot.compare(before, after)) == str(backspot.compare(before, after))
