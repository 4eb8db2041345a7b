"""Reading: a Kineto trace, from a file or from a live profiler, becomes columns of numbers.

Nothing here knows what a module or a backward pass is.
"""

from backspot.trace.events import Category, Events, Flows
from backspot.trace.reading import Progress, read_events

__all__ = ["Category", "Events", "Flows", "Progress", "read_events"]
