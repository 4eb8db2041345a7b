"""What PyTorch's operations and optimizers do: the one table that all rooms ask.

An operation is written ``aten::_to_copy`` where a program calls it, and ``ToCopyBackward0`` where
autograd has a node for it. ``of_operator`` and ``of_node`` return the same word for both,
``tocopy``, and ``kind_of`` says what the operation does with memory. What a single rule is about,
such as the operators of attention, is in that rule.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from backspot.trace.names import ATEN, BACKWARD, OPTIMIZER_STEP, short_node_name


class Kind(Enum):
    """What an operation does with memory."""

    VIEW = "looks at all of the same memory, and computes nothing"
    PERMUTE = "the same, with the dimensions in another order"
    PART = "the same, of a part of the memory"
    CAST = "writes the same numbers in another type, or on another device"
    COPY = "writes the same numbers again, in another layout"
    POINTWISE = "computes each element from the elements in its place"
    COMPARISON = "says of each element whether something is true"
    REDUCTION = "computes one element from many"
    JOIN = "writes several tensors into one"
    PRODUCT = "multiplies matrices, as linear layers and convolutions do"
    FACTORY = "makes a tensor of numbers that depend on no other tensor"


_ACTIVATIONS = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish prelu relu
    relu6 selu silu softshrink threshold
"""
_BATCHED = "baddbmm bmm"
_NAMES = {
    # reshape and flatten copy where they must; the copy is an operation of its own within them.
    Kind.VIEW: """
        _conj _neg_view _reshape_alias _unsafe_view alias broadcast_to conj detach expand
        expand_as flatten lift_fresh positive ravel reshape reshape_as resolve_conj
        resolve_neg squeeze unflatten unsqueeze view view_as view_as_complex view_as_real
    """,
    Kind.PERMUTE: """
        adjoint mH mT matrix_H moveaxis movedim numpy_T permute swapaxes swapdims t transpose
    """,
    Kind.PART: """
        as_strided chunk diagonal dsplit hsplit imag indices linalg_diagonal narrow real
        select slice split split_with_sizes tensor_split unbind unfold unsafe_chunk
        unsafe_split unsafe_split_with_sizes values vsplit
    """,
    Kind.CAST: "_to_copy bfloat16 double float half to type_as",
    Kind.COPY: "clone contiguous copy",
    Kind.POINTWISE: f"""
        {_ACTIVATIONS}
        abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or
        bitwise_xor ceil clamp clamp_max clamp_min cos cosh div erf erfc exp exp2 expm1
        floor floor_divide fmod hypot lerp log log10 log1p log2 logaddexp logit masked_fill
        maximum minimum mul neg pow reciprocal remainder round rsqrt rsub sigmoid sign sin
        sinh softplus sqrt square sub tan tanh true_divide trunc where xlogy
    """,
    Kind.COMPARISON: """
        eq ge gt isfinite isinf isnan le logical_and logical_not logical_or logical_xor lt ne
    """,
    Kind.REDUCTION: "amax amin mean prod std sum var var_mean",
    Kind.JOIN: "cat stack",
    Kind.PRODUCT: f"""
        {_BATCHED} _convolution _grouped_mm _int_mm _scaled_mm addbmm addmm addmv addr bilinear
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution dot
        einsum ger inner linear matmul mkldnn_linear mm mv outer tensordot vdot
    """,
    Kind.FACTORY: "arange eye full linspace logspace ones zeros",
}


def _word(name: str) -> str:
    return name.replace("_", "").lower()


_KINDS = {_word(name): kind for kind, names in _NAMES.items() for name in names.split()}
ACTIVATIONS = frozenset(_ACTIVATIONS.split())
"""Pointwise operations that are a function of their own for networks, as PyTorch spells them."""
BATCHED_PRODUCTS = frozenset(map(_word, _BATCHED.split()))
"""Products of many matrices of two tensors, as attention has them."""


def names_of(*kinds: Kind) -> frozenset[str]:
    """Return the operations of some kinds as PyTorch spells them: ``_to_copy``, ``view_as``."""
    return frozenset(name for kind in kinds for name in _NAMES[kind].split())


def operators_of(*kinds: Kind) -> frozenset[str]:
    """Return the operators of some kinds, as a trace has them: ``aten::_to_copy``."""
    return frozenset(ATEN + name for name in names_of(*kinds))


def of_operator(name: str) -> str:
    """Return the operation of an operator, also in place; ``""`` for one that is not PyTorch's."""
    return _word(name.removeprefix(ATEN)) if name.startswith(ATEN) else ""


def of_node(name: str) -> str:
    """Return the operation that autograd made a node for: ``tocopy`` of ``ToCopyBackward0``."""
    return short_node_name(name).partition(BACKWARD)[0].lower()


def kind_of(operation: str) -> Kind | None:
    """Return what an operation does with memory, ``None`` where the table does not say."""
    return _KINDS.get(operation)


VIEWS = (Kind.VIEW, Kind.PERMUTE, Kind.PART)
"""The kinds that compute nothing and move nothing."""


def is_view(operator: str) -> bool:
    """Whether this operator only looks at memory in another way, as far as its name says."""
    return kind_of(of_operator(operator)) in VIEWS


_MOVED = sorted(names_of(*VIEWS) | {"clone", "stack"})
_GENERATED_COPY = re.compile(rf"triton_poi_fused(?=\w*_clone_)(_({'|'.join(_MOVED)}))+_\d+$")


def is_generated_copy(kernel: str) -> bool:
    """Whether a generated kernel only copies into another layout: ``triton_poi_fused_clone_3``."""
    return _GENERATED_COPY.match(kernel) is not None


# Optimizers: torch/optim -------------------------------------------------------------------------


class FusedForm(NamedTuple):
    """What an optimizer does with ``fused=True``.

    Attributes:
        moves: how many tensors as large as a parameter it reads and writes.
        base: the operation that runs once for each parameter without it.
    """

    moves: int
    base: str


FUSED: dict[str, FusedForm] = {
    "Adam": FusedForm(7, "addcdiv"),
    "AdamW": FusedForm(7, "addcdiv"),
    "Adagrad": FusedForm(5, "addcdiv"),
    "SGD": FusedForm(5, "add"),
}
"""The classes of ``torch.optim`` that take ``fused=True``."""
FOREACH = frozenset(
    (*FUSED, "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop", "Adafactor")
)
"""Those that take ``foreach=True``."""


def optimizer_of(mark: str) -> str:
    """Return the class of the optimizer in a mark such as ``Optimizer.step#AdamW.step``."""
    return mark.removeprefix(OPTIMIZER_STEP).partition(".")[0]
