"""What the outermost calls of models are for: training, or one of the uses without gradients.

A call runs without gradients if no operator in it makes a node. That tells a use if its model is
trained (other calls of the model, or of a module inside it, make nodes), is a copy of a trained
model (the same classes of modules), or is called a reference or a teacher. Any other model without
gradients, such as a frozen encoder, is part of the forward.

The time is cut where models are trained and where batches are fetched. Calls without gradients
between two cuts are a *stretch*::

    fetch  call  fetch  call  fetch           call call call call  call       trains   trains
    |------------|------------|-------------------------------------------------|--------|
      evaluation   evaluation                 rollout              scoring

- What comes before the fetch of another batch ran on a batch that was not trained on: *evaluation*.
- A *rollout* has several calls behind which values are drawn from a distribution, or the best ones
  are appended to a sequence. It lasts from the first call of its stretch to the last of these.
- *Scoring* comes between a rollout and the training on it. In a training with rollouts, so do
  single calls right before a model is trained.
- A *reference* is what scores and has such a name, or has it where nothing is rolled out, and so
  has a *teacher*.

Where none of this decides, the call is an evaluation, which people read as "forward without
gradients".
"""

from __future__ import annotations

import re

import msgspec
import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.attribution.spans import Module, Spans
from backspot.analysis.timeline import FAR, NOTHING, distinct, grouped, is_in, median
from backspot.results.costs import WITHOUT_GRADIENTS, PhaseName
from backspot.trace import Category, Events, names
from backspot.trace.events import Ints, Mask

_REPEATED = 4
"""So many calls with a draw behind them are a rollout; fewer calls before a training score it."""
_WORDS: dict[str, PhaseName] = {
    "ref": "reference",
    "reference": "reference",
    "teacher": "teacher",
    "ema": "teacher",
    "momentum": "teacher",
}
"""What a model is for that has this word in its name."""
_WORD = re.compile(r"[a-z]+|[A-Z][a-z]*")


class Forwards(msgspec.Struct, frozen=True):
    """The outermost calls of models, as spans in the order in which they start.

    Attributes:
        training: the calls with gradients, and those of models that are not trained.
        bare: the calls without gradients.
        phase: what each of ``bare`` is for.
        uses: when each use starts and ends, in nanoseconds, with the work between its calls.
    """

    training: Ints
    bare: Ints
    phase: tuple[PhaseName, ...]
    uses: tuple[tuple[PhaseName, int, int], ...]


def find_forwards(
    events: Events, ownership: Ownership, calls: Ints, fetches: Ints, updates: Ints
) -> Forwards:
    """Tell apart what the outermost calls of models are for.

    Args:
        calls: those calls, as spans.
        fetches: the marks of fetched batches, as events.
        updates: the marks of gradients that are set to zero, with which an update may begin.
    """
    spans = ownership.spans
    calls = calls[np.argsort(spans.start[calls], kind="stable")]
    is_bare = _without_gradients(events, ownership, calls)
    training, bare = calls[~is_bare], calls[is_bare]
    if not len(bare):
        return Forwards(training, bare, (), ())
    trained = np.sort(np.concatenate([spans.start[training], ownership.passes.start]))
    fetches = fetches[is_in(events.thread[fetches], spans.thread[calls])]
    fetched = np.sort(events.start[fetches])
    stretch = np.searchsorted(trained, spans.start[bare])
    batch = np.searchsorted(fetched, spans.start[bare])
    # Whether the next batch is fetched before a model is trained again.
    next_trained = np.append(trained, FAR)[stretch]
    next_fetched = np.append(fetched, FAR)[batch]
    begun = np.append(np.sort(events.start[updates]), FAR)
    next_update = begun[np.searchsorted(begun, spans.start[bare])]
    until = np.minimum(np.minimum(next_trained, next_fetched), next_update)
    work = _WorkBehind.of(events, spans, bare, calls, until)
    phase = _phases(spans, bare, stretch, next_fetched < next_trained, work)
    last_fetched = np.append(NOTHING, fetched)[batch]
    last_trained = np.append(NOTHING, trained)[stretch]
    own_batch = (next_fetched < next_trained) & (last_fetched > last_trained)
    fetched_at = np.where(own_batch, last_fetched, spans.start[bare])
    return Forwards(
        training, bare, phase, tuple(_uses(spans, bare, stretch, phase, work, fetched_at))
    )


