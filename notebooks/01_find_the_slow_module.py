# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Find the slow module
#
# A small network with one bad idea in it: a gate whose backward does its work number by number.
# Which module is it? The profiler alone will say `GateBackward`. Let us have the path.

# %%
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import backspot

# %% [markdown]
# ## A network with a bad idea
#
# Four blocks, all alike but for the third, whose activation is a hand-written autograd function.


# %%
class Gate(torch.autograd.Function):
    """x if x > 0 else 0, with a backward that somebody wrote on a Friday."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        rows = [
            g if value > 0 else 0 * g
            for value, g in zip(x.flatten(), gradient.flatten(), strict=True)
        ]
        return torch.stack(rows).view_as(x)


class Gated(nn.Module):
    def forward(self, x):
        return Gate.apply(x)


def block(activation):
    return nn.Sequential(nn.Linear(32, 32), activation)


torch.manual_seed(0)
model = nn.Sequential(*(block(Gated() if number == 2 else nn.ReLU()) for number in range(4)))
loss_fn = nn.MSELoss()
x, y = torch.randn(16, 32), torch.randn(16, 32)


def step():
    loss_fn(model(x), y).backward()


# %% [markdown]
# ## Profile it with labels
#
# `instrument` puts hooks on the modules; they write labels while a profiler records and do nothing
# otherwise. Warm up first: the first steps of anything measure its start.

# %%
with backspot.instrument(model), backspot.instrument(loss_fn, name="loss"):
    step()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in range(3):
            step()

report = backspot.locate(prof)
print(report)

# %% [markdown]
# The third block's second module. Not "some `GateBackward`": `2.1`, by path, with its share.

# %%
print(report["2"])

# %% [markdown]
# ## Mend it and look again

# %%
model[2][1] = nn.ReLU()
with backspot.instrument(model), backspot.instrument(loss_fn, name="loss"):
    step()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in range(3):
            step()

after = backspot.locate(prof)
before_ms, after_ms = report["2.1"].row.wall_ms_per_step, after["2.1"].row.wall_ms_per_step
print(f"2.1: {before_ms:.2f} ms a step before, {after_ms:.2f} ms after")
