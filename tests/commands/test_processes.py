"""``backspot run``: the processes that a script starts have reports too, each of its own steps."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest

from support import preloaded
from support.program import program

torch = pytest.importorskip("torch")

import backspot  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="it forks, as Linux does"),
]

SMALL = ("--warmup", "1", "--steps", "2", "--trials", "none", "-o", "out")

TRAINING = """
import multiprocessing, os, signal, sys, time

def train(steps, name="net"):
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    print(f"trained {steps}", flush=True)  # in one piece: others print into the same pipe

def train_lightly(steps):
    # PyTorch's first optimizer imports its compiler, which takes as long as PyTorch does.
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        for p in model.parameters():
            p.data.sub_(0.1 * p.grad)
    print(f"trained {steps}", flush=True)

def train_until_its_report():
    while not os.path.exists("out/report.json"):
        train(30)
    train(30)

def start(how, *steps, target=train):
    context = multiprocessing.get_context(how)
    children = [context.Process(target=target, args=(n,), name=f"lr 0.{n}") for n in steps]
    for one in children:
        one.start()
    return children

def start_another(steps):
    wait(start("fork", steps))

def in_a_pool():
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.map(train, [9, 9], 1)
    pool.close()
    pool.join()

def killed(steps):
    train(1)
    os.kill(os.getpid(), signal.SIGKILL)

def batches():
    import torch
    loader = torch.utils.data.DataLoader(torch.randn(400, 8), batch_size=4, num_workers=2)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

def wait(children):
    for one in children:
        one.join(60)
    print([one.exitcode for one in children])
