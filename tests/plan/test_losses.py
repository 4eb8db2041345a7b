"""A loss outside of the model runs again after its copies, where it gives what the step gave."""

import random
import statistics
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from backspot.live.torch_internals.process import innermost_mode
from support.planning import planned, report_of, settings, stepping
from support.trainings import Scaled, Training

pytestmark = pytest.mark.usefixtures("short", "uncompiled")


@pytest.fixture(scope="module")
def report():
    """A report of a step of which a loss outside of the model is a large part."""
    return report_of(forward=20, loss=10, backward=20)


def why_no_loss(plan):
    """Why the loss did not run again, ``""`` if it did."""
    assert not plan.why_not
    bf16 = settings(plan)["bf16"]
    said = bf16.note.partition("was not tried: ")[2]
    runs = "with its loss" in plan.what
    assert runs == (not said), (plan.what, bf16)
    assert runs or bf16.high_ns - bf16.low_ns >= 10_000_000  # half of the loss on each side
    return said


class Center(nn.Module):
    """A loss with parameters, and with a mean that it writes to in each step."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("center", torch.zeros(4))

    def forward(self, out):
        self.center.mul_(0.9).add_(0.1 * out.detach().mean(0))
        return ((out - self.center) * self.scale).square().mean()


LABELS = torch.arange(8) % 4
SOFT = torch.randn(8, 4).softmax(1)


def masked(out):
    out[:, 0] = -10.0
    mask = (LABELS > 0).float()
    return (
        functional.cross_entropy(out, LABELS, reduction="none") * mask
    ).sum() / mask.sum().item()


def by_columns(out):
    found = torch.zeros(())
    for column in out.unbind(1):
        found = found + column.square().mean()
    found += torch.max(out, dim=1).values.mean()
    return found


def logged(out):
    with torch.no_grad():
        right = (out.argmax(1) == LABELS).float().mean()
    loss = functional.cross_entropy(out, LABELS)
    LOG.append((loss.item(), right.item()))
    return loss / 4


LOG = []
DROPPING = nn.Dropout(0.5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.rand(4))(out, LABELS),
        lambda out: functional.kl_div(out.log_softmax(1), SOFT, reduction="batchmean"),
        lambda out: functional.mse_loss(DROPPING(out), torch.randn_like(out)),
        lambda out: torch.stack([out[one == LABELS].var() for one in range(4)]).sum(),
        masked,
        by_columns,
        logged,
    ],
    ids=["module", "soft", "random", "indexed", "in place", "loop", "logged"],
)
def test_a_loss_of_functions_of_pytorch_runs_again(report, loss):
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))
    plan = planned(report, stepping(model, torch.randn(8, 4), loss=loss), model)
    assert not why_no_loss(plan)
    assert settings(plan)["bf16"].difference.loss is not None


def test_a_loss_of_a_model_s_own_weights_trains_those_of_its_copy(report):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))
    words = torch.randint(0, 50, (4, 6))

    def tied(out):
        scores = out @ model[0].weight.t()
        return functional.cross_entropy(scores.flatten(0, 1), words.flatten())

    before = [one.clone() for one in model.parameters()]
    plan = planned(report, stepping(model, words, loss=tied), model)
    assert not why_no_loss(plan)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_loss_has_what_it_writes_to_once_a_step_and_its_parameters_keep_their_gradients(report):
    model, loss = nn.Linear(4, 4), Center()
    x = torch.randn(8, 4)

    def step():
        loss.zero_grad()
        stepping(model, x, loss=loss)()

    step()
    step()
    expected = loss.center.clone(), loss.scale.grad.clone()
    loss.center.zero_()
    step()
    plan = planned(report, step, model)
    assert not why_no_loss(plan)
    assert torch.equal(loss.center, expected[0])
    assert torch.equal(loss.scale.grad, expected[1])


def test_nothing_but_functions_of_pytorch_runs_again(report):
    model = nn.Linear(4, 4)
    LOG.clear()
    planned(report, stepping(model, torch.randn(8, 4), loss=logged), model)
    assert len(LOG) == 1


def test_batches_that_accumulate_have_the_loss_of_the_first(report):
    model = nn.Linear(4, 4)

    def step():
        model.zero_grad()
        for _ in range(3):
            (functional.cross_entropy(model(torch.randn(8, 4)), LABELS) / 3).backward()

    plan = planned(report, step, model)
    assert not why_no_loss(plan)
    assert plan.batch == 24


def test_a_scaled_loss_runs_again(report):
    model = nn.Linear(4, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = lambda out: scaler.scale(out.square().mean())  # noqa: E731
    assert not why_no_loss(planned(report, stepping(model, torch.randn(8, 4), loss=loss), model))


class Adversarial:
    """A generator and a discriminator, with a backward for each call or for both together."""

    def __init__(self, *, together):
        torch.manual_seed(0)
        self.made, self.judged, self.together = nn.Linear(4, 4), nn.Linear(4, 1), together
        both = (self.made, self.judged)
        self.optimizers = [torch.optim.Adam(one.parameters(), 1e-2) for one in both]
        self.losses = []

    def loss(self, out, *, real):
        target = torch.ones_like(out) if real else torch.zeros_like(out)
        return functional.binary_cross_entropy_with_logits(out, target)

    def step(self):
        of_made, of_judged = self.optimizers
        fake = self.made(torch.randn(8, 4))
        of_judged.zero_grad()
        one = self.loss(self.judged(torch.randn(8, 4)), real=True)
        if not self.together:
            one.backward()
        other = self.loss(self.judged(fake.detach()), real=False)
        (one + other if self.together else other).backward()
        of_judged.step()
        of_made.zero_grad()
        loss = self.loss(self.judged(fake), real=True)
        loss.backward()
        of_made.step()
        self.losses.append(loss.item())


@pytest.mark.parametrize("together", [False, True])
def test_each_backward_of_a_step_has_its_loss(report, together):
    plain, tried = Adversarial(together=together), Adversarial(together=together)
    torch.manual_seed(1)
    for _ in range(4):
        plain.step()
    torch.manual_seed(1)
    tried.step()
    plan = planned(report, tried.step, tried.made, tried.judged, optimizers=tried.optimizers)
    tried.step()
    tried.step()
    assert ("several calls" if together else "") in why_no_loss(plan)
    assert together or not why_no_loss(plan)
    assert tried.losses == plain.losses


class Noted(nn.Linear):
    """Notes whether its output is held by anybody when its backward runs."""

    held = []  # noqa: RUF012 - for all copies

    def forward(self, x):
        hidden = super().forward(x)
        out = hidden * 2.0
        reference = weakref.ref(out)
        hidden.register_hook(lambda _: Noted.held.append(reference() is not None))
        return out


@pytest.mark.parametrize("holds", [False, True])
def test_copies_hold_in_their_backward_what_the_step_holds(report, holds):
    model, x = Noted(4, 4), torch.randn(8, 4)

    def step():
        model.zero_grad()
        if not holds:
            model(x).sum().mul(2.0).backward()
            return
        out = model(x)
        out.sum().mul(2.0).backward()

    Noted.held.clear()
    assert not why_no_loss(planned(report, step, model))
    assert Noted.held[0] == holds
    assert statistics.mode(Noted.held) == holds  # what is compared holds its results


# What is not run again ----------------------------------------------------------------------------


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


TABLE = torch.ones(4, 4)
NORM = nn.BatchNorm1d(4)
OWN = torch.Generator()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda out: (functional.embedding(LABELS, TABLE, max_norm=1.0) * out).mean(), "embedding"),
        (lambda out: NORM(out).square().mean(), ""),  # its statistics are those of copies
        (lambda out: Doubling.apply(out).square().mean(), "an autograd function of its own"),
        (lambda out: (out * torch.rand(8, 4, generator=OWN)).mean(), "rand cannot run again"),
        (lambda out: (out.mean() * random.choice([1, 1])).square(), ""),  # a constant
        (
            lambda out: (
                torch.autograd.grad(out.sum(), out, create_graph=True)[0].mean() + out.sum()
            ),
            "grad cannot run again",
        ),
    ],
    ids=["renormed", "statistics", "autograd function", "generator", "constant", "gradient"],
)
def test_what_runs_again_is_only_what_has_no_effect_elsewhere(report, loss, said):
    OWN.manual_seed(0)
    NORM.reset_running_stats()
    TABLE.fill_(1.0)
    model = nn.Linear(4, 4)
    plan = planned(report, stepping(model, torch.randn(8, 4), loss=loss), model)
    if plan.why_not:  # an output that goes through two backwards
        assert "more than one backward" in plan.why_not
        return
    found = why_no_loss(plan)
    assert (said in found) if said else not found
    assert torch.allclose(TABLE.norm(dim=1), torch.tensor(1.0 if said == "embedding" else 2.0))
    assert NORM.num_batches_tracked == (said == "" and "NORM" in loss.__code__.co_names)


def test_what_the_loss_is_not_made_by_runs_once(report):
    model, total = nn.Linear(4, 4), torch.zeros(4)

    def loss(out):
        total.add_(out.detach().sum(0))  # a metric
        torch.rand(3, generator=OWN)
        return out.square().mean()

    x = torch.randn(8, 4)
    assert not why_no_loss(planned(report, stepping(model, x, loss=loss), model))
    assert torch.equal(total, model(x).sum(0))


def test_a_loss_of_two_calls_is_not_run_again(report):
    model = nn.Linear(4, 4)

    def step():
        model.zero_grad()
        one, other = model(torch.randn(8, 4)), model(torch.randn(8, 4))
        functional.cosine_similarity(one, other).mean().backward()

    assert "several calls" in why_no_loss(planned(report, step, model))


def test_a_loss_that_no_mode_sees_is_not_run_again(report):
    def loss(out):
        with torch._C.DisableTorchFunction():
            hidden = out.sum()
        return out.square().mean() + hidden

    model = nn.Linear(4, 4)
    plan = planned(report, stepping(model, torch.randn(8, 4), loss=loss), model)
    assert "more than the outputs" in why_no_loss(plan)


def test_a_loss_that_is_another_one_when_it_runs_again_is_refused(report):
    def loss(out):
        torch.manual_seed(0)  # no function of tensors
        return (out * torch.rand(8, 4)).square().mean()

    model = nn.Linear(4, 4)
    plan = planned(report, stepping(model, torch.randn(8, 4), loss=loss), model)
    assert "gives another loss" in why_no_loss(plan)


def test_a_step_without_one_backward_by_its_loss_is_not_run_again(report):
    model = nn.Linear(4, 4)

    def step():
        model.zero_grad()
        torch.autograd.backward([model(torch.randn(8, 4)).square().mean()])

    assert "no backward of it was seen" in why_no_loss(planned(report, step, model))


def test_a_loss_that_runs_compiled_code_has_no_mode_around_it(report, monkeypatch):
    modes = []
    model = nn.Linear(4, 4)

    def loss(out):
        modes.append(innermost_mode())
        return out.square().mean()

    step = stepping(model, torch.randn(8, 4), loss=loss)
    planned(report, step, model)
    assert modes.pop() is not None
    assert innermost_mode() is None
    monkeypatch.setattr("backspot.live.plan.planning.compilations", lambda: 1)
    assert "compiled code" in why_no_loss(planned(report, step, model))
    assert modes.pop() is None


def _kept_out(out):
    """A loss of which a digit that bfloat16 has not decides, kept from autocast."""
    with torch.autocast("cpu", enabled=False):
        a = (out.float() * 0 + 1.0) * torch.tensor([1.0, 1.0 + 2**-12, 1.0, 1.0])
        far = (a @ a.t() - 4.0).abs()
    return far.mean() * 1000 + out.float().mean() * 0


def test_numbers_that_are_kept_from_autocast_have_all_digits(report):
    model = nn.Linear(4, 4)
    step = stepping(model, torch.randn(8, 4), loss=_kept_out)
    plan = planned(report, step, model)
    assert not why_no_loss(plan)
    assert settings(plan)["bf16"].difference.loss < 0.05


@pytest.mark.parametrize("kind", ["functions", "a default device"])
def test_a_mode_that_the_step_leaves_entered_is_alone_there_afterwards(report, kind):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    mode = Mode() if kind == "functions" else torch.device("cpu")
    model = nn.Linear(4, 4)

    def loss(out):
        mode.__enter__()
        return out.square().mean()

    try:
        planned(report, stepping(model, torch.randn(8, 4), loss=loss), model)
        found = torch._C._len_torch_function_stack()
    finally:
        mode.__exit__(None, None, None)
    assert found == 1
    assert innermost_mode() is None


def test_tensors_of_a_step_can_be_swapped_and_the_loss_does_not_run_again(report):
    model = nn.Linear(4, 4)

    def loss(out):
        torch.utils.swap_tensors(MOVING, torch.randn(8, 4))
        return (out - MOVING).square().mean()

    plan = planned(report, stepping(model, torch.randn(8, 4), loss=loss), model)
    assert "swaps tensors" in why_no_loss(plan)


MOVING = torch.randn(8, 4)


# The training stays as it was ---------------------------------------------------------------------


class Penalised(Training):
    """A loss of its parameters too, with dropout, written in place."""

    def step(self):
        index = torch.randint(0, 300, (4, 8))
        self.optimizer.zero_grad()
        out = self.model(index)
        loss = functional.cross_entropy(functional.dropout(out, 0.2), index[:, 0] % 4)
        loss += 1e-3 * sum(one.square().sum() for one in self.model.parameters())
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


@pytest.mark.parametrize("kind", [Training, Scaled, Penalised])
def test_a_training_whose_loss_runs_again_goes_on_bit_for_bit(report, kind):
    plain = kind()
    for _ in range(4):
        plain.step()
    tried = kind()
    tried.step()
    plan = planned(report, tried.step, tried.model, optimizers=[tried.optimizer])
    tried.step()
    tried.step()
    assert "with its loss" in plan.what, plan
    assert tried.state() == plain.state()


# What is not PyTorch's alone ----------------------------------------------------------------------


def test_a_function_in_place_of_pytorchs_runs_once_a_step(report, monkeypatch):
    """PyTorch hands it to a mode, and what it calls within to nobody."""
    original, calls = functional.cross_entropy, []

    def doubled(*args, **kwargs):
        calls.append(1)
        return 2 * original(*args, **kwargs)

    monkeypatch.setattr(functional, "cross_entropy", doubled)
    model = nn.Linear(6, 4)
    step = stepping(
        model, torch.randn(8, 6), loss=lambda out: functional.cross_entropy(out, LABELS)
    )
    plan = planned(report, step, model)
    assert len(calls) == 1
    assert why_no_loss(plan).endswith("cross_entropy is not PyTorch's own, and would run twice")


def test_code_that_a_function_is_given_does_not_run_again(report):
    own, calls = nn.Parameter(torch.ones(4)), []

    def distance(a, b):
        calls.append(1)
        return ((a - b) * own).square().sum(1)

    def loss(out):
        return functional.triplet_margin_with_distance_loss(
            out, out.flip(0), out.roll(1, 0), distance_function=distance
        )

    model = nn.Linear(6, 4)
    plan = planned(report, stepping(model, torch.randn(8, 6), loss=loss), model)
    assert len(calls) == 2
    assert "cannot run again apart from the training" in why_no_loss(plan)


def test_memory_of_an_array_is_written_once(report):
    numpy = pytest.importorskip("numpy")
    seen = numpy.zeros(4, numpy.float32)

    def loss(out):
        torch.as_tensor(seen).add_(1)
        return out.square().mean()

    model = nn.Linear(6, 4)
    plan = planned(report, stepping(model, torch.randn(8, 6), loss=loss), model)
    assert not plan.why_not
    assert seen.tolist() == [1, 1, 1, 1]


def test_a_tensor_that_answers_its_own_functions_alone_is_not_asked(report):
    class Strict(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is not torch.Tensor.mul:
                raise TypeError(func)
            with torch._C.DisableTorchFunctionSubclass():
                return torch.Tensor.mul(*(one.as_subclass(torch.Tensor) for one in args))

    weight = torch.ones(4).as_subclass(Strict)
    model = nn.Linear(6, 4)
    step = stepping(model, torch.randn(8, 6), loss=lambda out: (out * weight).sum())
    assert why_no_loss(planned(report, step, model)) == "it has a Strict"
