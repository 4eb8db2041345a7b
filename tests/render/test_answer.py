"""The first sentence of every output: what costs most in the step, wherever it is."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

import backspot
from backspot.render.html import to_html
from backspot.render.json import to_json
from backspot.render.markdown import to_markdown
from backspot.render.notebook import report_html
from backspot.render.text import render_text
from backspot.results.findings import Place, ReplayedStep, Saving
from backspot.results.host import Wait
from backspot.results.trials import Tried, Variant
from support import h200
from support.report_parts import phases, report, row
from support.sample_reports import SAMPLES, diagnosed, reports

STEP = 100_000_000


def step_of(*causes, data=5_000_000, fc=8_000_000):
    """A step of 100 ms: the wait for data, the backward of ``fc``, and mostly the forward."""
    times = {"data": data, "forward": STEP - data - fc, "backward": fc}
    by_step = {name: [ns] * 3 for name, ns in times.items()}
    return report([row("fc", wall=3 * fc)], phases=phases(by_step), findings=causes)


def cause(rule, ms, place, *, saves=True, line="", class_name=""):
    ns = int(ms * 1e6)
    priced = Saving(ns, ns, ns) if saves else None
    places = (Place(place, class_name, 1, ns, line),)
    made = replace(diagnosed().findings[0], rule=rule, title=f"Of {rule}", wall_ns=ns)
    return replace(made, places=places, saves=priced)


def first_line(made):
    return render_text(made, width=400).splitlines()[0]


def test_a_module_that_takes_most_is_the_answer():
    made = step_of(fc=40_000_000)
    assert (made.answer.kind, made.answer.path, made.answer.wall_ns) == ("module", "fc", 40_000_000)
    assert made.answer.share == pytest.approx(0.4)
    assert first_line(made).startswith("fc (Linear) takes 100% of the backward: 40.0 ms")


MS = 3_000_000
"""A millisecond of each of three steps."""


def step_with(*rows, noise=0.0, saves=None):
    """A step of 100 ms with these rows, of which the forward takes what the backward leaves."""
    backward = sum(one.wall_ns for one in rows)
    times = {"forward": [STEP - backward] * 3, "backward": [backward] * 3}
    made = [replace(one, saves=saves and saves.get(one.path)) for one in rows]
    step = ReplayedStep(STEP, STEP, STEP, True) if saves else None
    return replace(report(made, phases=phases(times)), noise=noise, replayed_step=step)


def saving(ms):
    return Saving(ms * 1_000_000, 0, STEP)


@pytest.mark.parametrize("replayed", [True, False])
def test_forward_and_backward_count_together_whether_the_step_can_be_replayed_or_not(replayed):
    rows = [row("fc", wall=12 * MS, forward=6 * MS), row("conv", wall=3 * MS, forward=60 * MS)]
    saves = {"fc": saving(18), "conv": saving(64)} if replayed else None
    made = step_with(*rows, saves=saves)
    assert (made.answer.path, made.answer.wall_ns) == ("conv", 63_000_000)
    assert made.answer.saves == (saving(64) if replayed else None)
    said = "conv (Linear) takes 63% of the step: 63.0 ms, most of it in its forward"
    assert first_line(made).startswith(said)
    in_both = step_with(row("fc", wall=20 * MS), row("conv", wall=18 * MS, forward=9 * MS))
    said = "conv (Linear) takes 27% of the step: 27.0 ms, in its forward and backward."
    assert first_line(in_both) == said


def test_a_layer_that_costs_in_its_forward_is_not_lost_among_its_like():
    names = [f"{number}.conv" for number in range(3)]
    rows = [row(name, wall=5 * MS, forward=MS) for name in names]
    assert step_with(*rows).answer.path == "*.conv"
    rows[1] = row(names[1], wall=5 * MS, forward=70 * MS)
    assert step_with(*rows).answer.path == "1.conv"


def test_layers_that_cost_in_their_forwards_are_the_answer_together():
    rows = [row(f"{number}.watch", wall=0, forward=10 * MS) for number in range(6)]
    made = step_with(*rows, row("fc", wall=9 * MS))
    assert made.answer.path == "*.watch"
    said = "6 × *.watch (Linear) take 60% of the step: 60.0 ms, most of it in their forward."
    assert first_line(made) == said


def test_a_module_that_hides_behind_other_work_is_not_the_answer_for_its_clock_time():
    rows = [row("fc", wall=12 * MS, forward=6 * MS), row("conv", wall=3 * MS, forward=60 * MS)]
    made = step_with(*rows, saves={"fc": saving(18), "conv": saving(0)})
    assert made.answer.path == "fc"


def test_the_forward_has_a_column_where_it_decides():
    def head(made):
        text = render_text(made, width=70)
        return next(line for line in text.splitlines() if line.startswith("#"))

    decides = step_with(row("fc", wall=12 * MS), row("conv", wall=3 * MS, forward=60 * MS))
    assert "forward" in head(decides)
    decides_not = step_with(row("fc", wall=62 * MS), row("conv", wall=3 * MS, forward=MS))
    assert "forward" not in head(decides_not)


def test_what_a_finding_explains_nearly_all_of_is_said_as_the_finding_says_it():
    made = step_with(row("conv", wall=3 * MS, forward=60 * MS))
    slow = cause("slow-kernel", 60, "conv", class_name="Conv2d")
    assert replace(made, findings=(slow,)).answer.rule == "slow-kernel"
    part = cause("slow-kernel", 20, "conv", class_name="Conv2d")
    found = replace(made, findings=(part,)).answer
    assert (found.kind, found.path, found.rule) == ("module", "conv", "slow-kernel")


def test_a_finding_that_does_not_help_here_is_no_answer():
    now, other = Variant("as it is", 4_000_000), Variant("other", verdict="does not help")
    made = cause("slow-kernel", 60, "conv", class_name="Conv2d", saves=False)
    refuted = replace(made, tried=Tried("it", (now, other), 15))
    assert step_of(made).answer.rule == "slow-kernel"
    assert step_of(refuted).answer.rule == ""


def by_turns(path, *steps, gpu=10):
    """A row that takes so many milliseconds of the clock in each step, and of a device."""
    wall, of_gpu = tuple(1_000_000 * ms for ms in steps), (1_000_000 * gpu,) * len(steps)
    made = row(path, wall=sum(wall), gpu=sum(of_gpu))
    return replace(made, wall_ns_by_step=wall, gpu_ns_by_step=of_gpu)


def wavering(*rows, has_gpu=True):
    whole = report(rows)
    wall, gpu = (
        tuple(map(sum, zip(*(getattr(one, f"{of}_ns_by_step") for one in rows), strict=True)))
        for of in ("wall", "gpu")
    )
    return replace(whole, wall_ns_by_step=wall, gpu_ns_by_step=gpu, noise=0.2, has_gpu=has_gpu)


def test_a_module_that_is_clearly_first_is_ranked_although_the_steps_disagree():
    clear = wavering(
        by_turns("fc", 80, 60, 80, gpu=60), by_turns("a", 5, 12, 5), by_turns("b", 9, 3, 5)
    )
    assert first_line(clear).startswith("fc (Linear) takes 85% of the backward")
    open_ = wavering(by_turns("fc", 50, 20, 40), by_turns("a", 20, 45, 30), has_gpu=False)
    assert first_line(open_).startswith("Too noisy to rank: 20% of the backward")


def test_where_the_host_wavers_the_time_of_the_device_ranks():
    rows = by_turns("fc", 50, 20, 40, gpu=3), by_turns("a", 20, 45, 30, gpu=9)
    said = first_line(wavering(*rows))
    assert said.startswith("The host's time wavers. By GPU time, a (Linear) takes 75% of the ")
    assert first_line(wavering(*rows, has_gpu=False)).startswith("Too noisy to rank")


def test_where_nothing_is_steady_the_first_line_says_so():
    changing = [by_turns("fc", 50, 20, 40), by_turns("a", 20, 45, 30)]
    gpu = (9_000_000, 1_000_000, 4_000_000), (1_000_000, 9_000_000, 4_000_000)
    rows = [replace(one, gpu_ns_by_step=of) for one, of in zip(changing, gpu, strict=True)]
    assert first_line(wavering(*rows)).startswith("Too noisy to rank")


def test_a_phase_that_takes_most_is_the_answer_with_what_its_cause_saves():
    loading = cause("slow-loading", 50, "(data)")
    made = step_of(loading, data=55_000_000)
    assert (made.answer.kind, made.answer.path, made.answer.rule) == (
        "phase",
        "(data)",
        "slow-loading",
    )
    assert first_line(made) == (
        "Waiting for data takes 55% of the step: 55.0 ms, more than the backward of any module; "
        "without it, a step would take 50.0 ms less."
    )
    small = step_of(cause("slow-loading", 30, "(data)"), data=55_000_000)
    assert small.answer.saves is None  # without the cause, not all of the phase is gone


def test_a_gain_has_a_bound_only_where_one_is_known():
    def said(**bound):
        loop = cause("a-loop", 30, "fc")
        return first_line(step_of(replace(loop, saves=replace(loop.saves, **bound))))

    assert said().endswith("; without it, a step would take 30.0 ms less.")
    assert said(at_best=True).endswith("; without it, a step would take at most 30.0 ms less.")
    assert said(at_least=True).endswith("; without it, a step would take at least 30.0 ms less.")


def test_a_line_of_python_is_named_with_its_module():
    loop = cause("a-loop", 30, "fc", line="train.py:8", class_name="Linear")
    made = step_of(loop)
    assert (made.answer.kind, made.answer.line) == ("cause", "train.py:8")
    said = "Of a-loop: 30.0 ms, 30% of the step in train.py:8, in fc (Linear); without it,"
    assert first_line(made).startswith(said)
    outside = step_of(cause("a-loop", 30, "(outside model)", line="train.py:8"))
    assert "30% of the step in train.py:8, in no module; without it," in first_line(outside)


def test_waits_that_cost_most_are_the_answer():
    saved = Saving(30_000_000, 20_000_000, 35_000_000)
    line = ("forward", "fc", "Linear", "aten::item", "train.py:9")
    made = replace(
        step_of(),
        waits=(Wait(*line, 51, 40_000_000, 30_000_000, saved),),
        without_waits=saved,
        replayed_step=ReplayedStep(90_000_000, 88_000_000, 92_000_000, True),
    )
    assert (made.answer.kind, made.answer.line, made.answer.rule) == (
        "waits",
        "train.py:9",
        "host-waits",
    )
    assert first_line(made) == (
        "51 waits for the GPU cost 33% of the step, most of it in train.py:9; without them, a step "
        "would take 30.0 ms less (20.0 ms to 35.0 ms)."
    )
    assert replace(made, without_waits=Saving(0, 0, 9)).answer.kind == "nothing"


def test_where_nothing_stands_out_the_answer_says_so():
    made = step_of()
    assert made.answer.kind == "nothing"
    assert first_line(made).startswith("Nothing stands out: no module, no cause and nothing around")


def test_a_cause_all_over_the_step_needs_twice_as_much_as_one_place():
    everywhere = replace(cause("launches", 38, "a"), places=(Place("a", "A", 1, 9_500_000),) * 4)
    assert step_of(everywhere).answer.rule == "launches"
    in_one = cause("a-loop", 20, "fc", line="train.py:8", class_name="Linear")
    assert step_of(everywhere, in_one).answer.rule == "a-loop"


def test_a_cause_that_no_replay_prices_is_no_answer_unless_it_is_most_of_the_step():
    small = cause("batch", 25, "", class_name="Net", saves=False)
    assert step_of(small).answer.rule != "batch"
    large = cause("batch", 90, "", class_name="Net", saves=False)
    made = step_of(large)
    assert made.answer.rule == "batch"
    assert "less" not in first_line(made)


@pytest.mark.parametrize("name", h200.EACH_WITH_BACKWARD)
def test_the_answer_promises_no_more_than_the_report(name):
    made = h200.report_of(name)
    known = [found.saves for found in made.findings] + [one.saves for one in made.modules]
    known += made.layers.values()
    assert made.answer.saves in [None, made.without_waits, *known]
    assert 0 <= made.answer.share <= 1


def words_of(html):
    return " ".join(re.sub(r"<[^>]+>", "", html).split())


@pytest.mark.parametrize("name", ["clip_each", "vit_patch_drop"])
def test_every_output_begins_with_the_same_sentence(name):
    folder = "host" if name == "clip_each" else "h200"
    made = backspot.locate(h200.DATA.parent / folder / f"{name}.trace.json.gz")
    said = first_line(made)
    page = to_html(made).decode()
    assert words_of(page[page.index("<h1>") : page.index("</h1>")]) == said
    cell = report_html(made)
    assert words_of(cell[cell.index('<p class="said">') :]).startswith(said)
    markdown = to_markdown(made).decode().splitlines()[0]
    plain = re.sub(r"&#(\d+);", lambda found: chr(int(found[1])), markdown)
    assert plain.replace("`", "").strip("*") == said
    written = json.loads(to_json(made))["answer"]
    assert written["line"] in said
    assert written["share"] == made.answer.share


@settings(max_examples=60, deadline=None)
@given(reports())
def test_any_report_has_an_answer(made):
    found = made.answer
    assert 0 <= found.share <= 1
    assert found.wall_ns >= 0
    assert found.rule == "" or found.rule in [one.rule for one in made.findings] + ["host-waits"]


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_answer_is_of_the_rows_and_not_of_their_order(name):
    made = SAMPLES[name]()
    assert replace(made, modules=made.modules[::-1]).answer == made.answer
