"""Whose markers stand on which nodes, and where they stand in the backward."""

import threading
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import backspot
from support.blocks import Net, step
from support.choice import slow_except


def test_backward_markers_follow_the_engine(record):
    model = Net()
    with backspot.instrument(model, markers=True):
        assert record(step(model)).backward() == [
            "backward: head (Linear)",
            "backward: (Net)",
            "backward: blocks.1 (Block)",
            "backward: blocks.1.act (GELU)",
            "backward: blocks.1.fc (Linear)",
            "backward: blocks.0 (Block)",
            "backward: blocks.0.act (GELU)",
            "backward: blocks.0.fc (Linear)",
        ]


def test_a_marker_stands_in_the_event_of_its_node_and_before_the_node(record):
    model = Net()
    with backspot.instrument(model, markers=True):
        recording = record(step(model))
    marker = next(x for x in recording.labels if x.name == "backward: blocks.1.act (GELU)")
    node = next(x for x in recording.events if x.name == "GeluBackward0")
    around = [x.name for x in recording.events if x.name.startswith("autograd::engine") and
              x.contains(marker)]  # fmt: skip
    assert around == ["autograd::engine::evaluate_function: GeluBackward0"]
    assert marker.end <= node.start


def test_an_identity_does_not_claim_what_it_passes_on(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Tanh(), nn.Identity())
    with backspot.instrument(model, markers=True):
        assert record(step(model)).backward() == ["backward: 2 (Tanh)", "backward: 0 (Linear)"]


def test_an_identity_bears_a_label_only_where_somebody_hooks_it(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Identity())
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    with backspot.instrument(model, markers=True) as instrumentation:
        assert instrumentation.paths == ("", "0", "1")
        assert record(step(model)).backward() == ["backward: 1 (Identity)", "backward: 0 (Linear)"]
    with backspot.instrument(nn.Identity(), markers=True) as instrumentation:
        assert instrumentation.paths == ("",)


class Doubling(nn.Identity):
    def forward(self, x):
        return x * 2


def test_an_identity_with_a_forward_of_its_own_bears_a_label(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Identity(), Doubling())
    model[1].forward = lambda x: x * 2
    with backspot.instrument(model, markers=True) as instrumentation:
        assert instrumentation.paths == ("", "0", "1", "3")
        assert record(step(model)).backward() == [
            "backward: 3 (Doubling)",
            "backward: 1 (Identity)",
            "backward: 0 (Linear)",
        ]


def test_a_feature_belongs_to_the_module_that_made_it(record):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.early = nn.Linear(4, 4)
            self.late = nn.Bilinear(4, 4, 4)

        def forward(self, x):
            feature = self.early(x)
            return self.late(torch.relu(feature), feature)

    model = Skips()
    with backspot.instrument(model, markers=True):
        recording = record(step(model))
    assert recording.backward() == [
        "backward: late (Bilinear)",
        "backward: (Skips)",
        "backward: early (Linear)",
    ]


