import re
from dataclasses import replace
from functools import cache
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from backspot import locate
from backspot.errors import UsageError
from backspot.formatting import milliseconds, size, visible
from backspot.render import renderer_for
from backspot.render.text import render_text
from backspot.render.text_parts import render_subtree
from backspot.render.view import View
from backspot.results.costs import Phase
from backspot.results.findings import Finding, Place, ReplayedStep, Saving
from backspot.results.rare import RareWork
from backspot.results.report import changed
from backspot.results.training import Training
from backspot.results.trials import Tried, Variant
from support.report_parts import node, phases, report, row
from support.sample_reports import ODD_NAMES, SAMPLES, even_vit, odd, reports, unlabelled, vit
from support.synthetic import Trace

DATA = Path(__file__).parents[1] / "data"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@cache
def with_memory(name="vit"):
    """A report of a training that was asked for its memory."""
    return replace(locate(DATA / "memory" / f"{name}.trace.json.gz"), memory_asked=True)


@pytest.mark.parametrize("color", [False, True], ids=["plain", "color"])
@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("name", ["vit", "odd", "vit_with_lines", "diagnosed", "varied"])
def test_the_text_reads_as_it_did(golden, name, width, color):
    text = render_text(SAMPLES[name](), width=width, color=color)
    golden(f"{name}.{width}{'.color' if color else ''}.txt", text + "\n")


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_every_kind_of_report_reads_as_it_did(golden, name):
    text = render_text(SAMPLES[name](), View(top=15), width=100, full=True)
    golden(f"{name}.100.txt", text + "\n")


@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.parametrize("width", [80, 160])
def test_by_default_everything_that_matters_is_on_one_screen(name, width):
    text = render_text(SAMPLES[name](), width=width)
    assert len(text.splitlines()) <= 23  # and the prompt
    assert "\nNext: " in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_command_that_comes_next_stays_on_one_line(width):
    more = "backspot show a-folder-with-a-long-name/report.json --full"
    lines = render_text(SAMPLES["diagnosed"](), width=width, more=more).splitlines()
    assert any(more in line for line in lines)
    assert any("backspot explain sorted-indexing" in line for line in lines)


def test_of_several_models_each_has_its_share_of_the_backward():
    costs = {"netD": 0, "netD.0": 60, "netD.1": 10, "netG": 29, "loss": 1}
    rows = [
        row(path, wall=cost * 10**6, root=path.partition(".")[0]) for path, cost in costs.items()
    ]
    assert "\nBackward: 70% netD · 29% netG\n" in render_text(report(rows), width=80)
    assert "Backward: " not in render_text(SAMPLES["vit"](), width=80)


def test_a_model_without_a_path_has_its_share_by_its_class():
    rows = [
        row("", "DETR", wall=10 * 10**6),
        row("backbone", wall=60 * 10**6),
        row("criterion", "SetCriterion", wall=30 * 10**6, root="criterion"),
    ]
    assert "\nBackward: 70% DETR · 30% criterion\n" in render_text(report(rows), width=80)


def test_a_finding_on_the_screen_has_its_evidence_and_its_remedy():
    text = render_text(SAMPLES["diagnosed"](), width=100)
    assert (
        "1. Indexing backward sorts its indices: 5.1 ms, 11% of the step in patch_drop "
        "(PatchDropout),\n   patch_dropout.py:47.\n"
        "   GatherBackward0 takes 5.1 ms in 1 node a step; 6 kernels of it sort (0.5 ms).\n"
        "   → Index whole rows instead: x[torch.arange(len(x))[:, None], keep].\n"
    ) in text


def test_a_finding_about_the_answer_alone_has_its_remedy_before_the_others():
    sorting, copying = SAMPLES["diagnosed"]().findings
    made = replace(SAMPLES["diagnosed"](), findings=(copying, sorting), warnings=("Beware.",) * 2)
    text = render_text(made, width=80)
    assert "Index whole rows" in text
    assert copying.title in text
    assert "channels_last" not in text
    assert "backspot explain sorted-indexing" in text


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("name", ["diagnosed", "varied", "odd"])
def test_the_first_finding_has_its_remedy_at_every_width(name, width):
    made = SAMPLES[name]()
    first = min(made.findings, key=lambda one: one.rule != "sorted-indexing")
    text = render_text(made, width=width)
    assert "".join(visible(first.remedy).split()) in "".join(text.split())
    assert text.index("1. ") < text.index("→ ")
    assert f"backspot explain {first.rule}" in text


def test_rows_give_way_to_a_remedy_unless_they_were_asked_for():
    made = SAMPLES["varied"]()
    assert "blocks.6.mlp.fc1" not in render_text(made, width=60)
    assert "blocks.6.mlp.fc1" in render_text(made, View(fewest=5), width=60)


def test_a_finding_about_a_phase_names_no_place():
    (waiting,) = [
        replace(one, places=(Place("(data)", "", 1, one.wall_ns),), title="The step waits")
        for one in SAMPLES["diagnosed"]().findings[:1]
    ]
    made = report([row("fc", wall=9_000_000)], findings=(waiting,))
    forms = [renderer_for(f"x.{suffix}")(made).decode() for suffix in ("html", "md")]
    for text in (render_text(made, width=200), render_text(made, width=200, full=True), *forms):
        assert "The step waits" in text
        assert "in (data)" not in text
        assert "<code>(data)" not in text
    both = replace(waiting, places=(*waiting.places, Place("fc", "Linear", 1, 5)))
    made = replace(made, findings=(both,))
    assert "in the loading of data and 1 more place." in render_text(made, width=200)


