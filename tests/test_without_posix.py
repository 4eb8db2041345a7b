"""What ``pytest --without-posix`` takes away is away, also in the processes that a test starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "support" / "laptop"
CODE = """
import os, signal, sys
from pathlib import Path

def refused(action, *errors):
    try:
        action()
    except errors:
        return True
    return False

folder = Path(sys.argv[1])
(folder / "a").write_text("é\\n")
assert (folder / "a").read_bytes() == b"\\xe9\\r\\n"
(folder / "b").touch()
with (folder / "a").open("rb"):
    assert refused((folder / "a").unlink, PermissionError)
    assert refused(lambda: (folder / "b").replace(folder / "a"), PermissionError)
assert refused(lambda: (folder / "a:b").open("w"), OSError)
assert refused(lambda: (folder / "c").symlink_to(folder / "a"), OSError)
assert refused(lambda: open("/proc/self/status"), FileNotFoundError)
assert refused(lambda: __import__("fcntl"), ImportError)
assert refused(lambda: __import__("torch"), ImportError)
assert not hasattr(os, "fork") and not hasattr(signal, "SIGUSR1")
assert sys.stdout.encoding == "cp1252"
"""


@pytest.mark.slow
@pytest.mark.posix
def test_what_a_laptop_lacks_is_taken_away(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SITE), "PYTHONIOENCODING": "cp1252"}
    subprocess.run([sys.executable, "-c", CODE, tmp_path], env=environment, check=True)
