"""A training job of many ranks: which rank is slow, where, and who waits for it.

In: one located trace for each rank. Out: a ``JobReport``. Each trace is reduced to a ``Summary``
where it lies, and only summaries are put together, so that memory grows with ranks times modules.

The order in which the files work::

    identity.py     which rank a trace is of, and on which host, from its head and its name
    collectives.py  what the collectives of one trace are, and when the host waits for them
    outside.py      what the host of a rank does outside of modules, by place in the training loop
    reduce.py       one trace to a ``Summary``
    summary.py      ``Summary``, its bytes and back
    matching.py     the same collective on all ranks
    roles.py        what a process group is for
    align.py        one clock for all ranks
    transfers.py    the same transfer on its two ranks, and clocks of ranks that only transfer
    waiting.py      how long each rank waits in each collective, and how long the transfer takes
    scatter.py      the median of the other ranks, and whether a time is longer, beyond the noise
    noise.py        how far apart the steps of a rank and of the others must be
    modules.py      the modules over the ranks, and those that take longer on one of them
    kernels.py      the kernels of such a module that make the difference
    replay.py       the job's step after a change, with all ranks together
    findings/       what makes the job slow: the rules
    answer.py       all of that for the summaries of a job
    remote.py       traces on other machines, by ``fsspec``
    worker.py       one trace, or its summary from the cache, in a process of its own
    readers.py      these processes
    gather.py       all of this for the traces of a job

Terms:

- *rank*: one process of the job, by its number in ``torch.distributed``.
- *collective*: one operation of a process group in which all its ranks take part. Point-to-point
  operations are none. A *rooted* collective, such as a broadcast, has one rank that need not wait.
- *entry*: when a collective begins to run on a rank. A rank *waits* from its own entry until the
  last rank enters; the rest is *transfer*. The last rank to enter waits for no other.
- *offset* and *drift*: add the offset to the time of a rank's clock to get the job's time. The
  offset grows by the drift, in nanoseconds for each second.
- *own time*: a step's time on a rank without its waits.
- *exposed*: a collective runs and nothing else does. *Stalled*: the same of a transfer between two
  ranks, as between the stages of a pipeline.
- *peers*: the ranks that have a module. A rank is compared with its peers.
"""
