"""The methods and properties of a Report."""

from dataclasses import FrozenInstanceError, replace
from statistics import quantiles

import pytest
from hypothesis import given, strategies as st

from backspot.errors import UsageError
from backspot.results.costs import Hiccup, Row
from backspot.results.grouping import add_totals, fold
from backspot.results.report import Report
from support.sample_reports import even_vit, node, report, reports, row, vit

COSTS = ("wall_ns", "gpu_ns", "cpu_ns", "forward_ns", "recompute_ns")


def sums(rows) -> dict[str, int]:
    return {cost: sum(getattr(one, cost) for one in rows) for cost in COSTS}


def found(rows, path: str) -> Row:
    return next(one for one in rows if one.path == path)


def test_a_report_is_frozen():
    with pytest.raises(FrozenInstanceError):
        vit().wall_ns = 0


def test_top_ranks_by_wall_time_and_gives_at_most_n_rows():
    first, second = vit().top(2)
    assert (first.path, second.path) == ("patch_drop", "patch_embed.proj")
    assert vit().top(0) == ()
    assert len(vit().top()) == len(vit().top(10_000)) == len(vit().modules)


@pytest.mark.parametrize("sort", ["wall", "gpu", "cpu"])
def test_top_ranks_by_the_time_asked_for(sort):
    times = [getattr(one, f"{sort}_ns") for one in vit().top(sort=sort)]
    assert times == sorted(times, reverse=True)


def test_equal_rows_are_ranked_by_path_so_that_two_runs_agree():
    rows = [row("b", wall=5), row("a", wall=5), row("c", wall=5)]
    assert [one.path for one in report(rows).top()] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"n": -1}, "top\\(-1\\)"),
        ({"n": "3"}, "top\\('3'\\)"),
        ({"n": True}, "top\\(True\\)"),
        ({"depth": -2}, "depth=-2"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"sort": "time"}, "sort='time': choose one of wall, gpu, cpu"),
        ({"by": "name"}, "by='name': choose one of path, class, pattern"),
    ],
)
def test_an_invalid_argument_is_quoted(request_, complaint):
    with pytest.raises(UsageError, match=complaint):
        vit().top(**request_)


def test_a_share_is_of_the_time_asked_for_and_of_nothing_it_is_none():
    rows = [row("a", wall=90, gpu=15, cpu=0), row("b", wall=30, gpu=45, cpu=0)]
    made = report(rows)
    a = found(made.modules, "a")
    assert made.share(a) == 0.75
    assert made.share(a, "gpu") == 0.25
    assert made.share(a, "cpu") == 0.0
    with pytest.raises(UsageError, match="sort='time'"):
        made.share(a, "time")


def test_folding_puts_everything_deeper_into_its_ancestor():
    folded = vit().top(depth=1)
    block = found(folded, "blocks.3")
    assert block.wall_ns == block.total_wall_ns == vit()["blocks.3"].row.total_wall_ns
    assert block.class_name == "Block"
    assert not [one for one in folded if one.path.startswith("blocks.3.")]
    nodes = {spent.name: spent.count for spent in block.nodes}
    assert nodes["AddmmBackward0"] == 4


def test_folding_at_zero_leaves_each_root_and_what_no_module_owns():
    assert {one.path for one in vit().top(depth=0)} == {
        "",
        "loss",
        "(autograd engine)",
        "(outside model)",
    }


def test_a_root_that_was_never_called_gets_a_row_of_its_own():
    root = found(report([row("blocks.0", wall=90), row("head", wall=60)]).top(depth=0), "")
    assert root.class_name == ""
    assert root.calls == 1
    assert root.wall_ns == root.total_wall_ns == 50


@pytest.mark.parametrize(
    ("layers", "depth", "paths"),
    [
        # A ``ModuleList`` has no row: its forward never runs.
        ([], 1, ["", "lm_head", "model"]),
        ([], 2, ["", "lm_head", "model", "model.layers.0", "model.layers.1"]),
        # Or it has one without a call, of a parameter that no optimizer has.
        ([row("model.layers", "Stack", calls=0)], 1, ["", "lm_head", "model"]),
        (
            [row("model.layers", "Stack", calls=0)],
            2,
            ["", "lm_head", "model", "model.layers", "model.layers.0", "model.layers.1"],
        ),
        # A ``Sequential`` is called.
        ([row("model.layers", "Sequential")], 2, ["", "lm_head", "model", "model.layers"]),
    ],
)
def test_only_modules_that_were_called_make_a_level(layers, depth, paths):
    rows = [row("", "Llama", wall=3), row("model", "Decoder", wall=6), row("lm_head", wall=12)]
    for number in range(2):
        rows.append(row(f"model.layers.{number}", "Layer", wall=24))
        rows.append(row(f"model.layers.{number}.self_attn", "Attention", wall=48))
    folded = report(rows + layers).top(depth=depth)
    assert sorted(one.path for one in folded) == paths
    assert sum(one.wall_ns for one in folded) == 55


