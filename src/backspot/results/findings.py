"""What surrounds the ranking: where a step's time goes, and what was found to be wrong with it.

Times are integer nanoseconds summed over the recorded steps, as everywhere in a report.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding was seen: a module, or what stands for one.

    Attributes:
        path: the module's path, as its row's; or what no module owns, in parentheses; or a phase of
            the step, ``(optimizer)`` or ``(data)``.
        class_name: the module's class, ``""`` for what is no module.
        count: how many times it was seen there (nodes, kernels, calls: the finding says which).
        wall_ns: the clock time that it takes there.
        line: the forward's source line, ``file:line``, where it is known, else ``""``.
    """

    path: str
    class_name: str
    count: int
    wall_ns: int
    line: str = ""

    @property
    def label(self) -> str:
        """Path and class: what to search a trace for."""
        name = self.path or self.class_name or "(root)"
        return f"{name} ({self.class_name})" if self.class_name not in ("", name) else name


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that makes the step slower than it need be, and what to do about it.

    Attributes:
        rule: which rule found it: the name of its section in ``docs/findings.md``.
        title: what is wrong, in a few words.
        seen: what was seen, with counts and times: one or two sentences.
        remedy: what to do: one or two sentences.
        wall_ns: the clock time of the recorded steps that goes into it; the most that the remedy
            could save.
        places: where, the most expensive first; never empty.
        nodes: names of the autograd nodes that take part, the heaviest first.
        operators: names of the operators that take part, the heaviest first.
        kernels: names of the kernels and copies that take part, the heaviest first.
        link: where to read more.
    """

    rule: str
    title: str
    seen: str
    remedy: str
    wall_ns: int
    places: tuple[Place, ...]
    nodes: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    link: str = ""

    @property
    def path(self) -> str:
        """The path of the place that pays most."""
        return self.places[0].path
