"""Inside compiled regions: launches matched with the sites of the generated code."""

import tempfile
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import backspot
from backspot import Report
from backspot.analysis.attribution.alignment import align, embed
from backspot.analysis.attribution.ownership import Special, attribute
from backspot.analysis.attribution.shares import Share, shares_of
from backspot.analysis.caveats import warnings_of
from backspot.analysis.recording import Recording
from backspot.analysis.replay.saving import free_owners
from backspot.pipeline import report_of
from backspot.render.text import render_text
from backspot.trace import Category, names, read_events
from backspot.trace.compiled import (
    Compilation,
    CompiledGraph,
    CompiledTable,
    KnownModule,
    ModuleRef,
    Part,
    Site,
)
from support.replays import recorded
from support.sums import assert_adds_up

DATA = Path(__file__).parents[1] / "data" / "compiled"


def events_of(name):
    return read_events(DATA / f"{name}.json.gz")


def with_table(events, **changes):
    table = replace(events.compiled, **changes)
    return replace(events, compiled=table)


def with_sites(events, change):
    """The trace with a graph's sites changed by a function of each list of sites."""
    graphs = tuple(
        CompiledGraph(g.key, g.backward, g.places, change(list(g.sites)))
        for g in events.compiled.graphs
    )
    return with_table(events, graphs=graphs)


def paths_of(ownership, work):
    return [ownership.owners.path(owner) for owner in ownership.work_owner[work].tolist()]


# Recordings of an H200 ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "sites"), [("llama", (101, 135)), ("vit", (80, 139))])
def test_every_launch_of_a_recorded_model_is_matched(name, sites):
    ownership = attribute(events_of(name))
    assert not ownership.compiled.unmatched
    assert len(ownership.compiled.event) == 2 * sum(sites)  # two steps


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_nearly_all_gpu_time_of_a_compiled_backward_has_a_module_inside(name):
    events = events_of(name)
    ownership = attribute(events)
    work = ownership.work
    compiled = np.flatnonzero((ownership.compiled.of_work >= 0) & (work.run >= 0))
    amount = work.end[compiled] - work.start[compiled]
    inside = np.array([bool(path) for path in paths_of(ownership, compiled)])
    assert amount[inside].sum() > 0.96 * amount.sum()  # Llama's own forward computes the loss


def test_a_products_owner_is_the_linear_layer_with_its_line():
    events = events_of("llama")
    ownership = attribute(events)
    shares = ownership.work_shares
    called = [events.names[name] for name in events.name[ownership.compiled.event].tolist()]
    products = [at for at, name in enumerate(called) if name == "aten::mm"]
    of_products = np.flatnonzero(np.isin(ownership.compiled.of_work, products))
    assert {path.rpartition(".")[2] for path in paths_of(ownership, of_products)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
        "rotary_emb",
    }
    assert (shares.count[of_products] == 1).all()
    line = ownership.lines[shares.line[shares.first[of_products[-1]]]]
    assert line.file.startswith("transformers/")


def test_a_module_in_a_region_has_a_row_and_the_whole_still_sums_up():
    report = backspot.locate(DATA / "llama.json.gz")
    assert report["model.layers.0.mlp.down_proj"].row.gpu_ns > 0
    assert sum(row.gpu_ns for row in report.modules) == report.gpu_ns
    assert sum(row.wall_ns for row in report.modules) == report.wall_ns
    assert not report.warnings


def test_kernels_of_a_replayed_graph_have_the_modules_of_the_code():
    events = events_of("resnet_graphs")
    ownership = attribute(events)
    compiled, work, owners = ownership.compiled, ownership.work, ownership.owners
    assert not compiled.unmatched
    assert not len(compiled.event)  # a replay launches nothing
    replayed = np.flatnonzero(compiled.of_work >= 0)
    replayed = replayed[np.argsort(work.start[replayed], kind="stable")]
    called = [events.names[name] for name in events.name[work.event[replayed]].tolist()]
    generated = [at for at, name in enumerate(called) if name.startswith("triton_")]
    forward, backward = events.compiled.graphs
    sites = [
        (graph, site)
        for graph in (forward, backward) * 2
        for site in graph.sites
        if site.name.startswith("triton_")
    ]
    shares = ownership.work_shares
    for at, (graph, site) in zip(generated, sites, strict=True):
        assert called[at] == site.name
        mine = slice(*shares.first[replayed[at] : replayed[at] + 2])
        expected = {graph.places[part.place].path for part in site.parts if part.place >= 0}
        assert {owners.path(owner) for owner in shares.owner[mine].tolist()} >= expected
    length = (work.end - work.start)[replayed]
    known = compiled.shares.largest[compiled.of_work[replayed]] >= 0
    assert length[known].sum() > 0.95 * length.sum()
    libraries = [path for path, name in zip(paths_of(ownership, replayed), called, strict=True)
                 if "fprop" in name]  # fmt: skip
    assert len(libraries) > 30
    assert {path.rpartition(".")[2][:4] for path in libraries} <= {"conv", "0"}


