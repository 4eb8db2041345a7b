"""The notebooks run, show what their text says, and are what their sources make."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from support import preloaded

for name in ("torch", "timm", "pandas", "ipykernel"):  # kernels import them, which takes seconds
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}", allow_module_level=True)
jupytext = pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
_SPEC = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "execute.py")
executing = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(executing)

SOURCES = executing.sources()
NOISY = "record more steps, on an idle machine"
"""What is said on a busy machine, where times tell little: then the notebook may run again."""
SMALLER = {"01_find_the_slow_module": {"(8, 3, 224, 224": "(2, 3, 224, 224", "(8,)": "(2,)"}}
"""Sizes in the sources, and smaller ones with which the same is shown."""
SHOWN = {
    "01_find_the_slow_module": [
        r"10 profiler steps",
        r"Indexing backward sorts its indices",
        r"vit\.trace\.json\.gz: \d",
    ],
    "02_read_a_trace": [
        r"torch imported: False",
        r"backward +10\.82 ms, the GPU busy for +52%",
        r"by class\n +4\.64 ms +43%  Conv2d",
        r"reads back equal: True",
        r"The trace names no modules",
        r"Communication between ranks is not hidden",
        r"holds no backward pass",
    ],
    "03_fix_and_compare": [
        r"2\.1 \(Gated\) takes [6-9]\d%",
        r"return Gate\.apply\(x\)",
        r"shorter\n",
        r"same\.json --fail-above 50\nexit code 0",
        r"bad\.json --fail-above 50\nexit code 8",
    ],
}


def shown_by(notebook) -> str:
    """Everything that the notebook's cells put out, as text."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            texts.append(output.get("text", "") or output.data["text/plain"])
    return "".join(texts)


def missing_in(shown: str, source: Path) -> list[str]:
    """What the text of a notebook says, and its cells do not show."""
    return [expected for expected in SHOWN[source.stem] if not re.search(expected, shown)]


def name_of(source: Path) -> str:
    return source.stem


@pytest.fixture
def quick_kernel(tmp_path, monkeypatch):
    """Kernels start with PyTorch in memory."""
    preloaded.write_kernel(tmp_path)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_kernel")
@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_a_notebook_runs_and_shows_what_its_text_says(source, tmp_path):
    text = source.read_text(encoding="utf-8")
    for size, less in SMALLER.get(source.stem, {}).items():
        assert size in text
        text = text.replace(size, less)
    source = tmp_path / source.name
    source.write_text(text, encoding="utf-8")
    shown = shown_by(executing.execute(source))
    for _ in range(2):
        if NOISY in shown and missing_in(shown, source):
            shown = shown_by(executing.execute(source))
    assert not missing_in(shown, source)


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_the_notebook_beside_a_source_is_what_the_source_makes(source):
    ours = jupytext.read(source)
    path = source.with_suffix(".ipynb")
    theirs = nbformat.read(path, as_version=4)
    assert [(cell.cell_type, cell.source) for cell in theirs.cells] == [
        (cell.cell_type, cell.source) for cell in ours.cells
    ], "write it anew: python notebooks/execute.py"
    code = [cell for cell in theirs.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not missing_in(shown_by(theirs), source)
    text = path.read_text()
    assert path.stat().st_size < 200_000
    assert not re.search(r"/(home|root|tmp|opt|usr|work|Users)/|site-packages|ipykernel_", text)


def test_every_notebook_has_a_source():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {path.stem for path in SOURCES}
