"""Changes by name: what each of them saves, on traces made by hand and on recorded ones."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

import backspot
from backspot.analysis.replay.host import ZERO
from backspot.render.text import render_text
from backspot.render.view import View
from backspot.results.report import predictor_of
from backspot.trace.compiled import KEY, Parameters, format_compiled
from support import h200
from support.replays import BACKWARD, FORWARD, MS, PATHS, US, Program, recording, unfitted

PAIRS = (
    # A recording with a fault, one without it, and the finding that prices the remedy.
    ("adamw_foreach", "adamw_fused", "optimizer-kernels"),
    ("casts_gelu_vit", "plain_vit", "casts"),
    ("fp32_recommender", "plain_recommender", "no-tensor-cores"),
    ("recompute_tower_recommender", "plain_recommender", "recompute"),
    ("duplicates_skewed_recommender", "plain_recommender", "duplicate-indices"),
    ("sorted_detector", "gather_detector", "sorted-indexing"),
    ("gelu_pow", "gelu_function", "pointwise-chain"),
    ("gelu_erf", "gelu_function", "pointwise-chain"),
)


def update(program: Program, at: int, *tensors: tuple[int, int]) -> None:
    """An update by AdamW: the operators of each tensor, each of which takes so long."""
    start = at
    for length, count in tensors:
        for _ in range(count):
            for name in ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_"):
                program.trace.operator(f"aten::{name}", at, at + length)
                at += length
    program.trace.annotation("Optimizer.step#AdamW.step", start, at)


def trained(folder, *, shares: bool = True, zeroing: int = 0) -> backspot.Report:
    """Two modules on a CPU; ``b`` has a table, and ``a`` ten small tensors.

    Args:
        zeroing: nanoseconds of ``zero_grad`` in each step.
    """
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 2 * MS)
        program.node(step, "a", at + 2 * MS, at + 4 * MS)
        update(program, at + 5 * MS, (1010 * US, 1), (10 * US, 10))
        if zeroing:
            program.trace.annotation("Optimizer.zero_grad#AdamW.zero_grad", at - zeroing, at)
    if shares:
        held = [Parameters("b", "M", 1, 100_000), Parameters("a", "M", 10, 0)]
        program.trace.metadata[KEY] = json.loads(format_compiled([], parameters=held))
    return backspot.locate(program.save(folder))


def test_a_module_is_worth_its_forward_its_backward_and_its_share_of_the_update(tmp_path):
    report = trained(tmp_path)
    table, small = report["b"].row.saves, report["a"].row.saves
    assert set(table.parts) == {"forward", "backward", "optimizer"}
    for saves in (table, small):
        assert sum(saves.parts.values()) == saves.ns
    # Of the update, eight operators take 1,010 microseconds and eighty take 10.
    assert table.parts["optimizer"] == pytest.approx(8.08 * MS, rel=0.05)
    assert small.parts["optimizer"] == pytest.approx(0.8 * MS, rel=0.15)
    assert " ms optimizer." in " ".join(str(report["b"]).split())


def test_a_module_is_worth_its_share_of_zero_grad(tmp_path):
    """No operator says so: it frees the gradients, and takes as long as these are large."""
    plain = trained(tmp_path)
    freed = trained(tmp_path, zeroing=4 * MS)
    gained = {name: freed[name].row.saves.ns - plain[name].row.saves.ns for name in "ab"}
    assert gained["b"] == pytest.approx(4 * MS, rel=0.1)
    assert gained["a"] == pytest.approx(0, abs=0.4 * MS)  # it has hardly any numbers
    parts = freed["b"].row.saves.parts
    assert parts["optimizer"] == pytest.approx(12.08 * MS, rel=0.05)


def test_without_the_number_of_parameters_the_update_is_left_out_and_said_so(tmp_path):
    report = trained(tmp_path, shares=False)
    assert "optimizer" not in report["b"].row.saves.parts
    report.save(tmp_path / "report.txt")
    text = " ".join((tmp_path / "report.txt").read_text().split())
    assert "its share of the optimizer aside, which the trace does not tell" in text


def test_a_fused_optimizer_reads_and_writes_each_parameter_once(tmp_path):
    found = trained(tmp_path).what_if(optimizer="fused")
    # AdamW one by one moves 20 tensors for each parameter, and fused it moves 7.
    assert found.saves_ns == pytest.approx(8.88 * MS - 8.0 * MS * 7 / 20, rel=0.1)


def test_each_of_two_optimizers_is_fused_by_what_it_moves_itself(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 2 * MS)
        update(program, at + 3 * MS, (500 * US, 1), (10 * US, 10))
        program.trace.operator("aten::add_", at + 8 * MS, at + 12 * MS)
        program.trace.annotation("Optimizer.step#SGD.step", at + 8 * MS, at + 12 * MS)
    found = backspot.locate(program.save(tmp_path)).what_if(optimizer="fused")
    # SGD moves no less with its one operator fused.
    assert found.saves_ns == pytest.approx(4.8 * MS - 4.0 * MS * 7 / 20, rel=0.1)


@pytest.mark.parametrize(
    ("taken", "has_it"),
    [
        (None, True),  # recorded without Backspot: the name counts
        ("AdamW", True),
        ("no class", False),
        ("NAdam", False),  # which has no fused form
    ],
)
def test_an_optimizer_has_a_fused_form_by_its_class_and_not_by_its_name(tmp_path, taken, has_it):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 2 * MS)
        update(program, at + 3 * MS, (500 * US, 1), (10 * US, 10))
        if taken is not None:
            begin = at + 3 * MS + US
            mark = f"optimizer with the arguments of {taken}"
            program.trace.annotation(mark, begin, begin + 1)
    report = backspot.locate(program.save(tmp_path))
    remedies = [one.remedy for one in report.findings if one.rule == "optimizer-kernels"]
    assert ["fused=True" in remedy for remedy in remedies] == [True] * has_it
    if has_it:
        assert report.what_if(optimizer="fused").saves_ns > 0
    else:
        with pytest.raises(backspot.UsageError, match="AdamW has no fused form"):
            report.what_if(optimizer="fused")


@pytest.mark.parametrize(
    ("name", "gpu", "saved"),
    [
        ("_fused_adamw_", True, 4000 * US),  # all that the host does goes with groups
        ("_fused_adamw_", False, 2000 * US),  # what operators compute does not
        ("addcdiv_", True, 1900 * US),  # these run for each parameter anyway, as what is between
        ("addcdiv_", False, 1900 * US),  # the parameters of a group does
    ],
)
def test_groups_with_equal_settings_are_updated_as_one(tmp_path, name, gpu, saved):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 2 * MS)
        begin = at + 5 * MS
        for number in range(40):
            start = begin + number * 100 * US
            for parameter in range(3):
                if name == "addcdiv_" or not parameter:
                    end = start + (15 if name == "addcdiv_" else 50) * US
                    program.trace.operator(f"aten::{name}", start, end)
                    start = end + US
            if gpu:
                ready = begin + number * 100 * US + 10 * US
                program.trace.kernel(ready, ready + 2 * US, launch=ready - 5 * US)
        program.trace.annotation("groups of the optimizer: 40 for 10", begin, begin + 1)
        program.trace.annotation("Optimizer.step#AdamW.step", begin, begin + 4 * MS)
    report = backspot.locate(program.save(tmp_path))
    (found,) = (one for one in report.findings if "groups" in one.title)
    assert found.saves.ns == pytest.approx(saved * 3 / 4, rel=0.1)


def test_a_phase_that_takes_half_the_time_saves_the_other_half(tmp_path):
    trained(tmp_path)
    found = unfitted(recording(tmp_path / "trace.json"), ZERO)
    saves = found.what_if({"phases": {"optimizer": 0.5}}).saves_ns
    assert saves == pytest.approx(8.88 * MS / 2, rel=0.02)
    assert found.what_if({"phases": {"averaging": 0.0}}).saves_ns == 0


def test_a_step_can_do_without_the_time_in_which_its_host_is_idle(tmp_path):
    phases = {phase.name: phase.wall_ns for phase in trained(tmp_path).phases}
    found = unfitted(recording(tmp_path / "trace.json"), ZERO)
    saves = found.what_if({"phases": {"idle": 0.0}}).saves_ns
    assert saves == pytest.approx(phases["idle"], rel=0.01)


def test_a_remedy_that_makes_more_work_faster_says_that_it_saves_at_least_so_much():
    report = backspot.locate(PATHS["watched_layers"])
    (found,) = (one for one in report.findings if one.rule == "anomaly-mode")
    assert found.saves.at_least
    shown = replace(report, findings=(replace(found, saves=replace(found.saves, ns=1_000_000)),))
    assert "(at least 1.0 ms less without it)" in " ".join(str(shown).split())


def test_without_a_layout_that_nobody_reads_a_step_saves_the_copies_of_its_forward_too():
    report = backspot.locate(PATHS["layout_windows_vit"])
    (found,) = (one for one in report.findings if one.rule == "layout-copies")
    assert found.saves.ns > 1.2 * found.wall_ns  # which is that of the backward's
    assert not found.saves.at_least


@pytest.mark.parametrize(
    ("name", "layout"), [("doubled_map", "channels_last)"), ("grouped_volume", "channels_last_3d)")]
)
def test_another_layout_for_convolutions_has_no_price_as_other_kernels_run_then(name, layout):
    report = backspot.locate(PATHS[name])
    (found,) = (one for one in report.findings if one.rule == "layout-copies")
    assert found.saves is None
    assert "only a trial gives a price" in found.seen
    assert layout in found.remedy


@pytest.mark.parametrize(
    ("name", "norms", "others"),
    [
        ("layout_group_norm_unet", "NativeGroupNormBackward0", "NativeBatchNormBackward0"),
        ("layout_instance_norm_unet", '"aten::instance_norm"', '"aten::normalized"'),
    ],
)
def test_a_model_stays_in_nchw_for_norms_that_a_gpu_computes_in_no_other_layout(
    tmp_path, name, norms, others
):
    """With few of them among its norms, and with batch norms alone, it does not."""
    text = gzip.decompress(Path(PATHS[name]).read_bytes()).decode()
    path = tmp_path / "t.json"
    for keep in (None, 8, 0):
        parts = text.split(norms)
        kept = len(parts) if keep is None else keep + 1
        path.write_text(others.join([norms.join(parts[:kept]), *parts[kept:]]))
        report = backspot.locate(path)
        (found,) = (one for one in report.findings if one.rule == "layout-copies")
        assert found.saves is None
        assert ("Leave the model in NCHW, and compile it" in found.remedy) is (keep is None)
        assert ("memory_format=torch.channels_last)" in found.remedy) is (keep is not None)


def test_in_channels_last_the_copies_are_in_the_norms_that_know_nchw_alone(tmp_path):
    text = gzip.decompress(Path(PATHS["layout_group_norm_unet"]).read_bytes()).decode()
    path = tmp_path / "t.json"
    path.write_text(text.replace('"aten::native_group_norm_backward"', '"aten::contiguous"'))
    report = backspot.locate(path)
    (found,) = (one for one in report.findings if one.rule == "layout-copies")
    assert "Leave the model in NCHW" in found.remedy


def test_convolutions_of_sequences_have_no_other_layout_to_be_told_of(tmp_path):
    path = tmp_path / "trace.json"
    text = gzip.decompress(Path(PATHS["doubled_map"]).read_bytes()).decode()
    assert "aten::conv2d" in text
    path.write_text(text.replace("aten::conv2d", "aten::conv1d"))
    assert backspot.locate(path).rules["layout-copies"] == "nothing"


def test_a_remedy_that_does_the_same_in_another_form_says_that_it_saves_at_best_so_much():
    report = backspot.locate(PATHS["loop_decay"])
    (found,) = (one for one in report.findings if one.rule == "operator-loop")
    assert found.saves.at_best
    text = render_text(report, View(preview=True))
    assert f"{found.saves.ns / 1e6:.2g} ms less at best" in " ".join(text.split())


def test_without_repeats_a_step_saves_those_too_through_which_no_gradient_flows(tmp_path):
    program = Program()
    for step, at in program.steps():
        begin = at - BACKWARD + FORWARD + MS
        program.trace.forward("canvas", "M", begin, begin + 6 * MS)
        program.trace.operator("aten::repeat", begin + US, begin + 5 * MS)
        program.node(step, "b", at, at + MS)
    report = backspot.locate(program.save(tmp_path))
    (found,) = (one for one in report.findings if one.rule == "repeated-tensor")
    assert found.saves.ns == pytest.approx(5 * MS, rel=0.05)
    assert found.saves.at_least


@pytest.mark.parametrize(("count", "known"), [(1, True), (50, False)])
def test_a_few_long_kernels_have_a_price_where_the_host_decides_too(tmp_path, count, known):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 6 * MS)
        for number in range(count):
            begin = at + 20 * US + number * 5 * MS // count
            name, end = "cdist_kernel_cuda_impl<float>", begin + 5 * MS // count
            program.trace.kernel(begin, end, launch=at + 10 * US, name=name)
        program.call("cudaStreamSynchronize", at + 30 * US, at + 5_025 * US)
        program.node(step, "a", at + 6 * MS, at + 14 * MS)
    report = backspot.locate(program.save(tmp_path))
    (found,) = (one for one in report.findings if one.rule == "pairwise-distance")
    assert (found.saves is not None) == known
    if known:
        assert found.saves.ns == pytest.approx(5 * MS, rel=0.05)


def test_who_reads_no_values_waits_for_none_and_copies_none(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 6 * MS)
        program.trace.kernel(at + 20 * US, at + 5 * MS, launch=at + 10 * US)
        program.trace.operator("aten::item", at + 30 * US, at + 5 * MS + 900 * US, thread=2)
        program.call("cudaStreamSynchronize", at + 40 * US, at + 5_010 * US)
        program.node(step, "a", at + 6 * MS, at + 14 * MS)
        program.trace.kernel(at + 14 * MS, at + 15 * MS, launch=at + 14 * MS - US)
    report = backspot.locate(program.save(tmp_path))
    (found,) = (one for one in report.findings if one.rule == "host-waits")
    waits = report.what_if(no_waits=True).saves_ns
    assert found.saves.ns == pytest.approx(waits + 860 * US, rel=0.05)


def test_a_host_that_waits_no_longer_goes_on(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 6 * MS)
        program.trace.kernel(at + 20 * US, at + 5 * MS, launch=at + 10 * US)
        program.call("cudaStreamSynchronize", at + 30 * US, at + 5_010 * US)
        program.node(step, "a", at + 6 * MS, at + 14 * MS)
    report = backspot.locate(program.save(tmp_path))
    assert report.what_if(no_waits=True).saves_ns == pytest.approx(5 * MS, rel=0.05)
    with pytest.raises(backspot.UsageError, match=r"graph: the host waits .* ask for no_waits too"):
        report.what_if(graph=True)
    both = report.what_if(graph=True, no_waits=True)
    assert both.saves_ns > 10 * MS
    assert both.at_best
    assert set(both.alone) == {"no_waits", "graph"}


def test_a_copy_to_pinned_memory_that_has_ended_by_chance_is_no_wait(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 6 * MS)
        program.trace.kernel(at + 20 * US, at + 2 * MS, launch=at + 10 * US)
        copied = program.trace.event(
            "cuda_runtime", "cudaMemcpyAsync", at + 30 * US, at + 2 * MS + 20 * US, 2,
            correlation=step + 1,
        )  # fmt: skip
        program.trace.event(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 2 * MS, at + 2 * MS + 10 * US, 7,
            correlation=copied["args"]["correlation"], device=0, stream=7,
        )["pid"] = 0  # fmt: skip
    report = backspot.locate(program.save(tmp_path))
    with pytest.raises(backspot.UsageError, match="the host waits for no device"):
        report.what_if(no_waits=True)


def masked(
    folder, *, asked: bool = False, by: str = "M", each: str = "", last: str = ""
) -> dict[str, backspot.Finding]:
    """Rows that a forward picks by eight masks, and what asks first whether there are any.

    Args:
        by: the class of the module.
        each: an operator on the rows of each mask.

    Returns:
        The findings by their rule.
    """
    program = Program(paths=("a", "b"))
    for step, at in program.steps():
        begin = at - BACKWARD + FORWARD + 100 * US
        program.trace.forward("heads", by, begin, begin + 9 * MS)
        for number in range(8):
            start = begin + 20 * US + number * MS
            if asked:
                program.trace.operator("aten::any", start, start + 40 * US)
                program.trace.operator("aten::is_nonzero", start + 50 * US, start + 350 * US)
                program.call("cudaStreamSynchronize", start + 60 * US, start + 340 * US, thread=1)
            program.trace.operator("aten::index", start + 400 * US, start + 800 * US)
            program.trace.operator("aten::nonzero", start + 410 * US, start + 700 * US)
            program.call("cudaStreamSynchronize", start + 420 * US, start + 690 * US, thread=1)
            if each:
                program.trace.operator(each, start + 850 * US, start + 950 * US)
        if last:
            program.trace.operator(last, begin + 8 * MS, begin + 8 * MS + 100 * US)
        program.node(step, "b", at + 10 * MS, at + 11 * MS)
        program.trace.kernel(at + 10 * MS + 9 * US, at + 11 * MS, launch=at + 10 * MS + 8 * US)
    return {one.rule: one for one in backspot.locate(program.save(folder)).findings}


def test_without_masks_nobody_asks_whether_they_pick_anything(tmp_path):
    for name in ("asked", "not"):
        (tmp_path / name).mkdir()
    more, less = (
        masked(tmp_path / name, asked=name == "asked")["masked-indexing"].saves.ns
        for name in ("asked", "not")
    )
    assert more == pytest.approx(less + 8 * 340 * US, rel=0.05)


def test_what_is_done_alike_for_the_rows_of_each_mask_goes_with_the_masks_if_it_is_light(tmp_path):
    saves = {}
    for each in ("", "aten::square", "aten::linear"):
        folder = tmp_path / each.removeprefix("aten::") / "made"
        folder.mkdir(parents=True)
        saves[each] = masked(folder, each=each)["masked-indexing"].saves
    # From the first mask to the last, with the Python between; products of rows stay.
    assert saves["aten::square"].ns == pytest.approx(saves[""].ns + (7 * 600 + 150) * US, rel=0.05)
    assert saves["aten::linear"].ns == saves[""].ns
    assert all(one.at_best for one in saves.values())


def test_what_follows_the_last_mask_and_no_other_is_not_of_the_masks(tmp_path):
    saves = []
    for last in ("", "aten::stack"):
        folder = tmp_path / last.removeprefix("aten::") / "made"
        folder.mkdir(parents=True)
        found = masked(folder, each="aten::square", last=last)["masked-indexing"]
        saves.append(found.saves.ns)
    assert saves[1] == pytest.approx(saves[0], rel=0.01)


def test_masks_of_synchronized_statistics_are_waits_that_no_other_mask_avoids(tmp_path):
    found = masked(tmp_path, asked=False, by="SyncBatchNorm")
    assert "masked-indexing" not in found
    assert "torch.nn.BatchNorm" in found["host-waits"].remedy


def test_chains_of_a_module_take_as_long_as_the_usual_kernel_of_each(tmp_path):
    program = Program()
    for step, at in program.steps():
        program.node(step, "b", at, at + 100 * US)
        for number in range(5):
            begin = at + MS + number * 2 * MS
            name = "sgemm" if number == 3 else "vectorized_elementwise_kernel"
            program.trace.kernel(begin, begin + 2 * MS, launch=at + (10 + number) * US, name=name)
        program.call("cudaDeviceSynchronize", at + 500 * US, at + 11 * MS + 5 * US)
    report = backspot.locate(program.save(tmp_path))
    # Three kernels before the product become one; the one behind it stays alone.
    assert report.what_if(fuse=["b"]).saves_ns == pytest.approx(4 * MS, rel=0.02)
    with pytest.raises(backspot.UsageError, match="fuse: these modules have no chain"):
        report.what_if(fuse=["a"])


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"no_waits": True}, "no_waits: the host waits for no device in the recorded steps."),
        ({"graph": True}, "graph: the step runs on no GPU"),
        ({"dtype": "bf16"}, "dtype: it is not known how fast the device computes in it."),
        ({"dtype": "int3"}, "dtype: only 'bf16', 'fp16' and 'tf32'"),
        ({"optimizer": "fast"}, "optimizer: only 'fused' can be predicted, not 'fast'."),
        ({"buckets": 8}, "buckets: the recording has fewer than two buckets"),
        ({"buckets": 0}, "give a number of at least 1"),
        ({"graph": 1}, "give True or False"),
        ({"fuse": "b"}, "give a list of modules"),
        ({}, "needs a change"),
    ],
)
def test_a_change_that_cannot_be_predicted_is_refused_with_the_reason(tmp_path, asked, reason):
    report = trained(tmp_path)
    with pytest.raises(backspot.UsageError) as refused:
        report.what_if(**asked)
    assert reason in str(refused.value)


def test_changes_together_save_no_less_than_one_and_no_more_than_all_in_any_order(tmp_path):
    report = trained(tmp_path)
    changes = {"factors": {"a": 0.5}, "optimizer": "fused"}
    alone = [report.what_if(**{name: what}).saves_ns for name, what in changes.items()]
    found = {report.what_if(**dict(order)).saves_ns for order in permutations(changes.items())}
    assert len(found) == 1
    assert max(alone) <= min(found) <= sum(alone)
    # Of a shorter update, half of the share of a module is less.
    share = report["a"].row.saves.parts["optimizer"] / (8.88 * MS)
    assert found.pop() == pytest.approx(sum(alone) - 0.5 * share * alone[1], abs=20 * US)


def test_several_changes_print_as_a_sentence_and_a_table(tmp_path):
    lines = str(trained(tmp_path).what_if({"a": 0.5}, optimizer="fused")).splitlines()
    assert lines[0].startswith("A step would take ")
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "change", "a=0.5", "optimizer=fused", "together"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plain", "rule"), PAIRS)
def test_a_finding_saves_what_the_model_with_the_remedy_takes_less(name, plain, rule):
    before, after = backspot.locate(PATHS[name]), backspot.locate(PATHS[plain])
    step = before.replayed_step.ns
    gain = step - after.replayed_step.ns
    (finding,) = (one for one in before.findings if one.rule == rule)
    assert finding.saves.ns == pytest.approx(gain, abs=max(0.03 * step, 0.25 * gain))


def test_less_work_of_host_and_devices_saves_what_a_replay_of_both_says():
    """One step waits for the host, the other one for the device."""
    for name, path, decides in (("attention_math", "1.attention", 0), ("compiled_whole", "", 1)):
        report = h200.report_of(name)
        of_host, of_device = report[path].row.cpu_ns // 2, report[path].row.gpu_ns // 2
        nothing, host, device, both, more = predictor_of(report).with_less(
            [path], [(0, 0), (of_host, 0), (0, of_device), (of_host, of_device), (-1e6, -1e6)]
        )
        assert nothing == 0
        assert more < 0
        assert both == pytest.approx(max(both, host, device))
        assert both > 0.9 * (host, device)[decides]
    assert host == 0
    assert device == pytest.approx(of_device, rel=0.01)


@pytest.mark.parametrize(
    ("name", "limit"), [("attention_math", 0), ("vit_patch_drop", 0), ("compiled_whole", 1)]
)
def test_host_and_device_by_themselves_need_the_step_and_what_the_device_is_busy(name, limit):
    report = h200.report_of(name)
    apart = predictor_of(report).apart()
    busy = sum(phase.busy_ns for phase in report.phases)
    assert apart[limit] == max(apart)
    assert apart[limit] == pytest.approx(report.replayed_step.ns, rel=0.05)
    assert busy <= apart[1] <= 1.05 * busy


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("gpt2_checkpointed", 0.97, 1.0),
        ("vit_patch_drop", 0.95, 1.0),
        ("ddp.rank0", 0.8, 0.95),
        ("optimizer_foreach_false", 0.6, 0.75),
    ],
)
def test_the_host_works_for_the_models_but_for_their_optimizer_and_their_loss(name, least, most):
    predictor = predictor_of(h200.report_of(name))
    without, with_loss = (predictor.of_models(with_loss=one) for one in (False, True))
    assert least < without < with_loss < most
