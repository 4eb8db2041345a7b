"""Products of matrices."""

from __future__ import annotations

from backspot.analysis.accounting.formulas.registry import Inputs, Unknown, flops

__all__ = ["matrix_product"]


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
