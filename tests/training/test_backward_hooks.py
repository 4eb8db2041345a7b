"""Users' full backward hooks: their time, and the nodes that they ride on, are their module's."""

import functools
import re
import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from support.choice import slow_except  # noqa: E402
from support.training import cpu_profile, owners  # noqa: E402

WRAP = "BackwardHookFunctionBackward"
KINDS = ("register_full_backward_hook", "register_full_backward_pre_hook")
SLEEP = 0.02


def sleep(*_):
    time.sleep(SLEEP)


def nothing(*_):
    return None


def report_of(model, x, **options):
    with backspot.instrument(model, **options), cpu_profile() as profiler:
        model(x).sum().backward()
    return backspot.locate(profiler)


def has_slept(report, path):
    """Whether a module has the time of a sleep; on a busy machine others can have as much."""
    return report[path].row.wall_ns > SLEEP * 1e9


def wraps(report):
    return {path: nodes[WRAP] for path, nodes in owners(report).items() if WRAP in nodes}


def nested():
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())),
        nn.Tanh(),
    )


PATHS = ["0", "0.0", "0.1", "0.2", "0.2.0", "0.2.1", "1", ""]


@pytest.mark.parametrize("path", slow_except(["0", "0.2.1", ""], PATHS))
@pytest.mark.parametrize("kind", KINDS)
def test_time_in_a_hook_is_its_modules(kind, path):
    model = nested()
    getattr(model.get_submodule(path), kind)(sleep)
    for x in (torch.randn(2, 4), torch.randn(2, 4, requires_grad=True)):
        report = report_of(model, x)
        assert has_slept(report, path)
        (said,) = [text for text in report.warnings if text.startswith("Full backward hooks of")]
        assert report[path].row.class_name in said


class Waiter:
    def wait(self, _module, _inputs, _outputs):
        time.sleep(SLEEP / 4)


def test_hooks_of_many_modules_that_take_much_together_are_told_once(default_hooks):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    for module in model:
        module.register_full_backward_hook(functools.partial(Waiter().wait))
    report = report_of(model, torch.randn(2, 4, requires_grad=True))
    (said,) = [text for text in report.warnings if text.startswith("Full backward hooks of")]
    assert said.partition(" take ")[0].endswith(", 10 more modules")
    if default_hooks == "call":  # else the start of the profiler is not noticed
        assert re.search(r"backward: Waiter\.wait \(\S*test_backward_hooks\.py:\d+\)\.", said)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_take_little_are_not_told(kind):
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    getattr(model[2], kind)(nothing)
    report = report_of(model, torch.randn(4096, 512))
    assert wraps(report)
    assert not [text for text in report.warnings if "hooks" in text]


@pytest.mark.parametrize("kind", KINDS)
def test_each_module_has_the_nodes_around_it(kind):
    model = nested()
    for module in model.modules():
        getattr(module, kind)(nothing)
    found = wraps(report_of(model, torch.randn(2, 4, requires_grad=True)))
    assert found == dict.fromkeys(PATHS, 2)
    # No input of these requires a gradient, so that they have the outputs' alone.
    first = {"": 1, "0": 1, "0.0": 1}
    assert wraps(report_of(model, torch.randn(2, 4))) == {**dict.fromkeys(PATHS, 2), **first}


class Twice(nn.Module):
    """Works behind a hooked module, and calls it again."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(self.inner(x).tanh()) * 2


def test_work_behind_a_hooked_module_stays_its_callers():
    model = nn.Sequential(Twice())
    model[0].inner.register_full_backward_pre_hook(nothing)
    found = owners(report_of(model, torch.randn(2, 4, requires_grad=True)))
    assert found["0.inner"][WRAP] == 4
    assert found["0"] == {"TanhBackward0": 1, "MulBackward0": 1}


class ByLayers(nn.Module):
    """Calls layers of a list, which ``match="stem"`` gives no labels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("hooked", [True, False])
def test_a_module_without_a_label_gives_none_of_its_own_to_the_one_called_before(hooked):
    model = ByLayers()
    for layer in (*model.layers, *([model.stem] if hooked else [])):
        layer.register_full_backward_hook(nothing)
    found = wraps(report_of(model, torch.randn(2, 4), match="stem"))
    assert found == ({"": 4, "stem": 1} if hooked else {"": 4})


def test_the_hooks_of_hooks_module_are_their_modules():
    model = nested()
    found = wraps(report_of(model, torch.randn(2, 4, requires_grad=True), hooks="module"))
    assert found == dict.fromkeys(PATHS, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_hook_of_a_module_that_runs_again_is_its_modules(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return checkpoint(self.inner, self.stem(x), use_reentrant=reentrant).tanh()

    model = Again()
    model.inner[1].register_full_backward_pre_hook(sleep)
    assert has_slept(report_of(model, torch.randn(2, 4)), "inner.1")
