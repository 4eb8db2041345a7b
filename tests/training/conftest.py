import pytest

pytest.importorskip("torch")

from support.hooks import default_hooks  # noqa: F401
from support.hooks import for_each_kind as pytest_generate_tests  # noqa: F401
