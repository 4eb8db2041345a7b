"""The documents: their links, the code and the commands in them, what was generated, and the site.

A comment before a block, which readers do not see, says what the block needs:
``<!-- test: needs lightning -->`` or ``<!-- test: compile only -->``.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import backspot
from backspot.commands import VERBS, main
from benchmarks import claims, kept

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
DATA = ROOT / "tests" / "data"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("benchmarks/**/README.md")),
    ROOT / "notebooks" / "README.md",
]
BLOCK = re.compile(r"(?:<!-- test: ([^>]*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


# Links.


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    text = BLOCK.sub("", text_of(page))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text_of(page)))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            assert target.startswith(("https://", "mailto:")), target
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            broken.append(target)
    assert not broken


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", text_of(page))
        todo += [page.parent.joinpath(link).resolve() for link in links if ":" not in link]
    assert reached >= {*DOCS.rglob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_list_and_a_table_stand_apart_from_the_text_around_them(page):
    """As the site needs it: GitHub shows a list or a table without a blank line before it, too."""
    lines = BLOCK.sub("", text_of(page)).splitlines()
    begins = re.compile(r"- |\d+\. |\|")
    joined = [
        line
        for before, line in pairwise(lines)
        if begins.match(line) and before and not before.startswith((" ", "<!--"))
        if not begins.match(before) or (line[0] == "|") != (before[0] == "|")
    ]
    assert not joined


def test_the_documents_are_short():
    """A tired reader finds nothing in 50,000 words: say a thing once, and leave out its defence."""
    words = {page.name: len(text_of(page).split()) for page in (*DOCS.glob("*.md"), README)}
    assert sum(words.values()) <= 36_000, sorted(words.items(), key=lambda item: -item[1])[:8]
    assert words["README.md"] <= 800


@pytest.mark.parametrize("page", sorted(DOCS.glob("decisions/*.md")), ids=name_of)
def test_a_decision_has_at_most_25_lines(page):
    assert len(text_of(page).splitlines()) <= 25


# What is generated.


def test_the_reference_of_the_command_line_is_current():
    """``python docs/make_cli.py`` makes it so."""
    assert text_of(DOCS / "cli.md") == generator("make_cli").made()


def test_the_page_of_published_bottlenecks_has_every_case_that_ran():
    """``python docs/make_published.py`` makes it so."""
    made = generator("make_published")
    answer = made.answer()
    page = text_of(DOCS / "published.md")
    assert page == made.made(answer)
    cases = kept.rows_of(answer)
    assert len(cases) == answer["cases"][0] > 40
    for case in cases:
        if case.get("of") == "own" and not case.get("end"):
            continue  # in sums only
        wanted = case["case"] if case.get("end") else made.facts(case["case"])["title"]
        assert wanted in page, case["case"]


@pytest.mark.slow
def test_the_output_that_documents_show_is_that_of_today():
    """``python docs/make_output.py`` makes it so."""
    made = generator("make_output")
    assert len(made.documents()) >= 3
    for page in made.documents():
        assert text_of(page) == made.made(text_of(page)), page


# News.


def test_each_file_of_the_news_is_well_formed():
    made = generator("make_changelog")
    wrong = {file.name: [*made.wrong_in(file)] for file in made.NEWS.glob("*")}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("Labels Cost.md", "**Labels.** They cost less.\n", "name it after the change"),
        ("labels.txt", "**Labels.** They cost less.\n", "name it after the change"),
        ("labels.md", "They cost less.\n", "write one line"),
        ("labels.md", "**Labels.** They cost less", "write one line"),
        ("labels.md", "**Labels.** They cost\nless.\n", "write one line"),
        ("labels.md", f"**Labels.** They cost {'much ' * 80}less.\n", "at most 80 words"),
        (
            "labels.md",
            "**Labels.** [More](docs/no-such-page.md).\n",
            "no-such-page.md: there is no",
        ),
    ],
)
def test_news_that_is_not_well_formed_is_told(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text, "utf-8")
    (wrong,) = generator("make_changelog").wrong_in(tmp_path / name)
    assert complaint in wrong


def test_news_goes_to_the_end_of_the_newest_section_and_its_files_go(tmp_path):
    made = generator("make_changelog")
    made.NEWS, made.CHANGELOG = tmp_path / "news", tmp_path / "CHANGELOG.md"
    made.NEWS.mkdir()
    (made.NEWS / "second.md").write_text("**Second.** Two.\n", "utf-8")
    (made.NEWS / "first.md").write_text("**First.** One, [here](docs/run.md).\n", "utf-8")
    made.CHANGELOG.write_text("# Changes\n\n## 2\n\n- **Old.** X.\n\n## 1\n\n- Y.\n", "utf-8")
    made.main()
    assert text_of(made.CHANGELOG) == (
        "# Changes\n\n## 2\n\n- **Old.** X.\n- **First.** One, [here](docs/run.md).\n"
        "- **Second.** Two.\n\n## 1\n\n- Y.\n"
    )
    assert not [*made.NEWS.iterdir()]
    written = text_of(made.CHANGELOG)
    made.main()
    assert text_of(made.CHANGELOG) == written
    (made.NEWS / "third.md").write_text("no news", "utf-8")
    with pytest.raises(SystemExit, match=r"third\.md: write one line"):
        made.main()
    assert text_of(made.CHANGELOG) == written


# Claims.


@pytest.mark.parametrize("page", claims.PAGES, ids=name_of)
def test_every_claim_is_that_of_the_figures(page):
    """``python -m benchmarks.claims`` makes it so."""
    text = text_of(page)
    assert claims.made(text, claims.read()) == text
    assert len(re.findall(r"\*\*: ", text)) >= 4


@pytest.mark.parametrize("claim", claims.claims(), ids=lambda claim: claim["title"])
def test_every_number_of_a_claim_is_a_figure(claim):
    said = claim["result"] + claim.get("short", "")
    assert claims.without_a_figure(said) == []
    assert claims.without_a_figure(said.replace("{", "7 in 9 {", 1)) == ["7", "9"]


def test_a_claim_without_a_figure_is_an_error():
    evidence = claims.read()
    del evidence["cuda"]["questions"]["planted"]["summary"]["hit"]
    with pytest.raises(KeyError, match=r"no figure for 'cuda\.planted\.hit'"):
        claims.made(text_of(ROOT / "README.md"), evidence)


def test_what_was_measured_before_the_last_run_of_all_is_called_older():
    evidence = claims.read()
    for of in evidence.values():
        of |= {"commit": "newest", "date": "2026-12-02"}
        for entry in of["questions"].values():
            entry |= {"commit": "newest", "date": "2026-12-01"}
    page = text_of(DOCS / "evidence.md")
    assert "older: " not in claims.made(page, evidence)
    planted = evidence["cuda"]["questions"]["planted"]
    planted["commit"] = "another"
    assert claims.made(page, evidence).count("older: ") == 1
    planted["date"] = "2026-12-03"
    assert "older: " not in claims.made(page, evidence)


def test_a_claim_says_which_of_its_cases_are_of_another_run():
    evidence = claims.read()
    part = {"commit": "abc", "date": "2026-12-01", "hardware": {}, "cases": ["a", "b"]}
    evidence["cuda"]["questions"]["planted"]["parts"] = [part]
    made = claims.made(text_of(DOCS / "evidence.md"), evidence)
    assert made.count("2 of them 2026-12-01, abc") == 1


def test_the_readme_gives_one_command_for_the_main_job_and_one_for_the_tests():
    text = text_of(ROOT / "README.md")
    assert "\nbackspot run train.py --epochs 3\n" in text
    assert "\npip install -e '.[demo]' && backspot demo\n" in text
    assert "\npip install -e '.[dev]' && pytest\n" in text


def test_the_citation_and_the_changes_name_the_version():
    assert f"\nversion: {backspot.__version__}\n" in text_of(ROOT / "CITATION.cff")
    assert f"\n## {backspot.__version__}" in text_of(ROOT / "CHANGELOG.md")


# Commands.


def commands_on(page: Path) -> list[str]:
    """The commands on a page that start with ``backspot``, or that a launcher runs."""
    found = []
    for _, language, code in BLOCK.findall(text_of(page)):
        if language in ("", "console"):
            lines = [line.split("  #")[0].strip() for line in code.splitlines()]
            found += [line for line in lines if re.match(r"(?:.* -m )?backspot [a-z]+( |$)", line)]
    return found


COMMANDS = sorted({command for page in PAGES for command in commands_on(page)})


def words_of(command: str) -> list[str]:
    """The words after ``backspot``, without what the shell does with the output."""
    words = shlex.split(command[command.index("backspot ") :])[1:]
    cut = [at for at, word in enumerate(words) if word in ("|", ">", ">>", "&&")]
    return words[: min(cut, default=len(words))]


def test_the_documents_show_every_verb():
    assert {words_of(command)[0] for command in COMMANDS} >= {*VERBS}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_arguments_that_exist(command):
    verb, *words = words_of(command)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    command_of = import_module(f"backspot.commands.{verb}")
    command_of.prepare_parser(parser)
    worded = getattr(command_of, "worded", list)
    parser.parse_args(worded([verb, *words])[1:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with what the documents name: traces and reports."""
    folder = tmp_path_factory.mktemp("user")
    vit = DATA / "h200" / "vit_patch_drop.trace.json.gz"
    for name in ("trace", "x.trace", "before", "after", "runs/trace"):
        there = folder / f"{name}.json.gz"
        there.parent.mkdir(exist_ok=True)
        shutil.copy(vit, there)
    for rank in (0, 1):
        there = folder / "traces" / f"rank{rank}.json.gz"
        there.parent.mkdir(exist_ok=True)
        shutil.copy(DATA / "h200" / f"ddp.rank{rank}.trace.json.gz", there)
    report = backspot.locate(vit)
    report.save(folder / "report.json")
    for name in ("before", "after", "main", "branch", "out"):
        (folder / name).mkdir()
        shutil.copy(folder / "report.json", folder / name / "report.json")
        for number in ("", 1, 2, 3):  # as of several runs
            run = replace(report, recorded={**report.recorded, "run": f"{name}{number}"})
            run.save(folder / f"{name}{number}.json")
    return folder


