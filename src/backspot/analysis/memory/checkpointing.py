"""What stays in memory although a module is checkpointed: its output and its input.

What a module's forward allocates and its own backward finds is freed by checkpointing, with two
exceptions. Its output stays if the operator that runs next saves it as well. Its input stays
because checkpointing holds it; this is more than before if nothing else keeps the input. A trace
does not name the tensors of an operator, so both follow from the operators next to the two ends of
a call, by what PyTorch's formulas of derivatives save (``derivatives.yaml``). Where these operators
leave it open, nothing counts as staying. An operator counts as if its parameters were trained.
"""

from __future__ import annotations

import msgspec
import numpy as np

from backspot.analysis.attribution.ownership import Ownership
from backspot.analysis.memory.allocations import Blocks
from backspot.analysis.timeline import first_started, grouped, take
from backspot.trace import Category, Events
from backspot.trace.events import Ints, Mask
from backspot.trace.names import ATEN
from backspot.trace.operations import VIEWS, Kind, operators_of


def _aten(names: str) -> frozenset[str]:
    return frozenset(ATEN + name for name in names.split())


_RNNS = _aten("lstm gru rnn_tanh rnn_relu")
_PRODUCTS = _aten("linear addmm mm")
_SAVE_INPUT = (
    _RNNS
    | _PRODUCTS
    | _aten("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
    | _aten("layer_norm group_norm batch_norm instance_norm rms_norm")
    | _aten("max_pool1d max_pool2d max_pool3d avg_pool2d adaptive_avg_pool2d")
    | _aten("gelu silu mish softplus hardswish leaky_relu pow square")
)
_SAVE_OUTPUT = _RNNS | _aten(
    "relu relu_ tanh tanh_ sigmoid sigmoid_ softmax exp sqrt rsqrt scaled_dot_product_attention"
)
_DROP_INPUT = _aten("relu tanh sigmoid softmax log_softmax dropout")
_PASSED_OVER = operators_of(*VIEWS, Kind.FACTORY) | _aten("contiguous to empty")
"""Views, operators without a tensor as input, and copies that may copy nothing."""
_COPIED_FOR = _PRODUCTS | _RNNS | _PASSED_OVER
_RNN_LAYERS = _aten("_cudnn_rnn miopen_rnn mkldnn_rnn_layer")
"""What an RNN calls: the first block of the last one is the output."""
_SLACK, _SLACK_OF_LARGE = 512, 1 << 20
"""By how many bytes the allocator of a GPU may give out too much."""
_CLONE, _CAST = ATEN + "clone", ATEN + "_to_copy"


class _Within(msgspec.Struct, frozen=True):
    """Things of one thread in the order of time, and those of them in an interval."""

    index: Ints
    time: Ints

    @classmethod
    def of(cls, index: Ints, time: Ints) -> _Within:
        """Sort them."""
        order = np.argsort(time, kind="stable")
        return cls(index[order], time[order])

    def between(self, start: int, end: int) -> Ints:
        """Return those from ``start`` until before ``end``."""
        first, last = np.searchsorted(self.time, [start, end])
        return self.index[first:last]


class _Thread:
    """The forward calls of one thread."""

    def __init__(
        self, events: Events, blocks: Blocks, until: Ints, is_kept: Mask, operators: Ints
    ) -> None:
        """Sort a thread's operators."""
        self.events, self.blocks, self.until, self.kept = events, blocks, until, is_kept
        thread = int(events.thread[operators[0]])
        start, end = events.start[operators], events.end[operators]
        holding = first_started(start, end, operators).values
        outermost = holding[holding >= 0]
        self.operators = _Within.of(outermost, events.start[outermost])
        self.copies = self._named(operators, frozenset((_CLONE, _CAST)))
        self.layers = self._named(operators, _RNN_LAYERS)
        own_blocks = np.flatnonzero(
            (take(events.allocations.thread, blocks.came) == thread) & ~blocks.by_optimizer
        )
        self.allocated = _Within.of(own_blocks, events.allocations.time[blocks.came[own_blocks]])

    def _named(self, operators: Ints, names: frozenset[str]) -> _Within:
        wanted = self.events.names_where(names.__contains__)
        chosen = operators[wanted[self.events.name[operators]]]
        return _Within.of(chosen, self.events.start[chosen])

    def name(self, operator: int) -> str:
        operator_name: str = self.events.names[self.events.name[operator]]
        return operator_name

    def _during(self, operator: int) -> tuple[int, int]:
        return int(self.events.start[operator]), int(self.events.end[operator]) + 1

    def _first(self, operators: Ints) -> int | None:
        working = (
            operator for operator in map(int, operators) if not self._is_passed_over(operator)
        )
        return next(working, None)

    def _is_passed_over(self, operator: int) -> bool:
        return self.name(operator) in _PASSED_OVER and not len(self._copies(operator))

    def _copies(self, operator: int) -> Ints:
        return self.copies.between(*self._during(operator))

    def _live(self, operator: int, moment: int) -> Ints:
        """Return the blocks that an operator allocates and that are live at a later time."""
        allocated = self.allocated.between(*self._during(operator))
        return allocated[self.until[allocated] > moment]

    def _copies_first(self, operator: int, block: int) -> bool:
        """Whether an operator saves a copy, or a cast, of its input that lies in a block."""
        size = int(self.blocks.size[block])
        for copy in self._copies(operator).tolist():
            # A convolution copies below autograd, which has saved the input itself by then.
            if self.name(copy) == _CLONE and self.name(operator) not in _COPIED_FOR:
                continue
            allocated_bytes = self.blocks.size[self.allocated.between(*self._during(copy))]
            sizes = [size] if self.name(copy) == _CLONE else [size // 2, size * 2]
            slack = _SLACK_OF_LARGE if size > _SLACK_OF_LARGE else _SLACK
            if (np.abs(np.subtract.outer(allocated_bytes, sizes)) < slack).any():
                return True
        return False

    def output(self, start: int, end: int, before: int, begun: int) -> int:
        """Return the bytes of a call's output if its own last operator and the next one save it."""
        inside, after = self.operators.between(start, end), self.operators.between(end, before)
        last, following = self._first(inside[::-1]), self._first(after)
        if last is None or following is None or self.name(last) not in _SAVE_OUTPUT:
            return 0
        has_gradients = self.events.sequence[following] >= 0
        if not has_gradients or self.name(following) not in _SAVE_INPUT:
            return 0
        if self.name(last).endswith("_"):
            allocated = self.allocated.between(start, end)
            allocated = allocated[self.kept[allocated] & (self.until[allocated] >= begun)]
            allocated = allocated[
                np.argsort(self.until[allocated], kind="stable")
            ]  # its node is the first
        elif self.name(last) in _RNNS:
            layers = self.layers.between(*self._during(last))
            allocated = self._live(int(layers[-1]), end) if len(layers) else layers
        else:
            allocated = self._live(last, end)
        if not len(allocated) or not self.kept[allocated[0]] or self.until[allocated[0]] < begun:
            return 0
        return (
            0
            if self._copies_first(following, allocated[0])
            else int(self.blocks.size[allocated[0]])
        )

    def input(self, start: int, end: int, since: int, before: int) -> int:
        """Return the bytes of a call's input if nothing keeps it."""
        inside, ahead = self.operators.between(start, end), self.operators.between(since, start)
        first, last = self._first(inside), self._first(ahead[::-1])
        if first is None or last is None:
            return 0
        allocated = self._live(last, start)
        if not len(allocated):
            return 0
        size = self.blocks.size[allocated]
        block = allocated[np.flatnonzero(size == size.max())[-1]]  # dropout's noise comes before
        if self.kept[block]:
            return 0
        if not self._copies_first(first, block):
            # Another branch may have the block: it is the input if nothing uses it after the call.
            following = self.operators.between(end, before)[:1]
            used_last = len(following) and self.until[block] <= self.events.start[following[0]]
            if self.name(first) not in _DROP_INPUT or not used_last:
                return 0
        return int(size.max())


def find_staying(
    events: Events,
    ownership: Ownership,
    blocks: Blocks,
    until: Ints,
    is_kept: Mask,
    begun: Ints,
    frees: Ints,
) -> Ints:
    """Return the bytes that stay although a module is checkpointed, by owner and pass.

    Args:
        until: when each block is freed.
        is_kept: whether each block is kept from forward to backward.
        begun: when the backward of each owner begins in each pass.
        frees: what the module's own backward finds, by owner and pass. Nothing stays of nothing.
    """
    spans, passes = ownership.spans, ownership.passes
    staying = np.zeros_like(begun)
    threads = {
        thread: _Thread(events, blocks, until, is_kept, members)
        for thread, members in grouped(events.thread, events.prefixed(Category.OPERATOR, ATEN))
    }
    calls = np.flatnonzero((spans.module >= 0) & (passes.of_span < 0))
    owners = ownership.owners.of_modules(spans.module[calls])
    runs = np.searchsorted(passes.start, spans.end[calls], side="right")
    for call, owner, run in zip(calls.tolist(), owners.tolist(), runs.tolist(), strict=True):
        thread = threads.get(int(spans.thread[call]))
        if thread is None or run == len(passes.start) or not frees[owner, run]:
            continue
        start, end = int(spans.start[call]), int(spans.end[call])
        since, before = int(passes.end[run - 1]) if run else 0, int(passes.start[run])
        staying[owner, run] += thread.output(start, end, before, int(begun[owner, run]))
        staying[owner, run] += thread.input(start, end, since, before)
    return staying
