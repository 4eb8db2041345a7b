"""Backspot inside the programs that people train with: trainers, pytest, notebooks.

In comes the training of another program, through that program's own interface: a callback, a
fixture, a magic command. Out goes a report, in the place where that program keeps its results.
Each file needs its own package, which is imported with the file and never with ``backspot``:

- ``lightning.py`` and ``transformers.py``: a ``BackspotCallback`` for each trainer. The trainer
  tells which model it trains and when a step ends; ``live/recorder.py`` does the rest.
  ``_trainer.py`` has what both share: the folder, the headline, and what goes to the loggers.
- ``pytest_plugin.py``: the fixture ``backward_budget`` fails a test if a step's backward takes more
  than a share, or got slower than a saved report.
- ``ipython.py``: the magic command ``%%backspot`` runs a cell that trains, as ``backspot run`` does
  with a script.
- ``opentelemetry.py``: ``send_steps`` makes spans of the steps of a report, and needs no training.

A *logger* is what the trainer reports to, such as TensorBoard. The report goes to loggers through
the trainer, so that names, steps and runs are those of the trainer.
"""