ELSEWHERE = (
    *("backspot run", "backspot demo", "--install"),  # they have tests of their own
    *("s3://", "tcp://", "jq "),  # need a network, or another program
    *(
        "before/ ",
        "model.layers",
        "lightning_logs",
        "output/",
        "backspot/trace",
        "--cache",
    ),  # the same with other traces
)


def matches(folder: Path, word: str) -> list[str]:
    """What the shell makes of a word with a star."""
    return sorted(map(str, folder.glob(word))) if "*" in word else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if not any(part in command for part in ELSEWHERE)],
)
def test_a_command_that_reads_traces_works(command, folder, monkeypatch, capsysbinary):
    monkeypatch.chdir(folder)
    verb, *words = words_of(command)
    words = [there for word in words for there in (matches(folder, word) or [word])]
    if "-o" in words:
        words.append("--force")
    assert main([verb, *words]) == 0, capsysbinary.readouterr().err
    assert capsysbinary.readouterr().out or "-o" in words


# Code.


def code_on(page: Path) -> list[tuple[str, str]]:
    return [
        (need, code)
        for need, language, code in BLOCK.findall(text_of(page))
        if language == "python"
    ]


WITH_CODE = [page for page in PAGES if code_on(page) and page.name != "api.md"]


def test_what_is_written_for_the_tests_is_understood():
    for page in PAGES:
        needs = [need for need, *_ in BLOCK.findall(text_of(page)) if need]
        assert len(re.findall("^<!-- test:", text_of(page), re.MULTILINE)) == len(needs), page
        assert all(need == "compile only" or need.startswith("needs ") for need in needs), page


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_on_a_page_runs(page, folder, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from support.leftovers import left_in_torch

    pytest.importorskip("pandas")
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "user"))
    names = names_of_a_user(torch)
    if page.name == "memory-and-limits.md":
        shutil.copy(DATA / "memory" / "vit.trace.json.gz", "trace.json.gz")
    for need, code in code_on(page):
        compiled = compile(code, name_of(page), "exec")
        if need == "compile only":
            continue
        for package in need.removeprefix("needs ").split(", ") if need else ():
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"needs {package}")
        for path in re.findall(r'(?:trace=|save\(|_trace\()"([^"]+)"', code):
            Path(path).unlink(missing_ok=True)
        exec(compiled, names)
        for name in names.keys() & {"instrumentation", "monitor"}:
            names.pop(name).remove()
    assert left_in_torch() == []