def test_the_finding_about_the_phase_of_the_headline_comes_first():
    sorting, copying = SAMPLES["varied"]().findings[0], SAMPLES["diagnosed"]().findings[1]
    waiting = replace(copying, rule="waiting-for-data", places=(Place("(data)", "", 1, 9),))
    made = replace(SAMPLES["varied"](), findings=(copying, sorting, waiting))
    text = render_text(made, width=80)
    assert text.startswith("Waiting for data takes 24%")
    assert text.endswith("backspot explain waiting-for-data")


# Memory, where it was recorded.


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_the_first_screen_says_who_fills_the_memory_and_what_to_do(name, width):
    made = with_memory(name)
    text = render_text(made, width=width, more="--full")
    lines = text.splitlines()
    assert len(lines) <= 24
    gpu = made.memory[0]
    assert " of the memory at the peak: " in " ".join(lines[:2])
    assert f"peak {size(gpu.peak_bytes)} of {size(gpu.reserved_at_peak_bytes)} reserved" in text
    for kind in list(gpu.kinds.values())[:2]:
        assert f"{size(kind)} " in text
    first = next(line for line in lines if line.startswith("1  "))
    top = next(one for one in made.top(by="pattern", sort="memory") if one.is_module)
    assert top.name in first
    assert f" {top.memory.at_peak_bytes / 1e6:,.0f} " in first
    assert "→ " in text
    assert "--sort wall for time" in text


def test_shares_of_memory_are_of_all_gpus_together():
    made = with_memory()
    (gpu,) = made.memory

    def with_outside(share):
        """The report, with this share of the peak outside of the model."""
        rows = [
            replace(one, memory=replace(one.memory, at_peak_bytes=int(share * gpu.peak_bytes)))
            if one.path == "(outside model)"
            else one
            for one in made.modules
        ]
        return replace(made, modules=tuple(rows))

    def on_two_gpus(report):
        """The same, with a second GPU that has what the first one has."""
        rows = [
            replace(one, memory=replace(one.memory, at_peak_bytes=2 * one.memory.at_peak_bytes))
            if one.memory is not None
            else one
            for one in report.modules
        ]
        return replace(report, modules=tuple(rows), memory=(gpu, replace(gpu, device=1)))

    def ranked(report):
        text = render_text(report, View(order="memory"), width=120, more="--full")
        lines = text.partition("memory MB")[2].partition("\n\n")[0].splitlines()[1:]
        return [re.search(r"^[\d ]*(\S+).*? (\S+%)", line).groups() for line in lines]

    for share, shown in ((0.03, False), (0.08, True)):
        one = with_outside(share)
        assert ranked(one) == ranked(on_two_gpus(one))
        assert ("(outside" in dict(ranked(one))) is shown


def test_where_memory_was_recorded_the_view_by_time_says_how_to_see_it():
    made = with_memory()
    by_time = render_text(made, View(), width=100, more="--full")
    assert "--sort memory for memory" in by_time
    assert by_time != render_text(made, width=100, more="--full")
    assert "memory" not in render_text(vit(), width=100, more="--full")


def test_memory_that_a_trace_has_by_the_way_does_not_come_before_the_time():
    asked = with_memory()
    by_the_way = replace(asked, memory_asked=False)
    by_time = render_text(by_the_way, width=100, more="--full")
    assert by_time == render_text(asked, View(), width=100, more="--full")
    by_memory = render_text(by_the_way, View(order="memory"), width=100, more="--full")
    assert by_memory == render_text(asked, width=100, more="--full")


