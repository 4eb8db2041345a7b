"""The folder that ``children.py`` puts on ``PYTHONPATH``; Python runs its file at each start."""
