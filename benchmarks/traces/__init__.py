"""Traces as files: a plain second reading, copies of a step, trimming."""
