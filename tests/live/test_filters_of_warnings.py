"""Warnings that Backspot has PyTorch make are no errors of the program, whatever its filters."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("torch")

from backspot.live.host_marks import filtered

WITHOUT_HOOKS = True

OURS = "called a synchronizing operation"


@pytest.fixture
def shown(monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(
        warnings, "showwarning", lambda message, *_, **__: seen.append(str(message))
    )
    return seen


def program_makes_errors():
    warnings.simplefilter("error")


def program_makes_errors_of_one_kind():
    warnings.filterwarnings("error", category=UserWarning)


@pytest.mark.parametrize("makes", [program_makes_errors, program_makes_errors_of_one_kind])
def test_what_a_program_says_inside_comes_after_ours(makes, shown):
    with warnings.catch_warnings():
        with filtered(("always", OURS)):
            makes()
            warnings.warn(OURS, stacklevel=1)
            with pytest.raises(UserWarning, match="its own"):
                warnings.warn("its own", stacklevel=1)
        with pytest.raises(UserWarning):
            warnings.warn(OURS, stacklevel=1)
    assert shown == [OURS]


@pytest.mark.parametrize("makes", [program_makes_errors, program_makes_errors_of_one_kind])
def test_so_does_what_it_says_for_a_while(makes, shown):
    with filtered(("always", OURS)):
        with warnings.catch_warnings():
            makes()
            warnings.warn(OURS, stacklevel=1)
            with pytest.raises(UserWarning, match="its own"):
                warnings.warn("its own", stacklevel=1)
        warnings.warn(OURS, stacklevel=1)
    assert shown == [OURS, OURS]


def test_afterwards_its_filters_are_as_without_us():
    with warnings.catch_warnings():
        before, content = warnings.filters, [*warnings.filters]
        with filtered(("always", OURS)):
            warnings.filterwarnings("ignore", message="new")
        assert warnings.filters is before
        assert warnings.filters[1:] == content
        assert warnings.filters[0][0] == "ignore"
