"""Fused recurrent layers: LSTM, GRU and plain RNNs, forward and backward.

A layer multiplies each row of its input, one for each moment of each sequence, by each of its
weight matrices: from input to hidden, from hidden to hidden, and the projection. Backward does this
once more for the gradients of the rows and once for those of the weights. Packed sequences are rows
without padding, so they are counted exactly. ``torch.utils.flop_counter`` has no formula for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from backspot.analysis.accounting.formulas.registry import Inputs, Unknown, flops

__all__: list[str] = []


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
