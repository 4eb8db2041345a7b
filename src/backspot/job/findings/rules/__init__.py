"""The rules over ranks: one cause of a slow job a file. This is how to write one.

A rule is a pure function of the evidence that returns any number of findings::

    @rule("slow-network")  # in slow_network.py; the name is the file's
    def find(evidence: Evidence) -> list[JobFinding]:
        ...

1. Compare a rank with the other ranks, not with a fixed time. ``scatter.py`` says from which
   difference a claim is made. What concerns all ranks has ``rank=None``.
2. Return nothing where a little is normal, and where the summaries lack what the rule needs.
   ``evidence.waits`` is empty if any wait may be missing: then a wait would pass for a transfer.
3. ``title`` says what goes on, ``seen`` what was seen, with times, and ``remedy`` one thing to do.
   ``cost_ns`` is what the job loses at most, or with ``at_least`` what it loses at least.
   ``find_all`` fills in the name of the rule.
4. Nothing lists the rules: the first answer imports every file in this folder. A rule that needs
   the other findings is a ``fallback_rule``.
5. Tests demand a section in ``docs/findings.md``, its name in ``docs/ranks.md``, a planted case,
   which the rule finds, and its silence on even ranks.
"""
