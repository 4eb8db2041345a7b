"""Node for node: the owner in the report is the module that PyTorch saw making the node."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from support.choice import slow_except  # noqa: E402
from support.modules import Checkpointed, Custom  # noqa: E402
from support.training import assert_true_owners, tells_creation  # noqa: E402

needs_creation = pytest.mark.skipif(
    not tells_creation, reason="the truth about nodes made within nodes needs torch 2.14"
)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return self.act(y)


class Slices(nn.Module):
    """Parts of memory are written in place, by modules and around them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.write = Write()
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        y[:, :2] = self.second(y * 1)[:, :2]
        y = self.write(y)
        left, right = y.chunk(2, dim=1)
        z = torch.cat([left * 2, right], dim=1)
        z[0] = 0
        z[:, 1:3].mul_(3)
        return self.second(z).sum()


class Write(nn.Module):
    def forward(self, y):
        y[:, 3].add_(1)
        view = y.view(-1, 2, 3)
        view[:, 1].add_((y[:, :3] * 1).tanh())
        return y


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.rnn = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        out, (state, _) = self.rnn(self.embedding(x))
        return self.head(out[:, -1]).sum() + state.square().mean()


def loss_of(model, *shape, integers=False):
    x = torch.randint(0, 7, shape) if integers else torch.randn(shape)
    return lambda: model(x).sum().backward()


MODELS = {
    "residual": (lambda: nn.Sequential(Residual(), Residual()), (2, 3, 5, 5), 8),
    "slices": (Slices, (4, 6), 15),
    "LSTM": (Recurrent, (3, 5), 8),
    "custom function": (Custom, (3, 4), 7),
    "reentrant checkpoints": (lambda: Checkpointed(reentrant=True), (3, 4), 14),
    "checkpoints": (lambda: Checkpointed(reentrant=False), (3, 4), 14),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 3, 8), 15),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_node_belongs_to_the_module_that_made_it(name, tmp_path):
    make, shape, least = MODELS[name]
    model = make()
    if name == "reentrant checkpoints" and not tells_creation:
        pytest.skip("the truth about nodes made within nodes needs torch 2.14")
    step = loss_of(model, *shape, integers=name == "LSTM")
    assert_true_owners(model, step, tmp_path, least=least)


@needs_creation
def test_every_node_of_a_double_backward_belongs_where_its_first_backward_does(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def step():
        x = torch.randn(5, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()

    assert_true_owners(model, step, tmp_path, least=15)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x).sin()


class Again(nn.Module):
    """A module runs again within another, and functional code does besides."""

    def __init__(self, outer, inner):
        super().__init__()
        self.outer, self.inner = outer, inner
        self.stem, self.part, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        x = checkpoint(self.twice, self.stem(x), use_reentrant=self.outer)
        x = checkpoint(self.part, x, use_reentrant=self.inner)
        x = checkpoint(lambda y: (y.tanh() * 2) @ self.weight, x, use_reentrant=self.outer)
        return checkpoint(self.last, x, use_reentrant=self.outer)

    def twice(self, x):
        return checkpoint(self.part, x.exp(), use_reentrant=self.inner).cos()


@needs_creation
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", slow_except([True], [True, False]))
def test_what_a_backward_makes_is_told_from_what_checkpoints_run_again(outer, inner, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Again(outer, inner), nn.Linear(4, 1))

    def step():
        model(torch.randn(3, 4)).sum().backward(create_graph=True)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        sum(gradient.square().sum() for gradient in gradients).backward()

    assert_true_owners(model, step, tmp_path, least=60)


class Energy(nn.Module):
    """Its forward differentiates: forces are a gradient of the inner model."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
        self.scale = nn.Linear(3, 3)

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_()
            energy = self.inner(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.scale(force)


@needs_creation
def test_a_gradient_taken_within_a_forward_is_told_from_the_backward(tmp_path):
    model = Energy()
    assert_true_owners(model, lambda: model(torch.randn(4, 3)).sum().backward(), tmp_path, least=12)


@needs_creation
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "patch_drop_rate": 0.5, "depth": 3}),
        pytest.param("resnet18", {}, marks=pytest.mark.slow),
        pytest.param("convnext_atto", {}, marks=pytest.mark.slow),
        pytest.param(
            "densenet121",
            {"memory_efficient": True, "block_config": (2, 2, 2, 2)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "swin_tiny_patch4_window7_224",
            {"img_size": 32, "window_size": 2, "depths": (2, 2, 2, 2)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_node_of_a_real_model_belongs_to_the_module_that_made_it(name, options, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=3, **options)
    assert_true_owners(model, loss_of(model, 2, 3, 32, 32), tmp_path, least=50)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_every_node_of_a_checkpointed_vit_belongs_to_the_module_that_made_it(
    reentrant, set_reentrant, tmp_path
):
    timm = pytest.importorskip("timm")

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=3)
    model.set_grad_checkpointing()
    set_reentrant(reentrant)
    assert_true_owners(model, loss_of(model, 2, 3, 32, 32), tmp_path, least=50)
