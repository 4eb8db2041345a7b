"""Models at the edge of the recursion limit, and module calls that somebody has wrapped."""

import gc
import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import backspot
from support import preloaded


class Recursive(nn.Module):
    def forward(self, x, depth):
        return x * 2 if depth == 0 else self(x, depth - 1)


def deepest(model):
    """How deep it can be called from here without an error."""
    good, bad = 1, 4 * sys.getrecursionlimit()
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            model(torch.ones(1), middle)
            good = middle
        except RecursionError:
            bad = middle
    return good


@pytest.fixture
def limit():
    """Python's own recursion limit, whatever code that ran before has set."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield 1000
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("profiled", [False, True])
def test_a_model_as_deep_as_python_allows_runs_while_instrumented(profiled, record, limit):
    model = Recursive()
    depth = deepest(model)

    def run():
        model(torch.ones(1), depth)

    with backspot.instrument(model):
        if profiled:
            assert len(record(run).forward()) == depth + 1
        else:
            run()
    assert sys.getrecursionlimit() == limit


def test_a_limit_that_was_set_after_an_earlier_model_was_gone_has_room_too(limit):
    backspot.instrument(Recursive())
    gc.collect()  # the model is gone, and nobody has removed its labels
    sys.setrecursionlimit(limit - 50)
    model = Recursive()
    depth = deepest(model)
    with backspot.instrument(model):
        model(torch.ones(1), depth)
    assert sys.getrecursionlimit() == limit - 50


def test_a_recursion_limit_that_the_user_sets_meanwhile_stays(limit):
    with backspot.instrument(Recursive()):
        sys.setrecursionlimit(limit + 12345)
    assert sys.getrecursionlimit() == limit + 12345


WRAPPED = """
    import functools
    import json
    import sys
    import torch
    from torch import nn

    original = nn.Module._call_impl

    if sys.argv[1] == "wrapped":

        @functools.wraps(original)
        def call(*args, **kwargs):
            return original(*args, **kwargs)

    else:  # one of somebody's own, which knows pre-hooks and hooks

        def call(self, *args, **kwargs):
            for hook in list(self._forward_pre_hooks.values()):
                hook(self, args, kwargs)
            result = self.forward(*args, **kwargs)
            for hook in list(self._forward_hooks.values()):
                hook(self, args, kwargs, result)
            return result

    nn.Module._call_impl = nn.Module.__call__ = call

    import backspot
    from torch.profiler import ProfilerActivity, profile


    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x)


    class Borrower(nn.Module):
        def __init__(self, borrowed):
            super().__init__()
            object.__setattr__(self, "borrowed", borrowed)

        def forward(self, x):
            return torch.sigmoid(self.borrowed(x)).exp()


    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = Inner()
            self.b = Borrower(self.a.fc)

        def forward(self, x):
            return self.b(self.a(x))


    model = Model()
    with backspot.instrument(model):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(torch.randn(2, 8)).sum().backward()
    report = backspot.locate(profiler)
    print(json.dumps({row.path: [node.name for node in row.nodes] for row in report.modules}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "replaced"])
def test_nodes_are_the_callers_where_module_calls_are_wrapped(how):
    done = subprocess.run(
        [*preloaded.python(), "-c", textwrap.dedent(WRAPPED), how],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    nodes = json.loads(done.stdout.splitlines()[-1])
    assert {"SigmoidBackward0", "ExpBackward0"} <= set(nodes["b"])