def names_of_a_user(torch) -> dict[str, object]:
    """What the code on the pages takes as given: a model, a step, data, a report."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.Linear(16, 16)
            self.mlp = nn.Sequential()
            self.mlp.fc1 = nn.Linear(16, 16)

        def forward(self, x):
            return self.mlp(self.attn(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch_drop = nn.Dropout(0.5)
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            x = self.patch_drop(x)
            for block in self.blocks:
                x = block(x)
            return x

    model, loss_fn, x = Model(), nn.MSELoss(), torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batch):
        optimizer.zero_grad()
        loss_fn(model(x), x).backward()
        optimizer.step()

    return {
        "backspot": backspot,
        "torch": torch,
        "time": import_module("time"),
        "model": model,
        "loss_fn": loss_fn,
        "block": model.blocks[0],
        "x": x,
        "train": train,
        "step": lambda: train(x),
        "loader": [x] * 3,
        "compiled": model,
        "report": backspot.locate("trace.json.gz"),
        "args": None,
        "data": None,
        "Trainer": lambda *_, **__: None,
        "wandb": SimpleNamespace(log=print),
    }


# The site.


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(browser, tmp_path):
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = [*tmp_path.glob("*.html")]
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*>", text_of(page))
        foreign = [tag for tag in loaded if re.search(r'(?:src|href)="(?:https?:)?//', tag)]
        assert not foreign, page
    with browser.open(tmp_path / "concepts.html") as opened:
        assert opened.page.title().startswith("Concepts")
        opened.page.wait_for_load_state("networkidle")
    assert all(url.startswith(("file:", "data:", "blob:")) for url in opened.asked), opened.asked
