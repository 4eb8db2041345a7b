"""Functions that the modules of a package register, so that no list has to name a new one.

The decorators that use this follow the idiom of ``torch.utils.flop_counter.register_flop_formula``:
a module registers its function when it is imported, and the first question imports every module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import cleandoc
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

from backspot.imports import modules_of

Device = Literal["cpu", "cuda", "other"]
"""What a step runs on: ``cuda`` is also what PyTorch calls AMD's GPUs."""
DEVICES: tuple[Device, ...] = get_args(Device)

Tier = Literal["stable", "preview"]
"""How sure a rule is."""

Need: TypeAlias = str
"""What a rule needs in a recording: ``stacks`` (lines of Python), ``labels`` of Backspot,
``blocks`` (the thread blocks of kernels), or what the part has that registers it."""

Evidence = TypeVar("Evidence")
Finding = TypeVar("Finding")
Result = TypeVar("Result")
Found = TypeVar("Found", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Rule(Generic[Evidence, Finding, Result]):
    """A registered rule.

    Attributes:
        name: its name, and that of its section in the documentation.
        find: return what the rule finds, from the evidence and the findings of earlier rules.
        page: its section in the documentation: a sentence, then cause, signs and remedy.
        title: what a finding is called that does not say so itself.
        remedy: what to do, where a finding does not say so itself.
        link: where there is more.
        least: the share of a step that a cause must take, in most steps, to be a finding.
        devices: the kinds of device that the rule's advice is for.
        seldom: whether the cause may be in less than half of the steps.
        whole_calls: whether the remedy takes away whole calls of modules. That of others takes away
            nodes, operators and waits, and nothing else of a module.
        needs: without which the rule cannot look.
        fallback: whether the rule needs the findings of the others, and so runs after them.
        tier: ``preview`` until two sources that nobody here wrote have shown it right: the place,
            the cause and the remedy.
        common: whether it is true of nearly every step, so that it is a finding only where its
            remedy is known to pay, and else a line in the account of the step.
        sources: those that have: a thread (``owner/repository#number``), a public script as it is
            (``owner/repository:path``), or what ``docs/make_findings.py`` knows.
    """

    name: str
    find: Callable[[Evidence, Sequence[Finding]], Result]
    page: str
    title: str = ""
    remedy: str = ""
    link: str = ""
    least: float = 0.0
    devices: Sequence[Device] = DEVICES
    seldom: bool = False
    whole_calls: bool = False
    needs: Sequence[Need] = ()
    fallback: bool = False
    tier: Tier = "preview"
    sources: Sequence[str] = ()
    common: bool = False

    @property
    def short(self) -> str:
        """What it is about, in one sentence without a stop."""
        return self.page.partition("\n")[0].removesuffix(".")

    def named(self, finding: Any) -> Any:
        """Return a finding with the name of the rule, and what its head says for all of them."""
        if hasattr(finding, "tier"):
            finding = replace(finding, tier=self.tier)
        head_texts = {"title": self.title, "remedy": self.remedy, "link": self.link}
        missing = {
            key: text for key, text in head_texts.items() if text and not getattr(finding, key)
        }
        return replace(finding, rule=self.name, **missing)


class Registry(Generic[Evidence, Finding, Result]):
    """The rules that the modules of one package register.

    Args:
        package: name of the package.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._rules: dict[str, Rule[Evidence, Finding, Result]] = {}
        self._names: dict[str, tuple[str, str]] = {}  # of the function of each rule

    def rule(self, name: str, **head: Any) -> Callable[[Found], Found]:
        """Register the decorated function as a rule; its docstring is the page of the rule.

        Args:
            name: the rule's name.
            head: attributes of ``Rule``.

        Raises:
            ValueError: If another function is the rule of this name already. The same one may
                come again, as an import that was interrupted is made again.
        """

        def register(find: Found) -> Found:
            self._add(name, find, lambda evidence, _: find(evidence), head)
            return find

        return register

    def fallback_rule(self, name: str, **head: Any) -> Callable[[Found], Found]:
        """Register the decorated function as a rule that is given what the other rules found.

        The arguments are those of ``rule``.

        Raises:
            ValueError: as for ``rule``.
        """

        def register(find: Found) -> Found:
            self._add(name, find, find, {**head, "fallback": True})
            return find

        return register

    def _add(
        self, name: str, function: Callable[..., Any], find: Callable[..., Result], head: Any
    ) -> None:
        location = function.__module__, function.__qualname__
        if self._names.setdefault(name, location) != location:
            raise ValueError(f"{name!r}: a rule of this name exists already")
        self._rules[name] = Rule(name, find, page_of(function), **head)

    @cached_property
    def rules(self) -> tuple[Rule[Evidence, Finding, Result], ...]:
        """All rules, sorted by name, with the fallback rules last."""
        modules_of(self._package)
        return tuple(sorted(self._rules.values(), key=lambda rule: (rule.fallback, rule.name)))


def page_of(function: Callable[..., Any]) -> str:
    """Return the docstring of a function as Markdown: a line for each paragraph and list item."""
    text = cleandoc(function.__doc__ or "")
    paragraphs = (re.split(r"\n(?=- )", paragraph) for paragraph in text.split("\n\n"))
    return "\n\n".join(
        "\n".join(" ".join(line.split()) for line in paragraph) for paragraph in paragraphs
    )
