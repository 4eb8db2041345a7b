"""What a remedy is given and what it returns; and the list of the remedies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from backspot.imports import modules_of
from backspot.live.acts import Living
from backspot.live.trials.chains import Chain, Chains
from backspot.live.trials.twins import Refused, Run, check_fits, forward_and_backward
from backspot.results.findings import Finding
from backspot.results.report import Report

AS_IT_IS = "as it is"
CHAINS_S = 2.0
MOST_CHAINS = 3
"""How many chains are tried together."""
_AT_ONCE = 4
CALLS = 24
"""How many calls of the code as it is take as long as a trial may."""

Times = tuple[float, float]
"""Nanoseconds of the host, and of the device."""
Worth = Callable[[Sequence[Times]], Sequence[float]]
"""What a step saves if host and device need so much less for it; below 0 they need more."""


@dataclass(frozen=True)
class Piece:
    """Some work that is measured.

    Attributes:
        run: the work.
        calls: how often a step does it.
        before: what to do before, outside of what is measured.
    """

    run: Run
    calls: float = 1.0
    before: Run | None = None


@dataclass(frozen=True)
class Trial:
    """What is to be measured.

    Attributes:
        what: what that is, in words.
        variants: the pieces of the code as it is, first, and of each other way to write it. The
            first of these is the remedy that the finding has a price for, if it has one.
        cold: whether the step runs it with other data in the caches, as an optimizer.
        known_ns: what the recorded steps take for exactly this; 0 where that is not known.
        of_sample: whether the pieces are a part of the work, as often as a step does all of it: in
            the caches, and in memory that is used again, they can be many times as fast.
        notes: what else is different with a variant, by its name.
        changing: the variants with which something else is trained.
        allowed_s: how long it may take.
        worth: what a step saves with another variant than the code as it is, where the remedy does
            more for the step than the pieces show by themselves; ``None`` where it does not.
    """

    what: str
    variants: Mapping[str, Sequence[Piece]]
    cold: bool = False
    known_ns: int = 0
    of_sample: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    changing: Sequence[str] = ()
    allowed_s: float = 1.0
    worth: Worth | None = None


@dataclass(frozen=True)
class Live(Living):
    """What still lives of a training after it was recorded. A remedy copies what it uses.

    Attributes:
        chains: the operators of one more step, with what they were given; ``None`` if no step was
            watched.
        why_no_chains: why none was watched; ``""`` if no step came.
    """

    chains: Chains | None = None
    why_no_chains: str = ""

    @classmethod
    def of(cls, live: Living) -> Live:
        """Return a training of which no step was watched yet."""
        fields = live.models, live.optimizers, live.loader, live.step
        return cls(*fields, why_no_chains=live.why_no_step)

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers, and what the optimizers hold."""
        tensors = [
            tensor
            for model in self.models.values()
            for tensor in (*model.parameters(), *model.buffers())
        ]
        for optimizer in self.optimizers:
            tensors += [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    tensors += [
                        value for value in state.values() if isinstance(value, torch.Tensor)
                    ]
        return tensors

    @property
    def device(self) -> torch.device:
        """Where the training runs: the device of its first parameter."""
        return next((tensor.device for tensor in self.tensors()), torch.device("cpu"))


def step_of(report: Report) -> int:
    """Return how long a step takes, as far as that is known.

    Of the steps without and with the profiler, the shorter: the machine was busy in the others, and
    a share of a step that is too long would make each remedy look small.
    """
    return min(report.whole_ns, report.recorded_step_ns or report.whole_ns)


@dataclass(frozen=True)
class Request:
    """What a remedy is a function of.

    Attributes:
        at_once: how many forwards of a chain may come before the first backward.
    """

    finding: Finding
    report: Report
    live: Live
    at_once: int = _AT_ONCE

    @property
    def step_ns(self) -> int:
        """How long a step takes, as far as that is known."""
        return step_of(self.report)

    @property
    def known_ns(self) -> int:
        """What the finding is about takes in a step without the profiler."""
        return self.in_step(self.finding.wall_ns)

    def in_step(self, recorded_ns: int) -> int:
        """Return what recorded time is in a step without the profiler."""
        return round(min(1.0, recorded_ns / max(1, self.report.whole_ns)) * self.step_ns)

    def piece(self, chain: Chain, function: Callable[[], torch.Tensor]) -> Piece:
        """Return a function in place of a chain, with its backward, as often as a step runs it.

        Several forwards come before the first backward, as in a step, where there is time for that.
        """
        times = min(chain.count, self.at_once)
        run = forward_and_backward(function, chain.leaves, chain.autocast, times)
        return Piece(run, chain.count / times)

    def seen(self, kind: str, missing: str, size: Callable[[Chain], int]) -> list[Chain]:
        """Return the chains of a kind, those first that are largest in a step.

        Args:
            size: how large one of them is.

        Raises:
            Refused: If there are none, with the reason.
        """
        chains = self.live.chains
        seen_chains = chains.of(kind) if chains else []
        if not seen_chains:
            raise Refused((chains.missed.get(kind) if chains else None) or missing)
        return sorted(seen_chains, key=lambda chain: -chain.count * size(chain))

    def variants(
        self,
        chains: Sequence[Chain],
        ways_of: Callable[[Chain], Mapping[str, Callable[[], torch.Tensor]]],
        room: float = 2,
    ) -> dict[str, list[Piece]]:
        """Return the ways that all of these chains can go, each with its pieces.

        Raises:
            Refused: If there is no room for so many times their copies.
        """
        pieces_of: dict[str, list[Piece]] = {}
        for chain in chains:
            check_fits(chain.copies.values(), room)
            for name, way in ways_of(chain).items():
                pieces_of.setdefault(name, []).append(self.piece(chain, way))
        return {name: pieces for name, pieces in pieces_of.items() if len(pieces) == len(chains)}


Remedy = Callable[[Request], Trial | None]


@dataclass(frozen=True)
class Entry:
    """A remedy in the list.

    Attributes:
        prepare: return what to measure, or ``None`` if there is nothing to try in this case; it
            raises ``Refused`` with the reason why it cannot be tried.
        chains: whether it needs the operators of one more step.
        form: of which of the remedies of a rule, as ``Finding.form`` has it.
    """

    prepare: Remedy
    chains: bool = False
    form: str = ""


_entries: dict[str, dict[str, Entry]] = {}


def remedy(*rules: str, chains: bool = False, form: str = "") -> Callable[[Remedy], Remedy]:
    """Register the decorated function as what to try for the findings of some rules."""

    def register(prepare: Remedy) -> Remedy:
        for rule in rules:
            # By name: an import that was interrupted is made again.
            _entries.setdefault(rule, {})[prepare.__qualname__] = Entry(prepare, chains, form)
        return prepare

    return register


def remedies_of(rule: str, *, form: str = "") -> list[Entry]:
    """Return what can be tried for the findings of a rule with this form of the remedy."""
    modules_of("backspot.live.trials")
    return [entry for entry in _entries.get(rule, {}).values() if entry.form == form]
