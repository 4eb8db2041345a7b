"""Who has allocated what is in memory, by the lines of Python that the allocator has kept.

The lines tell whose forward was at work. Equal layers run the same lines, so they are listed
together: ``12 × blocks.*.mlp``.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import NamedTuple, TypeAlias

import torch

from backspot.live.modules import class_name, find_modules, unwrap
from backspot.live.torch_internals.allocator import Block, Line
from backspot.results.grouping import numberless
from backspot.results.out_of_memory import HeldKind, HeldMemory

_NAMED = 12
"""How many modules are named that hold activations."""
_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")

Models: TypeAlias = Mapping[str, torch.nn.Module]


class NamedModules:
    """The modules of some models, by path.

    Args:
        models: the models by name.
    """

    def __init__(self, models: Models) -> None:
        self.models = models
        self.modules: dict[str, torch.nn.Module] = {}
        self._around: dict[str, str | None] = {}
        paths: dict[int, str] = {}
        for name, model in models.items():
            for inner, module, around in find_modules(model):
                path = ".".join(filter(None, (name, inner)))
                self.modules[path], paths[id(module)] = module, path
                self._around[path] = None if around is None else paths[id(around)]
        self._paths = paths

    def of(self, module: torch.nn.Module | None) -> tuple[str, str]:
        """Return the path and the class of a module; of one that no model has, its class alone."""
        if module is None:
            return "", ""
        inner = unwrap(module)
        return self._paths.get(id(inner), ""), class_name(inner)

    def with_parameter(self, tensor: torch.Tensor | None) -> tuple[str, str]:
        """Return the path and the class of the module that has a parameter."""
        for module in self.modules.values() if tensor is not None else ():
            if any(parameter is tensor for parameter in module.parameters(recurse=False)):
                return self.of(module)
        return "", ""

    def around(self, path: str) -> Iterator[str]:
        """Iterate over a module and those around it, by path, the innermost first."""
        ancestor: str | None = path
        while ancestor is not None:
            yield ancestor
            ancestor = self._around[ancestor]


def held_by_kind(amounts: Iterable[tuple[HeldKind, int]]) -> list[HeldMemory]:
    """Return the sums by kind."""
    sums: Counter[HeldKind] = Counter()
    blocks: Counter[HeldKind] = Counter()
    for kind, size in amounts:
        sums[kind] += size
        blocks[kind] += 1
    return [HeldMemory(kind, sums[kind], blocks[kind]) for kind in sums if sums[kind]]


_Paths: TypeAlias = tuple[str, ...]


class _Code(NamedTuple):
    """A function: its file, its name, and its first and last line."""

    file: str
    name: str
    first: int
    last: int


class _Forwards:
    """Tells the module from the lines of Python that run: those of the forwards that are at work.

    Equal layers run the same lines, so that several modules can be meant.

    Args:
        names: the modules by path.
    """

    def __init__(self, names: NamedModules) -> None:
        forwards = {path: _forward_of(module) for path, module in names.modules.items()}
        self._codes: defaultdict[tuple[str, str], list[_Code]] = defaultdict(list)
        for one in {code for code in forwards.values() if code is not None}:
            self._codes[one.file, one.name].append(one)
        chains: defaultdict[tuple[_Code, ...], list[str]] = defaultdict(list)
        alike: defaultdict[_Code, list[str]] = defaultdict(list)
        for path, code in forwards.items():
            if code is not None:
                inside = (forwards[other] for other in names.around(path))
                chains[tuple(code for code in inside if code is not None)].append(path)
                alike[code].append(path)
        self._chains, self._alike = chains, alike
        self._known: dict[tuple[Line, ...], _Paths] = {}

    def paths_of(self, stack: tuple[Line, ...]) -> _Paths:
        """Return the modules whose forward runs innermost in a stack, by path; none is ``()``."""
        if stack not in self._known:
            chain = tuple(code for line in stack if (code := self._forward_at(*line)) is not None)
            paths: Sequence[str] = ()
            if chain:
                paths = self._chains.get(chain) or self._alike[chain[0]]
            self._known[stack] = tuple(paths)
        return self._known[stack]

    def _forward_at(self, file: str, name: str, line: int) -> _Code | None:
        codes = self._codes.get((file, name), ())
        return next((code for code in codes if code.first <= line <= code.last), None)


def _forward_of(module: torch.nn.Module) -> _Code | None:
    """Return the code of a module's forward, within its decorators; ``None`` without any."""
    if "forward" not in vars(module) and type(module).forward is torch.nn.Module.forward:
        return None  # as of a ModuleList
    function = inspect.unwrap(module.forward)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if not isinstance(code, CodeType):
        return None
    first = code.co_firstlineno
    last = max((line for *_, line in code.co_lines() if line is not None), default=first)
    return _Code(code.co_filename, code.co_name, first, last)


