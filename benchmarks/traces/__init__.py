"""Traces as files.

- ``plain.py``: a second, plain reading of a trace that shares no code with Backspot.
- ``copies.py``: large traces made of copies of a recorded one.
- ``trim.py``: reads, trims and writes exported traces.
"""
