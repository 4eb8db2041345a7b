"""What does Backspot survive: broken input, large input, interrupts at any moment?

- ``fuzz_traces.py``: breaks traces (``trace_mutations.py``); only Backspot's own errors may come
  out, or reports with sums that add up.
- ``fuzz_reports.py``: breaks saved reports, and shows, compares and writes what can still be read.
- ``scaling.py``: ten times as much of each thing in a trace (``scaling_traces.py``).
- ``scaling_forms.py``: ten times as much of each thing in a report, in every output form.
- ``interrupts.py``: KeyboardInterrupt at random moments of recorded steps.

A case of the fuzzers is made again by its seed and number alone; ``found.py`` counts the outcomes.
The exit code is 1 if anything was found. The tests run a few hundred of the same cases.
"""
