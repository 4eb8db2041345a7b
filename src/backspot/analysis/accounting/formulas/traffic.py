"""The bytes that an operator reads and writes at least.

Each distinct element of an input is read once, and each element of an output written once. Caches
can make real traffic smaller, if what one operator writes is read by the next before it leaves; bad
access patterns make it larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from backspot.analysis.accounting.formulas import Inputs, Unknown, kind_of, moved
from backspot.analysis.accounting.formulas.flops import output_sizes
from backspot.trace.operations import Kind, operators_of

__all__: list[str] = []


def _like(inputs: Inputs, *places: int) -> int:
    """The bytes of outputs that are like some inputs."""
    return sum(prod(inputs.shape(place)) * inputs.element(place) for place in places)


def _wanted(inputs: Inputs, place: int, outputs: Sequence[int]) -> int:
    """The bytes of those outputs that a mask of truth values asks for."""
    mask = inputs.value(place)
    if not isinstance(mask, list) or len(mask) != len(outputs):
        raise Unknown
    return sum(size for is_wanted, size in zip(mask, outputs, strict=True) if is_wanted)


# Pointwise ---------------------------------------------------------------------------------------

_BACKWARD = """
    elu gelu glu hardsigmoid hardswish hardtanh leaky_relu mish sigmoid silu softplus tanh threshold
