"""The rules: one cause of a slow step each, one subject a file. This is how to write one.

A rule is a pure function that picks spans or device work and says what they cost::

    @rule("slow-sort")
    def slow_sort(evidence: Evidence) -> Finding | None:
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
   was measured to help. What helps differs: name the ``devices`` that the advice is for, and in
   ``needs`` what else the rule cannot look without: the report says so then. A rule that sees only
   then that it lacks something returns that in words, ``"needs shapes"``.
4. Nothing lists the rules: the first report imports every file in this folder and asks the rules
   in the order of their names. A rule that needs the other findings is a ``fallback_rule``.
5. Tests demand a section in ``docs/findings.md`` and two recordings, as CONTRIBUTING.md says.

``memory.py`` has the rules about memory. They are functions of ``MemoryEvidence`` that pick blocks
and say what they hold::

    @memory_rule("kept-sort")
    def kept_sort(evidence: MemoryEvidence) -> Finding | None:
        kept = evidence.kept & evidence.allocated_in("aten::sort")
        held = evidence.held_at_peak(kept)
        if held < evidence.least:
            return None
        return evidence.finding(kept, held, title="…", seen="…", remedy="…", link="…")

They look at the first device of the report alone, because it decides what fits, and are asked only
if memory was recorded.

- ``host.py``: a device that waits for the host, for data or for other ranks.
- ``lines.py``: lines of the user's Python, and the garbage collector.
- ``copies.py``: tensors that are copied, cast or laid out again.
- ``indexing.py``: lookups, and gradients that are added by index.
- ``gradients.py``: gradients of parameters, and the optimizer.
- ``compute.py``: slower kernels than necessary, and work that need not be done.
- ``chains.py``: many operators that should be one, or none: copies, and the same again.
- ``kernels.py``: operators without a fast kernel, or that do not run it.
- ``memory.py``: what is in memory at the peak.
"""
