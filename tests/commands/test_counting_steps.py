"""What ``backspot run`` counts as a step: an iteration, however its parameters are updated."""

from __future__ import annotations

import json
import re

import pytest

from support import preloaded
from support.program import program

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

ITERATIONS = 30
START = """
import torch
from torch import nn

torch.manual_seed(0)
COMPILE = dict(backend="aot_eager")

class Loss(torch.Tensor):
    "backward() enters again by __torch_function__"

class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.01 * p.grad)

class Fast:
    "An optimizer that is not PyTorch's, as that of fastai."
    def __init__(self, parameters):
        self.parameters = list(parameters)
    def step(self):
        for p in self.parameters:
            p.data.add_(p.grad.data, alpha=-0.01)
    def zero_grad(self):
        for p in self.parameters:
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

def loss_of(model):
    return model(torch.randn(4, 8)).square().mean()

@torch.no_grad()
def update(model):
    for p in model.parameters():
        p -= 0.01 * p.grad

def drop(model):
    for p in model.parameters():
        p.grad = None

model = net()
"""

BY_HAND = {
    "a loss of a subclass and an optimizer of PyTorch's": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(ITERATIONS):
    optimizer.zero_grad()
    loss_of(model).as_subclass(Loss).backward()
    optimizer.step()
""",
    "a loss of a subclass and an update by hand": """
for _ in range(ITERATIONS):
    loss_of(model).as_subclass(Loss).backward()
    update(model)
    drop(model)
""",
    "an optimizer that is not PyTorch's": """
optimizer = Fast(model.parameters())
for _ in range(ITERATIONS):
    loss_of(model).as_subclass(Loss).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "gradients that are accumulated by hand": """
for _ in range(ITERATIONS):
    for _ in range(3):
        loss_of(model).backward()
    update(model)
    drop(model)
""",
    "gradients that are accumulated for an optimizer that is not PyTorch's": """
optimizer = Fast(model.parameters())
for _ in range(ITERATIONS):
    for _ in range(20):
        loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a GAN that is updated by hand": """
generator = nn.Linear(8, 8)
for _ in range(ITERATIONS):
    drop(model)
    (loss_of(model) - model(generator(torch.randn(4, 8)).detach()).mean()).backward()
    update(model)
    drop(generator)
    model(generator(torch.randn(4, 8))).mean().backward()
    update(generator)
""",
    "a penalty of gradients": """
for _ in range(ITERATIONS):
    x = torch.randn(4, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (loss_of(model) + gradient.square().mean()).backward()
    for p in model.parameters():
        p.data -= 0.01 * (0 if p.grad is None else p.grad)
    drop(model)
""",
    "updates within the backward": """
def hook(p):
    p.data -= 0.01 * p.grad
    p.grad = None
for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for _ in range(ITERATIONS):
    loss_of(model).backward()
""",
    "gradients of torch.autograd.grad": """
for _ in range(ITERATIONS):
    gradients = torch.autograd.grad(loss_of(model), list(model.parameters()))
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients):
            p -= 0.01 * gradient
""",
    "gradients of torch.func.grad": """
weights = {name: p.detach() for name, p in model.named_parameters()}
def loss(weights, x):
    return torch.func.functional_call(model, weights, (x,)).square().mean()
for _ in range(ITERATIONS):
    gradients = torch.func.grad(loss)(weights, torch.randn(4, 8))
    weights = {name: weights[name] - 0.01 * gradients[name] for name in weights}
""",
    "a second model after the first": """
for _ in range(2):
    model = net()
    for _ in range(ITERATIONS // 2):
        loss_of(model).backward()
        update(model)
        drop(model)
""",
    "two threads that update by hand": """
import threading
def train():
    model = net()
    for _ in range(ITERATIONS):
        loss_of(model).backward()
        update(model)
        drop(model)
threads = [threading.Thread(target=train) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
    "closures of LBFGS": """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
def closure():
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss
for _ in range(ITERATIONS):
    optimizer.step(closure)
""",
    "an optimizer that steps late": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(ITERATIONS):
    for _ in range(20):
        loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
}
COMPILED = {
    "a compiled step": """
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
step = torch.compile(lambda: optimizer.step(), **COMPILE)
for _ in range(ITERATIONS):
    optimizer.zero_grad()
    loss_of(model).backward()
    step()
""",
    "a compiled step in one graph": """
optimizer = Own(model.parameters())
step = torch.compile(lambda: optimizer.step(), fullgraph=True, **COMPILE)
for _ in range(ITERATIONS):
    optimizer.zero_grad()
    loss_of(model).backward()
    step()
""",
    "a compiled step with its scheduler": """
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
def both():
    optimizer.step()
    scheduler.step()
step = torch.compile(both, **COMPILE)
for _ in range(ITERATIONS):
    optimizer.zero_grad()
    loss_of(model).backward()
    step()
""",
    "a compiled method": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.step = torch.compile(optimizer.step, **COMPILE)
for _ in range(ITERATIONS):
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
""",
    "gradients that are accumulated for a compiled step": """
optimizer = Own(model.parameters())
step = torch.compile(lambda: optimizer.step(), **COMPILE)
for _ in range(ITERATIONS):
    optimizer.zero_grad()
    for _ in range(3):
        loss_of(model).backward()
    step()
""",
    "a GAN with one compiled step": """
generator = nn.Linear(8, 8)
of_model, of_generator = Own(model.parameters()), Own(generator.parameters())
step = torch.compile(lambda: of_model.step(), **COMPILE)
for _ in range(ITERATIONS):
    of_model.zero_grad()
    (loss_of(model) - model(generator(torch.randn(4, 8)).detach()).mean()).backward()
    step()
    of_generator.zero_grad()
    model(generator(torch.randn(4, 8))).mean().backward()
    of_generator.step()
""",
    "a GAN with two compiled steps": """
generator = nn.Linear(8, 8)
of_model, of_generator = Own(model.parameters()), Own(generator.parameters())
steps = [
    torch.compile(lambda: of_model.step(), **COMPILE),
    torch.compile(lambda: of_generator.step(), **COMPILE),
]
for _ in range(ITERATIONS):
    of_model.zero_grad()
    (loss_of(model) - model(generator(torch.randn(4, 8)).detach()).mean()).backward()
    steps[0]()
    of_generator.zero_grad()
    model(generator(torch.randn(4, 8))).mean().backward()
    steps[1]()
""",
    "a compiled iteration": """
optimizer = Own(model.parameters())
@torch.compile(**COMPILE)
def train(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
for _ in range(ITERATIONS):
    train(torch.randn(4, 8))
""",
}


@pytest.fixture
def counted(tmp_path):
    def count(code, *options):
        path = tmp_path / "train.py"
        path.write_text(START + code.replace("ITERATIONS", str(ITERATIONS)))
        given = ("run", "--trials", "none", *options, "-o", tmp_path / "out", path)
        done = program(*given, python=preloaded.python(), cwd=tmp_path)
        said = done.stderr.decode()
        assert done.returncode == 0, said
        steps = re.search(r"the script ended after (\d+) steps", said)
        assert steps, said
        return int(steps[1])

    return count


@pytest.mark.parametrize("way", BY_HAND)
def test_an_iteration_is_one_step(way, counted):
    # The first backward can be one too many, and a second model begins with one that is none.
    assert ITERATIONS - 1 <= counted(BY_HAND[way], "--warmup", "1000") <= ITERATIONS + 1


@pytest.mark.parametrize("way", COMPILED)
def test_an_iteration_with_a_compiled_optimizer_is_one_step(way, counted):
    # That no hook is called shows when the parameters have changed twice.
    assert ITERATIONS - 3 <= counted(COMPILED[way], "--warmup", "1000") <= ITERATIONS


UNKNOWN = """
w = torch.randn(8, 1, requires_grad=True)
for _ in range(ITERATIONS):
    (torch.randn(4, 8) @ w).mean().backward()
    w.data -= 0.01 * w.grad
    w.grad = None
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [(UNKNOWN, True), (BY_HAND["a loss of a subclass and an update by hand"], False)],
)
def test_that_each_backward_counts_is_said_where_nothing_tells_of_updates(
    code, expected, counted, tmp_path
):
    counted(code, "--warmup", "2", "--steps", "2", "--at", "20", "--steps", "20")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    said = [line for line in report["warnings"] if line.startswith("Each backward counts")]
    assert bool(said) == expected


OF_THREADS = """
import threading

class Noting(nn.Parameter):
    "Notes who looks at its gradient: while its own thread frees that, a look from another crashes."
    looked, training = set(), set()
    @property
    def grad(self):
        if self.thread in self.training:
            self.looked.add((self.thread, threading.get_ident()))
        return torch.Tensor.grad.__get__(self)
    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)

class First(nn.Linear):
    pass

class Second(nn.Linear):
    pass

def by_hand(model):
    update(model)

def master_weights(model):
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.01)
    def step(model):
        for copy, p in zip(copies, model.parameters()):
            copy.grad = p.grad
        optimizer.step()
        for copy, p in zip(copies, model.parameters()):
            p.data.copy_(copy.data)
    return step

def train(kind):
    model = kind(8, 1)
    for name, p in [*model.named_parameters()]:
        own = Noting(p.detach())
        own.thread = threading.get_ident()
        setattr(model, name, own)
    step = STEP
    both.wait()
    for _ in range(ITERATIONS):
        criterion(model(torch.randn(4, 8)), torch.zeros(4, 1)).backward()
        Noting.training.add(threading.get_ident())
        step(model)
        drop(model)

criterion = nn.MSELoss()
both = threading.Barrier(2)
threads = [threading.Thread(target=train, args=(kind,)) for kind in (First, Second)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(Noting.looked) == 2 and all(own == who for own, who in Noting.looked), Noting.looked
"""


@pytest.mark.parametrize("step", ["by_hand", "master_weights(model)"])
def test_no_thread_looks_at_gradients_of_another_one(step, tmp_path):
    path = tmp_path / "train.py"
    code = OF_THREADS.replace("STEP", step).replace("ITERATIONS", str(ITERATIONS))
    path.write_text(START + code)
    given = ("run", "--trials", "none", "--warmup", "10", "--steps", "2", path)
    done = program(*given, python=preloaded.python(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads((tmp_path / "backspot" / "report.json").read_text())
    paths = {row["class_name"]: row["path"] for row in report["modules"]}
    assert [paths[kind] for kind in ("First", "Second") if kind in paths] == [""]


def test_backwards_without_an_update_are_no_steps_and_said(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        START + "optimizer = Own(model.parameters())\n"
        "for _ in range(20):\n    loss_of(model).backward()\n"
    )
    done = program("run", path, python=preloaded.python(), cwd=tmp_path)
    assert b"no parameter was updated between two backwards" in done.stderr


def test_a_module_that_is_about_to_be_made_harms_nothing(counted):
    made = "begun = nn.ReLU.__new__(nn.ReLU)  # as another thread has it for a moment\n"
    code = made + BY_HAND["a loss of a subclass and an update by hand"]
    assert ITERATIONS - 1 <= counted(code, "--warmup", "1000") <= ITERATIONS + 1
