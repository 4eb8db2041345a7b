"""The plan: settings tried on a deep copy of the whole model, beside the training.

In come a report and what still lives of the training. Out comes the report with ``Report.plan``.
One real step is watched: what the models were called with, which functions made the loss of their
outputs, and which gradients these got. Copies then run all that under each setting, in turns with
the copy as it is, while the training stands still; the guard of trials is around all of it.

A *setting* is what could be different, such as bf16; a *rung* is a setting with the step that it
gives; the *ladder* has the rungs that help together. A copy is trusted if the model got no
gradient from it, each trained parameter of it did, and its outputs are those of the real call.
The order is: each cheap setting alone, the best ones on top of each other, kernels of attention,
twice the batch, then what has to compile. A setting helps if it saves 1% of the step or more, and
the lower end of its interval half of that; it does not if the upper end is below 1%; else it is
undecided, as with fewer than six rounds. ``planning.py`` has the reasons to make no plan.

- ``planning.py``: watches a step, plans within its limit of time, and writes the plan.
- ``watching.py``: the calls of models in a step, with what they were given and got.
- ``losses.py``: the functions that follow a call up to the backward, to run them again.
- ``room.py``: how much of a step may be copied, and samples of tensors.
- ``account.py``: what a step needs of host and device, as it is and with another copy.
- ``copies.py``: copies of models that run the calls again, and whether such a copy can be trusted.
- ``settings.py``: the settings, with what they change and where they are worth trying.
- ``time_limit.py``: the end of a compilation that takes too long.
- ``comparing.py``: one copy beside another: times, memory, and how far results are apart.
- ``search.py``: single settings first, then the best ones together; twice the batch at the end.
- ``around.py``: what is around the model: optimizers, pinned memory, workers of the loader.
- ``loader.py``: the data set in worker processes.
- ``pace.py``: what the loader leaves of what settings save.
- ``again.py``: what the plan of an earlier report, before a change, leaves to try again.
- ``remedies.py``: what the rungs say of the findings whose remedies they are.
- ``earlier.py``: the plan that a report of the same recording has already.
"""