# Calls without gradients -------------------------------------------------------------------------


def _without_gradients(events: Events, ownership: Ownership, calls: Ints) -> Mask:
    """Whether each outermost call has no gradients, and a model for which this tells a use."""
    spans = ownership.spans
    forwards = np.flatnonzero((spans.module >= 0) & (ownership.passes.of_span < 0))
    ran, nodes_made = _operators_of(events, spans, forwards)
    is_trained = np.zeros(len(spans.modules), bool)
    is_trained[_trained(spans.modules, spans.module[forwards[nodes_made > 0]])] = True
    shapes = [_shape(spans.modules, module) for module in spans.modules]
    trained_shapes = {shape for shape, trained in zip(shapes, is_trained, strict=True) if trained}
    for number, module in enumerate(spans.modules):
        is_copy = len(shapes[number]) > 1 and shapes[number] in trained_shapes
        is_trained[number] |= bool(trained_shapes) and (is_copy or _use_by_name(module) is not None)
    is_without: Mask = (
        is_in(calls, forwards[(ran > 0) & (nodes_made == 0)]) & is_trained[spans.module[calls]]
    )
    return is_without


def _operators_of(events: Events, spans: Spans, calls: Ints) -> tuple[Ints, Ints]:
    """Return how many operators each call runs, and how many of these make a node."""
    ran, nodes_made = np.zeros(len(calls), np.int64), np.zeros(len(calls), np.int64)
    operators = events.of(Category.OPERATOR)
    operators = operators[~events.is_label[events.name[operators]]]
    by_thread = dict(grouped(events.thread, operators))
    for thread, members in grouped(spans.thread[calls]):
        on_thread = by_thread.get(thread, operators[:0])
        with_node = on_thread[events.sequence[on_thread] >= 0]
        for count, index in ((ran, on_thread), (nodes_made, with_node)):
            start = np.sort(events.start[index])
            first = np.searchsorted(start, spans.start[calls[members]])
            count[members] = np.searchsorted(start, spans.end[calls[members]]) - first
    return ran, nodes_made


def _trained(modules: tuple[Module, ...], with_nodes: Ints) -> list[int]:
    """Return the modules that have calls with nodes, and those around them."""
    paths = {modules[number].path for number in distinct(with_nodes)}
    around = {path[: dot.start()] for path in paths for dot in re.finditer(r"\.", path)}
    around |= {modules[number].root for number in distinct(with_nodes)}
    return [number for number, module in enumerate(modules) if module.path in paths | around]


def _shape(modules: tuple[Module, ...], root: Module) -> tuple[str, ...]:
    """Return the classes of a model's modules; nothing for a module that is inside a model."""
    if root.path != root.root:
        return ()
    return tuple(sorted(module.class_name for module in modules if module.root == root.path))


def _use_by_name(module: Module) -> PhaseName | None:
    """Return what the last part of a module's path says that the module is for."""
    words = _WORD.findall(module.path.rpartition(".")[2])
    return next((_WORDS[word.lower()] for word in words if word.lower() in _WORDS), None)


# What they are for -------------------------------------------------------------------------------


