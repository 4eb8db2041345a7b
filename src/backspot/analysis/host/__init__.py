"""What a report says of the host: where it waits, what it launches, and its lines of Python.

``waits`` puts the calls in which the host waits for a device together by place, ``lines`` deals out
the host's time to lines of Python, of steps that were recorded with stacks, and ``real_time`` has
how long these parts of a step take without stacks and profiler. ``picture`` draws one step.

``report`` adds all that to the report, and then what a step saves without the waits. The calls, the
launches and where in the user's code the host is are facts about a recording, which others ask for,
too: ``analysis/recording.py`` has them.
"""
