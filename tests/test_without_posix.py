"""What ``pytest --without-posix`` takes away is away, also in the processes that a test starts.

And a whole training is recorded without it.
"""

import json
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


TRAINS = """
import os, signal, torch
assert not hasattr(os, "register_at_fork") and not hasattr(signal, "pthread_sigmask")
assert not os.path.exists("/proc/self/status")
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(8000, 256), batch_size=64)
for batch in loader:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.posix
def test_a_training_is_recorded_and_planned_without_what_only_posix_has(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAINS)
    environment = {**os.environ, "PYTHONPATH": str(SITE), "BACKSPOT_TEST_WITH_TORCH": "yes"}
    environment["PYTHONIOENCODING"] = "cp1252"
    done = subprocess.run(
        [sys.executable, "-m", "backspot", "run", "--plan=4", "--stacks", "train.py"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        encoding="cp1252",
        errors="replace",  # what the profiler writes is not Python's
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "backspot" / "report.json").read_bytes())
    assert {row["class_name"] for row in report["modules"]} >= {"Linear", "Tanh"}
    assert report["training"]["steps"] == 125
    assert report["plan"]["rungs"], report["plan"]
    assert "Traceback" not in done.stderr
