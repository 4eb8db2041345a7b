"""Exported traces: a second, plain reading, trimming, and copies in a row."""