def test_a_node_made_outside_of_every_module_bears_no_marker(record):
    model = nn.Tanh()

    def run():
        x = torch.randn(3, 4, requires_grad=True)
        model(model(x).exp()).sum().backward()

    with backspot.instrument(model, markers=True):
        assert record(run).backward() == 2 * ["backward: (Tanh)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "had_here",
    [
        pytest.param(
            True,
            marks=[pytest.mark.slow, pytest.mark.xfail(reason="a node does not tell its thread")],
        ),
        False,
    ],
    ids=["with a number that the model had here", "with a number that is to come here"],
)
def test_a_node_made_on_another_thread_bears_no_marker(had_here, record):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    number = torch._C._autograd._get_sequence_nr
    made = []

    def make(last):
        x = torch.randn(2, 4, requires_grad=True)
        while number() <= last:
            x = x * 1
        made.append(x)

    def run():
        first = number()
        for _ in range(5):  # numbers that this thread knows as the model's
            model(torch.randn(2, 4))
        last = first + 1 if had_here else number() + 50
        thread = threading.Thread(target=make, args=(last,))
        thread.start()
        thread.join()
        model(made[0]).sum().backward()

    # A new thread counts from zero, and its number is reached soon.
    with backspot.instrument(model, markers=True), ThreadPoolExecutor(1) as new:
        found = new.submit(record, run).result().backward()
    assert found == ["backward: 1 (Tanh)", "backward: 0 (Linear)"]


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "node_creation_hook"), reason="needs torch 2.14"
)
@pytest.mark.parametrize(
    "name", slow_except([None], ["resnet18", "vit_tiny_patch16_224", "convnext_atto", None])
)
def test_every_marker_names_the_module_that_was_running_when_the_node_was_made(name, record):
    if name is None:
        model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
    else:
        timm = pytest.importorskip("timm")
        size = {"img_size": 32} if name.startswith("vit") else {}
        model, x = timm.create_model(name, **size), torch.randn(2, 3, 32, 32)
    running, truth, marked = [], {}, {}
    paths = {module: path for path, module in model.named_modules()}
    for module in paths:
        module.register_forward_pre_hook(lambda m, a: running.append(paths[m]))
        module.register_forward_hook(lambda m, a, o: (running.pop(), None)[1])

    def made(node):
        if running:
            truth[node._sequence_nr()] = running[-1]

    def collect(node, seen):
        pending = [node]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for hook in getattr(node, "pre_hooks", ()):
                marked[node._sequence_nr()] = hook
            pending.extend(child for child, _ in node.next_functions)
        return seen

    def run():
        with torch.autograd.graph.node_creation_hook(made):
            loss = model(x).sum()
        nodes = collect(loss.grad_fn, set())
        numbers = sorted(truth)
        order = sorted(
            (node for node in nodes if "AccumulateGrad" not in node.name()),
            key=lambda node: -node._sequence_nr(),
        )

        def probe(node):
            # Told at the same moment as the marker: the node after it is this one.
            at = bisect_right(numbers, node._sequence_nr()) - 1
            label = torch.profiler.record_function(f"truth: {truth.get(numbers[at], '')}")

            def tell(*_):
                with label:
                    pass

            return tell

        for node in order:
            node.register_prehook(probe(node))
        loss.backward()

    with backspot.instrument(model, markers=True):
        recording = record(run)
    told = [
        event.name for event in recording.events if event.name.startswith(("truth: ", "backward: "))
    ]
    pairs = [
        (told[i].removeprefix("backward: ").split(" ")[0], told[i + 1].removeprefix("truth: "))
        for i in range(len(told) - 1)
        if told[i].startswith("backward: ")
    ]
    assert len(pairs) > 5
    assert [p for p in pairs if p[0] != p[1] and not p[0].startswith("(")] == []
    assert all(real == "" for marker, real in pairs if marker.startswith("("))


def test_what_a_module_joins_bears_its_marker_too(record):
    class Joins(nn.Module):
        def forward(self, x):
            return torch.cat([x.exp(), x.tanh()])

    model = nn.Sequential(nn.Linear(4, 4), Joins())
    with backspot.instrument(model, markers=True):
        recording = record(step(model))
    joins = "backward: 1 (Joins)"
    assert recording.backward() == [joins, joins, joins, "backward: 0 (Linear)"]


@dataclass
class Held:
    first: torch.Tensor
    rest: list[torch.Tensor]


CONTAINERS = {
    "tuple": lambda x, y: (x, (None, y)),
    "dict": lambda x, y: {"x": x, "deeper": {"y": y}},
    "list": lambda x, y: [x, [[y]]],
    "dataclass": lambda x, y: Held(x, [y]),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_outputs_in_containers_are_looked_into(container, record):
    class Gives(nn.Module):
        def forward(self, x):
            made.extend([x.exp(), x.tanh()])
            return CONTAINERS[container](*made)

    made = []
    model = Gives()
    x = torch.randn(2, 4, requires_grad=True)
    with backspot.instrument(model, markers=True):
        recording = record(lambda: (model(x), (made[0] + made[1]).sum().backward()))
    assert recording.backward() == 2 * ["backward: (Gives)"]


def test_outputs_of_transformers_are_looked_into(record):
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.fc(x)
            return outputs.BaseModelOutput(
                last_hidden_state=hidden.tanh(), hidden_states=(x, hidden)
            )

    model = Hidden()
    with backspot.instrument(model, markers=True):
        recording = record(lambda: model(torch.randn(2, 4)).last_hidden_state.sum().backward())
    assert recording.backward() == ["backward: (Hidden)", "backward: fc (Linear)"]
