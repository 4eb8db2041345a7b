"""Scripted graphs and C++ functions make nodes unrecorded: their owner is true, or unknown."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from backspot.analysis.attribution.ownership import Special  # noqa: E402
from support.hooks import MODES, instrument  # noqa: E402
from support.random_networks import (  # noqa: E402
    Again,
    build_functions,
    lacks_compiler,
    random_network,
    scripted,
    step_of,
)
from support.training import (  # noqa: E402
    Truth,
    cpu_profile,
    owners,
    owners_by_number,
    tells_creation,
)

# The C++ functions take half a minute to build: once, in one worker.
pytestmark = pytest.mark.xdist_group("cpp")

UNKNOWN = Special.UNRECORDED.path


@pytest.fixture(scope="session")
def cpp(tmp_path_factory):
    """Functions of C++ with a backward, as CUDA extensions have them."""
    if lacks_compiler():
        pytest.skip(lacks_compiler())
    return build_functions(tmp_path_factory.mktemp("functions"))


def judged(network, folder) -> tuple[Counter, set]:
    """How many nodes of a step have their true owner, or none; and those with another's."""
    step, truth = step_of(network), Truth(network)
    with backspot.instrument(network), cpu_profile() as profiler, truth.listen():
        step()
    truth.remove()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    counts: Counter = Counter()
    wrong = set()
    for (thread, number, _), (name, owner) in owners_by_number(trace).items():
        counts["unrecorded maker"] += "::" in name and "CopySlices" not in name
        counts["nodes"] += 1
        counts["unknown"] += owner == UNKNOWN
        if owner not in (UNKNOWN, truth.of(thread, number)):
            wrong.add((number, name, owner, truth.of(thread, number)))
    return counts, wrong


def judge(networks, folder) -> Counter:
    scripted()
    together: Counter = Counter()
    for network in networks:
        counts, wrong = judged(network, folder)
        assert wrong == set()
        together += counts
    assert together["nodes"] > 300
    assert together["unrecorded maker"] > 10
    assert together["unknown"] < 0.05 * together["nodes"]
    return together


@pytest.mark.slow
def test_no_node_of_networks_with_scripted_functions_goes_to_another_module(tmp_path):
    judge((random_network(seed) for seed in range(120, 165)), tmp_path)


@pytest.mark.slow
def test_no_node_of_networks_with_cpp_functions_goes_to_another_module(tmp_path, cpp):
    judge((random_network(seed, cpp) for seed in range(30)), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not tells_creation, reason="the truth within nodes needs torch 2.14")
def test_nor_where_they_run_again_in_the_backward(tmp_path, cpp):
    networks = (Again(random_network(seed, cpp), reentrant=True) for seed in range(20))
    judge(networks, tmp_path)


class Masked(nn.Module):
    """Its last operator is numbered, and makes no node."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return self.fc(x), (x.detach() > 0).float()


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x):
        return scripted()(x, self.weight)


class OfCpp(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class AfterMask(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.a, self.b = Masked(), after

    def forward(self, x):
        y, _ = self.a(x)
        return self.b(y)


def owner_of(kind, network, **options):
    # A function that has met too many kinds of inputs becomes a graph no more.
    scripted.cache_clear()
    scripted()
    for seen in range(40):  # a scripted function becomes a graph for inputs that it has seen
        output = network(torch.randn(4, 6))
        output.sum().backward()
        if seen > 3 and kind in str(output.grad_fn):
            break
    with instrument(network, **options), cpu_profile() as profiler:
        network(torch.randn(4, 6)).sum().backward()
    return [
        path
        for path, nodes in owners(backspot.locate(profiler)).items()
        if any(kind in name for name in nodes)
    ]


@pytest.mark.parametrize("hooks", MODES)
def test_a_mask_of_the_module_before_does_not_take_a_scripted_functions_node(hooks):
    assert owner_of("DifferentiableGraph", AfterMask(Scripted()), hooks=hooks) == ["b"]


@pytest.mark.slow
@pytest.mark.parametrize("hooks", MODES)
def test_a_mask_of_the_module_before_does_not_take_a_cpp_functions_node(hooks, cpp):
    assert owner_of("CppNode", AfterMask(OfCpp(cpp.half)), hooks=hooks) == ["b"]


@pytest.mark.slow
def test_two_cpp_functions_in_a_row_are_their_modules(cpp):
    assert owner_of("CppNode", AfterMask(OfCpp(cpp.halves))) == ["b"]


@pytest.mark.slow
@pytest.mark.skipif(not tells_creation, reason="lines are exact from torch 2.14 on")
def test_the_line_that_calls_them_is_known(cpp):
    network = nn.Sequential(OfCpp(cpp.half), Scripted())
    scripted()
    with backspot.instrument(network, lines=True, markers=True), cpu_profile() as profiler:
        network(torch.randn(4, 6, requires_grad=True)).sum().backward()
    report = backspot.locate(profiler)
    made = [(row.path, line.text) for row in report.modules for line in row.lines]
    assert ("0", "return self.function(x)") in made
    assert ("1", "return scripted()(x, self.weight)") in made
