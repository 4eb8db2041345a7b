"""Steps whose cause is known by construction: what a report says of it, and what not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import backspot
from backspot import Finding, Report

pytestmark = pytest.mark.slow
profile = partial(backspot.profile, trials="none", steps=2, warmup=1, unprofiled=2)


def found(report: Report, rule: str) -> Finding | None:
    return next((one for one in report.findings if one.rule == rule), None)


class Triplet(nn.Module):
    """A loss of many operators, none of which runs often."""

    def forward(self, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        d = torch.cdist(e, e)
        same, far = y[:, None] == y[None], d.detach()
        s, o = far.masked_fill(same, float("inf")).sort(1)
        k = torch.searchsorted(s, far.contiguous(), right=True).clamp(max=len(e) - 1)
        index, known = o.gather(1, k), s.gather(1, k).isfinite()
        nearest = far.masked_fill(same, -1).argmax(1)[:, None]
        negative = torch.where(known, d.gather(1, index), d.gather(1, nearest))
        positive = same & ~torch.eye(len(e), dtype=torch.bool)
        return torch.relu((d - negative + 0.2) * positive).sum() / positive.sum()


@pytest.mark.parametrize("labelled", [True, False])
def test_a_loss_of_many_operators_is_no_loop_around_the_model(labelled: bool) -> None:
    """Nothing in it is done for each of many tensors, labelled as a module or not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    loss, x, y = Triplet(), torch.randn(128, 64), torch.randint(0, 32, (128,))

    def step() -> None:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()

    models: dict[str, nn.Module] = {"": net, "loss": loss} if labelled else {"": net}
    one = found(profile(step, models), "code-around-model")
    assert one is None or "torch._foreach_" not in one.remedy


def test_masks_for_each_class_get_a_remedy_for_masks() -> None:
    torch.manual_seed(0)
    net = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, y = torch.randn(512, 16), torch.randint(0, 200, (512,))

    def by_class(scores: torch.Tensor) -> torch.Tensor:
        return torch.stack([scores[y == one].square().sum() for one in range(200)]).mean()

    def step() -> None:
        optimizer.zero_grad()
        by_class(net(x)).backward()
        optimizer.step()

    one = found(profile(step, net), "code-around-model")
    assert one is not None
    assert "torch._foreach_" not in one.remedy
    assert "index_add_" in one.remedy
    assert one.saves is not None
    assert one.saves.at_best


CURVES = [torch.sin, torch.cos, torch.tan, torch.exp, torch.tanh, torch.erf, torch.atan]
CURVES += [torch.sinh, torch.cosh, torch.asinh, torch.sigmoid, torch.expm1, torch.sinc]
CURVES += [torch.log1p, torch.sqrt, torch.rsqrt, torch.exp2, torch.erfc, torch.square, torch.abs]
CURVES += [torch.log2, torch.log10, torch.log]


@pytest.mark.parametrize(
    ("prepared", "is_found"),
    [
        (lambda x: x @ x, False),
        (lambda x: sum(curve(x[:256]).mean() for curve in CURVES), True),
    ],
    ids=["one product", "many operators"],
)
def test_what_few_operators_compute_before_the_model_is_no_code_around_it(
    prepared: Callable[[torch.Tensor], torch.Tensor], is_found: bool
) -> None:
    torch.set_num_threads(1)
    net, x, large = nn.Linear(16, 16), torch.randn(512, 16), torch.rand(1024, 1024) + 0.1
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def prepare() -> torch.Tensor:
        return prepared(large)

    def step() -> None:
        shift = prepare().mean() * 1e-9
        optimizer.zero_grad()
        (net(x) + shift).square().mean().backward()
        optimizer.step()

    report = profile(step, net)
    assert max(report.phases, key=lambda one: one.wall_ns).name == "other"
    assert (found(report, "code-around-model") is not None) is is_found


