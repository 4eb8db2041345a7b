"""Inside compiled regions: launches matched with the sites of the generated code."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from backspot.analysis.attribution.compiled import Share, shares_of
from backspot.analysis.attribution.ownership import attribute
from backspot.analysis.caveats import warnings_of
from backspot.trace import Category, read_events
from backspot.trace.compiled import CompiledGraph, CompiledTable, KnownModule, Part, Place, Site

DATA = Path(__file__).parents[1] / "data" / "compiled"


def events_of(name):
    return read_events(DATA / f"{name}.json.gz")


def with_table(events, **changes):
    table = dataclasses.replace(events.compiled, **changes)
    return dataclasses.replace(events, compiled=table)


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
    names = [events.names[name] for name in events.name[ownership.compiled.event].tolist()]
    products = [at for at, name in enumerate(names) if name == "aten::mm"]
    of_products = np.flatnonzero(np.isin(ownership.compiled.of_work, products))
    assert {path.rpartition(".")[2] for path in paths_of(ownership, of_products)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
        "rotary_emb",
    }
    assert (shares.count[of_products] == 1).all()
    line = ownership.lines[shares.line[shares.first[of_products[-1]]]]
    assert line.file.startswith("transformers/")


def test_a_module_in_a_region_has_a_row_and_the_whole_still_sums_up():
    import backspot

    report = backspot.locate(DATA / "llama.json.gz")
    assert report["model.layers.0.mlp.down_proj"].row.gpu_ns > 0
    assert sum(row.gpu_ns for row in report.modules) == report.gpu_ns
    assert sum(row.wall_ns for row in report.modules) == report.wall_ns
    assert not report.warnings


def test_the_replay_of_a_cuda_graph_has_one_owner_and_says_so():
    events = events_of("resnet_graphs")
    ownership = attribute(events)
    assert not len(ownership.compiled.event)
    (warning,) = (w for w in warnings_of(events, ownership) if "compiled code" in w)
    assert "CUDA graph" in warning


# Disagreement -------------------------------------------------------------------------------------


def reasons(events):
    return {one.reason for one in attribute(events).compiled.unmatched}


def test_a_site_too_few_leaves_the_region_with_one_owner():
    events = with_sites(events_of("llama"), lambda sites: tuple(sites[:-1]))
    assert reasons(events) == {
        "it has 100 launch sites, and 101 launches were recorded",
        "it has 134 launch sites, and 135 launches were recorded",
    }
    assert set(attribute(events).work_shares.count.tolist()) == {1}


def test_other_names_leave_the_region_with_one_owner():
    events = with_sites(events_of("vit"), lambda sites: tuple(sites[1:] + sites[:1]))
    assert all(reason.startswith("a launch of triton_") for reason in reasons(events))


def test_graphs_that_were_compiled_before_have_one_owner():
    events = with_sites(events_of("vit"), lambda sites: None)
    assert all("compiled before" in reason for reason in reasons(events))


def test_without_a_table_nothing_is_said():
    events = dataclasses.replace(events_of("vit"), compiled=CompiledTable())
    ownership = attribute(events)
    assert not ownership.compiled.unmatched
    assert not len(ownership.compiled.event)


def test_a_broken_table_is_a_warning():
    events = dataclasses.replace(
        events_of("vit"), compiled=CompiledTable(recorded=True, broken=True)
    )
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
    place = Place("L['self']", "norm", "")
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
