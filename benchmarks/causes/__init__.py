"""Causes planted on purpose, recorded on a GPU or a CPU.

Each case trains a small, well-built model in which one thing is done badly, or, for a control, the
same model with that thing done well. Of each the judge asks whether the rule that should find it
did, and whether the finding's first place is where the cause is. Of every finding it asks whether
there is a reason: the planted cause, or one that the case's ``also`` grants.

- ``case.py``: what a case is, and the registration of cases; ``training.py``: training steps of
  the models in ``benchmarks/models.py``; ``cases``: the causes.
- ``record.py``: from cases to ``NAME.trace.json.gz``, two trimmed steps.
- ``judge.py``: from traces to verdicts, and to precision and recall of each rule.
- ``after_fix.py``: what is found in the fixed variants of all cases; a question of its own.
- ``published``: slow steps that others published with their fix; a question of its own.
"""
