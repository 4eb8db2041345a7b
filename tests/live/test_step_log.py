"""The log of all steps, however a script takes them."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from backspot.live import discovery  # noqa: E402
from backspot.live.recorder import Schedule  # noqa: E402
from backspot.live.running import Observer  # noqa: E402
from backspot.live.step_log import StepLog  # noqa: E402
from backspot.live.torch_internals.process import hook_steps  # noqa: E402

WITHOUT_HOOKS = True

STEPS = 24


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Broken(Numbers):
    def __getitem__(self, index):
        if index % 8 == 5:
            raise ValueError("no such sample")
        return super().__getitem__(index)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(4)


class Training:
    def __init__(self, optimizer=torch.optim.SGD):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3)

    def loss(self, x):
        self.optimizer.zero_grad()
        return self.model(x).square().mean()

    def step(self, x):
        self.loss(x).backward()
        self.optimizer.step()


def reassigned_step():
    training = Training()
    step = training.optimizer.step
    training.optimizer.step = lambda: step()
    for x in torch.ones(STEPS, 4):
        training.step(x)
    return training


def backward_in_threads():
    training = Training()
    for x in torch.ones(STEPS, 4):
        thread = threading.Thread(target=training.loss(x).backward)
        thread.start()
        thread.join()
        training.optimizer.step()
    return training


def no_backward():
    training = Training()
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(STEPS):
        training.optimizer.step()
    return training


def closures():
    training = Training(torch.optim.LBFGS)

    def closure():
        loss = training.loss(torch.ones(4))
        loss.backward()
        return loss

    for _ in range(STEPS):
        training.optimizer.step(closure)
    return training


def gradients_by_hand():
    training = Training()
    parameters = [*training.model.parameters()]
    for x in torch.ones(STEPS, 4):
        gradients = torch.autograd.grad(training.loss(x), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        training.optimizer.step()
    return training


def a_loader_for_each_step():
    training = Training()
    for _ in range(STEPS):
        training.step(next(iter(torch.utils.data.DataLoader(Numbers(), 2))))
    return training


def a_loader_without_an_end():
    training = Training()
    batches = iter(torch.utils.data.DataLoader(Endless(), 2))
    for _ in range(STEPS):
        training.step(next(batches))
    return training


def a_loader_that_raises():
    training, taken = Training(), 0
    while taken < STEPS:
        batches = iter(torch.utils.data.DataLoader(Broken(), None))
        for _ in range(5):
            training.step(next(batches))
            taken += 1
            if taken == STEPS:
                break
        else:
            with pytest.raises(ValueError, match="no such sample"):
                next(batches)
    return training


def noted(train):
    log = StepLog()
    with log:
        unhook = hook_steps(lambda *_: log.step_ended())
        try:
            training = train()
        finally:
            unhook()
    return training, log.training()


@pytest.mark.parametrize(
    "train",
    [
        reassigned_step, backward_in_threads, no_backward, closures, gradients_by_hand,
        a_loader_for_each_step, a_loader_without_an_end, a_loader_that_raises,
    ],
    ids=lambda train: train.__name__,
)  # fmt: skip
def test_each_step_is_noted_and_the_training_is_the_same(train):
    plain = train()
    training, account = noted(train)
    assert account.steps == STEPS
    parts = account.data_ns + account.backward_ns + account.optimizer_ns + account.forward_ns
    assert parts == pytest.approx(account.step_ns, abs=4)
    for seen, alone in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(seen, alone)


@pytest.mark.slow
@pytest.mark.posix
@pytest.mark.usefixtures("workers_end_soon")
def test_loaders_that_a_script_makes_anew_in_each_step_are_not_all_kept(monkeypatch):
    # Each has a worker, a process of its own: the most that are kept are fewer here.
    monkeypatch.setattr("backspot.live.step_log._MOST_LOADERS", 4)
    count = 16

    def train():
        training = Training()
        for _ in range(count):
            training.step(next(iter(torch.utils.data.DataLoader(Numbers(), 2, num_workers=1))))
        return training

    _, account = noted(train)
    assert len(account.loaders) < count - 10
    # The first batch comes before the first step ends.
    assert sum(use.batches for use in account.loaders) == count - 1


@pytest.mark.slow
def test_a_search_for_what_updates_the_parameters_is_no_part_of_a_step(monkeypatch):
    # Of an optimizer that is not PyTorch's, as Keras's; in a large program a search takes long.
    search, found, took = discovery.other_optimizers, [], []

    def long_search(known):
        begin = time.perf_counter_ns()
        time.sleep(0.5)
        took.append(time.perf_counter_ns() - begin)
        return search(known)

    monkeypatch.setattr(discovery, "other_optimizers", long_search)
    model = nn.Linear(4, 1)
    observer = Observer(
        Schedule(warmup=5, steps=8, waits=False), found.append, print, lambda _: None
    )
    observer.begin()
    try:
        for _ in range(40):
            model(torch.ones(2, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)
                    parameter.grad = None
        training = observer.recorder.log.training()
    finally:
        observer.recorder.end()
    (recorded,) = found
    assert len(recorded.times_ns) == 8
    # Backwards 1, 2, 4 and 8 search; the last of them is one of the steps that are timed.
    assert len(took) >= 4
    assert max(recorded.times_ns) < min(took)
    assert training.longest_ns < min(took)
