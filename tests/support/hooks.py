"""Tests of a room, once for each kind of hooks that needs nothing of the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

import pytest

import backspot

KINDS = ("call", "node")
MODES = (*KINDS, "module")


def instrument(model: Any, *, hooks: str = "call", **options: Any) -> backspot.Instrumentation:
    """``backspot.instrument``; with ``hooks="node"`` as where no profiler's start is noticed."""
    from backspot.live.sessions import sessions

    if hooks != "node":
        return backspot.instrument(model, hooks=hooks, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "watches_starts", False)
        return backspot.instrument(model, **options)


_MARKED = "marked"  # "call", with markers where nothing else is asked for


def for_each_kind(metafunc: pytest.Metafunc) -> None:
    """Run a test with each kind as the default of ``hooks=``, unless the test names the kinds.

    The quick run has the default alone. So have slow tests, unless ``--hooks`` asks for more. All
    others have one kind more, each of the two in half of the tests.
    """
    if "hooks" in metafunc.fixturenames or hasattr(metafunc.module, "WITHOUT_HOOKS"):
        return
    kinds: list[Any]
    match metafunc.config.getoption("hooks"):
        case "all":
            kinds = [*KINDS, _MARKED]
        case None if metafunc.definition.get_closest_marker("slow"):
            kinds = ["call"]
        case None:
            other = ("node", _MARKED)[crc32(metafunc.function.__name__.encode()) % 2]
            kinds = ["call", pytest.param(other, marks=pytest.mark.slow)]
        case kind:
            kinds = [kind]
    metafunc.parametrize("default_hooks", kinds, indirect=True)


@pytest.fixture(autouse=True)
def default_hooks(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of hooks that a test gets without ``hooks=``: "node" where no start is noticed."""
    from backspot.live.sessions import sessions

    kind = getattr(request, "param", "call")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "watches_starts", sessions.watches_starts and kind != "node")
        if kind == _MARKED:  # as where no backward label can come later
            patch.setattr(sessions, "when_labelled", None)
        yield "node" if kind == "node" else "call"
