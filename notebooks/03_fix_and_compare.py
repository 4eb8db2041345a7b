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
# You found the slow module and mended it. Did it help, by how much, and how do you know that it was
# not the weather? And how does it stay mended?

# %%
import torch
from torch import nn

import backspot

torch.set_num_threads(1)  # a small model: threads would only add noise

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
    model.zero_grad()
    loss_fn(model(x), y).backward()


# %% [markdown]
# ## Before
#
# Ten steps instead of three: noise can only be told from what repeats.

# %%
before = backspot.profile(step, {"": model, "loss": loss_fn}, steps=10)
before

# %% [markdown]
# `2.1`, by path. A profiler alone would say `GateBackward`. And which line was it?

# %%
line = before["2.1"].row.lines[0]
print(line.place, "|", line.text)

# %% [markdown]
# ## How much of this is noise?
#
# Record the same thing again and compare it with itself, before you believe any difference.

# %%
again = backspot.profile(step, {"": model, "loss": loss_fn}, steps=10)
backspot.compare(before, again, names=("one run", "another"))

# %% [markdown]
# Nothing was changed in between. The noise column comes from how much the steps differ within each
# recording. Whatever is called faster or slower nevertheless is the machine, busier during one of
# the two; if most modules change alike, a line above the table says so. Record both under the same
# load.
#
# ## Mend it
#
# `Gate` is a ReLU.

# %%
model[2][1] = nn.ReLU()
after = backspot.profile(step, {"": model, "loss": loss_fn}, steps=10)
backspot.compare(before, after, names=("Gated", "ReLU"))

# %% [markdown]
# ## How does it stay mended?
#
# Keep the good report in your repository, record a new one in CI on the same machine, and let
# `backspot diff --fail-above` decide: 0 is fine, 8 is slower by more than so many percent, beyond
# the noise. Here somebody brings the gate back.

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
# Choose the percentage by what your machine's weather does: run the same commit a few times first.
