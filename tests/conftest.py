"""What all tests share: how they run, golden files, and hooks that are taken off."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from support import elsewhere, preloaded
from support.browsing import Browser, chromium

# No test asserts a timing. CI gives the same answer for the same code; developers' runs search on.
# A fixture that all examples of a test share is a folder to write to.
settings.register_profile(
    "dev",
    deadline=None,
    derandomize="CI" in os.environ,
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile(
    "mutated",  # the first failure is all that counts
    settings.get_profile("dev"),
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=50, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Hundreds of processes import the package and the tests: they are compiled once, not by each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Models in tests are tiny: threads only wait for each other. PyTorch reads this when imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Inductor compiles nine programs to see which vector instructions work, for each empty cache. It
# starts processes that import PyTorch to compile side by side, more than graphs of tests take.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--overwrite-golden",
        action="store_true",
        help="write the golden files instead of comparing with them",
    )
    parser.addoption(
        "--hooks",
        choices=("call", "node", "all"),
        help="with which hooks the tests of live/ and training/ run; without it, with those that "
        "are the default, and all but the slow tests with one other kind too",
    )
    parser.addoption(
        "--every-trace",
        action="store_true",
        help="open every recorded trace in Perfetto; without it, one of each kind",
    )
    parser.addoption(
        "--every-bytecode",
        action="store_true",
        help="interrupt the live half at every line and bytecode, with each kind of hooks; "
        "without it, at some of them",
    )
    parser.addoption(
        "--of-each",
        metavar="NUMBER",
        type=int,
        help="run each test with at most NUMBER of its sets of parameters, spread over all of "
        "them: where what counts is that all of the code runs",
    )
    parser.addoption(
        "--note-skipped",
        metavar="FILE",
        type=Path,
        help="write the names of the tests that were skipped to FILE: `pytest @FILE` runs them",
    )
    parser.addoption(
        "--without-posix",
        action="store_true",
        help="run the quick tests of the half that reads traces, as on a laptop with macOS or "
        "Windows: without torch, signals, forks, links, UTF-8 as the default, and more",
    )
    parser.addoption(
        "--live-without-posix",
        action="store_true",
        help="run the quick tests of the half that records, with torch, and without all else that "
        "--without-posix takes away",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests wait for processes that they start."""
    return 1 + (len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Grouping())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell has what it runs in the background ignore it, and tests send it to themselves.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.add_cleanup(_one_server_for_all_workers())
    if (skipped := config.getoption("--note-skipped")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Skipped(skipped.resolve()))
    if _is_elsewhere(config):
        is_live = config.getoption("--live-without-posix")
        elsewhere.take_away(torch_too=not is_live)
        here = Path(__file__).parent
        if config.args == config.getini("testpaths"):
            folders = elsewhere.LIVE_FOLDERS if is_live else elsewhere.FOLDERS
            config.args = [str(here / folder) for folder in folders]
        config.option.markexpr = config.option.markexpr or "not slow"


def _one_server_for_all_workers() -> Callable[[], None]:
    """Name a folder for the server of ``support/preloaded.py``; return what removes it."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.environ[preloaded.SHARED] = folder.name
    return folder.cleanup


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if of_each := config.getoption("--of-each"):
        _choose(config, items, of_each)
    if _is_elsewhere(config) or sys.platform == "win32":
        for item in items:
            if item.get_closest_marker("posix"):
                item.add_marker(pytest.mark.skip(reason="needs a POSIX system"))


def _choose(config: pytest.Config, items: list[pytest.Item], of_each: int) -> None:
    """Keep so many of the items of each test, the first, the last and some between them."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {
        id(same[number * (len(same) - 1) // max(1, of_each - 1)])
        for same in tests.values()
        for number in range(of_each)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def _is_elsewhere(config: pytest.Config) -> bool:
    """Whether the tests run as on a system that is not Linux."""
    return any(map(config.getoption, ("--without-posix", "--live-without-posix")))


class _Grouping:
    """Makes the groups of pytest-xdist 3.8 work with pytest 9.2.

    It writes the group of a test to an attribute that pytest no longer reads, without a word: see
    https://github.com/pytest-dev/pytest-xdist/issues/1386.
    """

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            grouped = vars(item).get("_nodeid", item.nodeid)
            if grouped != item.nodeid:
                item._id = type(item._id).parse(grouped)


class _Skipped:
    """Writes the names of the tests, and of the files, that were skipped."""

    def __init__(self, path: Path) -> None:
        self._path, self._names = path, dict[str, None]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            name, _, group = report.nodeid.rpartition("@")
            self._names[name if name and "]" not in group else report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._names[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        self._path.write_text("".join(f"{name}\n" for name in self._names), encoding="utf-8")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare with ``golden/NAME`` beside the test; ``--overwrite-golden`` writes that file."""
    folder = Path(request.path).parent / "golden"

    def compare(name: str, content: str) -> None:
        path = folder / name
        if request.config.getoption("--overwrite-golden"):
            folder.mkdir(exist_ok=True)
            path.write_bytes(content.encode())
        assert path.exists(), f"{path} is missing: write it with --overwrite-golden"
        assert content == path.read_bytes().decode()

    return compare


def pytest_runtest_setup() -> None:
    """Let a test collect its own garbage alone: with all of PyTorch, it takes half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nanobind prints that objects leak


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a process: Playwright refuses a second one."""
    with chromium() as found:
        yield found


@pytest.fixture
def forget_graphs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Make Inductor know no graph, here and in processes; and what does so once more.

    The folder of its caches is one for all tests of a worker, and keeps what the C++ compiler
    built, so that it runs once for equal code.
    """
    folder = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def forget() -> None:
        for graphs in ("fxgraph", "aotautograd"):
            shutil.rmtree(folder / graphs, ignore_errors=True)

    forget()
    return forget


@pytest.fixture(autouse=True)
def no_hooks_left_behind() -> Iterator[None]:
    """A test that fails leaves its hooks on, and the next test could not use their paths.

    What watches the optimizers, and room on the stack, stay for a model that is gone, too.
    """
    yield
    if live := sys.modules.get("backspot.live.sessions"):
        import backspot

        for scope in list(live.sessions.live_scopes()):
            live.sessions.depart(scope)
        backspot.instrument(sys.modules["torch"].nn.Identity()).remove()
