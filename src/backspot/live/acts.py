"""What parts do with a training that still lives: around its recorded steps, and after its report.

``parts.py`` lists them. ``profile`` and the recorder call each, and know none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_type_hints

import torch

from backspot.analysis.recording import Recording
from backspot.presented import Presented
from backspot.results.report import Report

Rest: TypeAlias = "Callable[[bool], Rest | None]"
"""What a delivery has left for after one more step; called with whether it cannot be later.

What it returns is left for the step after, or called at once if it cannot be later."""

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Living:
    """What still lives of a training after it was recorded.

    Attributes:
        models: the models by name.
        optimizers: those that took a step.
        loader: the loader of the batches, or its iterator, if that is known.
        step: runs one more real step of the training; ``None`` if only the training does.
        why_no_step: why one more step must not be run; ``""`` if it may.
    """

    models: Mapping[str, torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loader: Any = None
    step: Callable[[], object] | None = None
    why_no_step: str = ""


class Act:
    """What a part does with a training. By default, nothing.

    Attributes:
        needs_living: whether it does something that needs what still lives of the training.
        records: further options of PyTorch's profiler for the steps that are recorded in detail.
    """

    needs_living = False
    records: Sequence[str] = ()

    def __enter__(self) -> Act:
        """Begin, before the steps run."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, when there is a report or an error in its place."""

    def use(self, path: Path, recording: Recording) -> None:
        """See the exported trace, and its recording, before there is a report."""

    def after(self, report: Report, live: Living) -> Report:
        """Return the report with what the training, as it still lives, adds to it."""
        return report

    def begin(self, report: Report, live: Living) -> Report | Callable[[], Report]:
        """As ``after``, where the training alone runs its next step.

        Returns:
            The report; or what returns it once that step has ended, or the training has.
        """
        return self.after(report, live)


def records_of(acts: Iterable[Act]) -> tuple[str, ...]:
    """Return the options of PyTorch's profiler that acts ask for."""
    return tuple(option for act in acts for option in act.records)


def hand_on(
    acts: Sequence[Act], report: Report, live: Living, then: Callable[[Report], None]
) -> Rest | None:
    """Hand on the report with what parts add: at once, or as they need further steps.

    Returns:
        What to call when one more step has ended, or the training has; ``None`` if all is done.
    """
    for place, act in enumerate(acts):
        added = act.begin(report, live)
        if callable(added):
            ended, others = added, acts[place + 1 :]
            return lambda _: hand_on(others, ended(), live, then)
        report = added
    then(report)
    return None


class Asking(NamedTuple):
    """What ``profile`` takes for a part.

    Attributes:
        name: of the argument.
        default: its value where it is not given.
        declared: the class that declares it; its docstring says what it means.
        act: returns what the part does for a value, or ``None``; a default of ``None`` asks for
            nothing.
    """

    name: str
    default: object
    declared: type
    act: Callable[[Any], Act | None]

    @property
    def parameter(self) -> Parameter:
        """The argument as a signature has it."""
        declared = self.declared.__annotations__[self.name]
        text = getattr(declared, "__forward_arg__", declared)
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=self.default, annotation=text)


def takes(asking: Sequence[Asking]) -> Callable[[Function], Function]:
    """Give a function the arguments of parts, as ``help`` and editors show them."""

    def decorate(function: Function) -> Function:
        own = signature(function)
        own_parameters = [
            parameter
            for parameter in own.parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        all_parameters = [*own_parameters, *(argument.parameter for argument in asking)]
        # What checks types at run time reads these, and knows nothing of a signature.
        hints = {
            argument.name: get_type_hints(argument.declared)[argument.name] for argument in asking
        }
        names = {parameter.name for parameter in own_parameters} | {"return"}
        own_hints = {name: hint for name, hint in function.__annotations__.items() if name in names}
        function.__annotations__ = {**own_hints, **hints}
        function.__signature__ = own.replace(parameters=all_parameters)  # type: ignore[attr-defined]
        means = [
            cleandoc(argument.declared.__doc__ or "").partition("Attributes:\n")[2]
            for argument in asking
        ]
        before, returns, after = cleandoc(function.__doc__ or "").partition("\n\nReturns:")
        function.__doc__ = "\n".join([before, *means]) + returns + after
        return function

    return decorate


def acts_for(asking: Sequence[Asking], values: Mapping[str, Any]) -> list[Act]:
    """Return what parts do for the arguments that were given.

    Raises:
        TypeError: If no part takes one of them.
        UsageError: If one of them is invalid.
    """
    for name in values.keys() - {argument.name for argument in asking}:
        raise TypeError(f"profile() got an unexpected keyword argument {name!r}")
    with_values = [(argument, values.get(argument.name, argument.default)) for argument in asking]
    acts = [
        argument.act(value)
        for argument, value in with_values
        if not (value is argument.default is None)
    ]
    return [act for act in acts if act is not None]


class Joint(Act):
    """What the processes of a training answer together, beside the report of each.

    Attributes:
        file_name: what the files of the answer are called.
    """

    file_name: str

    def collect(self) -> Presented:
        """Return the answer, in the first process.

        Raises:
            UsageError: If there is none.
        """
        raise NotImplementedError
