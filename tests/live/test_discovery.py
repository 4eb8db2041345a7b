"""The search for the modules of a script disturbs nothing in it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from backspot.live.discovery import outermost


@pytest.fixture
def threads_in_turns() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_in_turns")
def test_another_thread_can_fill_tuples_meanwhile():
    """A tuple that is not yet full must have one reference, or ``SystemError`` is raised."""
    errors: list[SystemError] = []
    done = threading.Event()

    def fill() -> None:
        while not done.is_set():
            try:
                tuple(number for number in range(2000))
            except SystemError as error:
                errors.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    for _ in range(40):
        outermost()
    done.set()
    thread.join()
    assert not errors


def test_nothing_that_was_found_is_kept():
    model = nn.Sequential(nn.Linear(2, 2))
    known, others = weakref.ref(model), len(gc.get_objects())
    assert model in outermost()
    assert len(gc.get_objects()) - others < 100
    del model
    assert known() is None


def test_a_class_of_any_kind_is_found_and_no_proxy_is_asked_what_it_is():
    class Hashed(type):
        def __hash__(cls) -> int:
            raise AssertionError("nobody may ask for it")

    class Parent(nn.Module, metaclass=Hashed):
        pass

    class Child(Parent):
        pass

    joined: list[Any] = [Child]
    for _ in range(20):  # two ways to each: a million ways to the last
        left, right = type("Left", (joined[-1],), {}), type("Right", (joined[-1],), {})
        joined.append(type("Both", (left, right), {}))

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("nobody may ask for it")

    proxy, models = Proxy(), [Parent(), Child(), joined[-1]()]
    found = {id(model) for model in outermost()}
    assert {id(model) for model in models} <= found
    assert id(proxy) not in found
