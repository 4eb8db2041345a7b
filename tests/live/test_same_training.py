"""Instrumented or not: the same loss, the same gradients, the same graph."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import backspot
from support.choice import slow_except
from support.modules import Residual


class Passing(nn.Identity):
    """Bears labels, which ``nn.Identity`` itself does not."""


class Views(nn.Module):
    """Views of memory that is changed in place, before and after the view is made."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.passing = Passing()
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        left, right = y[:, :3], y[:, 3:]
        left.mul_(2)
        y = self.passing(y)
        right = self.passing(right)
        parts = y.view(-1, 2, 3).unbind(1)
        z = self.second(torch.cat([parts[0], right], 1))
        z[:, 0] = 0
        z.add_(1)
        return self.passing(z.view(-1)[2:])


class StaleUnbind(nn.Module):
    """Reading grad_fn of such a part raises once its base has changed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.passing = Passing()

    def forward(self, x):
        y = self.linear(x) * 1
        parts = y.unbind(0)
        y.mul_(2)
        self.passing(parts[0])
        return y


class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.relu = nn.ReLU()

    def forward(self, x):
        self.feature = self.stem(x)
        y = self.relu(self.head(self.feature))
        return self.head(y + self.feature.tanh())


class Keyworded(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(4, 4, 4)

    def forward(self, *, x, y=None):
        return {"out": self.inner(input1=x, input2=x * 2), "deep": [{"none": y}, (x,)]}


@dataclass
class Output:
    loss: torch.Tensor
    hidden: tuple


class ReturnsDataclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.inner(x)
        return Output(hidden.sum(), (hidden, x))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
        packed, state = self.rnn(packed)
        return packed.data.sum() + state[0].sum()


Pair = namedtuple("Pair", "a b")


class ReturnsNamedTuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return Pair(self.inner(x), OrderedDict(x=x))


def parametrized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())


def first_tensor(output):
    if isinstance(output, torch.Tensor):
        return output.sum()
    if isinstance(output, Output):
        return output.loss
    if isinstance(output, dict):
        return output["out"].sum()
    return output[0].sum()


CASES = {
    "residual": (lambda: nn.Sequential(Residual(), Residual()), (2, 3, 5, 5)),
    "views": (Views, (4, 6)),
    "stale unbind": (StaleUnbind, (2, 4)),
    "held feature": (Held, (2, 4)),
    "keywords": (Keyworded, (2, 4)),
    "dataclass": (ReturnsDataclass, (2, 4)),
    "packed sequence": (Packed, (3, 2, 4)),
    "named tuple": (ReturnsNamedTuple, (2, 4)),
    "parametrized": (parametrized, (2, 4)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (2, 3, 8),
    ),
}


def train_once(case, graph_of, around):
    make, shape = CASES[case]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(shape)

    def step():
        loss = first_tensor(model(x=x) if case == "keywords" else model(x))
        step.graph = graph_of(loss)
        loss.backward()
        step.loss = loss.detach()

    around(model, step)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return step.loss, gradients, step.graph


@pytest.mark.parametrize("lines", [False, True], ids=["", "lines"])
@pytest.mark.parametrize("case", CASES)
def test_labels_change_neither_loss_nor_gradients_nor_graph(case, lines, graph_of, record):
    def labelled(model, step):
        with backspot.instrument(model, lines=lines):
            assert record(step).names

    loss, gradients, graph = train_once(case, graph_of, lambda model, step: step())
    loss2, gradients2, graph2 = train_once(case, graph_of, labelled)
    assert torch.equal(loss, loss2)
    assert gradients.keys() == gradients2.keys()
    assert all(torch.equal(gradients[name], gradients2[name]) for name in gradients)
    assert graph == graph2


@pytest.mark.parametrize("case", ["held feature", "transformer", "parametrized", "named tuple"])
def test_module_hooks_change_neither_loss_nor_gradients(case, graph_of, record):
    def labelled(model, step):
        with backspot.instrument(model, hooks="module"):
            assert record(step).names

    loss, gradients, _ = train_once(case, graph_of, lambda model, step: step())
    loss2, gradients2, _ = train_once(case, graph_of, labelled)
    assert torch.equal(loss, loss2)
    assert all(torch.equal(gradients[name], gradients2[name]) for name in gradients)


@pytest.mark.slow
@pytest.mark.timm
@pytest.mark.parametrize(
    "name",
    slow_except(["vit_tiny_patch16_224"], ["vit_tiny_patch16_224", "resnet18", "convnext_atto"]),
)
def test_labels_leave_real_models_as_they_are(name, graph_of, record):
    timm = pytest.importorskip("timm")
    size = {"img_size": 32} if name.startswith("vit") else {}

    def run(around):
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=3, **size)
        x = torch.randn(2, 3, 32, 32)

        def step():
            loss = model(x).square().sum()
            step.graph = graph_of(loss)
            loss.backward()

        around(model, step)
        return [p.grad for p in model.parameters()], step.graph

    def labelled(model, step):
        with backspot.instrument(model, markers=True):
            assert len(record(step).backward()) > 10

    gradients, graph = run(lambda model, step: step())
    gradients2, graph2 = run(labelled)
    assert graph == graph2
    assert all(map(torch.equal, gradients, gradients2))


def test_a_stale_view_is_counted_and_not_asked(record):
    model = StaleUnbind()
    with backspot.instrument(model, markers=True):
        names = record(lambda: model(torch.randn(2, 4)).sum().backward()).names
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(torch.randn(2, 4)).sum().backward()
    assert (
        "Views that were changed in place, at passing (Passing), have no 'backward:' label in a "
        "trace viewer. The numbers here do not need these labels."
    ) in backspot.locate(profiler).warnings
    assert names.count("unmarked: passing (Passing)") == 1
    assert names[-2:] == ["backward: (StaleUnbind)", "backward: linear (Linear)"]


class StaleView(nn.Module):
    """Asking such a view for its node makes one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.passing = Passing()

    def forward(self, x):
        y = self.linear(x) * 1
        part = y[:, :2]
        y.mul_(2)
        self.passing(part)
        return y


