"""The host's side of the whole step: where it waits, what it launches, which lines it runs.

``waits`` finds the calls in which the host waits for a device, with the phase, the module and the
operator of each. ``batches`` finds which batches of worker processes were late. ``launches`` counts
the device work of each phase and module, and what the device waits for.
``lines`` deals out the host's time to lines of Python, of steps that were recorded with
stacks; ``real_time`` has how long these parts of a step take without stacks and profiler.
"""
