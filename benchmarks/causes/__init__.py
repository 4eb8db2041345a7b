"""Causes planted on purpose: does a report say what is wrong, where, and nothing else?

A case trains a small, well-built model in which one thing is done badly, or, for a control, the
same model with that thing done well. ``python -m benchmarks.causes`` records the cases' traces on a
GPU and judges the reports of these traces anywhere.

- ``case.py``: what a case is, and the registration of cases.
- ``training.py``: the training steps of the models in ``benchmarks/models.py``.
- ``cases``: the cases.
- ``record.py``: from cases to ``NAME.trace.json.gz``, two trimmed steps with shapes.
- ``judge.py``: from traces to verdicts and to precision and recall of each rule.

Of each planted cause the judge asks whether the rule that should find it did, and whether the
finding's first place is where the cause is. Of every finding it asks whether there is a reason: the
planted cause, or one that the case's ``also`` grants.
"""
