"""Trials: whether the remedy of a finding helps here, measured beside the training.

In come a report and what still lives of the training. Out comes the report with ``Finding.tried``.
A remedy runs on copies, in random turn with the code as it is, and the training finds everything as
it was. By default no code of the user's runs: only PyTorch's optimizers and operators do.

- ``trial.py``: what a remedy is given and returns, its copies, and the list of the remedies.
- ``measuring.py``: times variants in turn, and gives the verdict.
- ``untouched.py``: the guard around all trials.
- ``chains.py``: the operators of one real step with what they were given.
- ``attempts.py``: goes through the findings within a limit of time.
- ``remedies/``: one file a remedy.
"""
