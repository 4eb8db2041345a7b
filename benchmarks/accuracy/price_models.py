"""The trainings of ``price_truth``: a cause and an innocent operator in one module, and a clock.

A ``Training`` says what is done badly, or well, and where; ``built`` makes a step of it. The cause
runs in the same forward as its neighbour (``Mixed``), in the same function around the model, or in
the same phase of the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.models import Context

Run = Callable[..., torch.Tensor]
"""Takes hidden states of (batch, length, width), and the weights of its part."""
Shape = tuple[int, ...]
FEATURES = 32
"""Of an input, before the first layer."""


@dataclass(frozen=True)
class Size:
    """How large a training is.

    Attributes:
        device: where it runs.
        batch: sequences in a batch.
        length: tokens of a sequence.
        width: features of a token.
        hidden: features inside of the neighbours.
        turns: rounds of a loop.
        rows: of what is large: a table, a vocabulary.
    """

    device: str
    batch: int
    length: int
    width: int
    hidden: int
    turns: int
    rows: int


def size_of(context: Context) -> Size:
    """Return the size for the device: some tens of milliseconds a step on one core of a CPU.

    On a GPU the kernels must take longer than the host needs to launch them, or the gain of a fix
    is lost in the host's noise: a quarter of this batch made steps of 3 ms on an H200, and in 15 of
    80 cases the gain then wavered by more than a price may err.
    """
    if context.small:
        return Size(context.device, 4, 16, 32, 32, 8, 64)
    if context.device == "cpu":
        return Size(context.device, 8, 128, 512, 512, 512, 8192)
    return Size(context.device, 128, 512, 1024, 4096, 512, 65536)


@dataclass(frozen=True)
class Part:
    """An operation in a module's forward, with the shapes of its weights.

    Attributes:
        run: the operation.
        weights: shapes at a size.
        trained: ``False`` where no optimizer has the weights; ``None`` where they have no gradient
            either.
    """

    run: Run
    weights: Callable[[Size], Sequence[Shape]] = lambda size: ()
    trained: bool | None = True


NOTHING = Part(lambda x: x)


class Clock:
    """Measures the forward and the backward of one function, or what a ``with`` holds.

    On a CPU it is the process's time, on a GPU the time between two events of the stream.
    """

    def __init__(self, device: str, now: Callable[[], float] = time.process_time) -> None:
        self._on_gpu, self._now = device != "cpu", now
        self._spans: list[list[Any]] = []

    def _stamp(self) -> Any:
        if not self._on_gpu:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def mark(self) -> Iterator[None]:
        """Measure what is inside."""
        begin = self._stamp()
        yield
        self._spans.append([begin, self._stamp()])

    def around(self, run: Run) -> Run:
        """Return the function with a clock around its forward, and around its backward."""
        begun: list[Any] = []

        def begin(gradient: torch.Tensor) -> None:
            begun.append(self._stamp())

        def end(gradient: torch.Tensor) -> None:
            if begun:
                self._spans.append([begun.pop(), self._stamp()])

        def timed(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            x = x.view_as(x)
            if x.requires_grad:
                x.register_hook(end)
            with self.mark():
                y = run(x, *weights)
            y = y.view_as(y)
            if y.requires_grad:
                y.register_hook(begin)
            return y

        return timed

    def take(self) -> float:
        """Return the milliseconds since the last call."""
        if self._on_gpu:
            torch.cuda.synchronize()
            spent = sum(begin.elapsed_time(end) for begin, end in self._spans)
        else:
            spent = 1e3 * sum(end - begin for begin, end in self._spans)
        self._spans.clear()
        return spent


Mark = Callable[[], AbstractContextManager[None]]
"""Gives what is put around the cause alone: a clock, or nothing."""
State = dict[str, Any]
"""What the functions of a training keep between its steps."""


def mean_square(model: nn.Module, x: torch.Tensor, mark: Mark) -> torch.Tensor:
    """The loss of most trainings."""
    return model(x).square().mean()


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of most trainings: fused, so that it takes next to nothing."""
    return torch.optim.SGD(parameters, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Training:
    """A training with a cause in it, or with its fix.

    Attributes:
        part: what runs beside the neighbour in one forward.
        in_loss: whether that is the forward of the loss, and not of a layer.
        depth: how many such modules the model has.
        batch: sequences in a batch, other than the size's.
        spare: small parameters that the model has beside.
        optimizer: makes it.
        clips: whether gradients are clipped.
        clocks_update: whether the clock is around the optimizer, and not around the part.
        drops: whether ``zero_grad`` drops gradients.
        micro: passes in a step.
        around: what a step runs in.
        loss: computes it.
        before: takes the batch, and returns it.
        after: runs behind the optimizer.
        loader: what loads batches; else they are there.
    """

    part: Part = NOTHING
    in_loss: bool = False
    depth: int = 1
    batch: int = 0
    spare: int = 0
    optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd
    clips: bool = False
    clocks_update: bool = False
    drops: bool = True
    micro: int = 1
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    loss: Callable[[nn.Module, torch.Tensor, Mark], torch.Tensor] = mean_square
    before: Callable[[torch.Tensor, State, Mark], torch.Tensor] | None = None
    after: Callable[[nn.Module, torch.Tensor, State, Mark], None] | None = None
    loader: Callable[[Size], Iterable[torch.Tensor]] | None = None


class Mixed(nn.Module):
    """Runs its parts, one behind the other, in its own forward."""

    def __init__(self, size: Size, *parts: Part) -> None:
        super().__init__()
        self.parts = parts
        self.runs = [part.run for part in parts]
        self.trained: list[nn.Parameter] = []
        for number, part in enumerate(parts):
            for index, shape in enumerate(part.weights(size)):
                data = torch.randn(shape, device=size.device) * shape[0] ** -0.5
                weight = nn.Parameter(data, requires_grad=part.trained is not None)
                self.register_parameter(f"weight{number}_{index}", weight)
        self.counts = [len(part.weights(size)) for part in parts]

    def weights_of(self, number: int) -> list[nn.Parameter]:
        """Return the weights of one of the parts."""
        return [getattr(self, f"weight{number}_{index}") for index in range(self.counts[number])]

    def optimized(self) -> list[nn.Parameter]:
        """Return the weights that an optimizer has."""
        kept = [n for n, part in enumerate(self.parts) if part.trained]
        return [weight for number in kept for weight in self.weights_of(number)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, run in enumerate(self.runs):
            x = run(x, *self.weights_of(number))
        return x


class Net(nn.Module):
    """A first layer, the modules with the cause, and a last layer."""

    def __init__(self, size: Size, mixed: Sequence[Mixed], spare: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, size.width, device=size.device)
        self.blocks = nn.ModuleList(mixed)
        self.last = nn.Linear(size.width, 64, device=size.device) if mixed else nn.Identity()
        shapes = (torch.randn(FEATURES, device=size.device) for _ in range(spare))
        self.spare = nn.ParameterList(map(nn.Parameter, shapes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass
class Built:
    """A training ready to run.

    Attributes:
        step: one training step.
        models: what is instrumented, by name.
        clock: around the cause alone, where it was asked for.
    """

    step: Callable[[], None]
    models: Mapping[str, nn.Module]
    clock: Clock | None = None


@dataclass
class _Loaded:
    """The batches of a loader, again and again."""

    loader: Iterable[torch.Tensor]
    left: Iterator[torch.Tensor] = field(default_factory=lambda: iter(()))

    def following(self) -> torch.Tensor:
        while True:
            for batch in self.left:
                return batch
            self.left = iter(self.loader)


def built(training: Training, neighbour: Part, size: Size, *, clocked: bool = False) -> Built:
    """Make a training with an innocent part beside the cause.

    Args:
        training: what it is.
        neighbour: runs in the same forward.
        size: how large it is.
        clocked: whether a clock is put around the cause alone. Such a step is not profiled.
    """
    torch.manual_seed(0)
    clock = Clock(size.device) if clocked else None
    mark: Mark = clock.mark if clock else nullcontext
    mixed = [Mixed(size, neighbour, training.part) for _ in range(training.depth)]
    if clock and training.part is not NOTHING and not training.clocks_update:
        for module in mixed:
            module.runs[1] = clock.around(training.part.run)
    model = Net(size, [] if training.in_loss else mixed, training.spare)
    parameters = [*model.first.parameters(), *model.last.parameters()]
    parameters += [weight for module in mixed for weight in module.optimized()]
    optimizer = training.optimizer(parameters)
    models: dict[str, nn.Module] = {"": model} | ({"loss": mixed[0]} if training.in_loss else {})
    whole: nn.Module = nn.Sequential(model, mixed[0]) if training.in_loss else model
    state: State = {"size": size}
    shape = (training.batch or size.batch, size.length, FEATURES)
    given = torch.randn(shape, device=size.device)
    loaded = _Loaded(training.loader(size)) if training.loader else None

    def step() -> None:
        with training.around():
            x = given
            if loaded:
                with mark():
                    x = loaded.following()
            if training.before:
                x = training.before(x, state, mark)
            optimizer.zero_grad(set_to_none=training.drops)
            for some in x.chunk(training.micro):
                (training.loss(whole, some, mark) / training.micro).backward()
            if training.clips:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            with mark() if training.clocks_update else nullcontext():
                optimizer.step()
            if training.after:
                training.after(model, x, state, mark)

    return Built(step, models, clock)


def alone(
    made: Sequence[Built], now: Callable[[], float] = time.process_time, rounds: int = 8
) -> list[float | None]:
    """Return the share of a step that each cause takes alone, by the clock around it, in turn.

    Args:
        made: trainings with a clock.
        now: seconds, by which a step is timed.
        rounds: steps of each of them, of which the first does not count.
    """
    shares: list[list[float]] = [[] for _ in made]
    for number in range(rounds + 1):
        for index, one in enumerate(made):
            if one.clock is None:
                continue
            one.clock.take()
            begin = now()
            one.step()
            spent = one.clock.take()  # waits for a GPU
            if number:
                shares[index].append(spent / (1e3 * (now() - begin)))
    return [statistics.median(some) or None if some else None for some in shares]


# Neighbours --------------------------------------------------------------------------------------


def image_of(x: torch.Tensor) -> torch.Tensor:
    """Return the tokens as an image of a quarter as many channels as there are tokens."""
    batch, length, width = x.shape
    return x.reshape(batch, length // 4, 2, -1, width // 16 or 1).flatten(2, 3)


def _product(x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    return x + functional.relu(x @ inner) @ outer


def _convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(image_of(x), weight, padding=1).view_as(x)


def heads_of(x: torch.Tensor) -> torch.Tensor:
    """Return the tokens of all sequences as half as many, in heads of 32 features."""
    return x.reshape(max(1, len(x) // 2), -1, max(1, x.shape[2] // 32), 32).transpose(1, 2)


def _attention(x: torch.Tensor) -> torch.Tensor:
    q = heads_of(x)
    mixed = functional.scaled_dot_product_attention(q, q, q)
    return x + mixed.transpose(1, 2).reshape(x.shape)


NEIGHBOURS = {
    "product": Part(_product, lambda s: ((s.width, s.hidden), (s.hidden, s.width))),
    "convolution": Part(_convolution, lambda s: ((s.length // 4, s.length // 4, 3, 3),)),
    "attention": Part(_attention),
}
"""Innocent operators that are heavy."""
