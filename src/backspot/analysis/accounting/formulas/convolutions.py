"""Convolutions, transposed ones, and their backward.

The output's sizes are not recorded, so they are computed from the other arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from backspot.analysis.accounting.formulas.registry import Inputs, Unknown, flops

__all__ = ["output_sizes"]


def _count(image: Sequence[int], weight: Sequence[int], positions: Sequence[int]) -> int:
    """Return the operations of a convolution.

    Args:
        image: sizes of the input, whose first is the batch.
        weight: sizes of the weight.
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
    for at, (size, width) in enumerate(zip(image[2:], weight[2:], strict=True)):
        step, edge, spread = (
            numbers[at if len(numbers) > 1 else 0] for numbers in (stride, padding, dilation)
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
    stride, padding, dilation = (inputs.value(at) for at in (3, 4, 5))
    return _count(image, weight, output_sizes(image, weight, stride, padding, dilation)[2:])


@flops("aten::convolution_backward")
def convolution_backward(inputs: Inputs) -> int:
    """The gradients of the output, the input, the weight, …; the last says which are computed.

    The gradient of the input is a convolution of the output's gradient with the weight, and that of
    the weight one of the input with the output's gradient. Each has as many operations as the
    forward. ``torch.utils.flop_counter`` leaves out that groups divide those of the weight.
    """
    gradient, image, weight = (inputs.shape(at) for at in range(3))
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
        whole = 2 * prod(weight[2:]) * prod(second[2:]) * first[1] * second[1] * second[0]
        count += whole // groups
    return count
