"""``Monitor``: times of blocks in some steps of a run, which does not notice."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import backspot  # noqa: E402
from backspot.live.monitor import _Times  # noqa: E402
from support.leftovers import hooks_on, left_in_torch  # noqa: E402
from support.sleeping import Sleep  # noqa: E402


class Sleepy(nn.Module):
    """Sleeps in backward, so that a test knows the least time that it takes."""

    def __init__(self, seconds=0.0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, x):
        return Sleep.apply(self.linear(x), lambda: self.seconds)


class Trained:
    def __init__(self, model, call=None):
        torch.manual_seed(0)
        self.model = model
        self.call = call or model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.losses = []

    def train(self, steps, passes=1):
        for _ in range(steps):
            self.optimizer.zero_grad()
            for _ in range(passes):
                loss = self.call(torch.randn(3, 4)).square().mean()
                loss.backward()
                self.losses.append(loss.item())
            self.optimizer.step()


def sleepers(*seconds):
    torch.manual_seed(0)
    return nn.Sequential(*(Sleepy(one) for one in seconds))


def steps_of(monitor):
    return [times.step for times in monitor._samples]


def sampled(model, call=None, depth=1, passes=1):
    """The times of one sampled step, by path."""
    found = []
    trained = Trained(model, call)
    with backspot.Monitor(
        model, depth=depth, every=2, on_sample=lambda step, times: found.append((step, times))
    ):
        trained.train(4, passes)
    assert [step for step, _ in found] == [3]
    return found[0][1]


# Times -------------------------------------------------------------------------------------------


def test_the_time_of_a_backward_is_that_of_its_block():
    times = sampled(sleepers(0.0, 0.02, 0.0))
    assert times["1/backward_ms"] >= 20
    assert times["0/backward_ms"] < 20
    assert times["2/backward_ms"] < 20
    assert 0 < times["1/forward_ms"] < 20


def test_branches_are_told_apart():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.left, self.right = Sleepy(), Sleepy(0.05), Sleepy(0.15)

        def forward(self, x):
            x = self.stem(x)
            return x + self.left(x) + self.right(x)

    times = sampled(Branches())
    assert 50 <= times["left/backward_ms"] < 150
    assert times["right/backward_ms"] >= 150
    assert times["stem/backward_ms"] < 50


def test_a_block_contains_the_blocks_inside_it():
    model = nn.Sequential(sleepers(0.0, 0.02), Sleepy())
    times = sampled(model, depth=2)
    assert times["0.1/backward_ms"] >= 20
    assert times["0/backward_ms"] >= times["0.1/backward_ms"] + times["0.0/backward_ms"] - 1e-6
    assert set(sampled(model)) == {f"{path}/{kind}_ms" for path in "01" for kind in KINDS}


KINDS = ("forward", "backward")


def test_the_whole_model_is_timed_at_depth_0():
    assert sampled(sleepers(0.02, 0.02), depth=0)["Sequential/backward_ms"] >= 40


def test_the_passes_of_a_step_are_added_up():
    assert sampled(sleepers(0.02, 0.0), passes=3)["0/backward_ms"] >= 60


def test_a_block_that_is_called_twice_has_the_time_of_both():
    model = sleepers(0.02, 0.0)
    assert sampled(model, lambda x: model(model[0](x)))["0/backward_ms"] >= 40


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_backward(reentrant):
    model = sleepers(0.0, 0.02)

    def call(x):
        x = model[0](x.requires_grad_())
        return checkpoint(model[1], x, use_reentrant=reentrant)

    times = sampled(model, call)
    assert times["1/backward_ms"] >= 20
    assert times.get("1/forward_ms", 0.0) < 20


def test_layers_of_a_list_are_blocks_and_the_list_is_none():
    model = nn.ModuleDict({"layers": nn.ModuleList([Sleepy(), Sleepy()]), "head": nn.Linear(4, 2)})
    monitor = backspot.Monitor(model)
    assert monitor.paths == ("layers.0", "layers.1", "head")
    monitor.remove()


def test_evaluation_between_is_not_timed():
    model = sleepers(0.0, 0.0)
    trained = Trained(model)
    with backspot.Monitor(model, every=1) as monitor:
        trained.train(1)
        with torch.no_grad():
            model(torch.randn(3, 4))
        trained.train(2)
    assert steps_of(monitor) == [2, 3]


def test_a_step_that_fails_gives_no_sample_and_the_next_one_does():
    model = sleepers(0.0, 0.0)
    trained = Trained(model)
    with backspot.Monitor(model, every=1) as monitor:
        trained.train(1)
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 5))
        trained.train(3)
    assert steps_of(monitor) == [3, 4]


# Nothing changes ---------------------------------------------------------------------------------


def test_losses_and_gradients_are_the_same_bit_for_bit():
    def run(monitored):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        trained = Trained(model, lambda x: model(x[None]))
        if monitored:
            with backspot.Monitor(model, every=1):
                trained.train(6)
        else:
            trained.train(6)
        return trained.losses, [p.grad for p in model.parameters()]

    (losses, gradients), (same_losses, same_gradients) = run(False), run(True)
    assert losses == same_losses
    assert all(map(torch.equal, gradients, same_gradients))


def test_the_model_has_hooks_in_sampled_steps_only():
    model = sleepers(0.0, 0.0)
    trained = Trained(model)
    monitor = backspot.Monitor(model, every=3)
    seen = []
    for _ in range(7):
        seen.append(len(hooks_on(model)) > 0)
        trained.train(1)
    assert seen == [False, False, False, True, False, False, True]
    monitor.remove()
    assert hooks_on(model) == left_in_torch() == []
    monitor.remove()


def test_a_monitor_that_is_removed_where_it_hands_over_a_sample_leaves_no_hook():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = backspot.Monitor(model, every=1, on_sample=lambda *_: monitor.remove())
    for _ in range(8):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert hooks_on(model) == left_in_torch() == []


def test_a_copy_made_in_a_sampled_step_is_plain():
    model = sleepers(0.0, 0.0)
    trained = Trained(model)
    with backspot.Monitor(model, every=1) as monitor:
        trained.train(1)
        assert hooks_on(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(torch.randn(3, 4)).sum().backward()
        assert monitor._sample.forward == []


def test_the_model_is_not_kept_alive():
    model = sleepers(0.0)
    monitor = backspot.Monitor(model)
    left = monitor._model
    del model
    assert left() is None
    assert left_in_torch() == []


def test_the_optimizer_of_another_model_does_not_count():
    model, other = sleepers(0.0), Trained(sleepers(0.0))
    with backspot.Monitor(model) as monitor:
        other.train(3)
        Trained(model).train(2)
    assert monitor.step == 2


def test_a_block_that_replaces_another_is_timed_instead():
    model = sleepers(0.0, 0.0)
    trained = Trained(model)
    with backspot.Monitor(model, every=2) as monitor:
        trained.train(3)
        model[1] = Sleepy(0.02)
        trained.train(4)
    assert [times.backward[1] >= 20 for times in monitor._samples] == [False, True, True]


def test_a_block_that_does_not_run_has_no_times():
    model = sleepers(0.0, 0.0)
    told = []
    with backspot.Monitor(model, every=2, on_sample=lambda _, times: told.append(times)) as monitor:
        Trained(model, call=model[0]).train(4)
    assert told[0].keys() == {"0/forward_ms", "0/backward_ms"}
    assert str(monitor).splitlines()[2].split() == ["1", "Sleepy", "–", "–", "–"]


def test_times_of_blocks_that_run_now_and_then_raise_no_alarm():
    assert fed([*noisy(40, 1.8), 0.0, *noisy(4, 2.9), 0.0, *noisy(40, 1.8)]).alarms == []
    (alarm,) = fed([0.0, *noisy(20, 1.8), 0.0, *noisy(20, 2.9)], on_alarm=print).alarms
    assert alarm.before_ms > 1.6


# Compiled models ---------------------------------------------------------------------------------


class CallsSuper(nn.Linear):
    """As the layers of transformers, whose hooks are in the guards of what is compiled."""

    def __call__(self, *args):
        return super().__call__(*args)


def _each(compile_block):
    def compile_blocks(model, backend):
        for index, block in enumerate(model):
            compiled = compile_block(block, backend)
            model[index] = block if compiled is None else compiled
        return model

    return compile_blocks


COMPILED = {
    "block.compile()": _each(lambda block, backend: block.compile(backend=backend)),
    "torch.compile(block)": _each(lambda block, backend: torch.compile(block, backend=backend)),
    "torch.compile(model)": lambda model, backend: torch.compile(model, backend=backend),
    "model.compile()": lambda model, backend: model.compile(backend=backend) or model,
}


def compiled_run(way, cls, depth, watch):
    """The number of compiled graphs, and of samples if a monitor watches."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(cls(4, 4), cls(4, 4))
    monitor = backspot.Monitor(model, every=2, depth=depth) if watch == "before" else None
    trained = Trained(model, call=COMPILED[way](model, backend))
    if watch == "after":
        monitor = backspot.Monitor(model, every=2, depth=depth)
    trained.train(9)
    if monitor is not None:
        monitor.remove()
    return len(graphs), monitor and len(steps_of(monitor))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [nn.Linear, CallsSuper])
