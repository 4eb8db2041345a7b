"""The rules about memory: one cause a file.

A rule is a function of ``MemoryEvidence`` under ``@memory_rule("its-file-name")`` that picks blocks
and says what they hold::

    @memory_rule("kept-sort")  # in kept_sort.py
    def find(evidence: MemoryEvidence) -> Finding | None:
        kept = evidence.kept & evidence.allocated_in("aten::sort")
        held = evidence.held_at_peak(kept)
        if held < evidence.least:
            return None
        return evidence.finding(kept, held, title="…", seen="…", remedy="…", link="…")

The rules look at the first device of the report alone, because it decides what fits. They are asked
only if memory was recorded. Each has a section in ``docs/findings.md``.
"""
