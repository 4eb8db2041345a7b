"""``backspot demo`` without a GPU: the whole story on a model that it brings along."""

import pytest

torch = pytest.importorskip("torch")

import backspot  # noqa: E402
from backspot.commands import demo, main  # noqa: E402
from backspot.results.report import Report  # noqa: E402


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where others want the processors too
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_demo_ranks_writes_its_files_and_mends_the_module(tmp_path, capsys, monkeypatch):
    classifier = demo._classifier
    small = lambda torch, rows, width: classifier(torch, rows, width // 4)  # noqa: E731
    monkeypatch.setattr("backspot.commands.demo._classifier", small)
    monkeypatch.setattr("backspot.commands.demo._VOCABULARY", 50_000)
    monkeypatch.setattr("backspot.commands.demo._OnCpu.rounds", 2)
    output = tmp_path / "out"
    assert main(["demo", "--device", "cpu", "--output", str(output)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert 'search for "backward: tokens"' in said
    assert "tokens, backward wall" in said
    names = ("trace.json.gz", "report.html", "report.json", "report.csv", "report.md")
    assert sorted(path.name for path in output.iterdir()) == sorted(names)
    for report in (
        Report.load(output / "report.json"),
        backspot.locate(output / "trace.json.gz"),
    ):
        row = report["tokens"].row
        assert row.class_name == "Embedding"
        assert row.nodes[0].name == "EmbeddingBackward0"
        assert "demo.py:" in row.lines[0].place


def test_a_step_that_is_timed_frees_the_gradients_of_its_own_variant(monkeypatch):
    monkeypatch.setattr("backspot.commands.demo._VOCABULARY", 100)
    case = demo._OnCpu(torch)
    case.rounds = 1
    freed, zero_grad = [], case.optimizer.zero_grad

    def noting():
        gradient = case.model.tokens.weight.grad
        freed.append((case.model.tokens.sparse, gradient is not None and gradient.is_sparse))
        zero_grad()

    monkeypatch.setattr(case.optimizer, "zero_grad", noting)
    case.time(lambda: None)
    assert freed[1::2] == [(False, False), (True, True)]


def test_the_demo_overwrites_nothing_unasked(tmp_path, capsys):
    (tmp_path / "report.md").write_text("mine")
    assert main(["demo", "--device", "cpu", "--output", str(tmp_path)]) == 6
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "report.md").read_text() == "mine"
