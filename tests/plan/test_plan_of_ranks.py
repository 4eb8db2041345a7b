"""One rank of a job plans while the others wait for it in their step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import backspot
from support import preloaded

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_gloo_available():
    pytest.skip("built without gloo", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.posix]

SCRIPT = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
# A shell has what it starts in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=2,
    timeout=timedelta(seconds=int(os.environ.get("WAITS", "90"))),
)
with open(f"pid{rank}", "w") as file:
    file.write(str(os.getpid()))

def is_copy():
    frame, copies = sys._getframe(), os.path.join("plan", "copies.py")
    while frame and not frame.f_code.co_filename.endswith(copies):
        frame = frame.f_back
    return frame is not None

class Mean(nn.Module):
    calls = 0  # of copies

    def forward(self, x):
        if rank == 0 and "WHILE_WAITING" in os.environ and Mean.calls < 10 and is_copy():
            Mean.calls += 1
            if Mean.calls == 10:
                open("plans", "w").close()
        if os.environ.get("TALKS"):
            mean = x.detach().mean()
            dist.all_reduce(mean)
            return x - mean
        return x

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), Mean(), nn.Linear(64, 8))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)

def watch():
    while not os.path.exists("plans"):
        time.sleep(0.01)
    if os.environ["WHILE_WAITING"] == "dies":
        os._exit(3)
    os.kill(int(open("pid0").read()), signal.SIGINT)

for step in range(40):
    if rank == 1 and step == 0 and "WHILE_WAITING" in os.environ:
        threading.Thread(target=watch, daemon=True).start()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(torch.randn(16, 32)), torch.randn(16, 8))
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
    time.sleep(0.02)  # a copy, on a busy machine, takes less than a step
    for _ in range(50):  # a report is made meanwhile, and its plan needs one step more
        if not any(one.name.startswith("backspot_") for one in threading.enumerate()):
            break
        time.sleep(0.01)
os._exit(0) if "WHILE_WAITING" in os.environ else dist.destroy_process_group()
"""
RUN = ("-m", "backspot", "run", "--plan=3", "--warmup", "1", "--steps", "2", "-o", "out")


def trained(folder, *before, **environment):
    """What both ranks print, and how they end."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "meeting").unlink(missing_ok=True)
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "MEETING": str(folder / "meeting"),
        "WORLD_SIZE": "2",
        **environment,
    }
    command = [*preloaded.python(), *before, "train.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    started = [
        subprocess.Popen(command, env={**given, "RANK": str(rank)}, **pipes) for rank in range(2)
    ]
    try:
        said = [one.communicate(timeout=150) for one in started]
    finally:
        for one in started:
            one.kill()
    return [(out, error, one.returncode) for one, (out, error) in zip(started, said, strict=True)]


def losses_of(ranks):
    """The losses that each rank prints."""
    for _, error, code in ranks:
        assert code == 0, error[-2000:]
    return [[line for line in out.splitlines() if "0x" in line] for out, _, _ in ranks]


def plan_in(folder):
    return backspot.Report.load(folder / "out" / "report.rank0.json").plan


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The losses of a training that nobody looks at."""
    return losses_of(trained(tmp_path_factory.mktemp("plain")))


def test_a_job_of_two_ranks_goes_on_bit_for_bit_and_has_a_plan_of_the_replica(tmp_path, plain):
    ranks = trained(tmp_path, *RUN)
    plan = plan_in(tmp_path)
    assert not plan.why_not
    assert plan.what == "a copy of Sequential with its loss, forward and backward"
    assert "bf16" in {one.setting for one in plan.rungs}
    assert not plan.ladder or "Tried on rank 0 of 2" in plan.next_limit
    assert losses_of(ranks) == plain


def test_an_interrupt_while_a_rank_plans_ends_the_plan_alone(tmp_path, plain):
    command = [one.replace("=3", "=25") for one in RUN]
    ranks = trained(tmp_path, *command, WHILE_WAITING="interrupts")
    assert losses_of(ranks) == plain
    plan = plan_in(tmp_path)
    assert plan.took_ns < 20e9
    assert "interrupted" in {one.note for one in plan.rungs}


def test_a_rank_that_dies_while_another_plans_leaves_no_process(tmp_path):
    (_, error, first), (_, _, second) = trained(tmp_path, *RUN, WHILE_WAITING="dies")
    assert second == 3
    assert first != 0
    assert "gloo" in error.lower() or "Connection" in error


def test_ranks_that_do_not_wait_long_enough_have_no_plan(tmp_path):
    losses_of(trained(tmp_path, *RUN, WAITS="20"))
    assert "wait for this one for 20 s at most" in plan_in(tmp_path).why_not


def test_a_model_that_talks_to_other_ranks_is_refused_before_it_does(tmp_path):
    losses_of(trained(tmp_path, *RUN, TALKS="1"))
    assert "talks to other ranks" in plan_in(tmp_path).why_not