def test_checkpointing_layers_is_advised_with_what_it_frees_and_its_price():
    made = with_memory()
    (blocks,) = [one for one in made.top(by="pattern") if one.path == "blocks.*"]
    frees = size(blocks.memory.checkpoint_frees_bytes * 11 // 12)
    text = render_text(made, width=200)
    assert f"→ Checkpointing the 12 × blocks.* (Block) would free up to about {frees}, " in text
    nothing = [
        replace(one, memory=replace(one.memory, checkpoint_frees_bytes=0))
        if one.memory is not None
        else one
        for one in made.modules
    ]
    assert "Checkpointing" not in render_text(replace(made, modules=tuple(nothing)), width=200)


def test_checkpointing_frees_no_more_than_the_activations_at_the_peak():
    made = with_memory()
    (device, *_) = made.memory
    at_peak = tuple(
        replace(share, bytes=33) if share.kind == "activation" else share for share in device.live
    )
    elsewhere = replace(made, memory=(replace(device, live=at_peak),))
    assert "Checkpointing" in render_text(made, width=200)
    assert "Checkpointing" not in render_text(elsewhere, width=200)


def test_what_the_screen_has_no_room_for_is_counted_with_what_to_ask_for():
    made = replace(SAMPLES["diagnosed"](), warnings=tuple(f"Warning {n}." for n in range(5)))
    shown, asked = render_text(made, width=200, more="--full").rsplit("\n", 1)
    assert asked == (
        "Next: --full for 110 more modules, 3 more warnings · --by pattern for repeated layers · "
        "backspot explain sorted-indexing"
    )
    assert "Warning 2." not in shown
    everything = render_text(made, View(top=None), width=200, full=True)
    assert all(f"Warning {n}." in everything for n in range(5))
    assert "Next: " not in everything
    assert 'Next: report.save("report.txt") for 110 more modules' in render_text(made, width=80)


@pytest.mark.parametrize(("layers", "offered"), [(5, False), (6, True)])
def test_grouping_by_pattern_is_offered_where_it_shortens_a_list_that_is_longer_than_a_screen(
    layers, offered
):
    walls = [16_000_000, *(9_000_000 - n for n in range(1, layers))]  # the first is the answer
    made = report([row(str(n), wall=wall) for n, wall in enumerate(walls)])
    assert ("for repeated layers" in render_text(made, width=100)) == offered
    named = report([row(f"layer{n}", wall=9_000_000 - n) for n in range(layers)])
    assert "for repeated layers" not in render_text(named, width=100)


def test_layers_that_are_the_answer_together_are_one_row_of_the_screen():
    text = render_text(even_vit(), width=100)
    assert "\n1  blocks.*.mlp.fc1 " in text
    assert 'report.top(by="path") for single modules' in text
    for single in (
        render_text(even_vit(), width=100, regroup=False),
        render_text(even_vit(), width=100, full=True),
    ):
        assert re.search(r"^\d  blocks\.11\.mlp\.fc1 ", single, re.MULTILINE)


@pytest.mark.parametrize(
    ("layers", "rest", "said", "where"),
    [
        # Layers that are alike are the answer together, however large the share of each is.
        ([11, 11, 11, 11], 5, "4 × layers.*.up (Linear) take", "head"),
        ([30, 29, 21, 20], 0, "4 × layers.*.up (Linear) take", "head"),
        # One that stands out is the answer by itself.
        ([17, 11, 11, 11], 5, "layers.0.up (Linear) takes", "head"),
        ([25, 2, 2, 2], 5, "layers.0.up (Linear) takes", "head"),
        # So is a module that takes longer than each of them, and is no layer.
        ([11, 11, 11, 11], 15, "head (Linear) takes", "head"),
        # A module around the layers, which takes what they leave over, is not.
        ([11, 11, 11, 11], 15, "4 × layers.*.up (Linear) take", "layers"),
        ([11, 11, 11, 11], 15, "4 × layers.*.up (Linear) take", ""),
        # Two are no majority of anything.
        ([30, 29], 5, "layers.0.up (Linear) takes", "head"),
    ],
)
def test_layers_that_are_alike_are_the_answer_together(layers, rest, said, where, tmp_path):
    rows = [row(f"layers.{at}.up", wall=1_000_000 * ms) for at, ms in enumerate(layers)]
    made = report([*rows, row(where, wall=1_000_000 * rest)])
    assert render_text(made, width=100).startswith(said)
    assert render_text(made, width=100, full=True).startswith(said)
    markdown = made.save(tmp_path / "report.md").read_text("utf-8").replace("`", "")
    assert said in markdown.replace("\\*", "*")
    for html in (made.save(tmp_path / "report.html").read_text("utf-8"), made._repr_html_()):
        assert said in re.sub("<[^>]+>", "", html)


@pytest.mark.parametrize("isatty", [True, False])
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_no_line_ends_between_a_number_and_its_unit(step, isatty, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: isatty, raising=False)
    made = SAMPLES["diagnosed"]()
    for width in range(40, 100, step):
        monkeypatch.setenv("COLUMNS", str(width))
        for text in (str(made), render_text(made, full=True)):
            lines = text.splitlines()
            assert not [line for line in lines if re.match(r" *(µs|ms|s|MB|GB)\b", line)]
            assert max(map(cell_len, lines)) <= width or not isatty


@pytest.mark.parametrize("name", ["h200/two_streams", "memory/vit"])
def test_no_line_begins_with_a_dot_or_ends_with_a_multiplication_sign(name):
    made = locate(DATA / f"{name}.trace.json.gz")
    lines = [
        line.strip()
        for width in range(60, 100)
        for line in render_text(made, width=width, full=True).splitlines()
    ]
    assert "12 × blocks.*.mlp.act" in " ".join(lines) or name != "memory/vit"
    assert not [line for line in lines if line.startswith("·") or line.endswith("×")]


def test_steps_of_several_passes_say_how_many():
    made = locate(DATA / "h200" / "gradient_accumulation.trace.json.gz")
    assert "\n2 profiler steps (6 passes) of 9.5 ms with the profiler" in render_text(
        made, width=80
    )


def test_a_phase_that_is_longer_than_any_backward_comes_first():
    times = {"data": [50_000_000] * 3, "backward": [20_000_000] * 3}
    made = report([row("fc", wall=60_000_000)], phases=phases(times))
    assert render_text(made, width=100).splitlines()[:2] == [
        "Waiting for data takes 71% of the step: 50.0 ms, more than the backward of any module.",
        "fc (Linear) takes 100% of the backward: 20.0 ms",
    ]
    short = {"data": [5_000_000] * 3, "backward": [20_000_000] * 3}
    made = report([row("fc", wall=60_000_000)], phases=phases(short))
    assert render_text(made, width=100).startswith("fc (Linear) takes")


def test_a_phase_that_comes_first_has_advice_from_a_finding_or_else_from_its_meaning():
    times = {"optimizer": [50_000_000] * 3, "backward": [20_000_000] * 3}
    found = SAMPLES["diagnosed"]().findings[0]
    made = report([row("fc", wall=60_000_000)], phases=phases(times), findings=(found,))
    advice = "Look first at what it does for each parameter"
    assert advice in " ".join(render_text(made, width=100).split())
    about = replace(found, places=(Place("(optimizer)", "", 1, 9),))
    told = " ".join(render_text(replace(made, findings=(about,)), width=100).split())
    assert told.startswith("The optimizer takes 71% of the step")
    assert advice not in told


def test_without_a_terminal_no_table_is_wider_than_80_columns_and_paths_come_before_times(
    monkeypatch,
):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    path = "decoder.layers.11.self_attention.output_projection"
    rows = [
        row(f"{path}.{at}", "Linear", wall=9_000_000, calls=3, nodes=(node("MmBackward0", 9),))
        for at in ("left", "right")
    ]
    for text in (str(report(rows)), str(report(rows)[f"{path}.right"])):
        assert f"{path}.right" in text.partition("\n\n")[2]
        assert max(map(len, text.splitlines())) <= 80


def test_a_path_that_is_cut_begins_with_a_whole_name():
    path = ".".join(f"level{number}" for number in range(40))
    text = render_text(report([row(path, wall=9_000_000)]), width=80)
    assert re.search(r"^1  ….level\d+.*level39 ", text, re.M)


def test_a_warning_is_shown_to_its_end():
    advice = f"Something {'long ' * 60}happened: do this."
    text = render_text(report([row("fc", wall=9_000_000)], warnings=(advice,)), width=80)
    assert " ".join(advice.split()) in " ".join(text.split())


def test_a_range_wider_than_twice_its_start_says_so_in_a_word():
    wide = Saving(9_000_000, 2_000_000, 19_000_000)
    narrow = Saving(9_000_000, 8_000_000, 10_000_000)
    slow = row("fc", wall=1_000_000, nodes=(node("MmBackward0", 900_000),))
    said = [
        render_text(report([replace(slow, saves=saves)]), width=200) for saves in (wide, narrow)
    ]
    assert "9.0 ms less (uncertain, 2.0 ms to 19.0 ms)" in said[0]
    assert "9.0 ms less (8.0 ms to 10.0 ms)" in said[1]


def test_much_time_of_the_engine_itself_is_explained_with_what_makes_it_less():
    def said(engine):
        rows = [row("fc", wall=100 - engine), row("(autograd engine)", wall=engine)]
        return render_text(report(rows), width=80)

    assert "fewer, larger operations" in said(25)
    assert "fewer, larger operations" not in said(6)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_path_is_cut_for_a_terminal_only(monkeypatch, terminal):
    path = ".".join(f"level{number}" for number in range(40))
    made = report(
        [row(path, wall=9_000_000)],
        findings=(replace(SAMPLES["diagnosed"]().findings[0], places=(Place(path, "A", 1, 9),)),),
    )
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    text = str(made)
    assert text.count(path) == (0 if terminal else 2)  # the answer and the finding
    assert str(made[path]).count(path) == (0 if terminal else 1)
    assert path not in render_text(made, width=80)


@pytest.mark.parametrize(("ns", "shown"), [(0, "0"), (1, "0.0"), (499_999, "0.0"), (600_000, "1")])
def test_very_little_is_told_apart_from_nothing(ns, shown):
    assert milliseconds(ns, 0) == shown


@pytest.mark.parametrize("by", ["class", "pattern"])
def test_groups_read_as_they_did(golden, by):
    golden(f"even_vit.{by}.txt", render_text(even_vit(), View(by=by), width=100) + "\n")


@pytest.mark.parametrize("sort", ["gpu", "cpu"])
def test_other_rankings_read_as_they_did(golden, sort):
    golden(f"vit.{sort}.txt", render_text(vit(), View(5, 1, sort), width=80) + "\n")


def test_a_module_with_its_children_reads_as_it_did(golden):
    golden("subtree.txt", render_subtree(vit()["blocks.3"], width=100) + "\n")


def test_the_first_line_says_the_answer():
    first = render_text(vit(), width=100).splitlines()[0]
    assert first == (
        "patch_drop (PatchDropout) takes 18% of the backward: 5.2 ms, mostly GatherBackward0"
    )


def test_the_line_of_source_stands_below_the_answer():
    second = render_text(SAMPLES["vit_with_lines"](), width=100).splitlines()[1]
    assert second == (
        "  ← timm/layers/patch_dropout.py:45  x = x.gather(1, keep_indices.unsqueeze(-1)"
    )


def test_a_line_that_only_called_the_module_is_told_as_such():
    text = render_text(SAMPLES["vit_with_call_sites"](), width=100, full=True)
    assert "\n  ← called at timm/layers/mlp.py:48  x = self.fc1(x)\n" in text
    assert "called at" in text.split("slowest node")[2]


def test_layers_that_are_slow_together_are_the_answer_where_no_module_stands_out():
    first = " ".join(render_text(even_vit(), width=100).splitlines()[:2])
    assert first.startswith("12 × blocks.*.mlp.fc1 (Linear) take 21% of the backward")
    assert "no single module takes more than 2.7%" in first


def test_time_that_no_module_owns_is_part_of_the_answer_once_it_is_much():
    slow = [row("fc", wall=6_000_000), row("(outside model)", wall=9_000_000, is_module=False)]
    assert "60% belongs to no module" in render_text(report(slow), width=200).splitlines()[1]


def test_without_labels_nodes_are_ranked_and_the_remedy_is_named():
    text = render_text(unlabelled(), width=100)
    assert "The trace names no modules" in text
    assert "GatherBackward0, takes 38%" in text
    assert "backspot.instrument(model)" in text


def test_what_no_module_owns_stands_below_the_modules_without_a_rank():
    lines = render_text(vit(), View(top=3), width=80, full=True).splitlines()
    heading = lines.index("   owned by no module:")
    assert lines[heading - 1].startswith("3  blocks.")
    assert lines[heading + 1].startswith("   (autograd engine)")


def test_a_row_is_one_line_and_the_end_of_a_long_path_stays():
    path = ".".join(f"level{number}" for number in range(40)) + ".the_end"
    lines = render_text(report([row(path, wall=9_000_000)]), width=80).splitlines()
    assert [line for line in lines if line.startswith("1  …") and "the_end" in line]


def test_columns_go_before_a_path_that_can_be_read_is_cut():
    path = "decoder.layers.11.self_attn.out_proj"
    rows = [
        row(path, "Linear", wall=9_000_000, calls=3, nodes=(node("AddmmBackward0", 9_000_000),))
    ]
    narrow, middle, wide = (render_text(report(rows), width=w) for w in (84, 100, 120))
    assert all(f" {path} " in text.partition("\n\n")[2] for text in (narrow, middle, wide))
    heads = [text.splitlines()[text.splitlines().index("") + 1].split() for text in (narrow, wide)]
    assert "calls" not in heads[0]
    assert {"wall", "share"} < set(heads[0])
    assert {"calls", "class", "CPU", "GPU"} < set(heads[1])


def test_layers_of_two_classes_with_one_pattern_are_told_apart():
    classes = ("Conv2d", "LeakyReLU", "Conv2d", "LeakyReLU")
    rows = [row(f"netD.{at}", name, wall=9_000 - at) for at, name in enumerate(classes)]
    text = render_text(
        report([*rows, row("netG", "Linear", wall=8_000)]), View(by="pattern"), width=80
    )
    assert re.findall(r"^\d  (\S+(?: \(\w+\))?) ", text, re.M) == [
        "netD.* (Conv2d)",
        "netD.* (LeakyReLU)",
        "netG",
    ]


def test_a_path_beyond_all_measure_does_not_drive_all_other_columns_away():
    long = ".".join(f"level{number}" for number in range(60))
    head = render_text(report([row(long, "Linear", wall=9_000)]), width=120)
    assert {"class", "wall", "share", "GPU", "CPU", "calls"} < set(
        head.partition("\n\n")[2].split()
    )


def test_the_rows_left_out_are_counted_and_none_is_when_all_are_shown():
    assert "112 more modules take 22.1 ms (77%) in total; see --top 115" in render_text(
        vit(), View(top=3), width=80, full=True
    )
    assert "for 112 more modules" in render_text(vit(), View(top=3), width=80)
    for full in (True, False):
        assert "more module" not in render_text(vit(), View(top=None), width=80, full=full)


def test_a_request_that_cannot_be_meant_is_refused():
    with pytest.raises(UsageError, match="depth=-1"):
        render_text(vit(), View(depth=-1))
    with pytest.raises(UsageError, match="choose one of wall, gpu, cpu"):
        render_text(vit(), View(sort="time"))


def test_ranking_by_gpu_time_without_a_gpu_says_so():
    first = render_text(SAMPLES["vit_on_a_cpu"](), View(sort="gpu"), width=100).splitlines()[0]
    assert "no GPU time" in first


def test_a_report_prints_at_the_terminals_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert str(vit()) == render_text(vit(), width=72)
    assert str(vit()["blocks.3"]) == render_subtree(vit()["blocks.3"], width=72)


def test_the_environment_has_no_say_in_a_given_width_and_colour(monkeypatch):
    plain, colored = (render_text(vit(), width=80, color=color) for color in (False, True))
    for name, value in {
        "FORCE_COLOR": "1",
        "NO_COLOR": "1",
        "COLUMNS": "40",
        "TERM": "dumb",
    }.items():
        monkeypatch.setenv(name, value)
    assert render_text(vit(), width=80) == plain
    assert render_text(vit(), width=80, color=True) == colored
    assert ESCAPES.sub("", colored) == plain


@pytest.mark.parametrize("color", [False, True])
def test_names_cannot_steer_the_terminal(color):
    text = ESCAPES.sub("", render_text(odd(), View(top=None), width=200, color=color))
    assert all(character.isprintable() for line in text.splitlines() for character in line)
    assert "\\x1b[31malert\\x1b[0m\\x07" in text
    assert "\\u202eeman" in text
    assert "[bold]markup[/bold]" in text
    text.encode()
    ranked = text.split("made by")[0]
    assert len(ODD_NAMES) == len(re.findall(r"^ *\d+  ", ranked, re.MULTILINE))


@pytest.mark.parametrize("name", [" ", "  ", "\u3000", " " * 60])
def test_a_name_that_is_blank_takes_its_room_of_the_line(name):
    row = replace(SAMPLES["diagnosed"]().modules[0], path=name, class_name="", is_module=True)
    made = replace(SAMPLES["diagnosed"](), modules=(row,), findings=())
    for width in range(40, 60):
        assert all(cell_len(line) <= width for line in render_text(made, width=width).splitlines())


def test_a_rule_of_a_saved_report_is_cut_where_its_name_is_wider_than_the_screen():
    found = SAMPLES["diagnosed"]()
    (first, *rest) = found.findings
    long = replace(found, findings=(replace(first, rule="r" * 60), *rest))
    lines = render_text(long, View(), width=60).splitlines()
    assert "backspot explain " + "r" * 42 + "…" in lines


@given(
    reports(),
    st.integers(40, 200),
    st.sampled_from(("wall", "gpu", "cpu")),
    st.sampled_from(("path", "class", "pattern")),
    st.none() | st.integers(0, 3),
)
def test_any_report_fits_its_width_in_printable_characters(any_report, width, sort, by, depth):
    text = render_text(any_report, View(None, depth, sort, by), width=width)
    text.encode()
    for line in text.splitlines():
        assert line.isprintable()
        assert cell_len(line) <= width
        assert line == line.rstrip()
    colored = render_text(any_report, View(None, depth, sort, by), width=width, color=True)
    assert ESCAPES.sub("", colored) == text
    for one in any_report.modules:
        render_subtree(any_report[one.path], width=width).encode()


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_facts_break_between_facts_only_and_a_line_that_goes_on_says_so(step):
    made = SAMPLES["diagnosed"]()
    for width in range(60, 120, step):
        text = render_text(made, width=width, full=True)
        told = text.partition("\n\n")[0].partition("Backward ")[2].split("\n")
        assert " ".join(told) == (
            "28.6 ms per step · CPU 3.3 ms · GPU 27.8 ms · times in ms per step · "
            "modules by Backspot's labels · 3 profiler steps of 45.7 ms with the profiler "
            "Step: 3.0% waiting for data · 1.0% copies to the GPU · 22% forward · 1.0% loss · "
            "62% backward · 7.0% optimizer · 4.0% idle"
        )
        for line in told:
            assert line.endswith((" ·", "with the profiler", "4.0% idle"))


def test_a_fact_that_comes_first_keeps_its_capitals():
    copy = Phase("copy", 9_000, 9_000, (), 9_000)
    one = replace(SAMPLES["diagnosed"](), phases=(copy,), step_ns=9_000)
    assert "Step: 100% copies to the GPU\n" in render_text(one, width=80)


def test_what_to_mistrust_stands_before_the_numbers():
    one = report([row("fc", wall=9)], warnings=("The trace is cut short.", "Another matter."))
    lines = render_text(one, width=80).splitlines()
    first = lines.index("! The trace is cut short.")
    assert lines[first + 1 : first + 3] == ["! Another matter.", ""]
    assert lines[first + 3].split()[:2] == ["#", "module"]


def test_what_was_found_stands_below_the_table_with_its_cost_its_place_and_its_remedy():
    text = render_text(SAMPLES["diagnosed"](), width=160, full=True)
    table, _, found = text.partition("Why, and what to do\n")
    assert "patch_embed.proj" in table
    assert found.splitlines()[:3] == [
        "1. Indexing backward sorts its indices: 5.1 ms, 11% of the step in "
        "patch_drop (PatchDropout), patch_dropout.py:47.",
        "   GatherBackward0 takes 5.1 ms in 1 node a step; 6 kernels of it sort (0.5 ms).",
        "   → Index whole rows instead: x[torch.arange(len(x))[:, None], keep].",
    ]
    assert "Why" not in render_text(vit(), width=160)


def test_a_finding_that_does_not_hold_in_every_step_says_in_how_many_it_does():
    found = render_text(SAMPLES["varied"](), width=160)
    assert "5.1 ms, 8.4% of the step (in 9 of 10 steps) in patch_drop (PatchDropout)," in found


def test_the_table_shows_how_much_each_row_varies_and_drops_that_column_first():
    of = SAMPLES["varied"]()
    wide, narrow = (render_text(of, width=width).splitlines() for width in (160, 60))
    head = next(line for line in wide if "module " in line)
    assert "±" in head
    first = next(line for line in wide if line.startswith("1  "))
    assert " 5.26 0.39 " in first
    assert of["patch_drop"].row.wall_spread_ns == pytest.approx(390_000, abs=9_000)
    assert "±" not in "\n".join(narrow)
    assert "forward" in head


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fewer_than_three_steps_show_no_spread(steps):
    made = report([row("fc", wall=9_000, steps=steps)], step_ns=(9_000,) * steps)
    assert ("±" in render_text(made, width=160)) == (steps == 3)


def test_a_step_that_takes_far_longer_is_named_among_the_warnings():
    text = render_text(SAMPLES["varied"](), width=160)
    assert "! Step 7 took 64.7 ms longer (waiting for data). The numbers are means over the" in text


def test_what_a_step_took_longer_is_recorded_time_beside_real_times():
    made = SAMPLES["varied"]()
    text = render_text(changed(made, clock="real"), width=160)
    assert "! Step 7 took 64.7 ms longer with the profiler (waiting for data)." in text


PHASES = ("data", "copy", "loss", "optimizer", "other", "idle")


@pytest.mark.parametrize("name", PHASES)
def test_a_long_phase_is_explained_in_every_output_and_a_short_one_is_not(name):
    def outputs(ms):
        times = {"backward": [100_000_000 - ms] * 3, name: [ms] * 3}
        made = report([row("fc", wall=9_000_000)], phases=phases(times))
        forms = [renderer_for(f"x.{suffix}")(made).decode() for suffix in ("html", "md")]
        return [render_text(made, width=500), made._repr_html_(), *forms]

    assert all(
        "21% of the step)" in text and "look first at" in text for text in outputs(21 * 10**6)
    )
    assert not any("look first at" in text for text in outputs(19 * 10**6))


@given(
    st.lists(st.lists(st.integers(10**6, 10**8), min_size=3, max_size=3), min_size=1, max_size=12)
)
def test_the_phases_add_up_to_the_step_also_where_they_are_slow_in_other_steps(by_step):
    names = ("forward", "backward", "optimizer")
    times = {name: [step[at] for step in by_step] for at, name in enumerate(names)}
    made = report([row("fc", steps=len(by_step))], phases=phases(times))
    line = render_text(made, width=400, full=True).partition("Step: ")[2].splitlines()[0]
    # Three shares are rounded to a whole percent.
    assert sum(map(float, re.findall(r"([\d.]+)%", line))) == pytest.approx(100, abs=1.5)


@pytest.mark.parametrize(
    ("looked", "lacks", "found", "said"),
    [
        (23, {}, False, "No cause found by 23 rules."),
        (14, {"a GPU": 9}, False, "No cause found by 14 rules; of others, 9 need a GPU."),
        (
            14,
            {"a GPU": 1, "stacks": 2},
            True,
            "Of 17 rules, 1 needs a GPU, 2 need lines of Python (--stacks).",
        ),
        (23, {}, True, ""),
        (0, {}, False, ""),
    ],
)
def test_every_output_says_how_many_rules_looked(looked, lacks, found, said):
    findings = SAMPLES["diagnosed"]().findings if found else ()
    did = ["nothing"] * looked + [f"needs {what}" for what, n in lacks.items() for _ in range(n)]
    rules = {f"rule-{number}": state for number, state in enumerate(did)}
    made = report([row("fc", wall=9_000)], findings=findings, rules=rules)
    forms = [renderer_for(f"x.{suffix}")(made).decode() for suffix in ("html", "md")]
    for text in (render_text(made, width=200, full=True), made._repr_html_(), *forms):
        assert said in text
        assert ("No cause found" in text) == (looked > 0 and not found)
        assert bool(re.search(r"\d rules", text)) == bool(said)


def test_the_screen_asks_for_stacks_where_they_would_let_a_rule_look():
    rules = {"python-code": "needs stacks", "code-around-model": "needs stacks", "casts": "found"}
    made = report([row("fc", wall=9_000)], rules=rules)
    assert "record with --stacks for 2 more rules" in render_text(made, width=200)
    made = report([row("fc", wall=9_000)], rules={**rules, "slow-path": "needs shapes"})
    assert "record with --shapes --stacks for 3 more rules" in render_text(made, width=200)
    recorded = report([row("fc", wall=9_000)], rules={"python-code": "nothing"})
    assert "--stacks" not in render_text(recorded, width=200)


def test_the_first_four_findings_are_on_the_screen_and_the_others_are_counted():
    one = SAMPLES["diagnosed"]().findings[0]
    made = report([row("fc", wall=9)], findings=(one,) * 7)
    text = render_text(made, width=160)
    assert text.count(f"{one.title}: ") == 4
    assert "for 3 more findings" in text
    assert render_text(made, width=160, full=True).count("Index whole rows") == 7


def test_other_findings_have_their_line_before_what_says_the_training_again():
    sorting, copying = SAMPLES["diagnosed"]().findings
    ms = 1_000_000
    training = Training(
        steps=40,
        counted=30,
        step_ns=45 * ms,
        data_ns=0,
        forward_ns=10 * ms,
        backward_ns=30 * ms,
        optimizer_ns=5 * ms,
        typical_ns=45 * ms,
        longest_ns=50 * ms,
    )
    remedy = "Write it as one kernel, which reads each number once. " * 8
    full = replace(
        SAMPLES["diagnosed"](),
        findings=(replace(sorting, remedy=remedy), copying),
        training=training,
        warnings=("Beware of this.", "Beware of that."),
    )
    text = render_text(full, width=80)
    assert f"2. {copying.title}: " in text
    assert "The training: " not in text
    assert len(text.splitlines()) <= 26
    assert "The training: " in render_text(replace(full, findings=full.findings[:0]), width=80)


# A fragment of a trace: the device's work is there in part, and the rest looks idle.


def fragment(path, *, started, labelled=True):
    """One node of 0.14 ms, whose kernel of 0.05 ms runs at ``started`` ms."""
    trace = Trace()
    if labelled:
        trace.forward("fc", "Linear", 0, 50_000)
    trace.operator("aten::addmm", 10_000, 20_000, seq=1)
    trace.node("AddmmBackward0", 100_000, 240_000, seq=1)
    start = round(started * 1e6)
    trace.kernel(start, start + 50_000, launch=150_000)
    return locate(trace.save(path))


@pytest.mark.parametrize("labelled", [True, False])
def test_idle_time_around_a_node_is_not_told_as_its_own(tmp_path, labelled):
    made = fragment(tmp_path / "t.json", started=64, labelled=labelled)
    first = render_text(made, width=200).splitlines()[0]
    name = "fc (Linear)" if labelled else "AddmmBackward0,"
    assert first.endswith(
        f"{name} itself takes 0.19 ms of the backward; "
        "around it, the backward is idle for 63.8 ms (99.7%)"
    )
    page, notebook, markdown = (
        renderer_for("x.html")(made).decode(),
        made._repr_html_(),
        renderer_for("x.md")(made).decode(),
    )
    for form in (page, notebook, markdown):
        assert " itself takes " in form


def test_a_node_that_waits_for_part_of_its_time_says_for_how_much(tmp_path):
    said = render_text(fragment(tmp_path / "t.json", started=0.32), width=200).splitlines()[0]
    assert said.startswith("fc (Linear) takes 100% of the backward: 0.27 ms (80 µs of it idle), ")
    assert " mostly AddmmBackward0; without it" in said


def test_a_node_that_works_for_its_time_says_nothing_of_idling(tmp_path):
    said = render_text(fragment(tmp_path / "t.json", started=0.2), width=200).splitlines()[0]
    assert "idle" not in said


def test_the_first_line_says_that_a_recording_is_too_noisy_to_rank_and_what_helps():
    made = replace(even_vit(), has_gpu=False, noise=0.27)
    made = replace(made, recorded={"host": "load 9.4, 2 threads of PyTorch, 2 CPUs"})
    text = " ".join(render_text(made, width=80).split())
    assert text.startswith(
        "Too noisy to rank: 27% of the backward may belong to other modules (load 9.4, 2 threads "
        "of PyTorch, 2 CPUs). Record again on an idle machine, with OMP_NUM_THREADS=1 and "
        "--steps 10 (profile(steps=10)). "
    )
    assert "Too noisy" not in render_text(replace(made, noise=0.05), width=80)


def test_idle_time_on_a_cpu_names_the_option_that_records_its_lines():
    idle = phases({"backward": [10**6] * 3, "idle": [9 * 10**6] * 3})
    made = replace(even_vit(), has_gpu=False, phases=idle, step_ns=10**7)
    assert "whose lines backspot run --stacks shows" in " ".join(
        render_text(made, width=80, full=True).split()
    )


def found(rule, saves=None, tried=None):
    places = (Place("(optimizer)", "", 1, 4_000_000),)
    range_of = None if saves is None else Saving(saves, 0, 2 * saves)
    return Finding(rule, rule, "", "Do it.", 4_000_000, places, 3, saves=range_of, tried=tried)


def shown_with(*findings):
    step = ReplayedStep(20_000_000, 19_000_000, 21_000_000, True)
    made = replace(report([row("a", wall=10**7)]), findings=findings, replayed_step=step)
    return made, " ".join(render_text(made, width=100, full=True).split())


def test_what_a_trial_measured_comes_before_what_a_replay_says_and_each_is_said_once():
    now, fused = Variant("as it is", 4_000_000), Variant("fused=True", 1_000_000, 0, 0, 3_000_000)
    helps = Tried("it", (now, replace(fused, saves_high_ns=3_000_000, verdict="helps")), 15)
    _, text = shown_with(found("optimizer-kernels", 1_500_000))
    assert "(1.5 ms less without it)" in text
    made, text = shown_with(found("optimizer-kernels", 1_500_000, helps))
    assert text.count("1.5 ms") == 1
    assert "less without it" not in text
    assert (
        "a step takes at least 3.0 ms less (uncertain, 0 ms to 3.0 ms). By replay it would save 1.5"
        in text
    )
    assert made.answer.saves == Saving(3_000_000, 0, 3_000_000, at_least=True)
    _, text = shown_with(found("optimizer-kernels", 2_900_000, helps))
    assert "By replay" not in text
    worse = Tried("it", (now, replace(fused, ns=5_000_000, verdict="does not help")), 15)
    _, text = shown_with(found("optimizer-kernels", 1_500_000, worse))
    assert text.count("5.0 ms with fused=True.") == 1
    assert "By replay" not in text
    assert "less without it" not in text


def test_a_trial_says_that_its_times_are_cpu_time():
    now, fused = Variant("as it is", 4_000_000), Variant("fused=True", 1_000_000, verdict="helps")
    said = str(Tried("it", (now, fused), 15, cpu_time=True))
    assert "4.0 ms → 1.0 ms of CPU time with fused=True; a step" in said
    worse = Tried("it", (now, replace(fused, verdict="does not help")), 15, cpu_time=True)
    assert "4.0 ms of CPU time as it is" in str(worse)
    assert "CPU time" not in str(replace(worse, cpu_time=False))


def test_a_trial_without_a_verdict_says_why_there_is_none():
    now, sparse = Variant("as it is", 88_000_000), Variant("sparse", verdict="undecided")

    def said(ns, note=""):
        return str(Tried("it", (now, replace(sparse, ns=ns, note=note)), 3))

    assert "Tried here, the times vary too much: 88.0 ms as it is; 0.57 ms with" in said(570_000)
    assert "Tried here, too close to tell: 88.0 ms as it is; 87.0 ms with" in said(87_000_000)
    assert "Tried here, not measured: " in said(0, "no time was left")


def test_two_findings_about_the_same_idle_time_say_so_everywhere():
    made, text = shown_with(found("launch-bound"), found("small-batch"))
    said = "Can be partly the same time as “launch-bound”: do not add them up."
    assert text.count(said) == 1
    for suffix in ("md", "html"):
        assert said in unescape(renderer_for(f"report.{suffix}")(made).decode())
    assert "the same time as" not in shown_with(found("launch-bound"), found("clipping"))[1]


def test_rare_work_that_was_recorded_is_told_once():
    """All steps were noted, and some recorded: these say what the work is."""
    noted = [
        RareWork("work outside the backward", 16.4, 80_000_000, 4_900_000, 0.4),
        RareWork("saving a checkpoint", 100.0, 50_000_000, 500_000, 0.04),
    ]
    steps = Training(
        400, 400, 12_000_000, 0, 8_000_000, 3_000_000, 1_000_000, 10_000_000, 90_000_000
    )
    training = replace(steps, rare=tuple(noted))
    seen = changed(vit(), training=training)
    both = render_text(seen, width=200, full=True)
    assert "Once in 16.4 steps: work outside the backward" in both
    assert "Once in 100 steps: saving a checkpoint" in both
    rollout = RareWork("rollout", 16.0, 80_000_000, 5_000_000, 0.4, (3,))
    once = render_text(changed(seen, rare=(rollout,)), width=200, full=True)
    assert "Once in 16.4 steps" not in once
    assert "Once in 100 steps: saving a checkpoint" in once
    assert "once in 16 steps: rollout" in once
