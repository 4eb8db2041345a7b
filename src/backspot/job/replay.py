"""What the job's step would take after a change: all ranks replayed together.

Each rank has a line of its own work, cut where it enters a collective and where it has to wait for
one. A collective begins when its last rank has entered, and after the collective before it in the
same process group; then it transfers for as long as it did. A rank waits for a collective where the
recording shows that nothing hid it, and at the end of the step for all others. So a change of one
rank's work moves the others only as far as they wait for that rank. Such a graph of a whole job,
and the idea to ask it what stragglers cost, are those of Lin et al., "Understanding Stragglers in
Large Model Training Using What-if Analysis" (OSDI 2025); ``benchmarks`` holds ``Graph`` against the
results that they publish.

A transfer between two ranks, as between the stages of a pipeline, begins when both have entered.
A host that started one learns of its end when it waits for it, which can be long after. So of
equal transfers of hosts, all take as long as the shortest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from backspot.job.align import RankClock
from backspot.job.scatter import Others
from backspot.job.summary import Call, Summary
from backspot.job.transfers import Transfers
from backspot.job.waiting import GroupWaits
from backspot.trace.events import Ints

__all__ = ["Graph", "JobReplay"]

Change: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""From how long each task takes to how long it would take."""


class Graph:
    """Tasks that begin when others have ended.

    Args:
        count: number of tasks.
        task: tasks that wait.
        cause: for each of them a task that it waits for; both arrays may repeat a task.

    Raises:
        ValueError: If tasks wait for each other in a circle.
    """

    def __init__(self, count: int, task: Ints, cause: Ints) -> None:
        waits = np.bincount(task, minlength=count)
        self._causes = _Ragged(count, task, cause)
        follows = _Ragged(count, cause, task)
        ready = np.flatnonzero(waits == 0)
        settled = 0
        self._levels: list[Ints] = []
        while len(ready):
            self._levels.append(ready)
            settled += len(ready)
            reached, times = np.unique(follows.of(ready)[0], return_counts=True)
            waits[reached] -= times
            ready = reached[waits[reached] == 0]
        if settled < count:
            raise ValueError(f"{count - settled} of {count} tasks wait for each other in a circle")

    def ends(self, takes: np.ndarray) -> np.ndarray:
        """Return when each task ends, if it takes so long; the first ones begin at 0.

        Args:
            takes: one row a task; any number of columns, each a variant of the whole.
        """
        ends = np.zeros_like(takes)
        for tasks in self._levels:
            causes, first = self._causes.of(tasks)
            begin = np.maximum.reduceat(ends[causes], first, axis=0) if len(causes) else 0
            ends[tasks] = begin + takes[tasks]
        return ends


class _Ragged:
    """For each of ``count`` keys the values that stand beside it."""

    def __init__(self, count: int, key: Ints, value: Ints) -> None:
        self._value = value[np.argsort(key, kind="stable")]
        self._count = np.bincount(key, minlength=count)
        self._first = np.cumsum(self._count) - self._count

    def of(self, keys: Ints) -> tuple[Ints, Ints]:
        """Return the values of these keys, one after the other, and where those of each begin."""
        count = self._count[keys]
        first = np.cumsum(count) - count
        offset = np.arange(count.sum()) - np.repeat(first, count)
        return self._value[np.repeat(self._first[keys], count) + offset], first


