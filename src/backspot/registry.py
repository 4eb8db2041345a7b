"""Functions that the modules of a package register, so that no list has to name a new one.

The decorators that use this follow the idiom of ``torch.utils.flop_counter.register_flop_formula``:
a module registers its function when it is imported, and the first question imports every module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, TypeVar, get_args

from backspot.imports import modules_of

Device = Literal["cpu", "cuda", "other"]
"""What a step runs on: ``cuda`` is also what PyTorch calls AMD's GPUs."""
DEVICES: tuple[Device, ...] = get_args(Device)

Need = Literal["stacks", "labels", "blocks", "memory"]
"""What a rule needs in a recording: lines of Python, labels of Backspot, the thread blocks of
kernels, what is in memory."""

Evidence = TypeVar("Evidence")
Finding = TypeVar("Finding")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Rule(Generic[Evidence, Finding, Result]):
    """A registered rule.

    Attributes:
        name: the name of its section in the documentation.
        find: return what the rule finds, from the evidence and the findings of earlier rules.
        devices: the kinds of device that the rule's advice is for.
        seldom: whether the cause may be in less than half of the steps.
        needs: without which the rule cannot look.
        fallback: whether the rule needs the findings of the others, and so runs after them.
    """

    name: str
    find: Callable[[Evidence, Sequence[Finding]], Result]
    devices: Sequence[Device] = DEVICES
    seldom: bool = False
    needs: Sequence[Need] = ()
    fallback: bool = False


class Registry(Generic[Evidence, Finding, Result]):
    """The rules that the modules of one package register.

    Args:
        package: name of the package.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._rules: dict[str, Rule[Evidence, Finding, Result]] = {}
        self._names: dict[str, tuple[str, str]] = {}  # of the function of each rule

    def rule(
        self,
        name: str,
        *,
        devices: Sequence[Device] = DEVICES,
        seldom: bool = False,
        needs: Sequence[Need] = (),
    ) -> Callable[[Callable[[Evidence], Result]], Callable[[Evidence], Result]]:
        """Register the decorated function as a rule.

        Args:
            name: the rule's name.
            devices: the kinds of device that the rule's advice is for.
            seldom: whether the cause may be in less than half of the steps.
            needs: without which the rule cannot look.

        Raises:
            ValueError: If another function is the rule of this name already. The same one may
                come again, as an import that was interrupted is made again.
        """

        def register(find: Callable[[Evidence], Result]) -> Callable[[Evidence], Result]:
            self._add(Rule(name, lambda evidence, _: find(evidence), devices, seldom, needs), find)
            return find

        return register

    def fallback_rule(
        self, name: str, *, devices: Sequence[Device] = DEVICES, needs: Sequence[Need] = ()
    ) -> Callable[
        [Callable[[Evidence, Sequence[Finding]], Result]],
        Callable[[Evidence, Sequence[Finding]], Result],
    ]:
        """Register the decorated function as a rule that is given what the other rules found.

        The arguments are those of ``rule``.

        Raises:
            ValueError: as for ``rule``.
        """

        def register(
            find: Callable[[Evidence, Sequence[Finding]], Result],
        ) -> Callable[[Evidence, Sequence[Finding]], Result]:
            self._add(Rule(name, find, devices, needs=needs, fallback=True), find)
            return find

        return register

    def _add(self, rule: Rule[Evidence, Finding, Result], find: Callable[..., Result]) -> None:
        known = find.__module__, find.__qualname__
        if self._names.setdefault(rule.name, known) != known:
            raise ValueError(f"{rule.name!r}: a rule of this name exists already")
        self._rules[rule.name] = rule

    @cached_property
    def rules(self) -> tuple[Rule[Evidence, Finding, Result], ...]:
        """All rules, sorted by name, with the fallback rules last."""
        modules_of(self._package)
        return tuple(sorted(self._rules.values(), key=lambda one: (one.fallback, one.name)))
