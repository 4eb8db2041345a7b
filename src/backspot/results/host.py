"""What the host does in a step beside the model: waits for a device, lines, and their picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from backspot.formatting import labelled, place_of
from backspot.presented import public
from backspot.results.costs import Launches, PhaseName
from backspot.results.findings import Saving
from backspot.results.quantities import SELDOM, Count

Costly = Literal["waits"]
"""What can cost most in a step."""


@public
@dataclass(frozen=True, slots=True)
class Wait:
    """A place of the step where the host waits until a device has done its work.

    All times are integer nanoseconds of a typical step.

    Attributes:
        phase: Phase of the step in which the host is.
        path: Path of the innermost module whose forward or backward waits, or a name in
            parentheses.
        class_name: Class of the module, ``""`` if no module waits.
        operator: The outermost operator around the wait (``aten::item``), or the call of the
            device's runtime where there is none.
        line: Line of Python that waits, ``file:line``, or ``""`` if it is not known.
        count: Number of waits in a typical step.
        wall_ns: Clock time that the host spends in them. Without the profiler it comes sooner, and
            waits longer than this.
        idle_ns: Clock time in which no device has work, during and after the waits, until the host
            is ahead of the devices again; at most twice ``wall_ns``.
        saves: How much less time a step would take if the host did not wait here. ``None`` where
            the recording cannot be replayed.
    """

    phase: PhaseName
    path: str
    class_name: str
    operator: str
    line: str
    count: Count
    wall_ns: Count
    idle_ns: Count
    saves: Saving | None = None

    def __repr__(self) -> str:
        place = self.line or labelled(self.path, self.class_name)
        times = f"{self.count} per step, {self.wall_ns / 1e6:.3f} ms"
        return f"<Wait {self.operator} in {place}: {times}>"


@public
@dataclass(frozen=True, slots=True)
class HostLine:
    """What the host does in a step at one place of the user's Python code.

    A place is the innermost line that is neither PyTorch's nor Python's own: what PyTorch does for
    it counts there. All times are integer nanoseconds of a typical step without stacks: recording
    stacks slows the host, and what it is known to add is taken off.

    Attributes:
        file: File name, relative to its package or to the working folder.
        line: Line number, from 1: the line of a call; the first line that may run, where the
            function itself runs between two calls; or the line on which the function begins, where
            the trace does not say more.
        last_line: The last line that may run; ``line`` for a call.
        function: Function that contains the lines.
        phase: Phase of the step in which it runs.
        path: Path of the module in whose forward or backward the function runs Python,
            ``(outside model)`` if there is none, or if mostly operators run.
        class_name: Class of the module, ``""`` if there is none.
        calls: Number of functions that it calls in a typical step.
        operators: Number of operators that it calls in a typical step, without those that these
            call.
        wall_ns: Clock time of the host.
        python_ns: Part of ``wall_ns`` in which the function, or another that is not PyTorch's, runs
            Python: no operator, and no call of the device's runtime.
        torch_ns: Part of ``wall_ns`` in which PyTorch's own Python runs, and no operator.
        idle_ns: Part of ``wall_ns`` in which no device has work, running or queued; all of it if
            the trace has no device work.
    """

    file: str
    line: Count
    last_line: Count
    function: str
    phase: PhaseName
    path: str
    class_name: str
    calls: Count
    operators: Count
    wall_ns: Count
    python_ns: Count
    torch_ns: Count
    idle_ns: Count

    @property
    def operators_ns(self) -> int:
        """Part of ``wall_ns`` in which operators run, or calls of the device's runtime."""
        return self.wall_ns - self.python_ns - self.torch_ns

    @property
    def place(self) -> str:
        """``file:line``, or ``file:line-last_line``."""
        return place_of(self.file, self.line, self.last_line)

    def __repr__(self) -> str:
        return f"<HostLine {self.place} {self.function}(): {self.wall_ns / 1e6:.3f} ms per step>"


@public
@dataclass(frozen=True, slots=True)
class StepPicture:
    """One recorded step of typical length, in coarse pieces that do not overlap.

    Each entry begins with its start and its end, in nanoseconds since the step began. With lines,
    it is a step with stacks, which takes longer.

    Attributes:
        recorded_wall_ns: Length of the step while it was recorded.
        host: Start, end, phase that the host is in.
        lines: Start, end, line of the user's Python, ``file:line``.
        device: Start, end, phase for which devices work, in which per cent of that time.
        waits: Of the longest waits: start, end, start and end of the work that the host waits for,
            and the line, ``""`` if not known.
    """

    recorded_wall_ns: Count
    host: tuple[tuple[Count, Count, PhaseName], ...]
    lines: tuple[tuple[Count, Count, str], ...]
    device: tuple[tuple[Count, Count, PhaseName, Count], ...]
    waits: tuple[tuple[Count, Count, Count, Count, str], ...]


@dataclass(frozen=True, kw_only=True)
class InReport:
    """What each report has.

    Attributes:
        waits: Places where the host waits for a device, the longest waits first.
        without_waits: What a step would save if the host waited in none of them, ``None`` if not
            known.
        host: Lines of the user's Python, those in which devices idle for longest first; empty
            unless steps were recorded with stacks.
        launches: What each module launches in each phase, most idle time first; empty without
            device work and phases.
        picture: One step as a picture; ``None`` where there is neither a device nor a line.
    """

    __slots__ = ()

    waits: tuple[Wait, ...] = ()
    without_waits: Saving | None = None
    host: tuple[HostLine, ...] = ()
    launches: tuple[Launches, ...] = field(default=(), metadata=SELDOM)
    picture: StepPicture | None = field(default=None, metadata=SELDOM)

    def _lines(self) -> tuple[HostLine, ...]:
        return self.host

    def _contradictions(self, _: int) -> Iterator[str]:
        if (drawn := self.picture) is not None:
            pieces = [
                interval[:2]
                for lane in (drawn.host, drawn.lines, drawn.device)
                for interval in lane
            ]
            if not drawn.recorded_wall_ns or any(
                not begin < end <= drawn.recorded_wall_ns for begin, end in pieces
            ):
                yield "its picture does not lie in its step"
