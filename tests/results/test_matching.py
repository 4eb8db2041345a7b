"""Modules chosen by patterns of their paths, and the sums that the choice keeps exact."""

import pytest
from hypothesis import given, strategies as st

from backspot.errors import UsageError
from backspot.results.grouping import patterns_of
from support.report_parts import report, row
from support.sample_reports import reports, vit


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("blocks.*", ["blocks.0", "blocks.11"], ["blocks", "blocks.0.attn", "xblocks.0", ""]),
        ("blocks.*.attn", ["blocks.0.attn"], ["blocks.0.x.attn", "blocks.attn"]),
        ("blocks.**", ["blocks.0", "blocks.0.attn.qkv"], ["blocks", "head"]),
        ("**.attn", ["attn", "blocks.0.attn"], ["xattn", "blocks.0.attn.qkv"]),
        ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["ab", "a.xb", "a.b.c"]),
        ("norm?", ["norm1", "norm2"], ["norm", "norm12", "norm."]),
        ("blocks.[0-3]", ["blocks.0", "blocks.3"], ["blocks.4", "blocks.-"]),
        ("blocks.[!0]", ["blocks.1"], ["blocks.0"]),
        ("a+b", ["a+b"], ["aab"]),
        ("x[", ["x["], ["x"]),
        ("[^]", ["^"], ["a"]),
        ("[!]", ["!"], ["a"]),
    ],
)
def test_a_star_stays_within_a_name_and_two_cross_dots(pattern, matching, others):
    patterns = patterns_of(pattern)
    assert [path for path in matching if not patterns.matches(path)] == []
    assert [path for path in others if patterns.matches(path)] == []


def test_what_does_not_match_is_added_to_what_is_around_it():
    made = report(
        [
            row("", "Net", wall=3 * 1),
            row("stem", wall=3 * 2),
            row("blocks.0", "Block", wall=3 * 4),
            row("blocks.0.attn", wall=3 * 8),
            row("blocks.0.attn.qkv", wall=3 * 16),
            row("loss", "Loss", root="loss", wall=3 * 32),
            row("(outside model)", is_module=False, wall=3 * 64),
        ]
    )

    def kept(match, **more):
        return {one.path: one.wall_ns for one in made.top(match=match, **more)}

    rest = {"loss": 32, "(outside model)": 64}
    assert kept("blocks.*") == {"": 3, "blocks.0": 28, **rest}
    assert kept(["stem", "**.qkv"]) == {"": 13, "stem": 2, "blocks.0.attn.qkv": 16, **rest}
    assert kept("**", depth=1) == {"": 1, "stem": 2, "blocks.0": 28, **rest}
    assert kept("**.qkv", depth=1) == {"": 31, **rest}


@given(reports(), st.sampled_from(("**", "*", "*.*", "**.a", "**.*[0-9]")), st.integers(0, 3))
def test_a_choice_loses_no_time(any_report, pattern, depth):
    try:
        rows = any_report.top(match=pattern, depth=depth)
    except UsageError:
        return
    for cost in ("wall_ns", "gpu_ns", "cpu_ns", "forward_ns"):
        assert sum(getattr(one, cost) for one in rows) == sum(
            getattr(one, cost) for one in any_report.modules
        )


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ("block.*.attn", "match='block.*.attn' matches no module; did you mean 'blocks.*.attn'"),
        (["blocks.*", "haed"], "match='haed' matches no module; did you mean 'head'"),
        (
            "nothing like this",
            "match='nothing like this' matches no module; among the modules are 'patch_",
        ),
        ([], "give a pattern"),
        (3, "match=3: give a pattern"),
        ([3], "match=3: a pattern of module paths must be a str"),
        ("[z-a]", "is not a pattern"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_in_one_line(match, said):
    with pytest.raises(UsageError) as caught:
        vit().top(match=match)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
