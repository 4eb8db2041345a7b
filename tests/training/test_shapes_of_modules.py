"""What modules take and give, share and hide: every shape of module trains and has its owners."""

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from support.training import check, owners  # noqa: E402


class Shared(nn.Module):
    """One module called many times, by others too."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.read = nn.Linear(4, 1)
        self.tied = self.read

    def forward(self, x):
        state = torch.zeros(x.shape[0], 4)
        total = 0
        for _ in range(20):
            state = self.cell(x, state)
            total = total + self.tied(state) + self.read(state)
        return total


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, times=5):
        x = self.fc(x).sin()
        return x if times == 1 else self(x, times - 1) * 2


@dataclass
class Output:
    main: torch.Tensor
    extra: tuple
    nothing: None = None


class Gives(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.inner = Inner(how)
        self.after = nn.Linear(4, 2)

    def forward(self, x):
        out = self.inner(x)
        if self.how == "dict":
            hidden = out["a"]["b"]
        elif self.how == "dataclass":
            hidden = out.extra[0]
        elif self.how == "nested":
            hidden = out[0][0][1][0]
        else:
            hidden = self.inner.kept
        return self.after(hidden)


class Inner(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x).tanh()
        if self.how == "dict":
            return {"a": {"b": y}, "none": None, "text": "x"}
        if self.how == "dataclass":
            return Output(x, (y, None))
        if self.how == "nested":
            return [(x, [y, None])], None
        self.kept = y
        return None


class KeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.inner = Keyword()

    def forward(self, *, query, scale=1.0):
        out, _ = self.attention(query=query, key=query, value=query, need_weights=False)
        return self.inner(value=out, scale=scale)


class Keyword(nn.Module):
    def forward(self, *, value, scale):
        return value.exp() * scale


class Packed(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(4, 5, bidirectional=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
        out, _ = self.rnn(packed)
        out, _ = nn.utils.rnn.pad_packed_sequence(out)
        return self.head(out)


def frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for index in (0, 4):
        model[index].requires_grad_(False)
    return model


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.after = nn.Linear(4, 2)

    def forward(self, x):
        return self.after(self.middle(self.before(x)))


def hooked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[1].register_forward_pre_hook(lambda module, args: (args[0].exp(),))
    model[2].register_full_backward_hook(lambda module, before, after: None)
    return model


def old_weight_norm():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh())


def parametrized(which):
    def make():
        normed = getattr(nn.utils.parametrizations, which)(nn.Linear(4, 4))
        return nn.Sequential(normed, nn.Tanh())

    return make


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh())


def step(model):
    out = model(torch.randn(3, 4))
    loss = out.square().sum()
    loss.backward()
    return loss


def found_in(make, run=step, **options):
    report = check(make, run, **options)
    own = {p: set(nodes) for p, nodes in owners(report).items() if not p.startswith("(")}
    assert not {"(forward not recorded)", "(ambiguous thread)"} & set(owners(report))
    return report, own


def test_a_shared_module_has_one_row_under_its_first_path():
    report, own = found_in(Shared)
    assert set(own) == {"", "cell", "read"}
    assert report["read"].row.recorded_calls == 2 * 40
    assert report["cell"].row.recorded_calls == 2 * 20
    assert owners(report)["read"]["AddmmBackward0"] == 40


def test_recursion():
    report, own = found_in(Recursive)
    assert own == {"": {"SinBackward0", "MulBackward0"}, "fc": {"AddmmBackward0", "TBackward0"}}
    assert report[""].row.recorded_calls == 10


@pytest.mark.parametrize("how", ["dict", "dataclass", "nested", "nothing"])
def test_outputs_of_every_kind(how):
    _, own = found_in(lambda: Gives(how))
    linear = {"AddmmBackward0", "TBackward0"}
    assert own == {"inner": {"TanhBackward0"}, "inner.fc": linear, "after": linear}


def test_keywords_only():
    def run(model):
        loss = model(query=torch.randn(2, 3, 4), scale=2.0).sum()
        loss.backward()
        return loss

    _, own = found_in(KeywordsOnly, run)
    assert own["inner"] == {"ExpBackward0", "MulBackward0"}
    assert set(own) == {"inner", "attention"}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_and_recurrent_nets(kind):
    def run(model):
        loss = model(torch.randn(3, 2, 4)).sum()
        loss.backward()
        return loss

    _, own = found_in(lambda: Packed(kind), run)
    assert set(own) <= {"", "rnn", "head"}
    assert {"rnn", "head"} <= set(own)


def test_frozen_parts_own_what_runs_through_them_and_nothing_else():
    report, own = found_in(frozen)
    assert set(own) == {"2", "3", "4"}
    assert "AddmmBackward0" in own["4"]
    assert not any("AccumulateGrad" in node.name for node in report["4"].row.nodes)


def test_inputs_that_need_a_gradient():
    def run(model):
        x = torch.randn(3, 4, requires_grad=True)
        model(x).sum().backward()
        return x.grad

    _, own = found_in(frozen, run)
    assert set(own) == {"0", "1", "2", "3", "4"}


@pytest.mark.parametrize("which", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_weights_belong_to_the_parametrization(which):
    _, own = found_in(parametrized(which))
    assert "AddmmBackward0" in own["0"]
    inside = [path for path in own if path.startswith("0.parametrizations.weight")]
    assert inside


def test_weight_norm_of_the_old_kind_and_hooks_of_others():
    _, own = found_in(old_weight_norm)
    assert "AddmmBackward0" in own["0"]
    assert set(own) == {"0", "1"}


def test_work_of_others_hooks_belongs_to_the_module_that_bears_them():
    _, own = found_in(hooked)
    assert "MulBackward0" in own["0"]
    assert "ExpBackward0" in own["1"]
    assert set(own) <= {"", "0", "1", "2"}


def test_lazy_modules():
    _, own = found_in(lazy)
    assert "AddmmBackward0" in own["0"]
    assert "NativeBatchNormBackward0" in own["1"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_belongs_to_the_module_around_it():
    def run(model):
        for _ in range(2):  # the second call optimizes
            loss = model(torch.randn(3, 4)).sum()
            loss.backward()
        return loss

    # PyTorch compares with itself only from the second model on: the first one's calls differ in
    # the last bit, without Backspot too.
    run(Scripted())
    _, own = found_in(Scripted, run)
    assert set(own) <= {"", "before", "after"}
    linear = {"AddmmBackward0", "TBackward0"}
    assert (own["before"], own["after"]) == (linear, linear)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices")
def test_data_parallelism_without_devices_passes_through():
    _, own = found_in(lambda: nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))
    assert set(own) == {"0", "1"}
