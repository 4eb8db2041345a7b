"""``Monitor``: time each block's forward and backward in some steps of a long run.

In a sampled step the blocks have hooks, and their boundary nodes a prehook that records a moment: a
CUDA event on a GPU, the clock's time on a CPU. A block that ``block.compile()`` has compiled has a
function around its call instead, as Dynamo compiles hooks. The time between two moments of the
backward belongs to the block of the first one. The graph stays as it is, and nothing waits for the
GPU: the times are read in a later step, when the GPU has passed all events.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from backspot.checks import check_whole, is_number
from backspot.errors import MissingDependencyError, UsageError
from backspot.interrupts import pass_on
from backspot.live.markers import tensors_in
from backspot.live.modules import class_name, is_called, unwrap
from backspot.live.optimizers import ids_updated_by
from backspot.live.torch_internals import autograd, dynamo
from backspot.live.torch_internals.modules import children_of
from backspot.live.torch_internals.process import hook_steps

if TYPE_CHECKING:
    import pandas as pd

_KEY = "backspot monitor"  # in node.metadata: this node has a moment
_OUTSIDE, _END = -1, -2
_RECENT = 5  # samples that must all be slow for an alarm
_PAST = 10  # samples that are needed to compare with
_PATIENCE = 16  # steps of another optimizer, after which its steps count
_LEAST_MS = 0.02  # of a change that is worth an alarm
_WHOLE = "the model is compiled as a whole; Monitor(compiled_model, depth=0) times it whole"
_log = logging.getLogger("backspot")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A block with a backward that has become slower than its own past.

    Attributes:
        path: Path of the block.
        before_ms: Median backward time before, in milliseconds.
        now_ms: Median of the last samples, in milliseconds.
        since: The first sampled step that was slower.
        step: The step of the alarm.

    Example:
        >>> print(backspot.Alarm("blocks.7", 1.8, 2.9, since=41_000, step=41_400))
        blocks.7 backward 1.80 → 2.90 ms since step 41,000
    """

    __module__ = "backspot"

    path: str
    before_ms: float
    now_ms: float
    since: int
    step: int

    def __str__(self) -> str:
        times = f"{self.before_ms:.2f} → {self.now_ms:.2f} ms"
        return f"{self.path or 'the model'} backward {times} since step {self.since:,}"


@dataclass(frozen=True, slots=True)
class _Block:
    path: str
    class_name: str
    around: int  # the index of the block around it, or _OUTSIDE


@dataclass(slots=True)
class _Sample:
    """What a sampled step records; moments are of the clock.

    Attributes:
        thread: the thread that runs the forward; 0 if the first call of a block decides.
        forward: each call of a block, with the moments of its start and end.
        backward: the block of which the backward begins, and the moment; ``_END`` ends a pass.
        running: the calls that have not returned, each with the moment of its start.
        interrupted: for each block that checkpointing is running again, the block of which the
            backward is interrupted by that.
    """

    step: int
    thread: int
    forward: list[tuple[int, Any, Any]] = field(default_factory=list)
    backward: list[tuple[int, Any]] = field(default_factory=list)
    running: list[tuple[int, Any]] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)
    broken: bool = False

    def is_whole(self) -> bool:
        return (
            not self.broken
            and not self.running
            and bool(self.backward)
            and self.backward[-1][0] == _END
        )

    def moments(self) -> Iterator[Any]:
        for _, start, end in self.forward:
            yield from (start, end)
        for _, moment in self.backward:
            yield moment


@dataclass(frozen=True, slots=True)
class _Times:
    """The milliseconds of each block in a sampled step, 0 for a block that did not run."""

    step: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]


class _HostClock:
    """Moments of a model on a CPU, where an operator has ended when it returns."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def has_passed(self, moments: Sequence[int]) -> bool:
        return True

    def between(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def take_back(self, moments: Sequence[int]) -> None:
        pass


class _DeviceClock:
    """Moments of a device's stream: events that the device passes some time later."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._free: list[Any] = []

    def now(self) -> Any:
        event = self._free.pop() if self._free else self._backend.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moments: Sequence[Any]) -> bool:
        return all(event.query() for event in moments)

    def between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def take_back(self, moments: Sequence[Any]) -> None:
        self._free.extend(moments)


