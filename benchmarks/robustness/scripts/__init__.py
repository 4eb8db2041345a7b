"""Training scripts in the styles that people write, which know nothing of Backspot.

Each prints its losses, bit for bit, and has one slow module, ``planted.Slow``.
"""