def test_a_replayed_graph_of_other_code_has_one_owner_and_says_so():
    events = with_sites(events_of("resnet_graphs"), lambda sites: tuple(sites[1:]))
    ownership = attribute(events)
    assert (ownership.compiled.of_work < 0).all()
    (warning,) = (w for w in warnings_of(events, ownership) if "compiled code" in w)
    assert "CUDA graph" in warning
    assert_adds_up(report_of(Recording(events, ownership)))


# Disagreement -------------------------------------------------------------------------------------


def reasons(events):
    return {one.reason for one in attribute(events).compiled.unmatched}


def test_a_site_that_was_not_launched_leaves_the_launches_around_it_with_their_modules():
    events = events_of("vit")
    whole = attribute(events)
    extra = Site("torch.ops.aten.sort.stable", ())
    some = attribute(with_sites(events, lambda sites: (*sites[:40], extra, *sites[41:])))
    assert len(some.compiled.unmatched) == 2  # forward and backward
    assert all(one.partly for one in some.compiled.unmatched)
    assert all("its code has" in one.reason for one in some.compiled.unmatched)
    assert some.compiled.event.tolist() == whole.compiled.event.tolist()
    differs = some.launch_shares.largest != whole.launch_shares.largest
    assert 0 < differs.sum() <= 4  # two graphs, two steps
    region = some.owner[some.compiled.span]
    assert (some.launch_shares.largest[differs] == region[differs]).all()
    assert_adds_up(report_of(Recording(events, some)))
    warnings = [w for w in warnings_of(events, some) if "of some launches inside 2 calls" in w]
    assert len(warnings) == 2


def test_sites_and_launches_without_a_common_name_leave_the_region_with_one_owner():
    other = Site("triton_poi_other_0", ())
    ownership = attribute(with_sites(events_of("llama"), lambda sites: (other,) * 101))
    assert len(ownership.compiled.unmatched) == 2
    assert not any(one.partly for one in ownership.compiled.unmatched)
    assert set(ownership.work_shares.count.tolist()) == {1}


def test_launches_without_a_site_leave_the_others_with_their_modules():
    events = events_of("llama")
    whole = attribute(events)
    some = attribute(with_sites(events, lambda sites: tuple(sites[:20] + sites[23:])))
    assert not some.compiled.unmatched
    assert some.compiled.event.tolist() == whole.compiled.event.tolist()
    alone = np.flatnonzero(some.launch_shares.count == 1)
    differs = some.launch_shares.largest != whole.launch_shares.largest
    assert 0 < differs.sum() < 0.1 * len(differs)
    region = some.owner[some.compiled.span]
    assert (some.launch_shares.largest[differs] == region[differs]).all()
    assert np.isin(np.flatnonzero(differs), alone).all()
    assert_adds_up(report_of(Recording(events, some)))


@pytest.mark.parametrize(
    ("sites", "called", "found"),
    [
        ("abc", "abxc", [0, 1, -1, 2]),
        ("aba", "aaba", [-1, -1, 1, 2]),  # either a could be the first
        ("ab", "ba", []),
        ("aa", "aaa", [-1, -1, -1]),
    ],
)
def test_sites_are_found_among_more_launches_where_only_one_launch_can_be_meant(
    sites, called, found
):
    assert embed(sites, called) == found


def test_what_finishes_a_reduction_belongs_to_the_kernel_that_began_it():
    def sites(then):
        return [Site("triton_red_0", (), then), Site("extern_kernels.mm", ())]

    finishing = ["aten::slice", "aten::view", "aten::sum", "aten::to"]
    called = ["triton_red_0", *finishing, "aten::mm", "aten::sum"]
    assert align(sites(True), called, every=False) == ([0, 0, 0, 0, 0, 1, -1], "")
    assert align(sites(False), called, every=False) == ([0, -1, -1, -1, -1, 1, -1], "")
    between = ["triton_red_0", "aten::sum", "triton_poi_1", "aten::sum", "aten::mm"]
    assert align(sites(True), between, every=False) == ([0, 0, -1, -1, 1], "")


