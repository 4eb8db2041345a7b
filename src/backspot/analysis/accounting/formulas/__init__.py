"""How much work an operator does, from the shapes of its inputs: one family of formulas a file.

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

- ``registry.py``: the decorators and ``Inputs``.
- ``products.py``, ``convolutions.py``, ``attention.py``, ``recurrent.py``: floating point
  operations.
- ``traffic.py``: bytes.
"""
