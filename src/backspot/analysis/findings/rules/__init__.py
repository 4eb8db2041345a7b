"""The rules: one cause of a slow step each, one subject a file. This is how to write one.

A rule is a pure function that picks spans or device work and says what they cost::

    @rule(
        "slow-sort",
        least=0.01,
        title="Sorting takes long",
        remedy="Sort once, before training.",
        link="https://docs.pytorch.org/docs/stable/generated/torch.sort.html",
    )
    def slow_sort(evidence: Evidence) -> Finding | None:
        '''Rows are sorted in each step.

        **Cause.** The order of the rows is the same in each step, and computed again.

        **Found by** kernels that sort, at the cost of their time.

        **Fix.** Sort once, before training.
        '''
        work = evidence.work_named(names.is_sort)
        return finding(
            evidence.costs.places_of_work(work),
            seen=f"{evidence.wording.ms(evidence.costs.of_work(work))} of sorting in each step.",
        )

1. Pick spans by ``evidence.nodes_named``, device work by ``work_named`` or ``launched_in``. Names
   that PyTorch writes are in ``trace/names.py``; a mask that another rule needs too goes into
   ``observations.py``. A rule does not import another rule.
2. What a finding is priced at is the work that its remedy takes away, and nothing else of the
   module, function or phase: nodes, operators of the forward with the Python between them, device
   work and waits. ``observations.both_ways`` has them as ``Placed.removable``; ``nodes_of`` has the
   nodes that operators made. A rule whose remedy leaves out whole calls of modules says
   ``whole_calls=True``. Where the remedy does the same in another form, ``at_best=True``; where it
   is known to lose on some hardware, or the work may be what the step is for, ``priced=False``.
3. Return ``None`` where the trace lacks what the rule needs. Where a little is normal, ``least`` is
   the share of the step from which it is not: the cause must take it in most steps, which one
   interruption cannot do. Findings under 1% of the step are left out anyway, and so is a finding
   without places. A threshold within the rule is ``costs.holds_in_most_steps``.
4. ``title`` says what goes on, ``seen`` what it costs, and ``remedy`` one thing to do about it that
   was measured to help. What is the same for all findings stands in the head. What helps differs:
   name the ``devices`` that the advice is for, and in ``needs`` what else the rule cannot look
   without: the report says so then. A rule that sees only then that it lacks something returns
   that in words, ``"needs shapes"``.
5. Nothing lists the rules: the first report imports every file in this folder and asks the rules
   in the order of their names. A rule that needs the other findings is a ``fallback_rule``.
6. The docstring is the page of the rule, in Markdown: a sentence for the table, then cause, how it
   is found, and what to do. ``backspot explain`` prints it, and ``python docs/make_findings.py``
   writes ``docs/findings.md``. What only a reader of the code needs is a comment.
7. Tests demand two recordings, as CONTRIBUTING.md says.

- ``allocator.py``: calls by which allocators get memory from the driver, and give it back.
- ``host.py``: a device that waits for the host, for data or for other ranks, and the garbage
  collector.
- ``lines.py``: lines of the user's Python.
- ``copies.py``: tensors that are copied, cast or laid out again.
- ``indexing.py``: lookups, and gradients that are added by index.
- ``gradients.py``: gradients of parameters, and the optimizer.
- ``sharding.py``: what the hooks of sharded parameters cost the host.
- ``compute.py``: slower kernels than necessary, and work that need not be done.
- ``chains.py``: many operators that should be one, or none: copies, and the same again.
- ``forms.py``: operations that have a faster form.
- ``precision.py``: a number format that takes longer than necessary.
- ``kernels.py``: operators without a fast kernel, or that do not run it.
"""