def test_what_finishes_a_reduction_does_not_keep_graphs_with_one_key_from_being_told_apart():
    sites = [Site("triton_red_0", (), True), Site("extern_kernels.mm", ())]
    called = ["triton_red_0", "aten::slice", "aten::sum", "aten::mm"]
    assert align(sites, called, every=True) == ([0, 0, 0, 1], "")
    assert isinstance(align(sites, [*called, "aten::sum"], every=True), str)
    assert isinstance(align(sites, called[:-1], every=True), str)


def test_graphs_with_one_key_are_told_apart_by_direction_and_launches():
    events = events_of("vit")
    graphs = events.compiled.graphs
    renamed = {f"{names.COMPILED_GRAPH}{graph.key} ##" for graph in graphs}
    same = replace(
        events,
        names=[f"{names.COMPILED_GRAPH}None ##" if n in renamed else n for n in events.names],
    )
    same = with_table(same, graphs=tuple(msgspec.structs.replace(g, key="None") for g in graphs))
    assert attribute(same).work_owner.tolist() == attribute(events).work_owner.tolist()
    # A launch without a site could as well be that of another graph.
    cut = with_sites(same, lambda sites: tuple(sites[:20] + sites[23:]))
    assert all("launch sites" in reason for reason in reasons(cut))


def test_other_names_leave_the_region_with_one_owner():
    events = with_sites(events_of("vit"), lambda sites: tuple(sites[1:] + sites[:1]))
    assert all(reason.startswith("a launch of triton_") for reason in reasons(events))


def test_graphs_that_were_compiled_before_have_one_owner():
    events = with_sites(events_of("vit"), lambda sites: None)
    assert all("compiled before" in reason for reason in reasons(events))


def test_without_a_table_the_report_says_how_to_get_one():
    events = replace(events_of("llama"), compiled=CompiledTable())
    ownership = attribute(events)
    assert not ownership.compiled.unmatched
    (warning,) = (w for w in warnings_of(events, ownership) if "compiled code" in w)
    assert "backspot.instrument(model) before the first step" in warning


def test_a_broken_table_is_a_warning():
    events = replace(events_of("vit"), compiled=CompiledTable(recorded=True, broken=True))
    assert any(
        "table of compiled code is broken" in w for w in warnings_of(events, attribute(events))
    )


def test_modules_of_another_model_are_not_taken_for_these():
    events = events_of("vit")
    others = tuple(
        KnownModule(m.path.replace("mlp", "ffn"), m.class_name, m.owner.replace("mlp", "ffn"))
        for m in events.compiled.modules
    )
    assert all("not those of the module" in r for r in reasons(with_table(events, modules=others)))


def test_a_class_that_differs_is_another_module():
    events = events_of("vit")
    others = tuple(
        KnownModule(m.path, "Other" if m.path == "norm" else m.class_name, m.owner)
        for m in events.compiled.modules
    )
    assert reasons(with_table(events, modules=others))


def test_one_key_with_two_different_graphs_is_no_answer():
    events = events_of("vit")
    forward = events.compiled.graphs[0]
    place = ModuleRef("L['self']", "norm", "")
    twin = CompiledGraph(
        forward.key,
        False,
        (place,),
        tuple(Site(site.name, (Part(0, 1),)) for site in forward.sites),
    )
    events = with_table(events, graphs=(*events.compiled.graphs, twin))
    assert any("several graphs" in reason for reason in reasons(events))


def test_a_module_without_a_label_pays_through_the_labelled_one_around_it():
    events = events_of("vit")
    folded = tuple(
        KnownModule(m.path, m.class_name, ".".join(m.path.split(".")[:2]))
        for m in events.compiled.modules
    )
    ownership = attribute(with_table(events, modules=folded))
    inside = np.flatnonzero(ownership.compiled.of_work >= 0)
    assert {path.count(".") for path in paths_of(ownership, inside)} <= {0, 1}
    assert "blocks.3" in paths_of(ownership, inside)


# Shares -------------------------------------------------------------------------------------------


