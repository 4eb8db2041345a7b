"""Activation checkpointing: recomputation is shown as such, and owned by what runs again."""

import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

from support.choice import slow_except  # noqa: E402
from support.training import check, owners  # noqa: E402

MODES = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.act(self.fc(x))) * 2


class Net(nn.Module):
    """``how(function, x)`` runs each block."""

    def __init__(self, how, around=lambda block: block):
        super().__init__()
        self.how = how
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.how(self.blocks, x)).sum()


def plain(blocks, x):
    return blocks(x)


def each(reentrant):
    def run(blocks, x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return run


def nested(reentrant):
    def inner(blocks):
        def run(x):
            return checkpoint(blocks[1], blocks[0](x), use_reentrant=reentrant)

        return run

    def run(blocks, x):
        x = checkpoint(inner(blocks), x, use_reentrant=reentrant)
        return checkpoint(blocks[2], x, use_reentrant=reentrant)

    return run


def sequential(reentrant):
    return lambda blocks, x: checkpoint_sequential(blocks, 2, x, use_reentrant=reentrant)


def step(model):
    loss = model(torch.randn(4, 8))
    loss.backward()
    return loss


def recomputed(report):
    return {row.path for row in report.modules if row.recompute_ns}


def without_checkpoints(found):
    """The owners without what only checkpointing adds, each block's own work alone."""
    kept = {
        path: {name: n for name, n in nodes.items() if "Checkpoint" not in name}
        for path, nodes in found.items()
    }
    return {path: nodes for path, nodes in kept.items() if nodes}


@MODES
@pytest.mark.parametrize("how", slow_except([nested], [each, nested, sequential]))
def test_nodes_belong_to_the_modules_that_they_belong_to_without_checkpoints(how, reentrant):
    expected = owners(check(lambda: Net(plain), step))
    report = check(lambda: Net(how(reentrant)), step)
    assert without_checkpoints(owners(report)) == expected


@MODES
@pytest.mark.parametrize("how", [each, nested])
def test_what_runs_again_is_recomputation_of_the_module_that_runs(how, reentrant):
    report = check(lambda: Net(how(reentrant)), step)
    inside = {f"blocks.{i}{part}" for i in range(3) for part in ("", ".fc", ".act", ".drop")}
    assert recomputed(report) <= inside | {""}
    # The last operations of a block may be left out: nothing of theirs is needed again.
    assert {f"blocks.{i}.fc" for i in range(3)} <= recomputed(report)
    assert {row.recorded_calls for row in report.modules if row.path in inside} == {2}


def test_without_checkpoints_nothing_is_recomputation():
    assert recomputed(check(lambda: Net(plain), step)) == set()


@MODES
def test_recomputation_stands_among_the_nodes_of_its_module(reentrant):
    report = check(lambda: Net(each(reentrant)), step)
    names = {node.name for node in report["blocks.1.fc"].row.nodes}
    assert "(recompute)" in names


@MODES
def test_a_module_checkpointed_within_another_backend_keeps_its_path(reentrant):
    wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    mode = wrappers.CheckpointImpl.REENTRANT if reentrant else wrappers.CheckpointImpl.NO_REENTRANT

    def make():
        model = Net(plain)
        for index in range(3):
            model.blocks[index] = wrappers.checkpoint_wrapper(
                model.blocks[index], checkpoint_impl=mode
            )
        return model

    report = check(make, step)
    assert without_checkpoints(owners(report)) == owners(check(lambda: Net(plain), step))
    assert "blocks.2.fc" in recomputed(report)


class Functional(nn.Module):
    """What is checkpointed is a closure: modules, and code of this module's own around them."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.before = nn.Linear(8, 8)
        self.fc = nn.Linear(8, 8)
        self.after = nn.Linear(8, 8)

    def forward(self, x):
        def run(x):
            return self.fc((x.exp() - 1).cumsum(1)).cos()

        return self.after(checkpoint(run, self.before(x), use_reentrant=self.reentrant)).sum()


@MODES
def test_functional_code_that_runs_again_belongs_to_the_module_around_it(reentrant):
    report = check(lambda: Functional(reentrant), step)
    names = {name.removesuffix("Backward0") for name in owners(report)[""]}
    assert {"Exp", "Sub", "Cumsum", "Cos"} <= names
    assert set(owners(report)) <= {"", "before", "fc", "after", "(outside model)"}


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.03)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SlowAgain(nn.Module):
    def __init__(self, reentrant, slow_first):
        super().__init__()
        self.reentrant = reentrant
        self.slow_first = slow_first
        self.before = nn.Linear(8, 8)
        self.inner = SlowInner()

    def forward(self, x):
        return self.inner.run(self.before(x), self.reentrant, self.slow_first).sum()


class SlowInner(nn.Module):
    """Called by a method of its own: the code in it is the caller's."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def run(self, x, reentrant, slow_first):
        def first(x):
            return self.fc(Slow.apply(x.exp()))

        def last(x):
            return Slow.apply(self.fc(x).exp()).exp()

        return checkpoint(first if slow_first else last, x, use_reentrant=reentrant)


@MODES
@pytest.mark.parametrize("slow_first", slow_except([True], [True, False]))
def test_slow_functional_code_that_runs_again_is_not_charged_to_a_module_beside_it(
    reentrant, slow_first
):
    report = check(lambda: SlowAgain(reentrant, slow_first), step)
    first = report.modules[0]
    assert first.path == ""
    assert first.recompute_ns > 50_000_000 // report.steps  # it sleeps longer than that
    assert report["inner.fc"].row.wall_ns < first.recompute_ns / 2


@pytest.mark.slow
@MODES
def test_a_checkpointed_vit_has_the_owners_of_the_plain_one(reentrant, set_reentrant):
    timm = pytest.importorskip("timm")

    def make(checkpointed):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=3)
        if checkpointed:
            model.set_grad_checkpointing()
            set_reentrant(reentrant)
        return model

    def run(model):
        loss = model(torch.randn(2, 3, 32, 32)).square().sum()
        loss.backward()
        return loss

    report = check(lambda: make(True), run, steps=1)
    expected = owners(check(lambda: make(False), run, steps=1))
    assert without_checkpoints(owners(report)) == expected
    assert {f"blocks.{i}.attn.qkv" for i in range(3)} <= recomputed(report)
    assert not {"head", "patch_embed.proj", "norm"} & recomputed(report)