@pytest.mark.parametrize("way", COMPILED)
def test_a_monitor_adds_no_compiled_graph_and_times_compiled_blocks(way, cls):
    times_blocks, times_whole = "block" in way, way != "torch.compile(model)"
    graphs, _ = compiled_run(way, cls, 1, watch=None)
    assert compiled_run(way, cls, 1, "before") == (graphs, 4 * times_blocks)
    assert compiled_run(way, cls, 0, "before") == (graphs, 4 * times_whole)
    if way != "model.compile()":
        assert compiled_run(way, cls, 1, "after") == (graphs, 4 * times_blocks)


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole_is_told_of():
    model = torch.compile(sleepers(0.0), backend="eager")
    with pytest.raises(backspot.UsageError, match="compiled as a whole"):
        backspot.Monitor(model)
    backspot.Monitor(model, depth=0).remove()


@pytest.mark.slow
def test_a_copy_of_a_compiled_block_made_in_a_sampled_step_is_plain():
    class KeepsAll(nn.Linear):
        def __getstate__(self):
            return dict(vars(self))

    model = nn.Sequential(nn.Linear(4, 4), KeepsAll(4, 4))
    for block in model:
        block.compile(backend="eager")
    with backspot.Monitor(model, every=1) as monitor:
        Trained(model).train(1)
        copy.deepcopy(model)(torch.randn(3, 4)).sum().backward()
        assert monitor._sample.forward == []