class _WorkBehind(msgspec.Struct, frozen=True):
    """The operators behind each call, up to the next call, the next batch or the next training.

    Attributes:
        first: index into ``end`` of the first one behind each call.
        count: how many there are.
        draws: whether one of them draws values, or the best values are appended to a sequence.
        end: when each operator outside of all calls has ended, and all before it.
    """

    first: Ints
    count: Ints
    draws: Mask
    end: Ints

    @classmethod
    def of(cls, events: Events, spans: Spans, bare: Ints, calls: Ints, until: Ints) -> _WorkBehind:
        """Find them.

        Args:
            until: when the next batch is fetched, or a model is trained, behind each call.
        """
        operators = events.of(Category.OPERATOR)
        operators = operators[is_in(events.thread[operators], spans.thread[bare])]
        operators = operators[spans.of(events, operators) < 0]
        operators = operators[np.argsort(events.start[operators], kind="stable")]
        start, name = events.start[operators], events.name[operators]
        following = np.append(spans.start[calls], FAR)
        following = following[np.searchsorted(spans.start[calls], spans.end[bare])]
        first = np.searchsorted(start, spans.end[bare])
        last = np.searchsorted(start, np.minimum(until, following))

        def behind(is_wanted: Mask) -> Mask:
            counted = np.append(0, np.cumsum(is_wanted[name]))
            has_work: Mask = counted[last] > counted[first]
            return has_work

        draws = behind(events.names_where(names.is_draw))
        appends = behind(events.names_where(names.is_best)) & behind(
            events.names_where(names.is_concatenation)
        )
        end = np.maximum.accumulate(events.end[operators])
        return cls(first, np.maximum(last - first, 0), draws | appends, end)


def _phases(
    spans: Spans, bare: Ints, stretch: Ints, not_trained_on: Mask, work: _WorkBehind
) -> tuple[PhaseName, ...]:
    """Return what each call is for.

    Args:
        stretch: a number for each call, the same for those between two trainings.
        not_trained_on: whether the batch of each call is not trained on.
    """
    named = [_use_by_name(spans.modules[number]) for number in spans.module[bare].tolist()]
    rolled_out = np.zeros(len(bare), bool)
    scored = np.zeros(len(bare), bool)
    few = np.zeros(len(bare), bool)
    for _, calls in grouped(stretch, np.flatnonzero(~not_trained_on)):
        drawn = calls[work.draws[calls]]
        if len(drawn) >= _REPEATED:
            rolled_out[calls[calls <= drawn[-1]]] = True
            scored[calls[calls > drawn[-1]]] = True
        else:
            few[calls] = len(calls) < _REPEATED
    if rolled_out.any():
        scored |= few
    phases: list[PhaseName] = []
    for number, name in enumerate(named):
        if rolled_out[number]:
            phases.append("rollout")
        elif not_trained_on[number]:
            phases.append("evaluation")
        elif scored[number]:
            phases.append("reference" if name == "reference" else "scoring")
        else:
            phases.append(name or "evaluation")
    return tuple(phases)


def _uses(
    spans: Spans,
    bare: Ints,
    stretch: Ints,
    phase: tuple[PhaseName, ...],
    work: _WorkBehind,
    fetched_at: Ints,
) -> list[tuple[PhaseName, int, int]]:
    """Join successive calls of one use, with the work between them.

    An evaluation begins where its first batch is asked for.

    The work behind the last call belongs to a rollout as far as it is there behind each call, and
    to scoring, which computes from it what is trained on.

    Args:
        fetched_at: when each call starts, or its batch is asked for that is not trained on.
    """
    numbers = np.array([WITHOUT_GRADIENTS.index(name) for name in phase])
    new = (np.diff(numbers, prepend=-1) != 0) | (np.diff(stretch, prepend=-1) != 0)
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(bare)) - 1
    ended = np.maximum.accumulate(spans.end[bare])
    uses = []
    for begin, final in zip(first.tolist(), last.tolist(), strict=True):
        usual_count = 0
        if phase[begin] == "rollout":
            drawn = work.draws[begin : final + 1]
            usual_count = int(median(work.count[begin : final + 1][drawn]))
        elif phase[begin] in ("scoring", "reference"):
            usual_count = int(work.count[final])
        usual_count = min(usual_count, int(work.count[final]))
        end = int(ended[final])
        if usual_count:
            end = max(end, int(work.end[work.first[final] + usual_count - 1]))
        uses.append((phase[begin], int(fetched_at[begin]), end))
    return uses