def test_a_split_sums_up_exactly():
    shares = shares_of(
        [[Share(7, 1)], [Share(3, 5), Share(4, 2), Share(5, 0)], [Share(1, 0), Share(2, 0)]]
    )
    amount = np.array([1_000_000_007, 13, 1, 0, 99])
    things = np.array([1, 1, 2, 0, 2])
    place, share, parts = shares.split(things, amount)
    sums = np.zeros(len(amount), np.int64)
    np.add.at(sums, place, parts)
    assert sums.tolist() == amount.tolist()
    assert (parts >= 0).all()
    big = parts[place == 0]
    assert big[0] / amount[0] == pytest.approx(5 / 7, rel=1e-4)
    assert shares.owner[share[place == 0]].tolist() == [3, 4, 5]
    assert shares.largest.tolist() == [7, 3, 1]


def test_device_time_split_by_shares_sums_up():
    ownership = attribute(events_of("llama"))
    work = ownership.work
    every = np.arange(len(work.start))
    _, _, parts = ownership.work_shares.split(every, work.end - work.start)
    assert parts.sum() == (work.end - work.start).sum()
    assert (ownership.work_shares.count > 1).any()


def test_work_of_one_launch_has_its_launchs_owner():
    events = events_of("llama")
    ownership = attribute(events)
    assert events.category[ownership.compiled.event].tolist().count(Category.OPERATOR) == len(
        ownership.compiled.event
    )
    compiled, work = ownership.compiled, ownership.work
    for at in np.flatnonzero(compiled.of_work >= 0)[:50]:
        launch = compiled.of_work[at]
        assert compiled.start[launch] <= work.launch[at] < compiled.end[launch]


def test_what_the_host_does_between_two_launches_is_for_the_second():
    events = events_of("llama")
    ownership = attribute(events)
    compiled, spans = ownership.compiled, ownership.spans
    follows = np.flatnonzero(compiled.start[1:] == compiled.end[:-1]) + 1
    assert len(follows) > 0.9 * len(compiled.event)
    between = (compiled.end[follows - 1] + events.start[compiled.event[follows]]) // 2
    assert compiled.at(spans, compiled.span[follows], between).tolist() == follows.tolist()


# Costs --------------------------------------------------------------------------------------------


def plain_device_time(name):
    """Device time of the backward by owner, from the events alone; exact fractions.

    The trace has one thread a graph, and each launch is directly in its graph's call.
    """
    events = events_of(name)
    starts, ends = events.start.tolist(), events.end.tolist()
    graphs = {graph.key: graph for graph in events.compiled.graphs}
    label = [n.startswith(("forward:", "backward:")) for n in events.names]
    operators = [
        at
        for at, kind in enumerate(events.category.tolist())
        if kind in (Category.OPERATOR, Category.ANNOTATION) and not label[events.name[at]]
    ]
    site_of = {}
    for call in operators:
        key = events.names[events.name[call]].removeprefix("## Call CompiledFxGraph ")[:-3]
        if key not in graphs or not graphs[key].backward:
            continue
        inside = [
            at
            for at in operators
            if at != call
            and events.thread[at] == events.thread[call]
            and starts[call] <= starts[at] < ends[call]
        ]
        direct = [
            at
            for at in inside
            if not any(o != at and starts[o] <= starts[at] and ends[at] <= ends[o] for o in inside)
        ]
        site_of |= dict(zip(sorted(direct, key=starts.__getitem__), graphs[key].sites, strict=True))
    owned = {}
    work = attribute(events).work
    for at in np.flatnonzero(work.run >= 0).tolist():
        launch = int(work.launch[at])
        for event, site in site_of.items():
            if events.thread[event] == work.thread[at] and starts[event] <= launch < ends[event]:
                graph = next(g for g in graphs.values() if g.backward)
                paths = [graph.places[part.place].path for part in site.parts if part.place >= 0]
                whole = len(site.parts)  # all weights are equal in these fixtures
                for path in paths or [""]:
                    amount = Fraction(int(work.end[at] - work.start[at]), whole or 1)
                    owned[path] = owned.get(path, 0) + amount
    return owned


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_rows_have_the_device_time_that_a_plain_count_gives(name):
    report = backspot.locate(DATA / f"{name}.json.gz")
    expected = plain_device_time(name)
    rows = {row.path: row for row in report.modules if sum(row.gpu_ns_by_step) and row.path}
    assert {path for path in expected if path and expected[path] >= 2} <= set(rows)
    for path, row in rows.items():
        if row.is_module:
            # Each kernel is rounded by a nanosecond, and weights to a part of 65,536.
            assert sum(row.gpu_ns_by_step) == pytest.approx(
                float(expected[path]), rel=1e-4, abs=200
            )