class JobReplay:
    """The recorded steps of all ranks as a graph, and its variants.

    Args:
        ranks: the summary of each rank.
        at: for each rank, where its summary has the steps that all ranks have.
        waits: waits and transfers of all process groups, on all ranks.
        clocks: the clock of each rank.
        transfers: the transfers between two ranks.

    Raises:
        ValueError: If the clocks contradict the order of the collectives.
    """

    def __init__(
        self,
        ranks: Mapping[int, Summary],
        places: Mapping[int, Sequence[int]],
        waits: Sequence[GroupWaits],
        clocks: Mapping[int, RankClock],
        transfers: Transfers | None = None,
    ) -> None:
        self._steps = len(next(iter(places.values())))
        tasks = _Tasks()
        collectives = [_Calls(tasks, group_waits, clocks) for group_waits in waits]
        calls: list[_Calls | _Moves] = [*collectives]
        if transfers and transfers.links:
            on_host = not any(
                any(module.forward_gpu) for own in ranks.values() for module in own.modules
            )
            calls.append(_Moves(tasks, transfers, clocks, on_host))
        self._lines = {
            rank: _Line(tasks, rank, ranks[rank], places[rank], calls) for rank in sorted(ranks)
        }
        for call in calls:
            call.connect()
        none = np.empty(0, np.int64)
        self._transfers = np.concatenate([none, *[call.leave.ravel() for call in collectives]])
        self._graph = Graph(tasks.count, *tasks.edges())
        self._takes = tasks.takes()

    def _longer(self, rank: int) -> np.ndarray | None:
        """Return by how much each task of a rank's line exceeds its peers', if it has any."""
        own = self._lines[rank]
        lines = [line for line in self._lines.values() if line.sections == own.sections]
        if len(lines) < 2:
            return None
        longer = np.zeros(len(self._takes))
        sections = np.array([line.by_section(self._takes) for line in lines])
        of_rank = sections[lines.index(own)]
        usual = Others(sections.astype(np.int64)).of(of_rank.astype(np.int64))
        share = np.where(of_rank > usual, 1 - usual / np.maximum(of_rank, 1), 0.0)
        longer[own.tasks] = self._takes[own.tasks] * share[own.section]
        return longer

    def steps(self, changes: Sequence[Change]) -> Ints:
        """Return the job's steps in nanoseconds, one row a change and one column a step.

        The first row is that without a change.
        """
        takes = [self._takes, *(change(self._takes) for change in changes)]
        ends = self._graph.ends(np.stack(takes, axis=1))
        until = np.array([ends[line.last] for line in self._lines.values()]).max(axis=0)
        step_ns: Ints = np.rint(np.diff(until, axis=0, prepend=0.0).T).astype(np.int64)
        return step_ns

    def sooner(self, rank: int, by_ns: int) -> Change | None:
        """Take so much from a rank's work in each step, where it works longer than its peers.

        What a rank works while a collective hides it is not part of its line. So how much longer a
        cause makes its work is for the caller to say, and the line says only where. ``None`` of a
        rank without peers, such as the only one of its stage.
        """
        longer = self._longer(rank)
        if longer is None:
            return None
        share = min(1.0, by_ns * self._steps / max(longer.sum(), 1.0))
        return lambda takes: takes - longer * share

    def balanced(self, takes: np.ndarray) -> np.ndarray:
        """Divide the work of all ranks evenly, as if layers moved between stages in any amounts."""
        takes = takes.copy()
        works = [takes[line.tasks].sum() for line in self._lines.values()]
        for line, work in zip(self._lines.values(), works, strict=True):
            takes[line.tasks] *= np.mean(works) / max(work, 1.0)
        return takes

    def without_transfers(self, takes: np.ndarray) -> np.ndarray:
        """Let no transfer of a collective take time: all are hidden."""
        takes = takes.copy()
        takes[self._transfers] = 0.0
        return takes


class _Tasks:
    """Tasks and what they wait for, while the graph is put together."""

    def __init__(self) -> None:
        self.count = 0
        self._takes: list[np.ndarray] = []
        self._edges: list[tuple[Ints, Ints]] = []

    def add(self, takes: np.ndarray) -> Ints:
        """Add tasks that take so long; return their numbers in the same shape."""
        tasks = np.arange(self.count, self.count + takes.size).reshape(takes.shape)
        self.count += takes.size
        self._takes.append(takes.ravel().astype(np.float64))
        return tasks

    def follow(self, task: Ints, cause: Ints) -> None:
        """Let tasks begin after others."""
        task, cause = np.broadcast_arrays(task, cause)
        self._edges.append((task.ravel(), cause.ravel()))

    def edges(self) -> tuple[Ints, Ints]:
        """Return all tasks that wait, and what for."""
        tasks, causes = zip(*self._edges, strict=True)
        return np.concatenate(tasks), np.concatenate(causes)

    def takes(self) -> np.ndarray:
        """Return what each task takes."""
        return np.concatenate(self._takes)


