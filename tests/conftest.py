"""What all tests share: sample reports to import, and files that hold what people read."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--overwrite-golden",
        action="store_true",
        help="write the golden files anew instead of comparing with them",
    )


@pytest.fixture
def golden(request):
    """Compare with ``golden/NAME`` beside the test; ``--overwrite-golden`` writes it instead."""
    folder = Path(request.path).parent / "golden"

    def compare(name: str, content: str) -> None:
        path = folder / name
        if request.config.getoption("--overwrite-golden"):
            folder.mkdir(exist_ok=True)
            path.write_bytes(content.encode())
        assert path.exists(), f"{path} is missing: write it with --overwrite-golden"
        assert content == path.read_bytes().decode()

    return compare