class Monitor:
    """Times the forward and the backward of a model's blocks, in one of many training steps.

    Between the sampled steps the model has no hook: one hook of PyTorch's own counts the steps of
    its optimizer. A sampled step is timed by CUDA events on a GPU and by the clock on a CPU,
    without a profiler, a synchronization or a change of the autograd graph. The times are read some
    steps later; several passes of a step are added up.

    The backward of a block runs until autograd reaches another block, the nodes outside of all
    blocks, or the end. A model that is compiled as a whole has no blocks: compile its blocks, or
    use ``depth=0``, which times ``torch.compile(model)`` as one. A block that is replaced is timed
    from the next sample on.

    Args:
        model: the model. It is not kept alive.
        depth: the deepest level of modules that are timed, as in ``instrument``. Default 1: the
            children of the model, and the layers of a ``ModuleList``.
        every: one of how many steps is sampled. Default 100.
        keep: how many samples are kept. Default 1000.
        slower_by: the slowdown of a block's backward that raises an alarm, as a share: in each of
            the last five samples, and beyond what most blocks have in common. ``None``: no alarm.
            Default 0.2.
        on_sample: called with the step and a dict of times for a logger, such as
            ``blocks.7/backward_ms``. Default: none.
        on_alarm: called with each ``Alarm``. ``None`` (default) logs a warning.

    Attributes:
        paths: The paths of the blocks.
        step: How many optimizer steps were counted.
        alarms: The alarms so far.

    Raises:
        UsageError: If an argument is invalid, or the model has no blocks.

    Example:
        >>> import backspot, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with backspot.Monitor(model, every=2) as monitor:
        ...     for _ in range(8):
        ...         model(torch.randn(32, 64)).square().mean().backward()
        ...         optimizer.step()
        >>> monitor.paths, monitor.step
        (('0', '1'), 8)
    """

    __module__ = "backspot"

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        depth: int = 1,
        every: int = 100,
        keep: int = 1000,
        slower_by: float | None = 0.2,
        on_sample: Callable[[int, dict[str, float]], object] | None = None,
        on_alarm: Callable[[Alarm], object] | None = None,
    ) -> None:
        _check(model, depth, every, keep, slower_by)
        self._blocks = tuple(block for block, _ in _find_blocks(model, depth))
        if not self._blocks:
            why = "it is compiled as a whole" if _is_compiled(model) else "it has no modules inside"
            raise UsageError(f"Monitor({class_name(model)}): {why}; depth=0 times it whole")
        self.paths = tuple(block.path for block in self._blocks)
        self.step = 0
        self.alarms: list[Alarm] = []
        self._depth, self._every, self._slower_by = depth, every, slower_by
        self._on_sample, self._on_alarm = on_sample, on_alarm
        self._model = weakref.ref(model)
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._others: Counter[int] = Counter()  # the steps of others since the counted one's last
        self._clock: Any = None
        self._sample: _Sample | None = None
        self._is_removed = False
        self._pending: deque[_Sample] = deque(maxlen=8)
        self._samples: deque[_Times] = deque(maxlen=keep)
        self._compared_from = [0] * len(self._blocks)
        self._handles: list[Any] = []
        self._hookers = {
            owner: autograd.node_hooker(_Hook(self, Monitor._reached, owner).__call__)
            for owner in range(_OUTSIDE, len(self._blocks))
        }
        self._unhook = hook_steps(self._after_step)
        weakref.finalize(model, self._unhook).atexit = False

    # The user's part -----------------------------------------------------------------------------

    def remove(self) -> None:
        """Stop: remove all hooks. The samples stay. A second call does nothing."""
        self._is_removed = True
        self._unhook()
        self._sample = None
        self._take_hooks()
        self.flush()

    def flush(self) -> None:
        """Read the samples that the device has finished; otherwise the next step reads them."""
        while self._pending:
            moments = list(self._pending[0].moments())
            if not self._clock.has_passed(moments):
                return
            self._read(self._pending.popleft(), moments)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Monitor({len(self.paths)} blocks, {len(self._samples)} samples, step {self.step})"

    def __str__(self) -> str:
        """Return a table of the blocks: median times, and the last backward; – if none ran."""
        if not self._samples:
            return f"{self!r}: no sample yet, the first one comes after step {self._every}"
        forward, backward = self._medians("forward"), self._medians("backward")
        last = self._samples[-1].backward
        rows = [["block", "class", "forward ms", "backward ms", "last backward"]]
        rows += [
            [
                block.path or "(model)",
                block.class_name,
                *(f"{ms:.3f}" if ms else "–" for ms in mine),
            ]
            for block, *mine in zip(self._blocks, forward, backward, last, strict=True)
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if number < 2 else cell.rjust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        steps = f"steps {self._samples[0].step:,} to {self._samples[-1].step:,}"
        lines.append(f"Medians of {len(self._samples)} samples, {steps}.")
        return "\n".join([*lines, *(f"! {alarm}" for alarm in self.alarms)])

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame with one row for each block of each sample.

        Returns:
            Columns ``step``, ``path``, ``class_name``, ``forward_ms`` and ``backward_ms``, which
            are missing where a block did not run.

        Raises:
            MissingDependencyError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingDependencyError(
                "to_pandas() needs pandas: pip install 'backspot[pandas]'"
            ) from None
        columns = ["step", "path", "class_name", "forward_ms", "backward_ms"]
        rows = [
            (times.step, block.path, block.class_name, forward or math.nan, backward or math.nan)
            for times in self._samples
            for block, forward, backward in zip(
                self._blocks, times.forward, times.backward, strict=True
            )
        ]
        frame: pd.DataFrame = pandas.DataFrame(rows, columns=columns)
        return frame

    # Steps ---------------------------------------------------------------------------------------

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if dynamo.is_dynamo_compiling():
            return
        try:
            if not self._is_of_model(optimizer):
                return
            if autograd.in_backward():
                autograd.at_end_of_backward(self._end_step)
            else:
                self._end_step()
        except Exception as error:
            pass_on(error)
            self._give_up()

    def _end_step(self) -> None:
        try:
            self.step += 1
            if self._sample is not None:
                self._end_sample()
            if self._pending:
                self.flush()
            if self.step % self._every == 0:
                self._begin_sample()
        except Exception as error:
            pass_on(error)
            self._give_up()

    def _give_up(self, why: str = "") -> None:
        if why:
            _log.warning("backspot.Monitor stops: %s", why)
        else:
            _log.exception("backspot.Monitor stops after an error")
        self._sample = None
        self._every = 1 << 62
        self._take_hooks()

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the optimizer of which the steps count.

        It is the first one of the model, or another one that steps for long without it.
        """
        counted = self._optimizer and self._optimizer()
        if counted is optimizer:
            self._others.clear()
            return True
        if counted is not None:
            self._others[id(optimizer)] += 1
        if counted is None or self._others[id(optimizer)] > _PATIENCE:
            model = self._model()
            if model is None:
                return False
            if ids_updated_by([optimizer]).isdisjoint(map(id, model.parameters())):
                return False
            self._optimizer = weakref.ref(optimizer)
            self._others.clear()
            return True
        return False

    def _begin_sample(self) -> None:
        model = self._model()
        if model is None or self._is_removed:  # by a function that was given a sample
            return
        if self._clock is None:
            self._clock = _clock_of(model)
            # It takes a look at all objects of the process, so it is asked once.
            if model in dynamo.compiled_modules():
                self._give_up(_WHOLE)
                return
        # The backward of a GPU has a thread of its own, which says nothing of the next forward.
        thread = 0 if autograd.in_backward() else threading.get_ident()
        self._sample = _Sample(self.step + 1, thread)
        index = {block.path: index for index, block in enumerate(self._blocks)}
        for block, module in _find_blocks(model, self._depth):
            if block.path in index:
                self._hook_block(module, index[block.path])
        if not self._handles:
            self._give_up(_WHOLE)

    def _hook_block(self, module: torch.nn.Module, block: int) -> None:
        before = _Hook(self, Monitor._before, block)
        after = _Hook(self, Monitor._after, block)
        if dynamo.compiles_itself(module):
            self._handles.append(dynamo.around_compiled_call(module, before, after))
        else:
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after),
            ]

    def _end_sample(self) -> None:
        if autograd.in_backward():  # this may come before the end that ``_reached`` asks for
            self._end_pass()
        sample, self._sample = self._sample, None
        self._take_hooks()
        if sample is not None and sample.is_whole():
            self._pending.append(sample)

    def _take_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # Moments -------------------------------------------------------------------------------------

    def _sampled_here(self) -> _Sample | None:
        """Return the sample that a call belongs to; ``None`` for an evaluation."""
        sample = self._sample
        if sample is None or dynamo.is_dynamo_compiling() or not torch.is_grad_enabled():
            return None
        if not sample.thread and not autograd.in_backward():
            sample.thread = threading.get_ident()
        if not (sample.thread == threading.get_ident() or autograd.in_backward()):
            return None
        return sample

    def _before(self, block: int, *inputs: object) -> None:
        sample = self._sampled_here()
        if sample is None:
            return
        if autograd.in_backward():  # checkpointing runs the block again
            sample.interrupted.append(sample.backward[-1][0] if sample.backward else _OUTSIDE)
            self._reached(block)
            return
        self._mark(inputs, sample.running[-1][0] if sample.running else _OUTSIDE)
        sample.running.append((block, self._clock.now()))

    def _after(self, block: int, module: object, args: object, output: object) -> None:
        sample = self._sampled_here()
        if sample is None:
            return
        if autograd.in_backward():
            if sample.interrupted:
                self._reached(max(sample.interrupted.pop(), _OUTSIDE))
                self._mark(output, block)
        elif sample.running:
            end = self._clock.now()
            begun, start = sample.running.pop()
            sample.broken |= begun != block
            sample.forward.append((block, start, end))
            self._mark(output, block)

    def _mark(self, value: object, owner: int) -> None:
        """Record the moment when autograd reaches the nodes of these tensors."""
        with autograd.ignore_torch_function():
            for tensor in tensors_in(value):
                if autograd.version_of(tensor) and autograd.is_view(tensor):
                    continue  # reading its node is not safe
                node = tensor.grad_fn
                if node is not None and _KEY not in node.metadata:
                    node.metadata[_KEY] = True
                    self._hookers[owner](node)

    def _reached(self, owner: int, *_: object) -> None:
        sample = self._sample
        if sample is None:
            return
        if not sample.backward or sample.backward[-1][0] == _END:
            autograd.at_end_of_backward(self._end_pass)
        sample.backward.append((owner, self._clock.now()))

    def _end_pass(self) -> None:
        sample = self._sample
        if sample is not None:
            sample.backward.append((_END, self._clock.now()))

    # Times ---------------------------------------------------------------------------------------

    def _read(self, sample: _Sample, moments: list[Any]) -> None:
        between = self._clock.between
        forward, backward = ([0.0] * len(self._blocks) for _ in range(2))
        for block, start, end in sample.forward:
            forward[block] += between(start, end)
        for (owner, start), (_, end) in zip(sample.backward, sample.backward[1:], strict=False):
            if owner >= 0:
                backward[owner] += between(start, end)
        for index in reversed(range(len(self._blocks))):  # blocks come after those around them
            if self._blocks[index].around >= 0:
                backward[self._blocks[index].around] += backward[index]
        self._clock.take_back(moments)
        self._add(_Times(sample.step, tuple(forward), tuple(backward)))

    def _add(self, times: _Times) -> None:
        self._samples.append(times)
        if self._on_sample is not None:
            values = {}
            for kind, of_blocks in (("forward_ms", times.forward), ("backward_ms", times.backward)):
                for block, ms in zip(self._blocks, of_blocks, strict=True):
                    if ms:
                        values[f"{block.path or block.class_name}/{kind}"] = ms
            self._on_sample(times.step, values)
        if self._slower_by is not None:
            self._compare(self._slower_by)

    def _compare(self, slower_by: float) -> None:
        """Raise an alarm for each block that is slower than before in all of the last samples.

        A sample in which most blocks are slower says something of the machine. So the times of a
        sample are divided by the slowdown that its blocks have in common.
        """
        samples = list(self._samples)
        recent = samples[-_RECENT:]
        past = {
            index: sorted(
                times.backward[index]
                for times in samples[:-_RECENT]
                if times.step >= at and times.backward[index]
            )
            for index, at in enumerate(self._compared_from)
        }
        past = {index: times for index, times in past.items() if len(times) >= _PAST}
        usual = {index: statistics.median(times) for index, times in past.items()}
        shared = [_shared_slowdown(times.backward, usual) for times in recent]
        for index, before in usual.items():
            now = [times.backward[index] for times in recent]
            nine_tenths = past[index][len(past[index]) * 9 // 10]
            limit = max(before * (1 + slower_by), before + _LEAST_MS, nine_tenths)
            if all(ms / common > limit for ms, common in zip(now, shared, strict=True)):
                self._compared_from[index] = recent[0].step
                self._raise(index, before, statistics.median(now), recent)

    def _raise(self, index: int, before: float, now: float, recent: Sequence[_Times]) -> None:
        alarm = Alarm(self.paths[index], before, now, recent[0].step, recent[-1].step)
        self.alarms.append(alarm)
        if self._on_alarm is not None:
            self._on_alarm(alarm)
        else:
            _log.warning("%s", alarm)

    def _medians(self, kind: str) -> list[float]:
        columns = zip(*(getattr(times, kind) for times in self._samples), strict=True)
        return [statistics.median([ms for ms in column if ms] or [0.0]) for column in columns]


def _shared_slowdown(times: Sequence[float], usual: Mapping[int, float]) -> float:
    """Return how many times slower most blocks are than they usually are, at least 1.

    Args:
        usual: what blocks usually take, by index.
    """
    ratios = [times[index] / before for index, before in usual.items() if times[index]]
    return max(1.0, statistics.median_low(ratios)) if len(ratios) > 1 else 1.0


def _check(model: object, depth: object, every: object, keep: object, slower_by: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"Monitor() takes a torch.nn.Module, not {type(model).__name__}")
    for name, value, least in (("depth", depth, 0), ("every", every, 1), ("keep", keep, 1)):
        check_whole(name, value, least)
    if slower_by is not None and not (is_number(slower_by) and slower_by):
        raise UsageError(f"slower_by={slower_by!r}: give a share above 0, such as 0.2, or None")


def _is_compiled(module: torch.nn.Module) -> bool:
    cls = dynamo.compiled_class()
    return dynamo.compiles_itself(module) or (cls is not None and isinstance(module, cls))


def _find_blocks(model: torch.nn.Module, depth: int) -> Iterator[tuple[_Block, torch.nn.Module]]:
    """Iterate over the modules of the levels 1 to ``depth``, those around others first.

    Wrappers count as what they wrap, but it is the wrapper that is called. What is inside a
    compiled module is left out: hooks there do not run, and may be in the guards.
    """
    if depth == 0:
        yield _Block("", class_name(unwrap(model)), _OUTSIDE), model
        return
    seen = {id(unwrap(model))}
    count = 0
    pending = [("", model, 0, _OUTSIDE)]
    while pending:
        path, module, level, around = pending.pop()
        inner = unwrap(module)
        if path and is_called(inner):
            level += 1
            yield _Block(path, class_name(inner), around), module
            around, count = count, count + 1
        is_closed = _is_compiled(module) or _is_compiled(inner)
        if level >= depth or is_closed or isinstance(inner, torch.jit.ScriptModule):
            continue
        for name, child in reversed(children_of(inner).items()):
            if child is not None and id(unwrap(child)) not in seen:
                seen.add(id(unwrap(child)))
                pending.append((f"{path}.{name}" if path else name, child, level, around))


def _clock_of(model: torch.nn.Module) -> _HostClock | _DeviceClock:
    kinds = {parameter.device.type for parameter in model.parameters()}
    for kind in sorted(kinds - {"cpu", "meta"}):
        backend = getattr(torch, kind, None)
        if hasattr(backend, "Event"):
            return _DeviceClock(backend)
    return _HostClock()


class _Hook:
    """A hook of a monitor on a block or a node, which does nothing in a copy of the model."""

    __slots__ = ("_block", "_of_monitor", "_record")

    def __init__(self, monitor: Monitor, record: Callable[..., None], block: int) -> None:
        self._of_monitor, self._record, self._block = monitor, record, block

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments and returns None

    def __call__(self, *args: object) -> None:
        try:
            self._record(self._of_monitor, self._block, *args)
        except Exception as error:  # a time is never worth a failed step
            pass_on(error)
            if self._of_monitor._sample is not None:
                self._of_monitor._sample.broken = True


dynamo.keep_from_dynamo(Monitor._after_step, _Hook.__call__)