@pytest.mark.parametrize("name", ["llama", "vit", "resnet_graphs"])
def test_a_report_of_compiled_code_adds_up(name):
    report = backspot.locate(DATA / f"{name}.json.gz")
    assert_adds_up(report)
    assert Report.load(report.save(Path(tempfile.mkdtemp()) / "report.json")) == report
    for row in report.modules:
        assert 0 <= row.split_ns <= max(0, row.wall_ns)
        assert 0 <= row.exact_share <= 1


def test_kernels_that_serve_several_modules_are_listed_with_their_shares():
    report = backspot.locate(DATA / "llama.json.gz")
    assert report.fused
    for kernel in report.fused:
        assert len({part.path for part in kernel.parts}) > 1
        assert sum(part.share for part in kernel.parts) == 1
        assert kernel.parts[0].share > max(part.share for part in kernel.parts) - 1e-4
    silu = next(kernel for kernel in report.fused if "silu_backward" in kernel.name)
    assert {part.path.rpartition(".")[2] for part in silu.parts} == {
        *("mlp", "down_proj", "act_fn", "gate_proj", "up_proj")
    }
    assert any(part.line.startswith("transformers/activations.py") for part in silu.parts)
    assert sum(kernel.spent_ns for kernel in report.fused) < report.gpu_ns
    assert report["lm_head"].row.exact_share < 1
    assert "work for several modules" in render_text(report, width=400, full=True)


def test_modules_inside_a_region_make_levels():
    report = backspot.locate(DATA / "llama.json.gz")
    assert report["model.layers.3"].row.calls == 1
    assert {row.path for row in report.top(None, depth=2)} >= {"model.layers.3", "model.norm"}
    assert not {"model.layers.3.mlp", "model.layers"} & {
        row.path for row in report.top(None, depth=2)
    }


def test_findings_are_placed_at_the_modules_and_advise_no_compiling():
    report = backspot.locate(DATA / "vit.json.gz")
    (finding,) = report.findings
    assert finding.rule == "launch-bound"
    assert "blocks.3.attn" in {place.path for place in finding.places}
    assert "compiled already" in finding.remedy


def test_a_launch_bound_backward_names_the_lines_at_which_its_graphs_break():
    resumed = "torch_dynamo_resume_in_forward_at_8"
    events = with_table(
        events_of("vit"),
        compilations=(
            Compilation("0/0", resumed, "model.py", 8, ""),
            Compilation("0/0", "forward", "model.py", 5, ""),
            Compilation("7/0", resumed, "elsewhere.py", 8, ""),
        ),
    )
    (finding,) = report_of(Recording.of(events)).findings
    assert finding.remedy.endswith(" The graphs break at model.py:8.")


@pytest.mark.parametrize(
    ("kernel", "rule"),
    [
        ("ampere_sgemm_128x64_nn", "no-tensor-cores"),
        ("triton_poi_fused_clone_t_1", "layout-copies"),
    ],
)
def test_costly_kernels_in_a_region_are_found_at_the_modules(kernel, rule):
    events = events_of("llama")
    named = [kernel if name.startswith("nvjet_") else name for name in events.names]
    events = replace(events, names=named)
    report = report_of(Recording.of(events))
    (finding,) = (found for found in report.findings if found.rule == rule)
    assert {"lm_head", "model.layers.3.mlp.up_proj"} <= {place.path for place in finding.places}
    assert "compile" not in finding.remedy


def test_a_free_module_frees_its_share_of_a_kernel():
    recording = recorded("llama")
    ownership = recording.ownership
    shares, work = ownership.work_shares, ownership.work
    freed = np.zeros(len(work.start))
    for change in free_owners(recording).values():
        freed[change.work] += 1 - change.work_factors
    assert freed[ownership.work_owner != Special.ENGINE] == pytest.approx(1)
    assert shares.mean(np.full(len(ownership.owners), 0.5)).tolist() == [0.5] * len(work.start)


def test_spans_of_the_labelled_copy_are_those_of_the_modules(tmp_path):
    backspot.locate(DATA / "llama.json.gz", trace=tmp_path / "labelled.json")
    text = (tmp_path / "labelled.json").read_text()
    assert "backward: model.layers.3.self_attn.o_proj" in text