def allocated_by(
    blocks: Sequence[Block], names: NamedModules
) -> tuple[list[HeldMemory], list[HeldMemory]]:
    """Return who has allocated some blocks, by module and kind; and the same by repeated layers.

    The largest are there by name, and all others as one. Of layers within layers, the outermost
    count; there are none where a checkpoint runs already.
    """
    by_path, others = _by_module(blocks, names)
    stacks = {block.stack for block in blocks}
    has_checkpoint = any(line[0] == _CHECKPOINT for stack in stacks for line in stack)
    layers = [] if has_checkpoint else _outermost_layers(by_path, names)
    return [*_patterns(by_path, names), *others], layers


def _by_module(
    blocks: Sequence[Block], names: NamedModules
) -> tuple[dict[_Paths, tuple[int, int]], list[HeldMemory]]:
    """Return the bytes and the number of blocks of modules, and what belongs to none."""
    forwards = _Forwards(names)
    by_paths: dict[_Paths, tuple[int, int]] = {}
    others: list[tuple[HeldKind, int]] = []
    for block in blocks:
        paths = forwards.paths_of(block.stack) if block.stack else ()
        if paths:
            size, count = by_paths.get(paths, (0, 0))
            by_paths[paths] = size + block.bytes, count + 1
        else:
            others.append(("other" if block.stack else "no_stack", block.bytes))
    return by_paths, held_by_kind(others)


def _named(paths: _Paths, names: NamedModules) -> tuple[str, str, int]:
    """Return the path or pattern of some modules, their class, and how many they are."""
    patterns = {numberless(path) for path in paths}
    classes = {class_name(names.modules[path]) for path in paths}
    path = paths[0] if len(paths) == 1 else patterns.pop() if len(patterns) == 1 else ""
    return path, " or ".join(sorted(classes)), len(paths)


def _patterns(by_path: Mapping[_Paths, tuple[int, int]], names: NamedModules) -> list[HeldMemory]:
    """Return who holds activations: the largest by name, and all others as one."""
    ranked = sorted(by_path.items(), key=lambda item: -item[1][0])
    holders = [
        HeldMemory("activation", size, count, *_named(paths, names))
        for paths, (size, count) in ranked[:_NAMED]
    ]
    rest = [amounts for _, amounts in ranked[_NAMED:]]
    if rest:
        sums = (sum(column) for column in zip(*rest, strict=True))
        holders.append(HeldMemory("activation", *sums))
    return holders


def _outermost_layers(
    by_path: Mapping[_Paths, tuple[int, int]], names: NamedModules
) -> list[HeldMemory]:
    """Return what all activations of repeated layers are, by their outermost pattern."""
    sums: dict[str, tuple[int, int]] = {}
    for paths, (size, count) in by_path.items():
        outermost = {_outermost(path) for path in paths}
        if len(outermost) == 1 and (layer := outermost.pop()):
            before = sums.get(layer, (0, 0))
            sums[layer] = before[0] + size, before[1] + count
    holders = []
    for layer, (size, count) in sums.items():
        members = tuple(path for path in names.modules if numberless(path) == layer)
        if len(members) > 1:
            holders.append(HeldMemory("activation", size, count, *_named(members, names)))
    return holders


def _outermost(path: str) -> str:
    """Return the pattern of the outermost repeated layer that a path lies in, ``""`` if none."""
    names_in_path = path.split(".")
    numbers = [
        number for number, name_in_path in enumerate(names_in_path) if name_in_path.isdecimal()
    ]
    return ".".join([*names_in_path[: numbers[0]], "*"]) if numbers else ""
