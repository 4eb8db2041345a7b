"""``backspot demo`` without a GPU: the whole story on a model that it brings along."""

import pytest

pytest.importorskip("torch")

import backspot
from backspot.commands import main
from backspot.report import Report


def test_the_demo_names_the_slow_module_writes_its_files_and_mends_it(tmp_path, capsys):
    output = tmp_path / "out"
    assert main(["demo", "--device", "cpu", "--output", str(output)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tokens (Embedding) takes" in said
    assert "demo.py:" in said  # the line that looked the tokens up
    assert 'search for "backward: tokens"' in said
    names = ("trace.json.gz", "report.html", "report.json", "report.csv", "report.md")
    assert sorted(path.name for path in output.iterdir()) == sorted(names)
    report = Report.load(output / "report.json")
    assert [row.name for row in report.top(1)] == ["tokens"]
    assert "dense-embedding-gradient" in [finding.rule for finding in report.findings]
    assert [row.name for row in backspot.locate(output / "trace.json.gz").top(1)] == ["tokens"]
    assert "tokens, backward wall" in said


def test_the_demo_overwrites_nothing_unasked(tmp_path, capsys):
    (tmp_path / "report.md").write_text("mine")
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path)]) == 6
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "report.md").read_text() == "mine"
