"""What is in memory, and what holds too much of it: bytes in place of time.

In comes a recording with the blocks of memory that came and went. Out come the peak of each device,
what each module keeps, and findings, which ``report.py`` adds to a report.

- ``allocations.py``: matches blocks with their ends, and finds who allocated them.
- ``checkpointing.py``: what stays of what a module keeps if it is checkpointed.
- ``peaks.py``: what is live at the peak of each device, and what each module keeps.
- ``evidence.py``: what the rules are functions of; ``registry.py`` lists them, and asks them.
- ``rules.py``: the rules.
- ``report.py``: adds all that to the report.

The rules are functions of ``MemoryEvidence`` that pick blocks
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
"""
