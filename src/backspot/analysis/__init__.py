"""From a trace's events to a report: whose the time is, how much it is, and why."""
