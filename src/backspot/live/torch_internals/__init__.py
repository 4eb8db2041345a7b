"""PyTorch internals that Backspot depends on: no file elsewhere uses a private name of PyTorch.

- ``profiler.py``: whether the profiler records, where it starts and stops, and what goes into its
  trace. The names of devices.
- ``autograd.py``: tensors and autograd nodes; what makes tensors other than they seem, and with
  that, whether to label.
- ``engine.py``: before and after each backward.
- ``modules.py``: how modules are called, their hooks, children and parameters.
- ``dynamo.py``: the modules that Dynamo compiles. ``inductor.py``: the graphs that it hands on, and
  the code that Inductor generates from these.
- ``process.py``: hooks on all modules and optimizers, and modes of a thread.
- ``allocator.py``: the allocator of CUDA devices when no memory is left.
- ``attention.py``: which kernels attention runs, and could run.
- ``batches.py``: how a ``DataLoader`` hands out batches.
- ``store.py``: what the ranks of a job share. ``collectives.py``: what they take part in together.
- ``references.py``: weak references to tensors, which PyTorch would refuse to swap for those.
- ``lookup.py``: finds a part of PyTorch now, or once it is loaded.

The policy of these files:

- Each private name is looked up once, at import, and bound to a global of one of these files. Files
  elsewhere bind these globals again, so that they cost no attribute lookup on the path of a module
  call.
- Each name has a comment that says what Backspot uses the name for, and what happens without it. A
  missing name costs a label, a line or some speed. It never causes an error.
- The hook dictionaries of ``torch.nn.Module`` and a few attributes of tensors and autograd nodes
  have no fallback: every supported version has them, and PyTorch cannot work without them. Files
  elsewhere use the functions of these files.
- ``call_wrapper`` has two of these attributes itself, as a function here would cost every call.
- What differs between versions is decided here. Files elsewhere ask for a capability
  (``push_node_hook is None``) and never for a version.

The public API of PyTorch is used everywhere in ``live``, directly.
"""
