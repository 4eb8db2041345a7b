"""Small trainings, shaped like those that people publish; each has a clock of its own.

``STEP_TRUTH_DEVICE`` is ``cpu`` or ``cuda``. ``STEP_TRUTH_PARTS=1`` times parts of the step, and
waits for the device around each of them. ``STEP_TRUTH_OUT`` is where the clock writes what it saw.
"""
