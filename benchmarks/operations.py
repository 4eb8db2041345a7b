"""PyTorch's counter of floating point operations, with one formula corrected and two added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    conv_backward_flop,
    conv_flop_count,
    sdpa_backward_flop,
    sdpa_flop,
)


def operations_counter() -> FlopCounterMode:
    """Return a counter in which groups count in the gradient of a convolution's weight.

    ``torch.utils.flop_counter`` counts that gradient as if there were one group. It has as many
    operations as the forward.
    """
    aten = torch.ops.aten
    formulas: dict[Any, Any] = {aten.convolution_backward: _convolution_backward}
    # The attention of a CPU, which the counter of torch 2.14 leaves out.
    formulas[aten._scaled_dot_product_flash_attention_for_cpu] = _of_shapes(sdpa_flop)
    backward = _of_shapes(sdpa_backward_flop)
    formulas[aten._scaled_dot_product_flash_attention_for_cpu_backward] = backward
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    """A registered formula takes the output; one that is given to the counter takes its shape."""

    def counted(*arguments: Any, out_shape: Any, **more: Any) -> int:
        return formula(*arguments, out_val=out_shape, **more)

    return counted


def _convolution_backward(*arguments: Any, out_shape: Sequence[Any], **more: Any) -> int:
    gradient, image, weight, *_, mask = arguments
    transposed = arguments[7]
    of_image = [mask[0], False, False]
    count: int = conv_backward_flop(*arguments[:-1], of_image, out_val=out_shape, **more)
    if mask[1]:
        count += conv_flop_count(list(image), list(weight), list(gradient), transposed=transposed)
    return count