class _Part(NamedTuple):
    """What one rank exchanges, on its own clock: ``entry`` is for its line to fill in."""

    start: Ints
    end: Ints
    exposed: Ints
    leave: Ints
    entry: Ints


class _Calls:
    """The collectives of a process group: one task in which all have entered, and one a rank."""

    def __init__(self, tasks: _Tasks, waits: GroupWaits, clocks: Mapping[int, RankClock]) -> None:
        self._group, self.ranks = waits.group, waits.ranks
        self._tasks = tasks
        self._rows = {rank: waits.group.ranks.index(rank) for rank in waits.ranks}
        self._start, self._end = (
            np.array([clocks[rank].to_job(times[row]) for rank, row in self._rows.items()])
            for times in (waits.group.start, waits.group.end)
        )
        self.leave = tasks.add(waits.transfer)
        self.entry = np.full(self.leave.shape, -1)

    def of(self, rank: int) -> _Part:
        """Return the part of a rank."""
        group, indices, row = self._group, self._rows[rank], self.ranks.index(rank)
        times = group.start[indices], group.end[indices], group.exposed[indices]
        return _Part(*times, self.leave[row], self.entry[row])

    def connect(self) -> None:
        """Let each rank leave after those that had entered when it left, in the group's order."""
        entered = self._tasks.add(np.zeros(self.leave.shape[1]))
        latest = self._start.max(axis=0)
        for row in range(len(self.ranks)):
            # Who has left a rooted collective before a rank entered did not wait for that rank.
            waited = latest <= self._end[row]
            self._tasks.follow(self.leave[row, waited], entered[waited])
            for column in np.flatnonzero(~waited).tolist():
                others = self._start[:, column] <= self._end[row, column]
                self._tasks.follow(self.leave[row, column], self.entry[others, column])
            self._tasks.follow(entered, self.entry[row])
            self._tasks.follow(self.leave[row, 1:], self.leave[row, :-1])


class _Moves:
    """The transfers between two ranks: of each rank one task for each."""

    def __init__(
        self, tasks: _Tasks, moved: Transfers, clocks: Mapping[int, RankClock], on_host: bool
    ) -> None:
        self.ranks, self._tasks, self._moved = tuple(moved.of), tasks, moved
        self._start = {rank: clocks[rank].to_job(own.start) for rank, own in moved.of.items()}
        self._end = {rank: clocks[rank].to_job(own.end) for rank, own in moved.of.items()}
        entered = {rank: start.copy() for rank, start in self._start.items()}
        for rank, entry, other, its in self._waits():
            np.maximum.at(entered[rank], entry, self._start[other][its])
        self._leave, self._entry = dict[int, Ints](), dict[int, Ints]()
        for rank, own in moved.of.items():
            takes = np.maximum(self._end[rank] - entered[rank], 0)
            if on_host:
                least: dict[Call, int] = {}
                for call, time in zip(own.call, takes.tolist(), strict=True):
                    least[call] = min(least.get(call, time), time)
                takes = np.array([least[call] for call in own.call], np.int64)
            self._leave[rank] = tasks.add(takes)
            self._entry[rank] = np.full(len(takes), -1)

    def _waits(self) -> Iterator[tuple[int, Ints, int, Ints]]:
        """Yield a rank, some of its transfers, and the rank and its transfers that they wait for.

        A receive waits for its send. A send that ends before its receive begins does not wait.
        """
        for (sender, receiver), link in self._moved.links.items():
            sent, received = link.T
            yield receiver, received, sender, sent
            waited = self._start[receiver][received] <= self._end[sender][sent]
            yield sender, sent[waited], receiver, received[waited]

    def of(self, rank: int) -> _Part:
        """Return the part of a rank."""
        own = self._moved.of[rank]
        return _Part(own.start, own.end, own.exposed, self._leave[rank], self._entry[rank])

    def connect(self) -> None:
        """Let each rank leave after the other has entered, and not before earlier transfers."""
        for rank, leave in self._leave.items():
            self._tasks.follow(leave, self._entry[rank])
        for rank, entry, other, its in self._waits():
            self._tasks.follow(self._leave[rank][entry], self._entry[other][its])
        for pair, link in self._moved.links.items():
            for rank, entry in zip(pair, link.T, strict=True):
                apart = entry[1:] != entry[:-1]  # launched together, they are one
                leave = self._leave[rank]
                self._tasks.follow(leave[entry[1:][apart]], leave[entry[:-1][apart]])


