"""Floating point operations of products of matrices, convolutions, attention and recurrent layers.

The sizes of a convolution's output are not recorded, so they are computed from the other arguments.
Causal masks of attention count as if nothing were masked.

A recurrent layer multiplies each row of its input, one for each moment of each sequence, by each of
its weight matrices: from input to hidden, from hidden to hidden, and the projection. Backward does
this once more for the gradients of the rows and once for those of the weights. Packed sequences are
rows without padding, so they are counted exactly. ``torch.utils.flop_counter`` has no formula for
these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from backspot.analysis.accounting.formulas import Inputs, Unknown, flops


def matrix_product(first: list[int], second: list[int]) -> int:
    """Return the operations of a product of matrices, or of a batch of such products.

    Args:
        first: sizes of the first factor, such as ``[batch, rows, inner]``.
        second: sizes of the second factor, such as ``[batch, inner, columns]``.

    Raises:
        Unknown: If these are no factors of a product.
    """
    if len(first) != len(second) or first[:-2] != second[:-2] or first[-1] != second[-2]:
        raise Unknown
    count = 2
    for size in (*first, second[-1]):
        count *= size
    return count


@flops("aten::mm", "aten::bmm", "aten::_scaled_mm")
def product(inputs: Inputs) -> int:
    """Two factors."""
    return matrix_product(inputs.shape(0), inputs.shape(1))


@flops("aten::addmm", "aten::baddbmm")
def added_product(inputs: Inputs) -> int:
    """What the product is added to, then two factors."""
    return matrix_product(inputs.shape(1), inputs.shape(2))


@flops("aten::_grouped_mm", "aten::_scaled_grouped_mm")
def grouped_product(inputs: Inputs) -> int:
    """Rows in groups, and a matrix for each group: each row is multiplied by one matrix.

    ``torch.utils.flop_counter`` has no formula for these.
    """
    rows, matrices = inputs.shape(0), inputs.shape(1)
    if len(rows) == len(matrices) == 2:  # each group is a part of the inner dimension
        return matrix_product(rows, matrices)
    if len(rows) + len(matrices) != 5:
        return matrix_product(rows, matrices)
    return 2 * rows[-2] * rows[-1] * matrices[-1]


def _count(image: Sequence[int], weight: Sequence[int], positions: Sequence[int]) -> int:
    """Return the operations of a convolution.

    Args:
        image: sizes of the input, whose first is the batch.
        positions: at how many places, in each dimension, the weight is applied.
    """
    return 2 * prod(positions) * prod(weight) * image[0]


def output_sizes(
    image: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Return the sizes of what a convolution that is not transposed gives.

    A list with one number stands for all dimensions.
    """
    sizes = []
    for dim, (size, width) in enumerate(zip(image[2:], weight[2:], strict=True)):
        step, edge, spread = (
            numbers[dim if len(numbers) > 1 else 0] for numbers in (stride, padding, dilation)
        )
        sizes.append((size + 2 * edge - spread * (width - 1) - 1) // step + 1)
    return [image[0], weight[0], *sizes]


@flops("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
def convolution(inputs: Inputs) -> int:
    """Input, weight, bias, stride, padding, dilation, transposed, and more."""
    image, weight = inputs.shape(0), inputs.shape(1)
    if len(image) != len(weight):
        raise Unknown
    if inputs.value(6):
        return _count(image, weight, image[2:])
    stride, padding, dilation = (inputs.value(place) for place in (3, 4, 5))
    return _count(image, weight, output_sizes(image, weight, stride, padding, dilation)[2:])


@flops("aten::convolution_backward")
def convolution_backward(inputs: Inputs) -> int:
    """The gradients of the output, the input, the weight, …; the last says which are computed.

    The gradient of the input is a convolution of the output's gradient with the weight, and that of
    the weight one of the input with the output's gradient. Each has as many operations as the
    forward. ``torch.utils.flop_counter`` leaves out that groups divide those of the weight.
    """
    gradient, image, weight = (inputs.shape(place) for place in range(3))
    if not len(gradient) == len(image) == len(weight):
        raise Unknown
    transposed, groups, wanted = inputs.value(7), inputs.value(9), inputs.value(10)
    if not isinstance(groups, int) or groups < 1:
        raise Unknown
    count = 0
    if wanted[0]:
        count += _count(gradient, weight, image[2:] if transposed else gradient[2:])
    if wanted[1]:
        first, second = (gradient, image) if transposed else (image, gradient)
        operations = 2 * prod(weight[2:]) * prod(second[2:]) * first[1] * second[1] * second[0]
        count += operations // groups
    return count


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
    return _forward(_sizes(*(inputs.shape(place) for place in range(3))))


@flops(
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)
def attention_backward(inputs: Inputs) -> int:
    """The gradient of the output, query, key, value, and more."""
    return _backward(_sizes(*(inputs.shape(place) for place in range(1, 4))))


@flops("aten::_flash_attention_forward", "aten::_efficient_attention_forward")
def attention_rows_first(inputs: Inputs) -> int:
    """Query, key, value, …, with the rows before the heads."""
    return _forward(_sizes(*(_heads_first(inputs.shape(place)) for place in range(3))))


@flops("aten::_flash_attention_backward", "aten::_efficient_attention_backward")
def attention_rows_first_backward(inputs: Inputs) -> int:
    """The gradient of the output, query, key, value, …, with the rows before the heads."""
    return _backward(_sizes(*(_heads_first(inputs.shape(place)) for place in range(1, 4))))


def _layers(rows: Sequence[int], weights: Iterable[Sequence[int]]) -> int:
    """Return the operations of the forward.

    Args:
        rows: the sizes of the input, the last one its width.
        weights: the sizes of all weights; biases have one dimension.

    Raises:
        Unknown: If the rows do not fit the weights.
    """
    matrices = [sizes for sizes in weights if len(sizes) == 2]
    if len(rows) < 2 or not matrices or matrices[0][1] != rows[-1]:
        raise Unknown
    return 2 * prod(rows[:-1]) * sum(map(prod, matrices))


@flops("aten::_cudnn_rnn", "aten::miopen_rnn")
def layers(inputs: Inputs) -> int:
    """The input, the weights of all layers and directions, and more."""
    return _layers(inputs.shape(0), inputs.shapes_in_list(1))


@flops("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def layers_backward(inputs: Inputs) -> int:
    """Input, weights, …; the last says whether gradients of the weights are computed.

    The gradients of the input and of the first hidden state are always computed.
    """
    mask = inputs.value(len(inputs.values) - 1)
    if not isinstance(mask, list) or len(mask) != 4:
        raise Unknown
    return (1 + bool(mask[3])) * layers(inputs)


@flops("aten::mkldnn_rnn_layer")
def layer_on_cpu(inputs: Inputs) -> int:
    """The input of one layer in one direction, its two matrices, and more."""
    return _layers(inputs.shape(0), [inputs.shape(1), inputs.shape(2)])


@flops("aten::mkldnn_rnn_layer_backward")
def layer_on_cpu_backward(inputs: Inputs) -> int:
    """As forward: the gradients of the input and of the weights are computed together."""
    return 2 * layer_on_cpu(inputs)
