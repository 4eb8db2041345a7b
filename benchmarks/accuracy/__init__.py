"""Are the modules that Backspot names the right ones, and are its numbers true?

Comes in: models of timm, torchvision and transformers, and own ones from ``benchmarks/models.py``.
Goes out: results that compare Backspot with something independent of it.

- ``timm_sweep.py``: every model of timm takes the same step with labels as without.
- ``planted.py``: a slow backward in a random module (``plants.py``) of ``architectures.py`` must
  come first in the list.
- ``gpu_truth.py``: GPU time against a plain count of kernels (``traces/plain.py``), wall time
  against CUDA events between nodes (``module_clock.py``), on the models of ``truth_models.py``.
- ``predicted_saving.py``: cost before minus cost after a remedy (``remedies.py``) against the
  change of the step time without profiler.
- ``what_if.py``: what a replay of one recording says that a change saves (``changes.py``) against
  the change of the step time; ``replayed.py`` compiles a trace for replays.
- ``compare_runs.py``: what ``backspot.compare`` claims of a real change, and of none.
- ``false_alarms.py``: what is found in models with nothing wrong (``healthy.py``).

``steps.py`` has what the sweep and the plants share: inputs, seeds, losses, equality of bits.
"""
