"""The rules: one cause of a slow step a file. This is how to write one.

A rule is a pure function that picks spans or device work and says what they cost::

    @rule("slow-sort")  # in slow_sort.py; the name is the file's
    def find(evidence: Evidence) -> Finding | None:
        work = evidence.work_named(names.is_sort)
        return finding(
            evidence.costs.places_of_work(work),
            title="Sorting takes long",
            seen=f"{evidence.wording.ms(evidence.costs.of_work(work))} of sorting in each step.",
            remedy="Sort once, before training.",
            link="https://docs.pytorch.org/docs/stable/generated/torch.sort.html",
        )

1. Pick spans by ``evidence.nodes_named``, device work by ``work_named`` or ``launched_in``. Names
   that PyTorch writes are in ``trace/names.py``; a mask that another rule needs too goes into
   ``observations.py``. A rule does not import another rule.
2. Return ``None`` where a little is normal, and where the trace lacks what the rule needs. Compare
   costs with a threshold by ``costs.holds_in_most_steps``, which one interruption cannot pass.
   Findings under 1% of the step are left out anyway, and so is a finding without places.
3. ``title`` says what goes on, ``seen`` what it costs, and ``remedy`` one thing to do about it that
   was measured to help. What helps differs: name the ``devices`` that the advice is for.
4. Nothing lists the rules: the first report imports every file in this folder, in the order of
   names. A rule that needs the other findings is a ``fallback_rule``.
5. Tests demand a section in ``docs/findings.md`` and two recordings, as CONTRIBUTING.md says.
"""
