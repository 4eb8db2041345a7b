"""A third set by someone who had not read the rules, one case a file.

``JUDGING.md`` says how it is judged, and ``SHA256SUMS`` what both were before their first run.
"""