_LEAVE, _ENTER, _END, _BEGIN = range(4)
"""Anchors of a rank's line, in their order at one moment."""


class _Line:
    """One rank's own work, from anchor to anchor.

    Attributes:
        tasks: its pieces in their order, each up to an anchor.
        section: for each piece the section that it is in.
        sections: what ends each section: the group whose collective the rank enters, -1 for a step.
        last: the last task of each step.
    """

    def __init__(
        self,
        tasks: _Tasks,
        rank: int,
        summary: Summary,
        places: Sequence[int],
        calls: Sequence[_Calls | _Moves],
    ) -> None:
        rank_calls = [call.of(rank) for call in calls if rank in call.ranks]
        begin, end = (
            np.array(times, np.int64)[list(places)] + summary.origin_ns
            for times in (summary.begin, summary.end)
        )
        none = np.empty(0, np.int64)
        enter, leave, exposed, leaving = (
            np.concatenate([none, *columns])
            for columns in ([call[field] for call in rank_calls] for field in range(4))
        )
        exposed = np.minimum(exposed, leave - enter)
        of_group = np.repeat(np.arange(len(rank_calls)), [len(call.start) for call in rank_calls])
        waits = np.flatnonzero(exposed > 0)

        time = np.concatenate([leave[waits], enter, end, begin])
        kind = np.repeat([_LEAVE, _ENTER, _END, _BEGIN], list(map(len, (waits, enter, end, begin))))
        event_number = np.concatenate(
            [waits, *[np.arange(len(times_of)) for times_of in (enter, end, begin)]]
        )
        order = np.lexsort((kind, time))
        time, kind, event_number = time[order], kind[order], event_number[order]
        within = np.cumsum(kind == _BEGIN) - np.cumsum(kind == _END) > 0
        alone = _covered(time, leave[waits] - exposed[waits], leave[waits])
        work = np.maximum(np.diff(time) - np.diff(alone), 0) * within[:-1]

        self.tasks = tasks.add(np.concatenate([[0], work]))
        tasks.follow(self.tasks[1:], self.tasks[:-1])
        # Nothing of this rank follows a wait that comes last, as in a summary that is cut off.
        left = np.flatnonzero(kind[:-1] == _LEAVE)
        tasks.follow(self.tasks[left + 1], leaving[event_number[left]])
        self.last = self.tasks[kind == _END]
        # What nothing waited for visibly is needed at the end of its step.
        hidden = np.flatnonzero(exposed <= 0)
        step = np.searchsorted(end, leave[hidden])
        hidden, step = hidden[step < len(end)], step[step < len(end)]
        tasks.follow(self.last[step], leaving[hidden])

        entered = np.flatnonzero(kind == _ENTER)
        entry = np.empty(len(enter), np.int64)
        entry[event_number[entered]] = self.tasks[entered]
        for number, call in enumerate(rank_calls):
            call.entry[:] = entry[of_group == number]
        cuts = np.flatnonzero((kind == _ENTER) | (kind == _END))
        self.section = np.searchsorted(cuts, np.arange(len(kind)))
        self.sections = tuple(
            int(of_group[event_number[cut]]) if kind[cut] == _ENTER else -1 for cut in cuts.tolist()
        )

    def by_section(self, takes: np.ndarray) -> np.ndarray:
        """Return what the rank works in each section."""
        return np.bincount(self.section, takes[self.tasks], minlength=len(self.sections) + 1)


def _covered(times: Ints, begin: Ints, end: Ints) -> Ints:
    """Return how much of these intervals lies before each of some ascending times."""
    if not len(begin):
        return np.zeros_like(times)
    edges = np.concatenate([begin, end]) - times[0]
    order = np.argsort(edges, kind="stable")
    slope = np.cumsum(np.repeat([1, -1], len(begin))[order])
    length = np.cumsum(np.concatenate([[0], np.diff(edges[order]) * slope[:-1]]))
    covered: Ints = np.interp(times - times[0], edges[order], length).astype(np.int64)
    return covered
