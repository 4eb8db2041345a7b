"""What breaks off, moves or starts late: training goes on, and no owner is wrong."""

import copy
import io
import pickle
import subprocess
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from support import preloaded  # noqa: E402
from support.choice import slow_except  # noqa: E402
from support.leftovers import hooks_on  # noqa: E402
from support.training import cpu_profile, owners  # noqa: E402


class BoomError(Exception):
    pass


class Fails(torch.autograd.Function):
    """Raises what it is told to, in forward or in backward."""

    raises = None
    where = ""

    @staticmethod
    def forward(ctx, x):
        if Fails.raises is not None and Fails.where == "forward":
            raise Fails.raises
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.raises is not None and Fails.where == "backward":
            raise Fails.raises
        return gradient


class Risky(nn.Module):
    def forward(self, x):
        return Fails.apply(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.risky = Risky()

    def forward(self, x):
        return x + self.risky(self.fc(x)).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


EXPECTED = {
    "stem": {"AddmmBackward0", "TBackward0"},
    "head": {"AddmmBackward0", "TBackward0"},
    **{f"blocks.{i}.fc": {"AddmmBackward0", "TBackward0"} for i in range(2)},
    **{f"blocks.{i}.risky": {"FailsBackward"} for i in range(2)},
    **{f"blocks.{i}": {"AddBackward0", "TanhBackward0"} for i in range(2)},
}


@pytest.fixture(autouse=True)
def harmless():
    yield
    Fails.raises = None


def step(model, size=3):
    loss = model(torch.randn(size, 4)).sum()
    loss.backward()
    return loss


def names(report):
    return {p: set(nodes) for p, nodes in owners(report).items() if not p.startswith("(")}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "error", slow_except([BoomError], [BoomError, KeyboardInterrupt, torch.OutOfMemoryError])
)
def test_a_step_that_fails_within_a_profile_leaves_the_next_ones_right(where, error):
    model = Net()
    with backspot.instrument(model):
        with cpu_profile() as profiler:
            step(model)
            Fails.raises, Fails.where = error("simulated"), where
            with pytest.raises(error):
                step(model, 4)
            Fails.raises = None
            step(model, 2)
        report = backspot.locate(profiler)
        assert names(report) == EXPECTED
        for _ in range(3):
            with cpu_profile() as profiler:
                step(model)
            assert names(backspot.locate(profiler)) == EXPECTED
            assert backspot.locate(profiler)["stem"].row.recorded_calls == 1
    assert not hooks_on(model)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_without_a_profile_leaves_the_next_ones_right(where):
    model = Net()
    with backspot.instrument(model):
        Fails.raises, Fails.where = KeyboardInterrupt(), where
        with pytest.raises(KeyboardInterrupt):
            step(model)
        Fails.raises = None
        with cpu_profile() as profiler:
            step(model)
    assert names(backspot.locate(profiler)) == EXPECTED


def test_a_failure_in_a_profile_that_it_ends():
    model = Net()
    with backspot.instrument(model):
        for where in ("forward", "backward"):
            Fails.raises, Fails.where = KeyboardInterrupt(), where
            with pytest.raises(KeyboardInterrupt), cpu_profile():
                step(model)
            Fails.raises = None
            with cpu_profile() as profiler:
                step(model)
            assert names(backspot.locate(profiler)) == EXPECTED


def test_hooks_removed_between_forward_and_backward():
    model = Net()
    with cpu_profile() as profiler:
        instrumentation = backspot.instrument(model)
        loss = model(torch.randn(3, 4)).sum()
        instrumentation.remove()
        assert not hooks_on(model)
        loss.backward()
        step(model)  # bears no label: it is nobody's
    found = owners(backspot.locate(profiler))
    assert {p: set(n) for p, n in found.items() if not p.startswith("(")} == EXPECTED
    assert found["head"]["AddmmBackward0"] == 1
    assert found["(outside model)"]["FailsBackward"] == 1


def test_a_profiler_started_between_forward_and_backward_names_no_module():
    model = Net()
    with backspot.instrument(model):
        loss = model(torch.randn(3, 4)).sum()
        with cpu_profile() as profiler:
            loss.backward()
    report = backspot.locate(profiler)
    assert names(report) == {}
    assert set(owners(report)) == {"(forward not recorded)"}
    assert any("start the profiler before" in warning for warning in report.warnings)