"""
"""Pointwise operations whose backward is an operator of its own, and pointwise too."""
_POINTWISE = operators_of(Kind.POINTWISE) - {"aten::where"}


@moved(*_POINTWISE, *(f"aten::{name}_backward" for name in _BACKWARD.split()))
def pointwise(inputs: Inputs) -> int:
    """An output with the sizes that the inputs have together, of the widest type among them."""
    return inputs.read_all() + prod(inputs.broadcast()) * _widest(inputs, inputs.tensors)


@moved("aten::where")
def where(inputs: Inputs) -> int:
    """The first input only says which of the others to take."""
    return inputs.read_all() + prod(inputs.broadcast()) * _widest(inputs, inputs.tensors[1:])


def _widest(inputs: Inputs, places: Sequence[int]) -> int:
    """Return the bytes of an element of what PyTorch makes of some tensors.

    A number is recorded as a tensor without dimensions. It widens others only if they are of a
    lower kind, such as integers; and then a float, which Python writes as a double, has 4 bytes.
    """
    kinds = {place: kind_of(inputs.types[place]) for place in places}
    sized = [place for place in places if inputs.shape(place)] or list(places)
    highest = max((kinds[place] for place in sized), default=0)
    above = [min(inputs.element(place), 4) for place in places if kinds[place] > highest]
    return max(above or [inputs.element(place) for place in sized], default=0)


@moved(*operators_of(Kind.COMPARISON))
def truth(inputs: Inputs) -> int:
    """An output of one byte an element."""
    return inputs.read_all() + prod(inputs.broadcast())


@moved(*(f"{name}_" for name in _POINTWISE))
def in_place(inputs: Inputs) -> int:
    """The first input is written, too."""
    return inputs.read_all() + _like(inputs, 0)


@moved("aten::copy_")
def copy(inputs: Inputs) -> int:
    """Destination, source, and more."""
    return _like(inputs, 0) + inputs.read(1)


@moved("aten::fill_", "aten::zero_")
def fill(inputs: Inputs) -> int:
    """Nothing is read."""
    return _like(inputs, 0)


@moved("aten::native_dropout")
def dropout(inputs: Inputs) -> int:
    """An output, and a mask of one byte an element."""
    return inputs.read(0) + _like(inputs, 0) + prod(inputs.shape(0))


@moved("aten::native_dropout_backward")
def dropout_backward(inputs: Inputs) -> int:
    """The gradient of the output, and the mask."""
    return inputs.read(0) + inputs.read(1) + _like(inputs, 0)


# Products ----------------------------------------------------------------------------------------


@moved("aten::mm", "aten::bmm")
def product(inputs: Inputs) -> int:
    """Two factors."""
    first, second = inputs.shape(0), inputs.shape(1)
    result = [*first[:-1], second[-1]]
    return inputs.read(0) + inputs.read(1) + prod(result) * inputs.element(0)


@moved("aten::addmm", "aten::baddbmm")
def added_product(inputs: Inputs) -> int:
    """What the product is added to, then two factors; what follows is written, not read."""
    first, second = inputs.shape(1), inputs.shape(2)
    result = [*first[:-1], second[-1]]
    return sum(map(inputs.read, range(3))) + prod(result) * inputs.element(1)


@moved("aten::convolution")
def convolution(inputs: Inputs) -> int:
    """Input, weight, bias, stride, padding, dilation, transposed, and more."""
    image, weight = inputs.shape(0), inputs.shape(1)
    if len(image) != len(weight) or inputs.value(6):
        raise Unknown
    stride, padding, dilation = (inputs.value(place) for place in (3, 4, 5))
    result = output_sizes(image, weight, stride, padding, dilation)
    return inputs.read_all() + prod(result) * inputs.element(0)


@moved("aten::convolution_backward")
def convolution_backward(inputs: Inputs) -> int:
    """The gradients of the output, the input, the weight, …; the last says which are computed."""
    channels = inputs.shape(0)[1] * inputs.element(0)
    outputs = (_like(inputs, 1), _like(inputs, 2), channels)
    return inputs.read_all() + _wanted(inputs, 10, outputs)


@moved(
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_cudnn_attention",
)
def attention(inputs: Inputs) -> int:
    """An output like the query, with the width of the value."""
    query, value = inputs.shape(0), inputs.shape(2)
    result = prod(query[:-1]) * value[-1] * inputs.element(0)
    return sum(map(inputs.read, range(3))) + result


@moved(
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_cudnn_attention_backward",
)
def attention_backward(inputs: Inputs) -> int:
    """The gradients of query, key and value."""
    return inputs.read_all() + _like(inputs, 1, 2, 3)


# Norms, softmax and sums -------------------------------------------------------------------------


@moved("aten::native_layer_norm", "aten::_softmax", "aten::_log_softmax", "aten::native_group_norm")
def normalized(inputs: Inputs) -> int:
    """An output like the input; the statistics are few."""
    return inputs.read_all() + _like(inputs, 0)


@moved("aten::cudnn_batch_norm", "aten::native_batch_norm", "aten::miopen_batch_norm")
def batch_norm(inputs: Inputs) -> int:
    """In training the input is read twice: for its statistics, and to apply them."""
    again = inputs.read(0) if _is_training(inputs, 5) else 0
    return inputs.read_all() + again + _like(inputs, 0)


@moved("aten::native_layer_norm_backward")
def layer_norm_backward(inputs: Inputs) -> int:
    """The gradient of the output, the input, sizes, mean, deviation, weight, bias, mask."""
    weight = _like(inputs, 5) if 5 in inputs.tensors else 0
    return inputs.read_all() + _wanted(inputs, 7, (_like(inputs, 1), weight, weight))


@moved("aten::cudnn_batch_norm_backward")
def batch_norm_backward(inputs: Inputs) -> int:
    """The gradient of the output and the input are read twice: for sums, and to apply these."""
    return inputs.read_all() + inputs.read(0) + inputs.read(1) + _like(inputs, 0)


@moved("aten::native_batch_norm_backward")
def native_batch_norm_backward(inputs: Inputs) -> int:
    """In training as above; else both are read once, and a mask says what is computed."""
    if _is_training(inputs, 7):
        return batch_norm_backward(inputs)
    weight = _like(inputs, 2) if 2 in inputs.tensors else 0
    return inputs.read_all() + _wanted(inputs, 9, (_like(inputs, 1), weight, weight))


def _is_training(inputs: Inputs, place: int) -> bool:
    """Whether an input says that a norm is in training; true where its value is not recorded."""
    try:
        return inputs.value(place) is not False
    except Unknown:
        return True


@moved("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(inputs: Inputs) -> int:
    """The gradient of the output, and the output."""
    return inputs.read_all() + _like(inputs, 0)


@moved("aten::sum", "aten::mean")
def reduced(inputs: Inputs) -> int:
    """The input, and what is left of it; without dimensions, one number."""
    shape = inputs.shape(0)
    try:
        value = inputs.value(1)
    except Unknown:
        value = None
    dims = {dim % len(shape) for dim in value} if isinstance(value, list) and shape else set()
    elements = prod(size for dim, size in enumerate(shape) if dim not in dims) if dims else 1
    return inputs.read(0) + elements * inputs.element(0)


@moved("aten::embedding")
def embedding(inputs: Inputs) -> int:
    """A table and indices: the rows that are looked up are read, and written."""
    rows = prod(inputs.shape(1)) * inputs.shape(0)[-1] * inputs.element(0)
    return inputs.read(1) + 2 * rows


# Recurrent layers --------------------------------------------------------------------------------


def _recurrent(inputs: Inputs, width: int) -> int:
    """Input, weights and output; what is kept for the backward has no recorded size.

    Each weight is read once.

    Args:
        width: the width of the output.
    """
    rows = prod(inputs.shape(0)[:-1])
    return inputs.read(0) + _weights(inputs) + rows * width * inputs.element(0)


def _weights(inputs: Inputs) -> int:
    return sum(map(prod, inputs.shapes_in_list(1))) * inputs.element(0)


@moved("aten::_cudnn_rnn")
def recurrent(inputs: Inputs) -> int:
    """The output is as wide as the state, or its projection, in each direction."""
    width = inputs.value(8) or inputs.value(7)
    return _recurrent(inputs, width * (1 + inputs.value(13)))


@moved("aten::miopen_rnn")
def recurrent_on_amd(inputs: Inputs) -> int:
    """As above, without projection, and with other places."""
    return _recurrent(inputs, inputs.value(6) * (1 + inputs.value(11)))


@moved("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def recurrent_backward(inputs: Inputs) -> int:
    """Input, weights, …, output, its gradient, …, what was kept, mask of the gradients."""
    last = len(inputs.values) - 1
    mask = inputs.value(last)
    if not isinstance(mask, list) or len(mask) != 4:
        raise Unknown
    weights = _weights(inputs) * (1 + bool(mask[3]))
    gradient = inputs.read(7) if 7 in inputs.tensors else 0
    return sum(map(inputs.read, (0, 6, last - 1))) + gradient + weights + _like(inputs, 0)


@moved("aten::_thnn_fused_lstm_cell")
def lstm_cell(inputs: Inputs) -> int:
    """Gates of the input and of the state, then the cell: a new state and cell, and the gates."""
    return inputs.read_all() + _like(inputs, 0, 2, 2)


@moved("aten::_thnn_fused_lstm_cell_backward_impl")
def lstm_cell_backward(inputs: Inputs) -> int:
    """Gradients of state and cell, the cell before and after, and the gates."""
    return inputs.read_all() + _like(inputs, 4, 2)
