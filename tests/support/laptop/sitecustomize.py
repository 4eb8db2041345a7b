"""Python imports this file at its start in each process that a test starts as on a laptop."""

import importlib.util
from pathlib import Path

_SPEC = importlib.util.spec_from_file_location(
    "elsewhere", Path(__file__).parents[1] / "elsewhere.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_ELSEWHERE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_ELSEWHERE)
_ELSEWHERE.take_away()
