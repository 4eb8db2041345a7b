"""PyTorch's counter of floating point operations, with one of its formulas corrected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, conv_backward_flop, conv_flop_count


def operations_counter() -> FlopCounterMode:
    """Return a counter in which groups count in the gradient of a convolution's weight.

    ``torch.utils.flop_counter`` counts that gradient as if there were one group. It has as many
    operations as the forward.
    """
    backward = {torch.ops.aten.convolution_backward: _convolution_backward}
    return FlopCounterMode(display=False, custom_mapping=backward)


def _convolution_backward(*arguments: Any, out_shape: Sequence[Any], **more: Any) -> int:
    gradient, image, weight, *_, mask = arguments
    transposed = arguments[7]
    of_image = [mask[0], False, False]
    count: int = conv_backward_flop(*arguments[:-1], of_image, out_val=out_shape, **more)
    if mask[1]:
        count += conv_flop_count(list(image), list(weight), list(gradient), transposed=transposed)
    return count