# Alarms ------------------------------------------------------------------------------------------


def fed(*backwards, **options):
    """A monitor that has these backward times of its blocks."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in backwards))
    monitor = backspot.Monitor(model, every=100, **options)
    for number, ms in enumerate(zip(*backwards, strict=True), 1):
        monitor._add(_Times(number * 100, (1.0,) * len(ms), ms))
    monitor.remove()
    return monitor


def noisy(count, ms, spread=0.05):
    generator = torch.Generator().manual_seed(1)
    return (ms * (1 + spread * torch.randn(count, generator=generator))).tolist()


def test_a_block_that_becomes_slower_raises_one_alarm():
    heard = []
    monitor = fed([*noisy(40, 1.8), *noisy(40, 2.9)], on_alarm=heard.append)
    (alarm,) = monitor.alarms
    assert heard == [alarm]
    assert (alarm.path, alarm.since) == ("0", 4100)
    assert alarm.step == 4500
    times = f"{alarm.before_ms:.2f} → {alarm.now_ms:.2f} ms"
    assert str(alarm) == f"0 backward {times} since step 4,100"


def test_a_steady_block_raises_none(caplog):
    assert fed(noisy(500, 1.8, 0.1)).alarms == []
    assert fed([50.0, *noisy(100, 1.8)]).alarms == []  # a slow start
    assert fed([*noisy(50, 1.8), 9.0, 9.0, 9.0, 9.0, *noisy(50, 1.8)]).alarms == []
    assert fed([*noisy(40, 0.002), *noisy(40, 0.004)]).alarms == []  # too little to matter
    assert caplog.records == []


@pytest.mark.parametrize("blocks", [2, 3, 6])
def test_a_slower_machine_raises_none(blocks):
    busy = [*noisy(40, 1.0), *noisy(20, 2.0)]
    steady = [[ms * (block + 1) for ms in busy] for block in range(blocks)]
    assert fed(*steady).alarms == []


def test_a_block_that_becomes_slower_on_a_slower_machine_is_found():
    busy = [*noisy(40, 1.0), *noisy(20, 2.0)]
    monitor = fed(busy, [*noisy(40, 1.0), *noisy(20, 3.0)], busy)
    (alarm,) = monitor.alarms
    assert (alarm.path, alarm.since) == ("1", 4100)
    assert alarm.now_ms > 2.5


def test_a_second_slowdown_raises_a_second_alarm_and_is_logged(caplog):
    monitor = fed([*noisy(30, 1.0), *noisy(30, 2.0), *noisy(30, 4.0)])
    assert [alarm.since for alarm in monitor.alarms] == [3100, 6100]
    assert [record.message for record in caplog.records] == list(map(str, monitor.alarms))


def test_how_much_slower_is_stated():
    times = [*noisy(30, 1.0, 0.01), *noisy(30, 1.3, 0.01)]
    assert fed(times).alarms
    assert not fed(times, slower_by=0.5).alarms
    assert not fed(times, slower_by=None).alarms


@pytest.mark.slow
def test_a_planted_slowdown_is_found():
    model = sleepers(0.01, 0.01)  # a busy machine makes a block that takes no time 3 times slower
    trained = Trained(model)
    with backspot.Monitor(model, every=1, slower_by=2.0, on_alarm=lambda _: None) as monitor:
        trained.train(25)
        model[1].seconds = 0.1
        trained.train(12)
    assert [alarm.path for alarm in monitor.alarms] == ["1"]
    assert monitor.alarms[0].since == 26


# Forms -------------------------------------------------------------------------------------------


def test_it_prints_a_table():
    model = sleepers(0.0, 0.0)
    with backspot.Monitor(model, every=2) as monitor:
        assert "no sample yet" in str(monitor)
        Trained(model).train(6)
    lines = str(monitor).splitlines()
    assert lines[0].split() == [
        "block",
        "class",
        "forward",
        "ms",
        "backward",
        "ms",
        "last",
        "backward",
    ]
    assert [line.split()[:2] for line in lines[1:3]] == [["0", "Sleepy"], ["1", "Sleepy"]]
    assert lines[3] == "Medians of 2 samples, steps 3 to 5."
    assert repr(monitor) == "Monitor(2 blocks, 2 samples, step 6)"


def test_the_oldest_samples_are_dropped():
    assert steps_of(fed(noisy(30, 1.0), keep=8)) == list(range(2300, 3100, 100))


def test_a_frame_has_a_row_for_each_block_of_each_sample():
    pytest.importorskip("pandas")
    model = sleepers(0.0, 0.02)
    with backspot.Monitor(model, every=2) as monitor:
        Trained(model).train(6)
    frame = monitor.to_pandas()
    assert list(frame["step"]) == [3, 3, 5, 5]
    assert list(frame["path"]) == ["0", "1", "0", "1"]
    assert (frame[frame["path"] == "1"]["backward_ms"] >= 20).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": -1},
        {"every": 0},
        {"keep": 0},
        {"slower_by": 0},
        {"slower_by": True},
        {"depth": 1.0},
    ],
)
def test_a_wrong_argument_is_an_error(wrong):
    with pytest.raises(backspot.UsageError, match=next(iter(wrong))):
        backspot.Monitor(sleepers(0.0), **wrong)


def test_a_model_without_blocks_and_what_is_no_model_are_errors():
    with pytest.raises(backspot.UsageError, match="depth=0"):
        backspot.Monitor(nn.Linear(2, 2))
    with pytest.raises(backspot.UsageError, match="takes a torch"):
        backspot.Monitor(print)
    assert left_in_torch() == []


# Optimizers --------------------------------------------------------------------------------------


def test_steps_are_counted_where_optimizers_step_inside_the_backward():
    model = sleepers(0.0, 0.02)
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: (own[p].step(), own[p].zero_grad())[0]
        )
    found = []
    with backspot.Monitor(
        model, every=2, on_sample=lambda step, times: found.append((step, times))
    ) as monitor:
        for _ in range(8):
            model(torch.randn(3, 4)).square().mean().backward()
    assert monitor.step == 8
    assert [step for step, _ in found] == [3, 5, 7]
    assert all(times["1/backward_ms"] >= 20 > times["0/backward_ms"] for _, times in found)


def test_an_optimizer_that_takes_over_is_counted_after_a_while():
    model = sleepers(0.0, 0.0)
    first = Trained(model)
    with backspot.Monitor(model, every=2) as monitor:
        first.train(4)
        Trained(model).train(30)
    assert monitor.step > 4
    assert len(steps_of(monitor)) > 2
    assert first.optimizer.param_groups  # it is still alive
