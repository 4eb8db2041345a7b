"""Fused attention, forward and backward. Causal masks count as if nothing were masked."""

from __future__ import annotations

from backspot.analysis.accounting.formulas.registry import Inputs, Unknown, flops

__all__: list[str] = []

_Sizes = tuple[int, int, int, int, int, int]


def _sizes(query: list[int], key: list[int], value: list[int]) -> _Sizes:
    """Return batch, heads, rows of the query, rows of the key, and the widths of key and value.

    The tensors are batch, heads, rows, width; key and value may have fewer heads, each for several
    of the query's.
    """
    if not len(query) == len(key) == len(value) == 4:
        raise Unknown
    batch, heads, rows, width = query
    if key[0] != batch or value[0] != batch or key[3] != width or key[2] != value[2]:
        raise Unknown
    if not key[1] or key[1] != value[1] or heads % key[1]:
        raise Unknown
    return batch, heads, rows, key[2], width, value[3]


def _forward(sizes: _Sizes) -> int:
    """The scores, and their product with the values."""
    batch, heads, rows, columns, width, width_of_value = sizes
    return 2 * batch * heads * rows * columns * (width + width_of_value)


def _backward(sizes: _Sizes) -> int:
    """The scores again; the gradients of scores and values; those of query and key."""
    batch, heads, rows, columns, width, width_of_value = sizes
    return 2 * batch * heads * rows * columns * (3 * width + 2 * width_of_value)


def _heads_first(shape: list[int]) -> list[int]:
    if len(shape) != 4:
        raise Unknown  # packed sequences, whose lengths are not recorded
    return [shape[0], shape[2], shape[1], shape[3]]


@flops(
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_cudnn_attention",
)
def attention(inputs: Inputs) -> int:
    """Query, key, value, and more."""
    return _forward(_sizes(*(inputs.shape(at) for at in range(3))))


@flops(
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)
def attention_backward(inputs: Inputs) -> int:
    """The gradient of the output, query, key, value, and more."""
    return _backward(_sizes(*(inputs.shape(at) for at in range(1, 4))))


@flops("aten::_flash_attention_forward", "aten::_efficient_attention_forward")
def attention_rows_first(inputs: Inputs) -> int:
    """Query, key, value, …, with the rows before the heads."""
    return _forward(_sizes(*(_heads_first(inputs.shape(at)) for at in range(3))))


@flops("aten::_flash_attention_backward", "aten::_efficient_attention_backward")
def attention_rows_first_backward(inputs: Inputs) -> int:
    """The gradient of the output, query, key, value, …, with the rows before the heads."""
    return _backward(_sizes(*(_heads_first(inputs.shape(at)) for at in range(1, 4))))
