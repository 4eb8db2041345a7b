"""Without torch, traces are read, and whatever needs torch raises an error that says so."""

import subprocess
import sys
from pathlib import Path

import pytest

TRACE = Path(__file__).parent / "data" / "foreign" / "hta_resnet.json.gz"
REMEDY = "pip install torch"


def without_torch(code):
    blocked = f"import sys; sys.modules['torch'] = None\n{code}"
    return subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, check=False, text=True
    )


@pytest.mark.parametrize(
    "asking",
    [
        "backspot.profile",
        "backspot.instrument",
        "from backspot import Instrumentation",
        "import backspot.live",
    ],
)
def test_what_needs_torch_says_so_and_how_to_get_it(asking):
    done = without_torch(f"import backspot; {asking}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("backspot.MissingDependencyError: ")
    assert "need torch" in last
    assert REMEDY in last
    assert done.stderr.count("Traceback") == 1  # not one for torch and another for this


def test_a_missing_torch_is_an_import_error_and_an_error_of_backspots():
    code = """
import backspot
try:
    from backspot import instrument
except ImportError as error:
    assert isinstance(error, backspot.BackspotError)
    print(error)
"""
    done = without_torch(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert REMEDY in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.slow
def test_traces_are_still_read_after_that_error():
    code = f"""
import backspot
try:
    backspot.profile
except ImportError:
    pass
report = backspot.locate({str(TRACE)!r})
print(backspot.compare(report, report).whole.verdict, report.wall_ns > 0)
"""
    done = without_torch(code)
    assert (done.stdout, done.stderr) == ("within the noise True\n", "")


def test_the_error_of_a_broken_torch_is_passed_on(tmp_path):
    (tmp_path / "torch.py").write_text("import libcudart_of_old\n")
    command = [sys.executable, "-c", "import backspot; backspot.profile"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, text=True)
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: No module named 'libcudart_of_old'"
    )


def test_the_demo_without_torch_is_one_line_and_its_exit_code():
    code = "from backspot.commands import main; sys.exit(main(['demo']))"
    done = without_torch(code)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.startswith("backspot: error: the demo needs torch and timm")
    assert done.stderr.endswith("pip install 'backspot[demo]'\n")
    assert done.stderr.count("\n") == 1
