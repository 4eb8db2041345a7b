import pytest

pytest.importorskip("torch")

from support.hooks import default_hooks  # noqa: E402, F401
from support.hooks import for_each_kind as pytest_generate_tests  # noqa: E402, F401