def test_a_named_root_is_at_level_zero_however_long_its_name_is():
    rows = [row("heads.a", root="heads.a"), row("heads.a.fc", root="heads.a", wall=5)]
    assert [one.path for one in report(rows).top(depth=0)] == ["heads.a"]
    assert len(report(rows).top(depth=1)) == 2


def test_classes_are_added_up():
    linear = found(even_vit().top(by="class"), "Linear")
    assert linear.members == 12 * 4 + 1
    assert linear.calls == linear.members
    assert linear.label == "Linear"


def test_a_pattern_adds_up_layers_whose_paths_differ_in_numbers_only():
    rows = even_vit().top(by="pattern")
    fc1 = found(rows, "blocks.*.mlp.fc1")
    assert fc1.members == 12
    assert fc1.label == "blocks.*.mlp.fc1 (Linear)"
    assert found(rows, "patch_embed.proj").members == 1


def test_a_number_without_a_sibling_is_no_pattern():
    assert [one.path for one in report([row("blocks.0.fc", wall=5)]).top(by="pattern")] == [
        "blocks.0.fc"
    ]


def test_a_pattern_keeps_the_unlike_layers_of_a_sequential_apart():
    rows = [
        row("f.0", "Conv2d", wall=27),
        row("f.1", "ReLU", wall=9),
        row("f.2", "Conv2d", wall=21),
        row("f.3", "MaxPool2d", wall=3),
    ]
    grouped = report(rows).top(by="pattern")
    assert [(one.path, one.class_name, one.members, one.wall_ns) for one in grouped] == [
        ("f.*", "Conv2d", 2, 16),
        ("f.1", "ReLU", 1, 3),
        ("f.3", "MaxPool2d", 1, 1),
    ]


@pytest.mark.parametrize("path", [0, None])
def test_a_report_is_asked_by_path(path):
    with pytest.raises(UsageError, match=r"report\.top\(\)"):
        vit()[path]


def test_a_report_is_no_sequence_and_says_where_its_rows_are():
    with pytest.raises(UsageError, match=r"report\.top\(\)"):
        list(vit())


def test_a_groups_total_counts_a_module_within_another_of_the_group_once():
    rows = [row("a", "Block", wall=30), row("a.b", "Block", wall=15), row("c", "Block", wall=3)]
    block = found(report(rows).top(by="class"), "Block")
    assert block.wall_ns == block.total_wall_ns == 16


def test_a_module_is_found_with_its_children_the_most_expensive_first():
    tree = vit()["blocks.3"]
    assert tree.row.path == "blocks.3"
    assert [child.row.path for child in tree.children][:2] == ["blocks.3.attn", "blocks.3.mlp.fc1"]
    attention = tree.children[0]
    assert [child.row.path for child in attention.children] == [
        "blocks.3.attn.qkv",
        "blocks.3.attn.proj",
    ]


def test_the_root_holds_its_own_modules_and_not_those_of_another_root():
    tree = vit()[""]
    assert "patch_drop" in {child.row.path for child in tree.children}
    assert "loss" not in {child.row.path for child in tree.children}
    own = [one for one in vit().modules if one.is_module and one.root == ""]
    assert tree.row.total_wall_ns == sum(one.wall_ns for one in own)


def test_time_without_an_owner_can_be_looked_up_but_a_module_of_that_name_comes_first():
    assert not vit()["(outside model)"].row.is_module
    rows = [row("(outside model)", wall=1), row("(outside model)", wall=2, is_module=False)]
    assert report(rows)["(outside model)"].row.is_module


def test_an_unknown_path_is_refused_and_near_ones_are_named():
    with pytest.raises(KeyError, match=r"no module 'patch_dorp'.*did you mean 'patch_drop'"):
        vit()["patch_dorp"]


def test_the_root_is_found_by_its_class():
    assert vit()["VisionTransformer"] == vit()[""]
    with pytest.raises(KeyError, match="did you mean 'VisionTransformer'"):
        vit()["VisionTransfomer"]
    with pytest.raises(KeyError, match="no module 'Block'"):
        vit()["Block"]
    made = report([row("", "head", wall=3), row("head", wall=6)])
    assert made["head"].row.wall_ns == 2


def test_times_are_those_of_a_typical_step_and_times_by_step_are_exact():
    made = report(
        [row("fc", wall=9_000_000, pace=(1, 1, 1, 1, 41), held_up=(4,))], step_ns=(9_999_999,) * 5
    )
    (first,) = made.modules
    assert first.steps == made.steps == 5
    assert first.wall_ms == made.wall_ms == 3
    assert first.wall_ns_by_step == made.wall_ns_by_step == (*[3_000_000] * 4, 123_000_000)
    assert sum(first.wall_ns_by_step) == sum(made.wall_ns_by_step) == 135_000_000
    assert sum(first.gpu_ns_by_step) == 135_000_000
    assert sum(first.cpu_ns_by_step) == 13_500_000
    assert first.calls == 1


def test_the_steps_that_count_are_all_but_those_that_were_held_up():
    made = replace(report([row("a", wall=30)]), hiccups=(Hiccup(1, 20, "a"),))
    assert made.typical_steps == (0, 2)
    assert report([row("a", wall=30)]).typical_steps == (0, 1, 2)