def differentiating(loss: Callable[[nn.Module], torch.Tensor]) -> Finding:
    torch.manual_seed(0)
    wide = 128
    net = nn.Sequential(
        *(nn.Linear(3, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 1))
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss(net).backward()
        optimizer.step()

    one = found(profile(step, net), "second-backward")
    assert one is not None
    return one


def inputs() -> list[torch.Tensor]:
    return [torch.rand(4096, 1, requires_grad=True) for _ in range(3)]


def at_once(net: nn.Module) -> torch.Tensor:
    parts = inputs()
    result = net(torch.cat(parts, 1)).sum()
    return sum(one.square().mean() for one in torch.autograd.grad(result, parts, create_graph=True))


def one_by_one(net: nn.Module) -> torch.Tensor:
    parts = inputs()
    result = net(torch.cat(parts, 1)).sum()
    gradients = (torch.autograd.grad(result, one, create_graph=True)[0] for one in parts)
    return sum(one.square().mean() for one in gradients)


def test_gradients_that_a_step_is_for_are_not_said_to_be_saved() -> None:
    one = differentiating(at_once)
    assert one.saves is None
    assert "they are needed" in one.remedy


def penalized(net: nn.Module, *, on: int = 4096) -> torch.Tensor:
    """A loss of all rows, and a penalty on the slope at some of them."""
    x = torch.rand(4096, 3)
    some = x[:on].requires_grad_()
    (slope,) = torch.autograd.grad(net(some).sum(), some, create_graph=True)
    return net(x.detach()).square().mean() + slope.square().mean()


def with_boundary(net: nn.Module, *, on: int = 512) -> torch.Tensor:
    """The slopes are what is trained, and a few rows say where the function begins."""
    inside = torch.rand(4096, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(net(inside).sum(), inside, create_graph=True)
    return (slope.sum(1) - 1).square().mean() + net(torch.rand(on, 3)).square().mean()


def of_second_order(net: nn.Module) -> torch.Tensor:
    """An equation with a second derivative, and as many rows that say where it begins."""
    inside = torch.rand(4096, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(net(inside).sum(), inside, create_graph=True)
    (curve,) = torch.autograd.grad(slope[:, 0].sum(), inside, create_graph=True)
    return curve[:, 0].square().mean() + net(torch.rand(4096, 3)).square().mean()


def test_a_penalty_beside_a_loss_of_the_same_modules_has_the_price_of_an_eighth_of_it() -> None:
    one = differentiating(penalized)
    assert one.saves is not None
    assert one.saves.at_best
    assert one.saves.ns <= one.wall_ns
    assert "If it is a penalty" in one.seen


@pytest.mark.parametrize("loss", [with_boundary, of_second_order])
def test_the_terms_of_an_equation_have_no_price_where_a_loss_is_beside_them(loss) -> None:
    one = differentiating(loss)
    assert one.saves is None
    assert "If it is a penalty" not in one.seen


def test_passes_that_run_the_same_nodes_again_are_found_and_priced() -> None:
    one = differentiating(one_by_one)
    assert one.title == "Backward passes run the same nodes again"
    assert "torch.autograd.grad(result, [a, b, c])" in one.remedy
    assert one.saves is not None
    assert one.saves.at_best
    assert one.saves.ns < one.wall_ns


class Cell(nn.Module):
    """Small operators on a few numbers, beside one large product."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Linear(width, width)

    def forward(self, x):
        few = x[:1, :8]
        for _ in range(2):
            few = few.sin().exp().neg().tanh()
        return self.weight(x) + few.sum()


class Refined(nn.Module):
    """One module, called again and again."""

    def __init__(self, width):
        super().__init__()
        self.cell = Cell(width)

    def forward(self, x):
        for _ in range(16):
            x = self.cell(x)
        return x


def test_the_product_of_a_module_that_is_called_again_is_no_part_of_the_loops_price():
    torch.set_num_threads(1)
    model, x = Refined(512), torch.randn(256, 512)
    found = profile(lambda: model(x).mean().backward(), model, steps=5, unprofiled=5)
    products = sum(
        row.wall_ns + row.forward_ns for row in found.modules if row.path == "cell.weight"
    )
    assert products > found.step_ns / 2
    for one in found.findings:
        if one.rule == "operator-loop":
            assert one.wall_ns < found.step_ns / 2, one.seen


@pytest.mark.parametrize("when", ["after", "before", "within"])
def test_what_the_training_may_need_of_calls_without_a_backward_has_no_price(when: str) -> None:
    """An evaluation comes after it; a rollout or a critic returns what is trained on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer, x = torch.optim.SGD(net.parameters(), lr=1e-3), torch.randn(256, 64)

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            state = x
            for _ in range(30):
                state = net(state)
            return state

    def step() -> None:
        optimizer.zero_grad()
        inputs = without_gradients() if when == "before" else x
        loss = net(inputs).square().mean()
        if when == "within":
            loss = loss * without_gradients().mean()
        loss.backward()
        optimizer.step()
        if when == "after":
            without_gradients()

    one = found(profile(step, net), "forward-only")
    assert one is not None
    assert (one.saves is not None) is (when == "after")
    assert ("may need what they return" in one.seen) is (when != "after")


@pytest.mark.parametrize("is_drawn", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_drawn_for_this_update_is_no_finding_and_for_the_next_one_has_no_price(
    is_drawn, when
):
    """A rollout draws from what the model returns; an evaluation compares."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer, x = torch.optim.SGD(net.parameters(), lr=1e-3), torch.randn(256, 64)

    @torch.no_grad()
    def without_gradients() -> None:
        state = x
        for _ in range(30):
            scores = net(state)
            chosen = scores.softmax(-1).multinomial(1) if is_drawn else scores.argmax(-1)
            state = x + (chosen == 3).float().mean()

    def step() -> None:
        if when == "before":
            without_gradients()
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        if when == "after":
            without_gradients()

    one = found(profile(step, net), "forward-only")
    assert (one is None) is (is_drawn and when == "before")
    assert one is None or (one.saves is not None) is (not is_drawn and when == "after")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cells_in_double_precision_are_no_finding_without_shapes_too(dtype: torch.dtype) -> None:
    """A whole LSTM in fp64 takes as long as a loop over its cells."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(8, 32).to(dtype)
    optimizer, x = torch.optim.SGD(cell.parameters(), lr=1e-3), torch.randn(300, 16, 8, dtype=dtype)

    def step() -> None:
        optimizer.zero_grad()
        state = x.new_zeros(16, 32), x.new_zeros(16, 32)
        for inputs in x:
            state = cell(inputs, state)
        state[0].square().mean().backward()
        optimizer.step()

    one = found(profile(step, {"cell": cell}), "recurrent-cells")
    assert (one is not None) is (dtype == torch.float32)


class Channels(nn.Module):
    """Goes through channels one by one, with small operators, and a longer one if asked."""

    def __init__(self, longer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(48))
        self.longer = longer

    def forward(self, x):
        parts = []
        for channel, scale in zip(x.unbind(1), self.weight.unbind(), strict=True):
            scale = ((scale * 2 + 1).tanh() - 0.5).abs() + 0.1
            value = channel * scale if self.longer else channel[0, 0] * scale
            parts.append(value.cumsum(-1).mean() if self.longer else value.mean())
        return torch.stack(parts)


@pytest.mark.parametrize("longer", [False, True])
def test_a_loop_has_a_bound_only_where_its_turns_run_nothing_longer(longer):
    torch.set_num_threads(1)
    model, x = Channels(longer), torch.randn(8, 48, 96, 96)
    found = profile(lambda: model(x).mean().backward(), model, steps=5, unprofiled=5)
    (loop,) = (one for one in found.findings if one.rule == "operator-loop")
    assert ("Longer operators of its turns are not counted" in loop.seen) == longer
    assert loop.saves.at_best == (not longer)


class Before(Channels):
    """Has long products in front of a loop of small operators."""

    def forward(self, x):
        large = x.reshape(-1)[: 128 * 128].view(128, 128)
        for _ in range(50):  # as many as the loop has turns
            large = large @ large * 1e-3
        return super().forward(x) + large.mean()


def test_long_operators_before_a_loop_are_none_of_its_turns():
    torch.set_num_threads(1)
    model, x = Before(longer=False), torch.randn(8, 48, 96, 96)
    found = profile(lambda: model(x).mean().backward(), model, steps=5, unprofiled=5)
    (loop,) = (one for one in found.findings if one.rule == "operator-loop")
    assert "Longer operators" not in loop.seen