@MODES
def test_a_backward_within_a_checkpoint_is_one_pass(reentrant):
    report = check(lambda: Net(each(reentrant)), step)
    assert len(report.passes) == 2


class Solve(torch.autograd.Function):
    """Its backward is a forward of its own, differentiated: as solvers of GPyTorch have it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(x.exp().cumsum(1).sum(), x)
        return gradient * found


class Solver(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.before, self.fc = how, nn.Linear(8, 8), nn.Linear(8, 8)

    def inner(self, x):
        return Solve.apply(self.fc(x))

    def forward(self, x):
        x = self.before(x)
        return (checkpoint(self.inner, x, use_reentrant=False) if self.how else self.inner(x)).sum()


def test_a_function_that_differentiates_in_its_backward_recomputes_nothing():
    report = check(lambda: Solver(how=False), step)
    assert recomputed(report) == set()
    assert {"SolveBackward", "CumsumBackward0"} <= set(owners(report)[""])
    rules = {one.rule for one in report.findings}
    assert not rules & {"recompute", "second-backward"}


def test_such_a_function_within_a_checkpoint_runs_again():
    report = check(lambda: Solver(how=True), step)
    assert {"", "fc"} <= recomputed(report)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors  # a checkpoint runs its part again here
        return 2 * x * gradient


class EndsInFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def inner(self, x):
        return Doubling.apply(nn.functional.gelu(x @ self.weight))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False).sum()


def test_what_a_checkpoint_runs_again_in_a_function_is_recomputation():
    """The function asks first for what was not kept, and calls no module."""
    assert recomputed(check(EndsInFunction, step)) == {""}
