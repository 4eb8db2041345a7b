"""More cases for ``record_fixtures.py``: who waits for whom, host or device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from _fixture_cases import Context, Mlp, Recipe, case, sgd_step

__all__: list[str] = []

# Host and device -----------------------------------------------------------------------------


@case()
def launch_bound(context: Context) -> Recipe:
    model = Mlp(32, 24).to(context.device)
    inputs = context.randn(8, 32)
    expect = {"launch_bound": True, "node_counts": {"AddmmBackward0": 48}}
    return Recipe([(model, "")], sgd_step(model, lambda: model(inputs).square().mean()), expect)


class _SyncInBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - torch's context
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - as above
        if gradient.abs().max().item() > 1e30:  # the host waits here
            return torch.zeros_like(gradient)
        rows = gradient.nonzero()  # and here
        return gradient if len(rows) else torch.zeros_like(gradient)


class _Syncing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _SyncInBackward.apply(x)


class _Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros_like(x)
        mask = x > 0
        kept[mask] = x[mask]
        return kept


@case()
def sync_in_backward(context: Context) -> Recipe:
    width = context.pick(2048, 16)
    model = nn.Sequential()
    model.add_module("first", Mlp(width, 3))
    model.add_module("syncing", _Syncing())
    model.add_module("second", Mlp(width, 3))
    model.add_module("masked", _Masked())
    model.add_module("third", Mlp(width, 3))
    model.to(context.device)
    inputs = context.randn(context.pick(2048, 4), width)
    expect = {
        "owners": {"_SyncInBackwardBackward": ["syncing"], "IndexPutBackward0": ["masked"]},
        "syncs_in_backward_of": ["syncing"],
    }
    return Recipe([(model, "")], sgd_step(model, lambda: model(inputs).square().mean()), expect)


def _batches(context: Context, width: int) -> Any:  # noqa: ANN401 - a loader
    data = torch.utils.data.TensorDataset(torch.randn(context.pick(1 << 14, 64), width))
    return torch.utils.data.DataLoader(data, context.pick(1 << 12, 8))


@case(shapes=False)
def pageable_copies(context: Context) -> Recipe:
    width = context.pick(2048, 16)
    model = Mlp(width, 4).to(context.device)
    loader = _batches(context, width)
    source = iter([*loader] * 40)

    def compute() -> torch.Tensor:
        (batch,) = next(source)
        return model(batch.to(context.device)).square().mean()

    return Recipe([(model, "")], sgd_step(model, compute), {"copies_in_forward": True})


@case("cuda", shapes=False)
def pinned_prefetch(context: Context) -> Recipe:
    """The next batch is copied on a stream of its own while backward runs."""
    width = context.pick(2048, 16)
    model = Mlp(width, 4).to(context.device)
    loader = _batches(context, width)
    source = iter([(batch.pin_memory(),) for (batch,) in loader] * 40)
    side = torch.cuda.Stream()
    following: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def prefetch() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            following.append(next(source)[0].to(context.device, non_blocking=True))

    def step() -> None:
        if not following:
            prefetch()
        torch.cuda.current_stream().wait_stream(side)
        batch = following.pop()
        batch.record_stream(torch.cuda.current_stream())
        optimizer.zero_grad(set_to_none=True)
        loss = model(batch).square().mean()
        prefetch()
        loss.backward()
        optimizer.step()

    return Recipe([(model, "")], step, {"copies_beside_backward": True})


@case(shapes=False)
def optimizer_foreach_false(context: Context) -> Recipe:
    model = Mlp(context.pick(2048, 16), 6).to(context.device)
    inputs = context.randn(context.pick(4096, 4), context.pick(2048, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    step = sgd_step(model, lambda: model(inputs).square().mean(), optimizer)
    return Recipe([(model, "")], step, {"optimizer_starts_before_backward_ends": True})


@case(shapes=False)
def gradient_accumulation(context: Context) -> Recipe:
    model = Mlp(context.pick(1024, 16), 3).to(context.device)
    inputs = context.randn(context.pick(2048, 4), context.pick(1024, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(3):
            model(inputs).square().mean().backward()
        optimizer.step()

    return Recipe([(model, "")], step, {"passes": 6})