def test_looking_at_a_view_of_changed_memory_makes_no_node(record):
    model, x = StaleView(), torch.randn(2, 4)
    number = torch._C._autograd._get_sequence_nr
    taken = []

    def forward():
        before = number()
        model(x)
        taken.append(number() - before)

    record(forward)
    with backspot.instrument(model):
        record(forward)
    assert taken[0] == taken[1] > 0


def test_state_dict_is_unchanged():
    model = Residual()
    before = list(model.state_dict())
    with backspot.instrument(model):
        assert list(model.state_dict()) == before
        model.load_state_dict(model.state_dict())


def test_a_module_that_gives_back_its_input_is_marked_where_it_changed_it(record):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Tanh())
    model.eval()  # the dropout hands on the very tensor
    with backspot.instrument(model, markers=True):
        names = record(lambda: model(torch.randn(3, 4)).sum().backward()).backward()
    assert names == ["backward: 3 (Tanh)", "backward: 1 (ReLU)", "backward: 0 (Linear)"]


def test_labels_add_no_operator_to_the_trace(record):
    model = Residual()
    x = torch.randn(2, 3, 5, 5)

    def operators():
        recording = record(lambda: model(x).sum().backward())
        return [event.name for event in recording.events if event.name.startswith("aten::")]

    plain = operators()
    model.zero_grad()
    with backspot.instrument(model):
        assert operators() == plain


def test_a_mode_of_the_user_hears_of_no_operator_of_ours(record):
    class Listening(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.heard = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.heard.append(str(function))
            return function(*args, **(kwargs or {}))

    model = Residual()
    x = torch.randn(2, 3, 5, 5)

    def heard():
        model.zero_grad()
        with Listening() as mode:
            model(x).sum().backward()
        return mode.heard

    plain = heard()
    with backspot.instrument(model, markers=True):
        found = []
        recording = record(lambda: found.extend(heard()))
    assert found == plain
    assert "backward: conv (Conv2d)" in recording.backward()
