"""Tests of a room, once for each kind of hooks that needs nothing of the user."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import backspot

KINDS = ("call", "node")
MODES = (*KINDS, "module")


def for_each_kind(metafunc: pytest.Metafunc) -> None:
    """Run a test with each kind as the default of ``hooks=``, unless the test names the kinds.

    Slow tests run with the default alone; ``--hooks all`` and ``--hooks node`` run the rest too.
    """
    if "hooks" in metafunc.fixturenames or hasattr(metafunc.module, "WITHOUT_HOOKS"):
        return
    asked = metafunc.config.getoption("hooks")
    if asked is None:
        asked = "call" if metafunc.definition.get_closest_marker("slow") else "all"
    metafunc.parametrize("default_hooks", KINDS if asked == "all" else (asked,), indirect=True)


@pytest.fixture(autouse=True)
def default_hooks(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of hooks that a test gets without ``hooks=``."""
    kind = getattr(request, "param", "call")
    functions = (backspot.instrument, backspot.profile)
    before = [function.__kwdefaults__ for function in functions]
    for function, defaults in zip(functions, before, strict=True):
        function.__kwdefaults__ = {**defaults, "hooks": kind}
    yield kind
    for function, defaults in zip(functions, before, strict=True):
        function.__kwdefaults__ = defaults
