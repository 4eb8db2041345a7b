"""Does the replay of a job reproduce what is published about real jobs?

    git clone https://github.com/ByteDance-Seed/StragglerAnalysis
    python -m benchmarks published_jobs StragglerAnalysis/data

Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025),
publish three jobs of 8 to 128 GPUs: what each rank did in each step, and what their own simulation
says. Here ``backspot.job.replay.Graph`` gets the same tasks. Read from the recording, by rules of
pipeline and data parallel training, is only what waits for what:

- a rank computes one thing after the other; transfers of one kind follow each other too;
- a forward or backward waits for what it receives, a transfer for what it sends;
- the first forward of a chunk of the model waits for its parameters, the exchange of a chunk's
  gradients for its last backward;
- the end of a step is a chain: the last backward, exchanges, clipping, the optimizer;
- an exchange begins when all its members are there, and takes as long as it took after that.

``S`` is the step as recorded over the step in which each kind of computing takes its mean and each
kind of transfer its median. ``M_W`` and ``M_S`` are the part of that difference that is gone if
the slowest 3% of the workers, or the last stage, take these times.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from backspot.testing import Graph
from benchmarks.harness import CannotRunError, Figures, Run

JOBS = {
    "AR": "64 GPUs; one worker is slow",
    "ST": "8 GPUs; the last stage takes longer",
    "SE": "128 GPUs; sequences of unequal length",
}
_SLOWEST = 0.03
_JITTER = 0.010
"""Seconds that clocks may differ by: earlier than this before the last entry is an error."""
_PEERS = {"forward-recv": "forward-send", "backward-recv": "backward-send"}
_OVER_DATA = ("params-all-gather", "grads-reduce-scatter")
_EMBEDDING, _CLIP = "embedding-grads-all-reduce", "optimizer-clip-main-grad"
_END = ("gc", "layernorm-grads-all-reduce", _EMBEDDING, "grads-reduce-scatter", _CLIP, "optimizer")
_ALONE = "layernorm-grads-all-reduce"
"""A transfer that no member waits for in the recording."""


class _Job:
    """The tasks of one step, with their times in all steps."""

    def __init__(self, path: Path) -> None:
        import pandas as pd

        rows = pd.read_parquet(path).sort_values(["dp_rank", "stage", "optype", "seq_id", "step"])
        steps = rows.step.nunique()
        first = rows.iloc[::steps]
        self.kind = first.optype.to_numpy(str)
        self.worker, self.stage = first.dp_rank.to_numpy(int), first.stage.to_numpy(int)
        self.number = first.seq_id.to_numpy(int)
        times = rows[["start_ts", "duration"]].to_numpy(float).reshape(len(first), steps, 2)
        self.start, self.takes = times[..., 0], times[..., 1].copy()
        self._edges: list[tuple[int, int]] = []
        self._lines()
        task, cause = np.array(self._edges).T
        # A task before the transfers of an exchange: until then its members wait.
        groups = self._exchanges()
        before = np.arange(len(self.kind))
        for number, group in enumerate(groups, len(before)):
            transfer = (self.start + times[..., 1])[group] - self.start[group].max(axis=0)
            self.takes[group] = np.where(transfer <= -_JITTER, 0, transfer)
            before[group] = number
        self._count = len(before) + len(groups)
        members = np.concatenate(groups)
        task = np.concatenate([before[task], members])
        self.graph = Graph(self._count, task, np.concatenate([cause, before[members]]))

    def _where(self, *kinds: str, **at: int) -> np.ndarray:
        chosen = np.isin(self.kind, kinds)
        for name, value in at.items():
            chosen &= getattr(self, name) == value
        return np.flatnonzero(chosen)

    def _exchanges(self) -> list[np.ndarray]:
        """Tasks that wait for each other."""
        stages, workers = range(self.stage.max() + 1), range(self.worker.max() + 1)
        found = [self._where(_CLIP)]
        found += [self._where(kind, stage=stage) for kind in _OVER_DATA for stage in stages]
        found += [self._where(_EMBEDDING, worker=worker) for worker in workers]
        for receive, send in _PEERS.items():
            to = 1 if receive == "forward-recv" else -1
            sent = self._where(send)
            places = zip(self.worker[sent], self.stage[sent] + to, self.number[sent], strict=True)
            by_place = dict(zip(places, sent.tolist(), strict=True))
            for task in self._where(receive).tolist():
                place = self.worker[task], self.stage[task], self.number[task]
                found.append(np.array([task, by_place[place]]))
        return found

    def _after(self, task: int, cause: int) -> None:
        self._edges.append((task, cause))

    def _chain(self, tasks: Any) -> None:
        for cause, task in pairwise(tasks):
            self._after(task, cause)

    def _lines(self) -> None:
        for worker in range(self.worker.max() + 1):
            for stage in range(self.stage.max() + 1):
                self._line({"worker": worker, "stage": stage})

    def _line(self, at: dict[str, int]) -> None:
        """What one rank does in which order."""
        computing = self._where("forward-compute", "backward-compute", **at)
        computing = computing[np.argsort(self.start[computing, 0], kind="stable")]
        self._chain(computing)
        for way in ("forward", "backward"):
            works = self._where(f"{way}-compute", **at)
            sends, receives = (self._where(f"{way}-{one}", **at) for one in ("send", "recv"))
            for work, send in zip(works, sends, strict=False):
                self._after(send, work)
            for work, receive in zip(works, receives, strict=False):
                self._after(work, receive)
            for receive, before in zip(receives[1:], works, strict=False):
                self._after(receive, before)
            self._chain(sends)
            self._chain(receives)
        for gather in self._where("params-all-gather", **at):
            self._after(computing[0], gather)
        end = [task for kind in _END for task in self._where(kind, **at)]
        self._chain([computing[-1], *end])

    def ideal(self) -> np.ndarray:
        """Computing takes the mean of its kind, and transfers the median of theirs."""
        takes = self.takes.copy()
        transfers = {_ALONE, _EMBEDDING, _CLIP, *_OVER_DATA, *_PEERS, *_PEERS.values()}
        for kind in np.unique(self.kind):
            average = np.median if kind in transfers else np.mean
            takes[self.kind == kind] = average(self.takes[self.kind == kind])
        return takes

    def step(self, takes: np.ndarray) -> float:
        """Seconds of a step, the mean over the steps."""
        none = np.zeros((self._count - len(takes), takes.shape[1]))
        return float(self.graph.ends(np.concatenate([takes, none])).max(axis=0).mean())


def _judge(job: _Job) -> dict[str, float]:
    ideal = job.ideal()
    step, fast = job.step(job.takes), job.step(ideal)

    def gone(chosen: np.ndarray) -> float:
        takes = np.where(chosen[:, None], ideal, job.takes)
        return (step - job.step(takes)) / (step - fast)

    def slow(chosen: np.ndarray) -> float:
        return job.step(np.where(chosen[:, None], job.takes, ideal)) / fast

    workers, stages = range(job.worker.max() + 1), range(job.stage.max() + 1)
    by_worker = [slow(job.worker == one) for one in workers]
    by_stage = [slow(job.stage == one) for one in stages]
    score = {(a, b): min(by_worker[a], by_stage[b]) for a in workers for b in stages}
    count = -int(-len(score) * _SLOWEST // 1)
    slowest = sorted(score, key=lambda one: -score[one])[:count]
    chosen = np.zeros(len(job.kind), bool)
    for worker, stage in slowest:
        chosen |= (job.worker == worker) & (job.stage == stage)
    last = job.stage == job.stage.max()
    return {"step": step, "ideal": fast, "S": step / fast, "M_W": gone(chosen), "M_S": gone(last)}


def options(parser: argparse.ArgumentParser) -> None:
    told = "with trace-AR.parquet, mw-AR.json and others"
    parser.add_argument("folder", type=Path, nargs="?", help=told)


def answer(run: Run) -> Figures:
    cases: dict[str, dict[str, float]] = {}
    if run.folder is None:
        raise CannotRunError("published_jobs needs the folder of the published traces")
    for name in run.choose(JOBS, ("ST",)):
        trace = run.folder / f"trace-{name}.parquet"
        if not trace.exists():
            raise CannotRunError(f"there is no {trace}")
        worker, stage = (
            json.loads((run.folder / f"{key}-{name}.json").read_text()) for key in ("mw", "ms")
        )
        published = {"step": stage["tori"], "ideal": stage["tideal"]}
        published |= {"S": stage["tori"] / stage["tideal"], "M_W": worker["Mw"], "M_S": stage["Ms"]}
        found = _judge(_Job(trace))
        cases[name] = {
            **found,
            **{f"{key}, published": value for key, value in published.items()},
            "largest difference": max(abs(found[key] - published[key]) for key in found),
        }
    worst = max(case["largest difference"] for case in cases.values())
    return {"cases": cases, "summary": {"jobs": len(cases), "largest difference": worst}}
