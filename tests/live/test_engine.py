"""Functions before and after each outermost run of autograd's engine, whoever begins it."""

import subprocess
import threading

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from backspot.live.torch_internals.engine import watch_backward  # noqa: E402
from support import preloaded  # noqa: E402

WITHOUT_HOOKS = True


class Loss(torch.Tensor):
    """A subclass whose ``backward`` enters again, by ``__torch_function__``."""


def leaf():
    return torch.ones(3, requires_grad=True)


def twice(x):
    return (x * x).sum()


def penalty():
    x = leaf()
    (grad,) = torch.autograd.grad(twice(x), x, create_graph=True)
    twice(grad).backward()


def within_a_hook():
    x = leaf()
    y = x * 2

    def again(_):
        with torch.enable_grad():
            twice(leaf()).backward()

    y.register_hook(again)
    y.sum().backward()


def by_the_engine():
    run = torch.autograd.Variable._execution_engine.run_backward
    run((twice(leaf()),), (torch.ones(()),), False, False, (), True, True)


def on_a_thread():
    thread = threading.Thread(target=lambda: twice(leaf()).backward())
    thread.start()
    thread.join()


WAYS = {
    "Tensor.backward": (lambda: twice(leaf()).backward(), [True]),
    "a subclass": (lambda: twice(leaf()).as_subclass(Loss).backward(), [True]),
    "autograd.backward": (lambda: torch.autograd.backward([twice(leaf())]), [True]),
    "autograd.grad": (lambda: torch.autograd.grad(twice(x := leaf()), x), [False]),
    "func.grad": (lambda: torch.func.grad(twice)(torch.ones(3)), [False]),
    "a penalty of gradients": (penalty, [False, True]),
    "a backward within a backward": (within_a_hook, [True]),
    "reentrant checkpointing": (
        lambda: checkpoint(twice, leaf(), use_reentrant=True).backward(),
        [True],
    ),
    "the engine itself": (by_the_engine, [True]),
    "a thread": (on_a_thread, [True]),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_outermost_run_is_heard_once(way):
    run, expected = WAYS[way]
    heard = []
    remove = watch_backward(
        lambda into_grad: heard.append(("begin", into_grad)),
        lambda into_grad: heard.append(("end", into_grad)),
    )
    run()
    remove()
    run()
    assert heard == [(moment, into) for into in expected for moment in ("begin", "end")]


def test_several_users_come_and_go_and_the_engine_is_pytorchs_again():
    engine, heard = torch.autograd.Variable._execution_engine, []

    def watch(name):
        return watch_backward(lambda _: None, lambda _: heard.append(name))

    first, second = watch("first"), watch("second")
    twice(leaf()).backward()
    first()
    twice(leaf()).backward()
    second()
    twice(leaf()).backward()
    assert heard == ["first", "second", "second"]
    assert torch.autograd.Variable._execution_engine is engine


def test_a_backward_that_raises_has_no_end_and_the_next_one_is_heard():
    heard = []
    remove = watch_backward(lambda _: heard.append("begin"), lambda _: heard.append("end"))
    x = leaf()
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        twice(x).backward()
    twice(leaf()).backward()
    remove()
    assert heard == ["begin", "begin", "end"]


COMPILED = """
import torch
from torch._dynamo.utils import get_compilation_metrics
from backspot.live.torch_internals.engine import watch_backward
heard = []
def begin(_): heard.append("begin")
def end(_): heard.append("end")
model = torch.nn.Linear(4, 1)
@torch.compile(backend="aot_eager", fullgraph=True)
def compiled_loss(x): return model(x).square().mean()
@torch.compile(backend="aot_eager")
def compiled_step(x): model(x).square().mean().backward()
def train():
    for _ in range(3):
        compiled_loss(torch.ones(2, 4)).backward()
        compiled_step(torch.ones(2, 4))
remove = watch_backward(begin, end)
train()
remove()
train()
print(len(heard), [(one.co_name, one.compile_id) for one in get_compilation_metrics()])
"""


@pytest.mark.slow
def test_compiled_code_is_compiled_as_without_it(tmp_path):
    def said(code):
        path = tmp_path / "compiled.py"
        path.write_text(code)
        done = subprocess.run([*preloaded.python(), path], capture_output=True, check=False)
        assert not done.returncode, done.stderr.decode()
        return done.stdout.decode().split(maxsplit=1)

    number, compiled = said(COMPILED)
    assert number == "12"
    assert "compiled_step" in compiled
    unwatched = COMPILED.replace("watch_backward(begin, end)", "list")
    assert said(unwatched) == ["0", compiled]
