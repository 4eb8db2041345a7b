import pytest

from support.synthetic import Trace


@pytest.fixture
def trace(tmp_path):
    """Two steps of a model with a slow and a fast module, and a name that tries to be an order."""
    made = Trace()
    modules = [("\x1b[2J", "=1+1", 9_000), ("head", "Linear", 90_000), ("stem", "Slow", 900_000)]
    for step in range(2):
        at = step * 2_000_000
        made.annotation(f"ProfilerStep#{step}", at, at + 1_900_000)
        since = at + 50_000
        for index, (path, class_name, lasting) in enumerate(modules):
            begin = at + (2 - index) * 10_000
            made.forward(path, class_name, begin, begin + 9_000)
            made.operator("aten::addmm", begin + 1_000, begin + 8_000, seq=step * 3 + 2 - index)
            made.node("AddmmBackward0", since, since + lasting, seq=step * 3 + 2 - index)
            since += lasting
    return made.save(tmp_path / "trace.json.gz")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "BACKSPOT_DEBUG", "TERM", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
