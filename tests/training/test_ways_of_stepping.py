"""Ways of making a step: accumulation, several losses, mixed precision, higher derivatives."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import backspot  # noqa: E402
from support.leftovers import hooks_on  # noqa: E402
from support.training import check, cpu_profile, owners, same, train  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.act = nn.Tanh()
        self.second = nn.Linear(8, 1)

    def forward(self, x):
        return self.second(self.act(self.first(x)) * 2)


OWN = {
    "": {"MulBackward0": 1},
    "first": {"AddmmBackward0": 1, "TBackward0": 1},
    "act": {"TanhBackward0": 1},
    "second": {"AddmmBackward0": 1, "TBackward0": 1},
}


def times(count, found=OWN):
    return {path: {name: n * count for name, n in nodes.items()} for path, nodes in found.items()}


def of_modules(report):
    return {path: nodes for path, nodes in owners(report).items() if not path.startswith("(")}


def test_gradient_accumulation_is_several_passes_in_one_step():
    optimizers = {}

    def step(model):
        optimizer = optimizers.setdefault(model, torch.optim.SGD(model.parameters(), 0.1))
        losses = []
        for _ in range(3):
            loss = model(torch.randn(4, 6)).mean() / 3
            loss.backward()
            losses.append(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return losses

    report = check(Net, step)
    assert of_modules(report) == times(3)
    assert len(report.passes) == 6
    assert len({run.nodes for run in report.passes}) == 1
    assert (report.step_unit, report.steps) == ("optimizer step", 2)


@pytest.mark.parametrize("scaled", [False, True])
def test_autocast_with_a_scaler(scaled):
    def step(model):
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 6)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    found = of_modules(check(Net, step))
    # The casts are the module's whose operator asked for them.
    assert found["first"]["ToCopyBackward0"] >= 1
    assert found["second"]["ToCopyBackward0"] >= 1
    assert found["first"]["AddmmBackward0"] == 1


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Net()
        self.critic = Net()
        self.critic.first = nn.Linear(1, 8)


def test_two_networks_with_a_backward_each():
    def step(model):
        noise = torch.randn(4, 6)
        fake = model.generator(noise)
        critic_loss = model.critic(torch.randn(4, 1)).mean() - model.critic(fake.detach()).mean()
        critic_loss.backward()
        generator_loss = -model.critic(fake).mean()
        generator_loss.backward()
        return critic_loss, generator_loss

    # A step that something held up does not count, and each pass is another kind of step here.
    reports = (check(Adversaries, step) for _ in range(9))
    report = next(one for one in reports if not one.hiccups)
    found = of_modules(report)
    assert found["generator.first"] == times(1)["first"]
    # The critic is called twice for one and once for the other.
    assert found["critic.first"] == times(2)["first"]
    assert len(report.passes) == 4
    assert report["critic.first"].row.recorded_calls == 6


def test_a_graph_kept_for_a_second_backward():
    def step(model):
        loss = model(torch.randn(4, 6)).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    report = check(Net, step)
    assert of_modules(report) == times(1)
    assert len(report.passes) == 4
    assert len({run.nodes for run in report.passes}) == 1


def test_two_losses_of_one_forward():
    def step(model):
        out = model(torch.randn(4, 6))
        one, two = out.mean(), out.square().mean()
        one.backward(retain_graph=True)
        two.backward()
        return one, two

    assert of_modules(check(Net, step)) == times(1)


def test_a_gradient_penalty():
    def step(model):
        x = torch.randn(4, 6, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    report = check(Net, step)
    found = of_modules(report)
    assert set(found) == {"", "first", "act", "second"}
    assert "TanhBackwardBackward0" in found["act"]
    assert sum(row.recompute_ns for row in report.modules) == 0


def test_gradients_without_backward():
    def step(model):
        return torch.autograd.grad(model(torch.randn(4, 6)).sum(), list(model.parameters()))

    assert of_modules(check(Net, step)) == times(1)


@pytest.mark.parametrize("create_graph", [True, False])
def test_the_gradient_of_a_tensor_that_is_no_leaf_warns_of_nothing(create_graph):
    def step(model):
        hidden = model.first(torch.randn(4, 6)) * 2
        loss = model.second(model.act(hidden)).sum()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=create_graph)
        if create_graph:
            gradient.square().sum().backward()
        return gradient

    report = check(Net, step)
    # How even the steps are is the machine's affair.
    assert [warning for warning in report.warnings if "warm up" not in warning] == []
    # The pass ends there: the engine takes the gradient and does not run the node.
    captured = report["(autograd engine)"].row.nodes
    assert [(node.name, node.count) for node in captured] == [("MulBackward0", 1)]


def test_the_gradient_of_an_inner_weight_alone():
    def step(model):
        return torch.autograd.grad(model(torch.randn(4, 6)).sum(), model.second.weight)

    found = of_modules(check(Net, step))
    assert set(found) == {"second"}


def test_function_transforms_run_as_ever_beside_a_backward():
    def step(model):
        parameters = dict(model.named_parameters())

        def loss_of(parameters, x):
            return torch.func.functional_call(model, parameters, (x,)).sum()

        x = torch.randn(4, 6)
        one = torch.func.grad(loss_of)(parameters, x)
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, x)
        jacobian = torch.func.jacrev(model)(x[0])
        tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        loss = model(x).sum()
        loss.backward()
        return one, each, jacobian, tangent, loss

    found = of_modules(check(Net, step))
    for path, nodes in times(1).items():
        for name, count in nodes.items():
            assert found[path][name] >= count


def functional(how):
    """A step that takes its gradients by transforms alone."""

    def step(model, x):
        parameters = dict(model.named_parameters())

        def loss_of(parameters, x):
            return torch.func.functional_call(model, parameters, (x,)).sum()

        if how == "vmap":
            each = torch.func.vmap(loss_of, in_dims=(None, 0))
            return each(parameters, x).sum().backward()
        if how == "vmap of grad":
            return torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(parameters, x)
        return getattr(torch.func, how)(loss_of)(parameters, x)

    return step


@pytest.mark.parametrize("how", ["grad", "vmap", "vmap of grad", "jacrev"])
def test_a_step_by_function_transforms_is_told_why_it_has_no_labels(how, tmp_path):
    model, x, step = Net(), torch.randn(4, 6), functional(how)
    with backspot.instrument(model), cpu_profile() as profiler:
        step(model, x)
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    for report in (
        backspot.locate(trace),
        backspot.profile(lambda: step(model, x), model, steps=2, warmup=3, trials="none"),
    ):
        (warning,) = (w for w in report.warnings if "warm up" not in w)
        assert "made under torch.func" in warning
        assert "record a step with loss.backward()" in warning


def test_no_transform_is_seen_where_none_is():
    model = Net()
    with cpu_profile() as profiler:
        for _ in range(2):
            x = torch.randn(4, 6)
            loss = torch.where(model(x) > 0, model(x), 0.0).std().clamp(0, 1)
            loss.backward()
    (warning,) = backspot.locate(profiler).warnings
    assert "names no modules" in warning


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_validation_between_training_steps(mode):
    def step(model):
        model.eval()
        with mode():
            validation = model(torch.randn(4, 6)).mean()
        model.train()
        loss = model(torch.randn(4, 6)).mean()
        loss.backward()
        with mode():
            again = model(torch.randn(4, 6)).mean()
        return validation.clone(), loss, again.clone()

    report = check(Net, step)
    assert of_modules(report) == times(1)


def test_validation_alone_is_no_backward():
    model = Net()
    with backspot.instrument(model), cpu_profile() as profiler, torch.no_grad():
        model(torch.randn(4, 6))
    with pytest.raises(backspot.BackspotError, match="no backward"):
        backspot.locate(profiler)


def test_a_profiler_with_a_schedule_counts_steps():
    torch.manual_seed(0)
    model = Net()
    reports = []
    with (
        backspot.instrument(model),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
            on_trace_ready=lambda profiler: reports.append(backspot.locate(profiler)),
        ) as profiler,
    ):
        for _ in range(9):
            model(torch.randn(4, 6)).mean().backward()
            profiler.step()
    assert [of_modules(report) for report in reports] == [times(1)] * 2
    assert [(r.step_unit, r.steps) for r in reports] == [("profiler step", 2)] * 2
    assert not hooks_on(model)


def test_anomaly_mode_and_saved_tensor_hooks():
    def step(model):
        with (
            torch.autograd.detect_anomaly(check_nan=False),
            torch.autograd.graph.save_on_cpu(),
        ):
            loss = model(torch.randn(4, 6)).mean()
            loss.backward()
        return loss

    assert of_modules(check(Net, step)) == times(1)


@pytest.mark.slow
def test_lbfgs_calls_the_closure_as_often_as_it_likes():
    def step(model):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        x, y = torch.randn(4, 6), torch.randn(4, 1)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    same(train(Net, step, instrumented=False), train(Net, step))
    report = check(Net, step)
    assert len(report.passes) >= 4
    assert set(of_modules(report)) == {"", "first", "act", "second"}