def test_a_backward_whose_forward_was_not_recorded_is_left_out_before_whole_steps():
    model = Net()
    with backspot.instrument(model):
        loss = model(torch.randn(3, 4)).sum()
        with cpu_profile() as profiler:
            loss.backward()
            step(model)
            step(model)
    report = backspot.locate(profiler)
    found = owners(report)
    assert "(forward not recorded)" not in found
    assert "1 of 3 backward passes was recorded without its forward" in report.warnings[0]
    assert {p: set(n) for p, n in found.items() if not p.startswith("(")} == EXPECTED
    assert found["head"]["AddmmBackward0"] == 1


@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_profiler_started_in_the_middle_of_a_forward_names_no_wrong_module(before):
    model = Net()
    profiler = cpu_profile()
    started = []

    def start(*_):
        if len(started) == 0:
            started.append(profiler.start())

    for _ in range(before):
        step(model)
    handle = model.blocks[1].register_forward_pre_hook(start)
    with backspot.instrument(model):
        step(model)
        profiler.stop()
    handle.remove()
    found = names(backspot.locate(profiler))
    # What has no label of its own lies within calls that began unseen.
    assert found.items() <= EXPECTED.items()
    assert "blocks.1.fc" in found


STOPPED = """
import sys
import torch, backspot
from torch import nn
from torch.profiler import ProfilerActivity, profile

model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
with backspot.instrument(model):
    profiler = profile(activities=[ProfilerActivity.CPU])
    profiler.start()
    hidden = model[:2](torch.randn(3, 4))
    hidden.register_hook(lambda _: profiler.stop())
    model[2](hidden).sum().backward()
    report = backspot.locate(profiler)
    for _ in range(5):
        model(torch.randn(3, 4)).sum().backward()
rows = {row.path: {node.name for node in row.nodes} for row in report.modules if row.nodes}
for cut_off in ("(forward not recorded)", "(autograd engine)"):
    rows.pop(cut_off, None)  # the node that was cut off
print(rows.keys() <= {"1", "2", "(outside model)"} and "AddmmBackward0" in rows["2"])
print(all(p.grad is not None for p in model.parameters()))
"""


@pytest.mark.slow
def test_a_profiler_stopped_within_backward():
    """In a process of its own: PyTorch cannot profile again on this thread afterwards."""
    done = subprocess.run(
        [*preloaded.python(), preloaded.WHOLE, "-c", STOPPED],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: torch.load(saved(model), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_plain_and_can_be_instrumented(copied):
    model = Net()
    with backspot.instrument(model), cpu_profile():
        step(model)
        other = copied(model)
    assert not hooks_on(other)
    with backspot.instrument(other), cpu_profile() as profiler:
        step(other)
    assert names(backspot.locate(profiler)) == EXPECTED


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_weights_go_in_and_out_as_ever():
    model, other = Net(), Net()
    with backspot.instrument(model):
        assert model.state_dict().keys() == other.state_dict().keys()
        model.load_state_dict(other.state_dict())
        with cpu_profile() as profiler:
            step(model)
    assert names(backspot.locate(profiler)) == EXPECTED


def test_forwards_in_several_threads():
    """One thread is recorded, as the profiler does by default; the others train undisturbed."""
    models = [Net() for _ in range(3)]
    failures = []

    def work(model):
        try:
            for _ in range(20):
                step(model)
        except BaseException as error:
            failures.append(error)

    handles = [backspot.instrument(m, name=f"net{i}") for i, m in enumerate(models)]
    with cpu_profile() as profiler:
        threads = [threading.Thread(target=work, args=(m,)) for m in models[1:]]
        for thread in threads:
            thread.start()
        for _ in range(5):
            step(models[0])
        for thread in threads:
            thread.join()
    for handle in handles:
        handle.remove()
    assert not failures
    assert names(backspot.locate(profiler)) == {f"net0.{p}": n for p, n in EXPECTED.items()}


def test_forwards_in_several_threads_all_recorded():
    config = torch._C._profiler._ExperimentalConfig
    if "profile_all_threads" not in (config.__init__.__doc__ or ""):
        pytest.skip("this PyTorch cannot record all threads")
    models = [Net() for _ in range(3)]
    handles = [backspot.instrument(m, name=f"net{i}") for i, m in enumerate(models)]
    with cpu_profile(experimental_config=config(profile_all_threads=True)) as profiler:
        threads = [threading.Thread(target=lambda m=m: [step(m) for _ in range(3)]) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for handle in handles:
        handle.remove()
    report = backspot.locate(profiler)
    for path, nodes in owners(report).items():
        _, _, inner = path.partition(".")
        assert path.startswith("(") or set(nodes) == EXPECTED[inner], "a wrong owner"
    # Of nine passes. Those that run at the same time count as one.
    assert sum(one.nodes for one in report.passes) == 9 * 23
