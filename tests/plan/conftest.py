from __future__ import annotations

import pytest

from support.uncompiled import nothing_is_compiled  # noqa: F401 - for all tests here

pytest.importorskip("torch")