@pytest.mark.parametrize(
    ("by_step", "spread"),
    [
        ((7,), 0),
        ((10, 30), 5),
        ((10, 20, 30), 5),
        ((10, 1000, 20, 30, 0), 10),
        ((1, 2, 3, 4), 0),
        ((1 << 62, 0, 0, 0, 1 << 62), 1 << 61),
    ],
)
def test_the_spread_is_half_of_what_the_middle_half_of_the_steps_covers(by_step, spread):
    made = replace(row("fc"), wall_ns_by_step=by_step)
    assert made.wall_spread_ns == spread
    low, _, high = quantiles(by_step * (1 + (len(by_step) == 1)), n=4, method="inclusive")
    assert made.wall_spread_ns == pytest.approx((high - low) / 2, abs=1)


def test_a_report_without_a_step_divides_by_nothing():
    times = {"wall_ns": 0, "gpu_ns": 0, "cpu_ns": 0, "step_ns": 0}
    none = {f"{name}_by_step": () for name in times}
    bare = replace(vit(), modules=(), **times, **none)
    assert bare.wall_ms == 0
    assert bare.top() == ()
    assert "takes any time" in str(bare)


def test_the_whole_is_the_steps_or_the_backward_if_that_is_longer():
    rows = [row("fc", wall=900, steps=2)]
    assert report(rows, step_ns=(500, 600)).whole_ns == 550
    assert report(rows, step_ns=(0, 0)).whole_ns == 450


def test_two_names_that_may_surprise_have_plainer_ones():
    made = vit()
    assert made.nodes is made.operators
    assert made.labels == made.source == "backspot"


def test_times_are_per_pass_where_each_backward_pass_is_a_step():
    assert [
        replace(vit(), step_unit=unit).per
        for unit in ("profiler step", "optimizer step", "backward pass")
    ] == ["step", "step", "pass"]
    assert repr(replace(vit(), step_unit="backward pass")).endswith(" ms per pass>")


def test_the_root_is_called_by_its_class():
    assert row("", "VisionTransformer").label == "VisionTransformer"
    assert row("", "").label == "(root)"
    assert row("head", "Linear").label == "head (Linear)"


@given(
    reports(),
    st.none() | st.integers(0, 4),
    st.sampled_from(("wall", "gpu", "cpu")),
    st.sampled_from(("path", "class", "pattern")),
)
def test_no_view_of_a_report_gains_or_loses_time(any_report: Report, depth, sort, by):
    rows = any_report.top(depth=depth, sort=sort, by=by)
    assert sums(rows) == sums(any_report.modules)
    for step in range(any_report.steps):
        assert sum(one.wall_ns_by_step[step] for one in rows) == sum(
            one.wall_ns_by_step[step] for one in any_report.modules
        )
    for cost in ("wall_ns", "gpu_ns", "cpu_ns", "count"):
        assert sum(getattr(spent, cost) for one in rows for spent in one.nodes) == sum(
            getattr(spent, cost) for one in any_report.modules for spent in one.nodes
        )
    assert [one for one in rows if not one.is_module] == sorted(
        (one for one in any_report.modules if not one.is_module), key=rows.index
    )
    if by == "path" and depth is not None:
        modules = {one.path: one for one in any_report.modules if one.is_module}
        assert all(level(one, modules) <= depth for one in rows if one.is_module)


def level(row: Row, modules: dict[str, Row]) -> int:
    """The modules around a row that were called, its root included, as the definition has it."""
    names = row.path.split(".")
    above = [modules.get(".".join(names[:count])) for count in range(len(names))]
    inner = [one for one in above if one and one.root == row.root != one.path and one.calls]
    return 0 if row.path == row.root else 1 + len(inner)


@given(reports(), st.integers(0, 4), st.integers(0, 4))
def test_folding_twice_is_folding_at_the_lesser_depth(any_report, first, second):
    def by_path(rows):
        return {
            (one.is_module, one.path): replace(one, class_name="", calls=0, root="") for one in rows
        }

    twice = by_path(fold(fold(any_report.modules, first), second))
    assert twice == by_path(fold(any_report.modules, min(first, second)))


@given(reports())
def test_a_total_is_a_modules_own_cost_and_its_childrens_totals(any_report):
    rows = add_totals(any_report.modules)
    tree_of = replace(any_report, modules=rows)
    for one in rows:
        children = tree_of[one.path].children if one.is_module else ()
        for cost in COSTS:
            expected = getattr(one, cost) + sum(
                getattr(child.row, f"total_{cost}") for child in children
            )
            assert getattr(one, f"total_{cost}") == expected


def test_nodes_of_one_name_are_added_up_heaviest_first():
    rows = [
        row("a"),
        row("a.b", wall=27, nodes=(node("X", 9), node("Y", 18))),
        row("a.c", wall=27, nodes=(node("X", 27),)),
    ]
    merged = found(report(rows).top(depth=1), "a")
    assert [(spent.name, spent.wall_ns, spent.count) for spent in merged.nodes] == [
        ("X", 12, 2),
        ("Y", 6, 1),
    ]
