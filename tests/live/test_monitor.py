"""``Monitor``: every step of a training is noted, and what becomes slower raises an alarm.

Time passes here only where a test says so.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

import backspot  # noqa: E402
from backspot.live import loaders, step_log  # noqa: E402
from support import preloaded  # noqa: E402
from support.leftovers import hooks_on, left_in_torch  # noqa: E402

WITHOUT_HOOKS = True
ENGINE = type(torch.autograd.Variable._execution_engine)


class Clock:
    """Milliseconds that pass when a test says so."""

    def __init__(self):
        self.ns = 10**9

    def __call__(self):
        return self.ns

    def pass_ms(self, ms):
        self.ns += round(ms * 1e6)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_log, "_now", clock)
    monkeypatch.setattr(step_log, "_thread_time", clock)
    monkeypatch.setattr(loaders, "perf_counter_ns", clock)
    return clock


class TakesTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, training):
        ctx.clock, ctx.training = clock, training
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.pass_ms(ctx.training.backward)
        return grad, None, None


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        self.training.clock.pass_ms(self.training.optimizer_ms)
        return super().step(closure)


class Slow(torch.utils.data.Dataset):
    def __init__(self, training):
        self.training = training

    def __len__(self):
        return 1 << 20

    def __getitem__(self, _):
        self.training.clock.pass_ms(self.training.data)
        return torch.ones(4)


class Training:
    """A training whose parts take as many milliseconds as its attributes say."""

    def __init__(self, clock, model=None, optimizer=SlowSGD):
        self.clock = clock
        self.data, self.forward, self.backward, self.optimizer_ms = 10.0, 20.0, 30.0, 40.0
        self.model = nn.Linear(4, 4) if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.optimizer.training = self
        self.batches = iter(torch.utils.data.DataLoader(Slow(self)))

    def train(self, steps, step=lambda _: None):
        for number in range(steps):
            x = next(self.batches)
            step(number)
            self.clock.pass_ms(self.forward)
            TakesTime.apply(self.model(x), self.clock, self).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def training(clock):
    return Training(clock)


def nothing_is_left(model):
    engine = torch.autograd.Variable._execution_engine
    return (
        hooks_on(model) == left_in_torch() == []
        and type(engine) is ENGINE
        and not hasattr(torch.save, "__wrapped__")
        and not hasattr(torch.utils.data.dataloader._BaseDataLoaderIter.__next__, "__wrapped__")
    )


# The account -------------------------------------------------------------------------------------


def test_each_step_is_noted_with_its_parts(training):
    with backspot.Monitor(training.model) as monitor:
        training.train(50)
    assert monitor.step == 50
    found = monitor.training
    assert (found.steps, found.counted) == (50, 49)  # before the first one ends is no step
    parts = (found.data_ns, found.forward_ns, found.backward_ns, found.optimizer_ns)
    assert parts == (10_000_000, 20_000_000, 30_000_000, 40_000_000)


@pytest.mark.posix  # the memory is from /proc
def test_a_sample_has_the_means_since_the_last_one(training):
    samples = []
    with backspot.Monitor(training.model, every=10, on_sample=lambda *said: samples.append(said)):
        training.train(10)
        training.backward = 50.0
        training.train(5)
        training.backward = 70.0
        training.train(8)
    assert [step for step, _ in samples] == [10, 20]
    (_, first), (_, second) = samples
    assert first.pop("memory_mb") > 1
    expected = {"step": 100, "data": 10, "forward": 20, "backward": 30, "optimizer": 40}
    assert first == {f"{name}_ms": pytest.approx(ms) for name, ms in expected.items()}
    assert second["backward_ms"] == pytest.approx(60)
    assert second["step_ms"] == pytest.approx(130)


def test_it_prints_what_the_steps_took_and_the_alarms(training):
    with backspot.Monitor(training.model, on_alarm=lambda _: None) as monitor:
        assert str(monitor) == "<Monitor: step 0, 0 alarms>: no whole step yet"
        training.train(500)
        assert str(monitor) == (
            "The training: 499 steps of 100 ms (10% waiting for data, 20% forward and all else, "
            "30% backward, 40% optimizer)."
        )
        training.backward = 60.0
        training.train(200)
    assert repr(monitor) == "<Monitor: step 700, 1 alarm>"
    assert str(monitor).splitlines()[-1] == f"! {monitor.alarms[0]}"


def test_the_account_can_be_read_while_another_thread_trains(training):
    with backspot.Monitor(training.model, slower_by=None) as monitor:
        thread = threading.Thread(target=training.train, args=(300,))
        thread.start()
        while thread.is_alive():
            so_far = monitor.training
            assert so_far is None or so_far.counted < so_far.steps
        thread.join()
        assert (monitor.training.steps, monitor.training.counted) == (300, 299)


# Alarms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "attribute", "said"),
    [
        ("data", "data", "waiting for data 10.00 → 40.00 ms since step 402"),
        ("forward", "forward", "forward 20.00 → 50.00 ms since step 402"),
        ("backward", "backward", "backward 30.00 → 60.00 ms since step 402"),
        ("optimizer", "optimizer_ms", "optimizer 40.00 → 70.00 ms since step 402"),
    ],
)
def test_a_part_that_becomes_slower_raises_one_alarm_that_names_it(training, part, attribute, said):
    heard = []
    with backspot.Monitor(training.model, on_alarm=heard.append) as monitor:
        training.train(401)
        setattr(training, attribute, getattr(training, attribute) + 30)
        training.train(140)
    (alarm,) = monitor.alarms
    assert heard == [alarm]
    assert (alarm.part, str(alarm)) == (part, said)


def test_an_alarm_is_logged(training, caplog):
    with backspot.Monitor(training.model) as monitor:
        training.train(401)
        training.backward = 90.0
        training.train(140)
    assert [record.message for record in caplog.records] == [str(monitor.alarms[0])]


def test_a_step_whose_parts_are_all_slower_raises_one_alarm_of_the_whole(training):
    with backspot.Monitor(training.model, on_alarm=print) as monitor:
        training.train(401)
        for name in ("data", "forward", "backward", "optimizer_ms"):
            setattr(training, name, 1.5 * getattr(training, name))
        training.train(140)
    assert [str(alarm) for alarm in monitor.alarms] == [
        "the step 100.00 → 150.00 ms since step 402"
    ]


@pytest.mark.parametrize(("slower_by", "alarms"), [(0.2, 1), (1.5, 0), (None, 0)])
def test_how_much_slower_is_stated(training, slower_by, alarms):
    with backspot.Monitor(training.model, slower_by=slower_by, on_alarm=print) as monitor:
        training.train(401)
        training.backward = 60.0
        training.train(140)
    assert len(monitor.alarms) == alarms


def hiccups(training, number):
    training.clock.pass_ms(5000 * (number in (420, 481, 482, 530)))


def more_checkpoints(training, number):
    training.clock.pass_ms(900 * (number % (50 if number < 400 else 10) == 0))


def a_moment(training, number):
    training.backward = 90.0 if 420 <= number < 480 else 30.0


def moved(training, number):
    """The work of a part is done in another one."""
    training.backward, training.forward = (30.0, 20.0) if number < 400 else (10.0, 40.0)


def faster(training, number):
    training.backward = 30.0 if number < 400 else 20.0


def very_little(training, number):
    training.data = 0.01 if number < 400 else 0.04


@pytest.mark.parametrize(
    "happens", [hiccups, more_checkpoints, a_moment, moved, faster, very_little]
)
def test_what_is_no_slower_step_raises_none(training, happens):
    with backspot.Monitor(training.model) as monitor:
        training.train(600, lambda number: happens(training, number))
    assert monitor.alarms == []


# Whose steps -------------------------------------------------------------------------------------


def test_the_optimizer_of_another_model_does_not_count(training, clock):
    with backspot.Monitor(training.model) as monitor:
        Training(clock).train(3)
        training.train(2)
    assert monitor.step == 2


def test_two_optimizers_of_a_model_take_one_step_together(training):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (torch.optim.SGD(layer.parameters(), 0.1) for layer in model)
    with backspot.Monitor(model) as monitor:
        for _ in range(20):
            model(torch.ones(4)).sum().backward()
            first.step()
            second.step()
    assert 19 <= monitor.step <= 21


def test_an_optimizer_within_another_one_is_a_part_of_its_step():
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            self.inner.step()
            return super().step(closure)

    model = nn.Linear(4, 4)
    optimizer = Outer(model.parameters(), 0.1)
    optimizer.inner = torch.optim.SGD(model.parameters(), 0.1)
    with backspot.Monitor(model) as monitor:
        for _ in range(10):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
    assert monitor.step == 10


def test_steps_within_the_backward_end_with_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(
            lambda p, own=own: (own.step(), own.zero_grad())[0]
        )
    with backspot.Monitor(model) as monitor:
        for _ in range(8):
            model(torch.ones(4)).sum().backward()
    assert monitor.step == 8


def test_an_optimizer_made_anew_for_each_step_goes_on():
    model = nn.Linear(4, 4)
    with backspot.Monitor(model) as monitor:
        for _ in range(8):
            model(torch.ones(4)).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
    assert monitor.step == 8


@pytest.mark.parametrize("watch_outside", [True, False])
def test_a_model_within_a_wrapper_is_the_same_model(clock, watch_outside):
    inner = nn.Linear(4, 4)
    outer = torch.compile(inner, backend="eager")
    training = Training(clock, inner)
    with backspot.Monitor(outer if watch_outside else inner) as monitor:
        del outer
        training.train(3)
    assert monitor.step == 3


def in_threads(functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_steps_of_several_threads_that_train_a_model_in_turns_all_count(clock):
    model, turn = nn.Linear(4, 4), threading.Lock()

    def train():
        training = Training(clock, model)
        for _ in range(40):
            with turn:  # PyTorch itself crashes where threads write the same gradients at once
                training.train(1)

    with backspot.Monitor(model) as monitor:
        in_threads([train] * 3)
    assert monitor.step == 120


def test_threads_that_train_models_of_their_own_have_a_monitor_each(clock):
    trainings = [Training(clock), Training(clock)]
    monitors = [backspot.Monitor(training.model) for training in trainings]
    in_threads([lambda: trainings[0].train(30), lambda: trainings[1].train(50)])
    for monitor in monitors:
        monitor.remove()
    assert [monitor.step for monitor in monitors] == [30, 50]
    assert [monitor.training.steps for monitor in monitors] == [30, 50]
    assert all(nothing_is_left(training.model) for training in trainings)


# Nothing changes ---------------------------------------------------------------------------------


def test_a_removed_monitor_leaves_nothing(training):
    monitor = backspot.Monitor(training.model)
    assert hooks_on(training.model) == []
    training.train(3)
    monitor.remove()
    monitor.remove()
    assert nothing_is_left(training.model)
    training.train(3)
    assert monitor.step == 3


@pytest.mark.parametrize("first", [0, 1])
def test_several_monitors_end_in_any_order(training, first):
    monitors = [backspot.Monitor(training.model), backspot.Monitor(training.model)]
    training.train(3)
    monitors.pop(first).remove()
    training.train(3)
    (last,) = monitors
    last.remove()
    assert last.step == 6
    assert nothing_is_left(training.model)


def test_a_monitor_that_is_removed_where_it_hands_over_a_sample_leaves_the_step_whole(training):
    monitor = backspot.Monitor(training.model, every=2, on_sample=lambda *_: monitor.remove())
    heard = []
    # PyTorch is iterating over the hooks meanwhile, and this one is yet to come.
    other = register_optimizer_step_post_hook(lambda *_: heard.append(1))
    training.train(1)
    each = len(heard)
    training.train(4)
    other.remove()
    assert len(heard) == 5 * each
    assert monitor.step == 2
    assert nothing_is_left(training.model)


def test_the_model_is_not_kept_alive(training):
    monitor = backspot.Monitor(training.model)
    training.train(2)
    model = weakref.ref(training.model)
    training.model = training.optimizer = training.batches = None
    gc.collect()
    assert model() is None
    assert left_in_torch() == []
    assert monitor.training.counted == 1


def test_copies_of_the_model_are_plain(training):
    with backspot.Monitor(training.model) as monitor:
        training.train(2)
        for twin in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
            assert hooks_on(twin) == []
            Training(training.clock, twin).train(2)
        assert monitor.step == 2


def test_losses_and_gradients_are_the_same_bit_for_bit():
    def run(watch):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters())
        monitor = backspot.Monitor(model, every=1, on_sample=print) if watch else None
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(1, 3, 4)).square().mean().backward()
            optimizer.step()
        if monitor is not None:
            monitor.remove()
        return [*model.parameters(), *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, run(watch=False), run(watch=True)))


@pytest.mark.parametrize("which", ["on_sample", "on_alarm"])
def test_an_error_of_a_function_that_is_called_ends_neither_training_nor_monitor(
    training, caplog, which
):
    def fails(*_):
        raise ValueError("no connection")

    with backspot.Monitor(training.model, every=10, **{which: fails}) as monitor:
        training.train(401)
        training.backward = 90.0
        training.train(140)
    assert monitor.step == 541
    assert len(monitor.alarms) == 1
    failed = [record for record in caplog.records if record.exc_info]
    assert [str(record.exc_info[1]) for record in failed] == ["no connection"]


def test_what_profile_does_to_steps_is_no_step_of_the_training(training):
    with backspot.Monitor(training.model) as monitor:
        training.train(20)
        backspot.profile(lambda: training.train(1), training.model, steps=3, trials="none")
        training.train(20)
    found = monitor.training
    assert "backspot" in [apart.name for apart in found.apart]
    assert found.counted < found.steps == monitor.step
    assert found.step_ns == 100_000_000


WATCHED = """
import backspot, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = []
monitor = backspot.Monitor(model, every=20, on_sample=lambda *said: samples.append(said))
for _ in range(200):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
apart = [part.name for part in monitor.training.apart]
print(monitor.step, monitor.training.steps, len(samples) > 5, "backspot" in apart)
"""


@pytest.mark.slow
def test_a_monitor_in_a_script_that_backspot_runs_leaves_out_what_that_records(tmp_path):
    (tmp_path / "train.py").write_text(WATCHED)
    command = [*preloaded.python(), "-m", "backspot", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, text=True)
    assert done.stdout.strip() == "200 200 True True", done.stderr
    assert (tmp_path / "backspot" / "report.json").exists()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"slower_by": 0}, {"slower_by": True}])
def test_a_wrong_argument_is_an_error(wrong):
    with pytest.raises(backspot.UsageError, match=next(iter(wrong))):
        backspot.Monitor(nn.Linear(2, 2), **wrong)
    assert left_in_torch() == []


def test_what_is_no_model_is_an_error():
    with pytest.raises(backspot.UsageError, match="takes a torch"):
        backspot.Monitor(print)
    assert left_in_torch() == []