"""


@pytest.fixture
def scratch():
    """A folder for temporary files with a short path, as those of sockets are limited."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def observed(tmp_path, scratch):
    """Runs a script under ``backspot run``; it and its processes have PyTorch already."""

    def run(code, *arguments, python=None, options=(), is_killed=False, **more):
        path = tmp_path / "train.py"
        path.write_text(f"{TRAINING}\nif __name__ == '__main__':\n    {code}\n")
        start = python or preloaded.parent(tmp_path)
        done = program(
            *("run", *SMALL, *options, path, *arguments),
            python=start,
            cwd=tmp_path,
            timeout=100,
            env={"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
            **more,
        )
        print(done.stderr.decode())
        left = [path.name for path in scratch.glob("backspot*")]
        assert is_killed or not left, "it leaves files"
        return done.stdout.decode(), done.stderr.decode(), done.returncode

    return run


@pytest.fixture
def reports(tmp_path):
    """The reports that were written: the steps of each, by the part of its name."""

    def read():
        found = sorted((tmp_path / "out").glob("report*.json"))
        return {
            path.name.removeprefix("report").removesuffix("json").strip("."): backspot.Report.load(
                path
            ).steps
            for path in found
        }

    return read


def told(errors):
    return [
        line.removeprefix("backspot: ")
        for line in errors.splitlines()
        if line.startswith("backspot: ")
    ]


def test_one_process_that_trains_has_the_report_of_the_script(observed, reports):
    output, errors, code = observed("wait(start('fork', 9))")
    assert (output, code) == ("trained 9\n[0]\n", 0)
    assert reports() == {"": 2}
    assert "of the backward" in errors
    assert not [line for line in told(errors) if "no report" in line]


def test_a_script_that_trains_before_and_after_its_processes(observed, reports):
    output, errors, code = observed("train_until_its_report(); wait(start('fork', 9, 9))")
    assert (output.count("trained 9"), code) == (2, 0)
    assert reports() == {"": 2, "lr-0-9": 2, **{name: 2 for name in reports() if ".pid" in name}}
    assert len(reports()) == 3
    listed = [line for line in told(errors) if line.startswith("lr 0.9 (process ")]
    assert len(listed) == 2
    assert all("a backward of" in line and "out/report.lr-0-9" in line for line in listed)


def test_of_many_processes_a_few_have_a_line_and_the_rest_one_together(observed, reports):
    _, errors, status = observed("train_until_its_report(); wait(start('fork', *[9] * 6))")
    assert (status, len(reports())) == (0, 7)
    assert len([line for line in told(errors) if "a backward of" in line]) == 4
    assert [line for line in told(errors) if "more" in line] == [
        "2 more processes have reports in out/"
    ]


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_that_train_side_by_side_note_all_their_own_steps(observed, tmp_path, how):
    _, _, code = observed(f"wait(start('{how}', 60, 90))")
    assert code == 0
    found = [backspot.Report.load(path) for path in (tmp_path / "out").glob("report*.json")]
    assert {report.training.steps for report in found} == {60, 90}
    for report in found:
        training = report.training
        apart = sum(time.steps for time in training.apart)
        assert training.counted + apart == training.steps - 1  # as in one process


def test_a_process_of_a_server_of_processes(observed, reports):
    # The server is Python itself, as Python starts it.
    output, _, code = observed(
        "wait(start('forkserver', 9, target=train_lightly))", python=preloaded.python()
    )
    assert (output, code) == ("trained 9\n[0]\n", 0)
    assert reports() == {"": 2}


def test_a_server_of_processes_that_makes_an_optimizer_is_not_said_to_be_killed(
    observed, reports, tmp_path
):
    made = "import torch; other = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)\n"
    (tmp_path / "made.py").write_text(made)
    code = "multiprocessing.set_forkserver_preload(['made']); wait(start('forkserver', 9))"
    _, errors, status = observed(code)
    assert (status, reports()) == (0, {"": 2})
    assert not [line for line in told(errors) if "no report" in line]


def test_processes_of_a_pool(observed, reports):
    output, _, code = observed("in_a_pool()")
    assert (output.count("trained 9"), code) == (2, 0)
    assert set(reports().values()) <= {2}
    assert 1 <= len(reports()) <= 2  # one worker may take both


def test_a_process_of_a_process(observed, reports):
    output, _, code = observed("wait(start('fork', 9, target=start_another))")
    assert (output, code) == ("trained 9\n[0]\n[0]\n", 0)
    assert reports() == {"": 2}


def test_a_process_that_is_killed_costs_its_own_report(observed, reports):
    output, errors, code = observed("wait(start('fork', 9)); wait(start('fork', 8, target=killed))")
    assert (output.splitlines()[-1], code) == ("[-9]", 0)
    assert reports() == {"": 2}
    assert len([line for line in told(errors) if "killed" in line]) == 1


def test_a_process_of_the_shell_and_one_in_place_of_the_script(observed, reports, tmp_path):
    # That in place of the script is Python itself, as Python starts it.
    *_, quick = preloaded.parent(tmp_path)
    code = (
        "import subprocess; train_lightly(9) if sys.argv[2:] else ("
        "subprocess.run([sys.argv[1], __file__, 'x', 'y'], check=True),"
        "os.execv(sys.executable, [sys.executable, __file__, 'x', 'y']))"
    )
    output, _, status = observed(code, quick, python=preloaded.python())
    assert (output.count("trained 9"), status) == (2, 0)
    assert set(reports().values()) == {2}
    assert len(reports()) == 2


def test_a_script_that_ends_before_its_process(observed, reports, tmp_path):
    observed("start('fork', 60); os._exit(3)", is_killed=True)
    until = time.monotonic() + 60
    while not reports() and time.monotonic() < until:
        time.sleep(0.2)
    assert set(reports().values()) == {2}


def test_a_process_that_python_waits_for_at_its_end(observed, reports):
    # The process is Python itself, as Python starts it.
    output, errors, code = observed(
        "start('spawn', 9, target=train_lightly)", python=preloaded.python()
    )
    assert (output, code) == ("trained 9\n", 0)
    assert reports() == {"": 2}
    assert not [line for line in told(errors) if "no report" in line]


def test_a_copy_that_ends_as_the_script_does_ends_nothing_else(observed, reports):
    code = "pid = os.fork(); pid or sys.exit(0); os.waitpid(pid, 0)"
    _, errors, status = observed(f"{code}; train_until_its_report(); wait(start('fork', 9))")
    assert status == 0
    assert set(reports()) == {"", "lr-0-9"}
    assert not [line for line in told(errors) if "no report" in line]


def test_a_process_of_a_pool_goes_on_with_exit(observed, reports):
    output, _, status = observed("in_a_pool()", options=("--exit",))
    assert (output.count("trained 9"), status) == (2, 0)
    assert set(reports().values()) == {2}


def test_a_long_command_line_leaves_the_script_its_processes(observed):
    code = "import subprocess; print(subprocess.run(['true']).returncode)"
    output, _, _ = observed(code, *["x" * 100] * 2_000)
    assert output == "0\n"


def test_a_script_chooses_its_folder_for_temporary_files(observed, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    code = "import tempfile; os.environ['TMPDIR'] = sys.argv[1]; print(tempfile.gettempdir())"
    output, _, _ = observed(code, folder, python=[sys.executable])
    assert output == f"{folder}\n"


OUTLIVES = """
import os, pathlib, sys, time
pathlib.Path("part").write_text(str(os.getpid()))
os.rename("part", "started")
while os.path.exists("/proc/" + sys.argv[1]):
    time.sleep(0.05)
import train
train.train(9)
pathlib.Path("ended").touch()
"""


def test_a_program_that_outlives_the_script_is_left_alone(observed, reports, tmp_path):
    (tmp_path / "outlives.py").write_text(OUTLIVES)
    code = "import subprocess; command = [sys.executable, 'outlives.py', str(os.getpid())]\n"
    code += "    subprocess.Popen(command, stdout=-3)\n"
    observed(f"{code}    while not os.path.exists('started'): time.sleep(0.05)")
    until = time.monotonic() + 60
    process = Path(f"/proc/{(tmp_path / 'started').read_text()}/stat")
    while time.monotonic() < until and not is_over(process):  # a report is whole at the exit
        time.sleep(0.1)
    assert is_over(process)
    assert (tmp_path / "ended").exists()
    assert not reports()


def is_over(process):
    """Whether a process has ended, be it that nobody has asked for its exit code yet."""
    try:
        return process.read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_workers_of_a_loader_are_no_trainings(observed, reports):
    _, errors, code = observed("batches()")
    assert code == 0
    assert reports() == {"": 2}
    assert not [line for line in told(errors) if "process" in line]


def test_ranks_that_a_script_spawns_have_one_answer(observed, reports, tmp_path):
    (tmp_path / "job.py").write_text(RANKS)
    code = "import job, torch.multiprocessing as mp; mp.spawn(job.train, (2,), nprocs=2)"
    output, errors, code = observed(code, str(free_port()))
    assert (output.count("trained"), code) == (2, 0)
    assert reports() == {"rank0": 2, "rank1": 2}
    assert (tmp_path / "out" / "job.json").exists()
    assert errors.index("2 ranks of 2") < errors.index("Rank 0 by itself:")


RANKS = """
import os, sys, torch, torch.distributed
def train(rank, ranks):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    print("trained", flush=True)
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    "code",
    [
        "accelerate.notebook_launcher(job.train, (), num_processes=2, use_port=sys.argv[1])",
        "accelerate.debug_launcher(job.train)",
        "run.main(['--nproc-per-node', '2', '--master-port', sys.argv[1], 'job.py'])",
    ],
    ids=["notebook_launcher", "debug_launcher", "torchrun"],
)
def test_ranks_of_a_launcher_that_a_script_calls_have_one_answer(code, observed, reports, tmp_path):
    pytest.importorskip("accelerate")
    (tmp_path / "job.py").write_text(LAUNCHED)
    begin = "import accelerate, job; from torch.distributed import run; "
    output, errors, code = observed(begin + code, str(free_port()))
    assert (output.count("trained"), code) == (2, 0)
    assert reports() == {"rank0": 2, "rank1": 2}
    assert "2 ranks of 2" in errors


LAUNCHED = """
import torch
def train():
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(9):
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    print("trained", flush=True)
    accelerator.end_training()
if __name__ == "__main__":
    train()
"""


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
