"""Frames that say for which module a node works, as text and back."""

from __future__ import annotations

from hypothesis import given, strategies as st

from backspot.live.frames import Frame, format_frame, parse_frame, with_frame

WITHOUT_HOOKS = True

numbers = st.integers(0, 1 << 40)
frames = st.builds(
    Frame,
    class_name=st.text("abcXYZ_.%0123456789", max_size=20),
    place=st.text(max_size=30),
    backward=st.booleans(),
    base=numbers,
    node=numbers,
    bytes=numbers,
    reads=st.dictionaries(numbers, numbers, max_size=4),
    users=st.lists(numbers, max_size=4).map(tuple),
)
OF_THE_USER = '  File "/home/me/model.py", line 12, in forward\n    y = self.fc(x)\n'


@given(frames)
def test_a_frame_is_found_again_in_its_text(frame: Frame) -> None:
    assert parse_frame(format_frame(frame)) == (frame, None)


@given(frames, frames)
def test_a_trace_has_one_frame_and_the_lines_of_the_user(first: Frame, second: Frame) -> None:
    trace = with_frame(with_frame(OF_THE_USER, first), second)
    found, line = parse_frame(trace) or (None, None)
    assert found == second
    assert trace == format_frame(second) + OF_THE_USER
    assert (line.line, line.function, line.text) == (12, "forward", "y = self.fc(x)")


def test_a_trace_of_the_user_alone_has_no_frame() -> None:
    assert parse_frame(OF_THE_USER) is None


def test_caches_of_earlier_versions_hold_this_text() -> None:
    frame = Frame("Linear", "L['self'].blocks.0", True, 3, 7, 128, {4: 64, 5: 32}, (9, 11))
    expected = "  File \"backspot:b:Linear:L['self'].blocks.0\", line 128, in 3/7<4.64,5.32>9,11\n"
    assert format_frame(frame) == expected
