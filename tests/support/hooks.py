"""Tests of a room, once for each kind of hooks that needs nothing of the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

KINDS = ("call", "node")
MODES = (*KINDS, "module")


def for_each_kind(metafunc: pytest.Metafunc) -> None:
    """Run a test with each kind as the default of ``hooks=``, unless the test names the kinds.

    The quick run has the default alone. So have slow tests, unless ``--hooks`` asks for more.
    """
    if "hooks" in metafunc.fixturenames or hasattr(metafunc.module, "WITHOUT_HOOKS"):
        return
    kinds: list[Any]
    match metafunc.config.getoption("hooks"):
        case "all":
            kinds = [*KINDS]
        case None if metafunc.definition.get_closest_marker("slow"):
            kinds = ["call"]
        case None:
            kinds = ["call", pytest.param("node", marks=pytest.mark.slow)]
        case kind:
            kinds = [kind]
    metafunc.parametrize("default_hooks", kinds, indirect=True)


@pytest.fixture(autouse=True)
def default_hooks(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kind of hooks that a test gets without ``hooks=``: "node" where no start is noticed."""
    from backspot.live.sessions import sessions

    kind = getattr(request, "param", "call")
    before = sessions.watches_starts
    sessions.watches_starts = before and kind == "call"
    yield kind
    sessions.watches_starts = before
