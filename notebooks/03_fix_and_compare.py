# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fix and compare
#
# You found the slow module and fixed it. Did the fix help, and by how much? Was it only noise? And
# how does it stay fixed?

# %%
import torch
from torch import nn

import backspot

torch.set_num_threads(1)  # a small model: threads would only add noise

# %% [markdown]
# ## A network with a bad idea
#
# Four equal blocks, except that the third has a hand-written autograd function as its activation.


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
    model.zero_grad()
    loss_fn(model(x), y).backward()


# %% [markdown]
# ## Before
#
# Twenty steps: the noise of their mean is estimated from how they differ.

# %%
before = backspot.profile(step, {"": model, "loss": loss_fn}, steps=20)
before

# %% [markdown]
# The module is `2.1`. A profiler alone would say `GateBackward`. Which line was it?

# %%
line = before["2.1"].row.lines[0]
print(line.place, "|", line.text)

# %% [markdown]
# ## How much of this is noise?
#
# Before you believe any difference, record the same thing twice and compare.

# %%
again = backspot.profile(step, {"": model, "loss": loss_fn}, steps=20)
backspot.compare(before, again, names=("one run", "another"))

# %% [markdown]
# Nothing changed in between. The first line says by how much these two recordings differ, give or
# take the noise of their steps, which falls with their number. “Too noisy to tell” means that this
# noise is more than a fifth of the step. If a module takes longer or shorter nevertheless, the
# machine was busier during one of the two: two recordings say nothing of the code. If most modules
# change alike, a line above the table says so.
#
# ## Fix it
#
# `Gate` is a ReLU.

# %%
model[2][1] = nn.ReLU()
after = backspot.profile(step, {"": model, "loss": loss_fn}, steps=20)
backspot.compare(before, after, names=("Gated", "ReLU"))

# %% [markdown]
# ## How does it stay fixed?
#
# Keep the good report in your repository, record a new one in CI on the same machine, and let
# `backspot diff --fail-above` decide. Exit code 0 is fine; 8 means longer by more than this
# percentage, and by more than the noise. With three recordings on each side, made in turns,
# (`backspot diff good*.json -- new*.json`), that is said of the code, beyond what recordings of the
# same code differ by. Where the noise is larger than the percentage, a warning
# says so, and `--strict` makes that exit code 9. Here the gate comes back.

# %%
import subprocess
import sys
import tempfile


def diff(good, new):
    command = [sys.executable, "-m", "backspot", "diff", good, new, "--fail-above", "50"]
    done = subprocess.run(command, cwd=folder.name, capture_output=True, text=True, check=False)
    print(f"backspot diff {good} {new} --fail-above 50\nexit code {done.returncode}", done.stderr)


folder = tempfile.TemporaryDirectory()
for name, report in {"good.json": after, "same.json": after, "bad.json": before}.items():
    report.save(f"{folder.name}/{name}")
diff("good.json", "same.json")
diff("good.json", "bad.json")
folder.cleanup()

# %% [markdown]
# To choose the percentage, run the same commit a few times on your machine first.
