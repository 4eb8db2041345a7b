"""The contract between the two halves."""

import json

import pytest
from hypothesis import given, strategies as st

from backspot.trace.labels import (
    Kind,
    Label,
    format_label,
    parse_label,
    readable_label,
    unused_label,
    unused_part,
)

any_text = st.text(st.characters(codec=None, categories=None))
module_name = any_text.filter(lambda name: name and "." not in name)
paths = st.lists(module_name, max_size=4).map(".".join)
labels = st.builds(
    Label, st.sampled_from(Kind), paths, any_text, st.integers(min_value=1, max_value=10**8)
)


@given(labels)
def test_every_label_reads_back_as_it_was(label: Label) -> None:
    assert parse_label(format_label(label)) == label
    assert parse_label(readable_label(label)) == label


@given(labels)
def test_a_label_is_safe_in_json_writers_that_do_not_escape(label: Label) -> None:
    text = format_label(label)
    assert json.loads(f'"{text}"') == text
    assert text.isprintable()
    assert text.isascii()
    assert readable_label(label).isprintable()
    readable_label(label).encode()


@given(labels, labels)
def test_different_labels_are_written_differently(one: Label, other: Label) -> None:
    assert (format_label(one) == format_label(other)) == (one == other)
    assert (readable_label(one) == readable_label(other)) == (one == other)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (Label(Kind.FORWARD, "blocks.3.attn", "Attention"), "forward: blocks.3.attn (Attention)"),
        (Label(Kind.BACKWARD, "", "VisionTransformer"), "backward: (VisionTransformer)"),
        (Label(Kind.FORWARD, "shared", "Linear", 2), "forward: shared (Linear) #2"),
        (Label(Kind.FORWARD, "a b", "C#"), "forward: a%20b (C%23)"),
    ],
)
def test_labels_read_well(label: Label, text: str) -> None:
    assert format_label(label) == readable_label(label) == text


def test_only_people_are_given_other_letters_than_ascii() -> None:
    label = Label(Kind.FORWARD, "层.0", "Größe")
    assert format_label(label) == "forward: %E5%B1%82.0 (Gr%C3%B6%C3%9Fe)"
    assert readable_label(label) == "forward: 层.0 (Größe)"


@given(any_text)
def test_any_other_text_is_no_label_or_a_whole_one(text: str) -> None:
    label = parse_label(text)
    assert label is None or isinstance(label, Label)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "forward",
        "forward: ",
        "forward: a b",
        "forward: x (Y) #0",
        "backward: x (%FF)",
        "aten::mm",
    ],
)
def test_other_text_is_no_label(text: str) -> None:
    assert parse_label(text) is None


@pytest.mark.parametrize("percent", [2, 11, 50, 99, 100])
def test_a_label_of_unused_gradients_says_which_part_they_are(percent):
    text = format_label(unused_label("blocks.3", "Mixed", percent / 100))
    label = parse_label(text)
    assert label is not None
    assert (label.path, unused_part(label)) == ("blocks.3", percent / 100)


def test_a_small_part_of_unused_gradients_is_not_taken_for_all():
    assert unused_part(unused_label("a", "M", 0.001)) == 0.02
    assert unused_part(unused_label("a", "M", 1.0)) == 1.0
