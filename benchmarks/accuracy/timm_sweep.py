"""Every model of timm: one training step plain, and one instrumented under the profiler.

    python -m benchmarks timm_sweep --device cuda --jobs 15

Each model has random weights, the smallest input that it takes, and a batch of 2. For each is
recorded: whether loss and gradients are bit-identical with and without ``instrument`` (and plain
against plain, for some operators have no deterministic form); whether the graph is the same; the
report's coverage; how many backward nodes come after a marker that names their owner; tensors that
have no marker; hooks left after ``remove()``.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Figures, Run, each
from benchmarks.measuring import profiling
from benchmarks.workers import NO_TIME, Job, Phase, Record, Stage, short

_GIANT = re.compile(r"giant|gigantic|enormous|_[157]b_")


# One model ---------------------------------------------------------------------------------------


def examine(job: Job, stage: Stage, device: str) -> Record:
    """Take one model's steps and compare them.

    Args:
        job: ``name``.
        stage: takes what begins and what is known so far.
        device: ``cpu`` or ``cuda``.
    """
    import torch

    import backspot
    from benchmarks.accuracy.steps import (
        build_timm,
        hooks_of,
        loss_of,
        names_of_nodes,
        same_bits,
        seed,
    )

    began = time.monotonic()
    record: Record = {}
    stage("plain", record)
    model, data = build_timm(job["name"], device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def step() -> tuple[torch.Tensor, list[torch.Tensor | None], Counter[str]]:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        seed(2)
        loss = loss_of(model(data))
        names = names_of_nodes(loss)
        loss.backward()
        gradients = [parameter.grad for parameter in parameters]
        model.zero_grad(set_to_none=True)
        return loss.detach(), gradients, names

    loss, gradients, names = step()
    again_loss, again, _ = step()
    record |= {
        "input": list(data.shape),
        "modules": sum(1 for _ in model.modules()),
        "parameters": sum(p.numel() for p in parameters),
        "nodes": names.total(),
        "loss_finite": bool(torch.isfinite(loss)),
        "reproducible_loss": same_bits([loss], [again_loss]),
        "reproducible_gradients": same_bits(gradients, again),
    }
    del again, again_loss
    stage("instrumented", record)
    hooks = hooks_of(model)
    with backspot.instrument(model, markers=True) as handle:
        with profiling(device) as profiler:
            labelled_loss, labelled, labelled_names = step()
        skipped = len(handle.skipped)
    report = backspot.locate(profiler)
    record |= {
        "same_loss": same_bits([loss], [labelled_loss]),
        "same_gradients": same_bits(gradients, labelled),
        "same_graph": names == labelled_names,
        "coverage_wall": report.coverage.wall,
        "coverage_gpu": report.coverage.gpu if report.has_gpu else None,
        "coverage_cpu": report.coverage.cpu,
        "hooks_left": sum(a != b for a, b in zip(hooks, hooks_of(model), strict=True)),
        "modules_skipped": skipped,
        "warnings": [short(warning, 160) for warning in report.warnings],
        **marker_shares(profiler),
        "seconds": round(time.monotonic() - began, 2),
    }
    return record


def marker_shares(profiler: Any) -> Record:
    """How many nodes come after a marker that names their owner, on their thread.

    A node's time is that of the first event within it, for its own marker is written in it.
    """
    import numpy as np

    from backspot.testing import Category, Kind, attribute, names as written, read_events

    events = read_events(profiler)
    ownership = attribute(events)
    spans = ownership.spans
    owners = ownership.owners
    of_module = {(m.path, m.class_name): owner for owner, m in owners.each_module()}
    names_owner = np.array(
        [
            of_module.get((label.path, label.class_name), -1)
            if label is not None and label.kind is Kind.BACKWARD
            else -2
            for label in events.labels
        ]
    )
    is_label = events.is_label | events.prefix_mask(written.EVALUATE_FUNCTION)
    operators = events.of(Category.OPERATOR, Category.ANNOTATION)
    nodes = np.flatnonzero(spans.is_node)
    right = np.zeros(len(nodes), bool)
    for thread in np.unique(spans.thread[nodes]).tolist():
        mine = operators[events.thread[operators] == thread]
        mine = mine[np.argsort(events.start[mine], kind="stable")]
        work = np.append(events.start[mine[~is_label[events.name[mine]]]], np.iinfo(np.int64).max)
        markers = mine[names_owner[events.name[mine]] > -2]
        on_thread = np.flatnonzero(spans.thread[nodes] == thread)
        node = nodes[on_thread]
        first = work[np.searchsorted(work[:-1], spans.start[node])]
        time_of = np.minimum(first, spans.end[node])
        at = np.searchsorted(events.start[markers], time_of, side="right") - 1
        said = np.append(names_owner[events.name[markers]], OUTSIDE)[at]
        owner = ownership.owner[node]
        right[on_thread] = said == np.where(owners.is_special[owner], OUTSIDE, owner)
    owned = ~owners.is_special[ownership.owner[nodes]]
    return {
        "marker_share": float(right[owned].mean()) if owned.any() else None,
        "marker_share_all": float(right.mean()) if len(nodes) else None,
        "nodes_owned": float(owned.mean()) if len(nodes) else None,
        "executed": len(nodes),
        "markers": int((names_owner[events.name[operators]] > -2).sum()),
        "unmarked": spans.unmarked,
    }


OUTSIDE = -3  # no module, and no marker before


# Summary -----------------------------------------------------------------------------------------


def outcome(record: Record) -> str:
    """``measured``, ``left out`` (the plain step can't run), or ``failed``."""
    if record["end"] == "done":
        return "measured"
    return "left out" if record.get("stage") in ("start", "plain") else "failed"


def _summary(records: Sequence[Record]) -> Record:
    """The whole sweep in one document."""
    groups: dict[str, list[Record]] = {"measured": [], "left out": [], "failed": []}
    for record in records:
        groups[outcome(record)].append(record)
    measured = groups["measured"]
    steady = [r for r in measured if r["reproducible_gradients"] and r["reproducible_loss"]]
    same = [r for r in steady if r["same_loss"] and r["same_gradients"]]
    summary: Record = {
        "models": len(records),
        "measured": len(measured),
        "left_out": {r["name"]: r["error"] for r in groups["left out"]},
        "failed": {r["name"]: f"{r['stage']}: {r['error']}" for r in groups["failed"]},
        "reproducible": len(steady),
        "not_reproducible": [r["name"] for r in measured if r not in steady],
        "bit_identical_of_reproducible": len(same),
        "not_bit_identical": [r["name"] for r in steady if r not in same],
        "same_graph": sum(r["same_graph"] for r in measured),
        "other_graph": [r["name"] for r in measured if not r["same_graph"]],
        "hooks_left": {r["name"]: r["hooks_left"] for r in measured if r["hooks_left"]},
        "unmarked": {r["name"]: r["unmarked"] for r in measured if r["unmarked"]},
    }
    for key in _SHARES:
        values = sorted((r[key], r["name"]) for r in measured if r.get(key) is not None)
        if values:
            at = {p: round(p / 100 * (len(values) - 1)) for p in (0, 1, 5, 25, 50, 75, 100)}
            summary[key] = {
                "percentiles": {str(p): round(values[place][0], 5) for p, place in at.items()},
                "at_least_99_percent": sum(value >= 0.99 for value, _ in values),
                "worst": [[name, round(value, 5)] for value, name in values[:12]],
            }
    return summary


_SHARES = ("coverage_wall", "coverage_gpu", "coverage_cpu", "marker_share", "marker_share_all")
"""Of wall, GPU and CPU time; nodes after their owner's marker, also with those of no module."""


# The run -----------------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", help="names, with * and ? (default: *; with --small resnet10t)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one model")


def answer(run: Run) -> Figures:
    wanted = run.models or ("resnet10t" if run.small else "*")

    def known() -> dict[str, Job]:
        import timm

        jobs = {
            name: {"turn": number * 7919 % 1009}
            for number, name in enumerate(timm.list_models())
            if fnmatch.fnmatch(name, wanted)
        }
        # Neighbours in the list are alike: dealt out, they keep the workers evenly busy.
        return dict(sorted(jobs.items(), key=lambda job: job[1]["turn"]))

    def set_up(workers: int) -> None:
        from benchmarks.accuracy.steps import set_up as prepare

        prepare(run.device, 0.9 / max(1, workers))

    workers, gib, seconds = run.jobs, 100 / (run.jobs + 2), run.timeout
    phases = [Phase(workers, seconds, gib)]
    phases += [Phase(3, 2 * seconds, max(gib, 30))] if workers > 3 else []
    phases += [Phase(1, 2 * seconds, max(gib, 90))] if workers > 1 else []
    cases = each(
        run,
        known,
        lambda job, stage: examine(job, stage, run.device),
        phases=phases,
        set_up=set_up,
        fresh=False,
        late=lambda job: bool(_GIANT.search(job["name"])),
    )
    left_out = [name for name, case in cases.items() if case["end"] == NO_TIME]
    done = [{"name": name, **cases[name]} for name in sorted(cases) if name not in left_out]
    summary = _summary(done)
    wrong = any(record["end"] != "done" for record in done)
    # A whole record of each of 1,400 models would be 2 MB.
    ends = {name: {"end": case["end"]} for name, case in cases.items()}
    lines = [_line(record) for record in done]
    return {"summary": summary, "rows": [], "wrong": wrong, "cases": ends, "lines": lines}


def _line(record: Record) -> Record:
    """What is kept of a model. The summary says what has an owner."""
    if record["end"] != "done":
        result = outcome(record)
    elif not (record["reproducible_gradients"] and record["reproducible_loss"]):
        result = "varies by itself"
    elif not (record["same_loss"] and record["same_gradients"]):
        result = "other bits"
    else:
        result = "same" if record["same_graph"] else "other graph"
    return {"model": record["name"], "result": result}
