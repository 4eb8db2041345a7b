"""How much work an operator does, from the shapes of its inputs.

A formula is a function of ``Inputs`` under ``@flops`` or ``@moved`` with the names of operators::

    @flops("aten::mm")
    def mm(inputs: Inputs) -> int:
        (rows, inner), (_, columns) = inputs.shapes[:2]
        return 2 * rows * inner * columns

``flops`` counts floating point operations by the definitions of ``torch.utils.flop_counter``: those
of products and convolutions, two for each multiplication and addition, without bias and softmax.
Groups divide the operations of a convolution's backward, which that counter forgets for the weight.
``moved`` counts the bytes that an operator must read and write at least: each element of an input
once, even if it is broadcast, and each element of an output.

A formula raises ``Unknown`` if the recorded inputs do not say enough. What has no formula is
unknown, and never counts as nothing.

- ``flops.py``: floating point operations.
- ``traffic.py``: bytes.

This file has the decorators, and the ``Inputs`` that a formula gets.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from importlib import import_module
from math import prod
from pkgutil import iter_modules
from typing import Any, TypeAlias

import msgspec

from backspot.trace.events import Signature

__all__ = [
    "Formula",
    "Inputs",
    "Unknown",
    "bytes_formulas",
    "flops",
    "flops_formulas",
    "kind_of",
    "moved",
]

_HOME = "backspot.analysis.accounting.formulas"
_BYTES = {
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "short": 2,
    "short int": 2,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "float": 4,
    "long": 8,
    "long int": 8,
    "long long": 8,
    "int64_t": 8,
    "double": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
}
"""Bytes of an element by the names that C++ has for its type."""


def kind_of(name: str) -> int:
    """Return the rank of a type of elements: truth values, integers, floats, complex numbers."""
    if "complex" in name:
        return 3
    if name in ("float", "double") or name.startswith("c10::"):
        return 2
    return int(name != "bool")


class Unknown(Exception):  # noqa: N818 - it is no error of anybody
    """The recorded inputs do not say how much work an operator does."""


class Inputs(msgspec.Struct, frozen=True, dict=True):
    """The inputs of one call of an operator, in the order of its arguments.

    Attributes:
        shapes: the sizes of each tensor; ``[]`` for a scalar and for what is no tensor; for a list
            of tensors, a list of their sizes.
        types: the type of each tensor's elements, as C++ names it; other words for other inputs.
        strides: the strides of each tensor; empty where they are not recorded.
        values: the values of other inputs, as text.
    """

    shapes: Sequence[Any]
    types: Sequence[str]
    strides: Sequence[Any]
    values: Sequence[str]

    @classmethod
    def of(cls, signature: Signature) -> Inputs:
        """Return the inputs that a signature has.

        Raises:
            Unknown: If it cannot be read.
        """
        try:
            columns = [json.loads(text or "[]") for text in signature]
        except (ValueError, RecursionError) as error:
            raise Unknown from error
        shapes, types, strides, values = columns
        are_lists = all(isinstance(column, list) for column in columns)
        if not (are_lists and all(isinstance(type_name, str) for type_name in types)):
            raise Unknown
        return cls(shapes, types, strides, values)

    @cached_property
    def tensors(self) -> list[int]:
        """The places of the inputs that are tensors."""
        return [place for place, name in enumerate(self.types) if name in _BYTES]

    def shape(self, place: int) -> list[int]:
        """Return the sizes of a tensor.

        Raises:
            Unknown: If this input is no tensor, or its sizes are not recorded.
        """
        if place >= len(self.shapes) or place >= len(self.types) or self.types[place] not in _BYTES:
            raise Unknown
        shape = self.shapes[place]
        if not isinstance(shape, list) or not {int, bool}.issuperset(map(type, shape)):
            raise Unknown
        return list(shape)

    def shapes_in_list(self, place: int) -> list[list[int]]:
        """Return the sizes of each tensor of a list.

        Raises:
            Unknown: If this input is no list of tensors, or their sizes are not recorded.
        """
        shapes = self.shapes[place] if place < len(self.shapes) else None
        if not isinstance(shapes, list) or not all(isinstance(shape, list) for shape in shapes):
            raise Unknown
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            raise Unknown
        return shapes

    def value(self, place: int) -> Any:
        """Return another input: a number, a truth value or a list.

        Raises:
            Unknown: If the value is not recorded.
        """
        try:
            return _literal(self.values[place])
        except (
            IndexError,
            ValueError,
            TypeError,
            SyntaxError,
            RecursionError,
            MemoryError,
        ) as error:
            raise Unknown from error

    def element(self, place: int) -> int:
        """Return the bytes of a tensor's element.

        Raises:
            Unknown: If this input is no tensor.
        """
        try:
            return _BYTES[self.types[place]]
        except (IndexError, KeyError) as error:
            raise Unknown from error

    def read(self, place: int) -> int:
        """Return the bytes of a tensor's distinct elements: a broadcast one counts once."""
        shape = self.shape(place)
        strides = self.strides[place] if place < len(self.strides) else []
        strides = strides if isinstance(strides, list) else []
        if len(strides) == len(shape):
            shape = [size for size, stride in zip(shape, strides, strict=True) if stride]
        return prod(shape) * self.element(place)

    def read_all(self) -> int:
        """Return the bytes of all tensors."""
        return sum(map(self.read, self.tensors))

    def broadcast(self) -> list[int]:
        """Return the sizes of what a pointwise operator gives."""
        shapes = [self.shape(place) for place in self.tensors]
        if not shapes:
            raise Unknown
        result = [1] * max(map(len, shapes))
        for shape in shapes:
            for back, size in enumerate(reversed(shape), 1):
                if result[-back] == 1:
                    result[-back] = size
        return result


_literal = lru_cache(1024)(ast.literal_eval)  # many operators have the same few values


Formula: TypeAlias = Callable[[Inputs], int]

_flops: dict[str, Formula] = {}
_moved: dict[str, Formula] = {}


def flops(*operators: str) -> Callable[[Formula], Formula]:
    """Register the decorated function as what counts the operations of these operators."""
    return _registering(_flops, operators)


def moved(*operators: str) -> Callable[[Formula], Formula]:
    """Register the decorated function as what counts the bytes of these operators."""
    return _registering(_moved, operators)


def _registering(
    table: dict[str, Formula], operators: Sequence[str]
) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        for operator in operators:
            if operator in table:
                raise ValueError(f"{operator} has a formula already")
            table[operator] = formula
        return formula

    return register


def flops_formulas() -> dict[str, Formula]:
    """Return the formula for the operations of each operator that has one."""
    _import_all()
    return _flops


def bytes_formulas() -> dict[str, Formula]:
    """Return the formula for the bytes of each operator that has one."""
    _import_all()
    return _moved


@cache
def _import_all() -> None:
    for module in iter_modules(import_module(_HOME).__path__, f"{_HOME}."):
        import_module(module.name)
