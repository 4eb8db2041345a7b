"""Who owns what: the owner of every node, kernel, copy and wait of the backward.

``attribute`` in ``ownership`` takes the events of a trace and returns ``Ownership``. It works in
this order:

1. ``spans`` finds module calls and autograd nodes on the host's threads by their names.
   ``recompute`` adds spans for code that activation checkpointing runs again. ``updates`` tells
   which compiled code is that of an optimizer's step, and no span.
2. ``join`` matches each node with the forward operator that made it, by autograd's sequence
   numbers. ``unseen`` handles nodes that no recorded operator made.
3. ``passes`` splits the nodes into backward passes, and passes into steps.
4. ``launches`` finds the work of the devices and the span that launched each piece, and recognises
   launches that load code.
5. ``communication`` finds what communication between ranks is for.
6. ``ownership`` gives each span its owner: the module call around the forward operator of a node.
   Device work has the owner of the span that launched it; communication has owners of its own.
   ``wrapping`` corrects the nodes of full backward hooks, which run outside of their module's call.
   ``compiled`` matches the launches of compiled regions with the modules inside (``alignment``:
   their names, in order); a fused kernel has several owners, whose ``shares`` sum to the whole.
7. ``partial`` finds the passes and steps that were recorded in part. ``cutting`` returns a part of
   the trace with the owners that were found.

``sites`` finds which place of the user's Python the host is at, in a recording with stacks.
``tracks`` turns ownership into nested spans for the labelled copy of a trace.

Terms: a *logical thread* is autograd's own number of a thread, a *recorded thread* one of the
trace. A *root* is a node in no other node. ``NOTHING`` (-1) as an index means that there is none.
"""
