"""Trials: whether the remedy of a finding helps here, measured beside the training.

In come a report and what still lives of the training. Out comes the report with ``Finding.tried``.
A remedy runs on copies, in random turn with the code as it is, and the training finds everything as
it was. By default no code of the user's runs: only PyTorch's optimizers and operators do.

- ``attempts.py``: goes through the findings within a limit of time.
- ``untouched.py``: the guard around all trials.
- ``chains.py``: the operators of one real step with what they were given.
- ``twins.py``: copies of tensors, within the memory that is free.
- ``trial.py``: what a remedy is given and returns, and the list of the remedies.
- ``measuring.py``: times variants in turn, and gives the verdict.

A remedy is a function that prepares copies and returns a ``Trial``: the code as it is, and each
other way to write it. Nothing lists them: the first trial imports every file in this folder.

- ``optimizer.py``: the form of the optimizer, clipping, gradients that are filled with zeros.
- ``attention.py``: attention in one kernel.
- ``pointwise.py``: the function that computes the same as a chain of pointwise ones.
- ``products.py``: products of tiny matrices, and distances.
- ``convolutions.py``: 3-D depthwise convolutions in other forms.
- ``losses.py``: the last layer and the loss without positions that have no label.
- ``lookups.py``: rows of a table, sparse gradients of embeddings, copies from pinned memory.
"""
