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
# # Find the slow module
#
# With deterministic algorithms switched on, a vision transformer became slower. Which of its
# modules is responsible? The profiler says `GatherBackward0`. We want the module's name, and the
# line.
#
# This runs in under a minute, on a GPU or a CPU.

# %%
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS wants it

import timm
import torch

import backspot

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # slower on a CPU, and steadier where others compute too

# %% [markdown]
# ## What do we train?
#
# timm's ViT, small enough for a CPU. With `patch_drop_rate=0.5`, a module called `patch_drop`
# drops half of the patches.

# %%
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)

model = timm.models.vision_transformer.VisionTransformer(
    embed_dim=128, depth=4, num_heads=4, num_classes=10, patch_drop_rate=0.5
).to(device)
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images = torch.randn(8, 3, 224, 224, device=device)
labels = torch.randint(0, 10, (8,), device=device)


def step():
    optimizer.zero_grad()
    loss_fn(model(images), labels).backward()
    optimizer.step()


# %% [markdown]
# ## Which modules make its backward slow?
#
# One call. It runs a few steps to warm up and a few more under `torch.profiler`, with labels on
# every module, and then removes the labels. These are real steps: the model trains.

# %%
report = backspot.profile(step, {"": model, "loss": loss_fn})
report

# %% [markdown]
# *wall* is the time that a module is responsible for. The rows sum to the whole backward, to the
# nanosecond. Rows in parentheses belong to no module. `report.show()` displays the whole page here.
#
# ## Four blocks, a row for each layer: what do they cost together?

# %%
for row in report.top(6, by="pattern"):
    print(f"{row.wall_ms:8.2f} ms  {report.share(row):4.0%}  {row.name}")

# %% [markdown]
# ## And inside one block?

# %%
print(report["blocks.0"])

# %% [markdown]
# ## So is it `patch_drop`?

# %%
patch_drop = report["patch_drop"].row
print(f"{report.share(patch_drop):.1%} of the backward on this {device}")
for node in patch_drop.nodes[:3]:
    print(node.name, node.count, "times")

# %% [markdown]
# On a CPU `gather` is cheap, deterministic or not, and blaming it would be wrong. It is slow on a
# GPU. Here is the trace of such a step on an H200, one of the repository's test traces. Reading it
# needs no GPU.

# %%
on_gpu = backspot.locate("../tests/data/h200/vit_patch_drop.trace.json.gz")
on_gpu

# %% [markdown]
# `patch_drop` takes seven times as long as any other module.
#
# ## Why, and what can be done?
#
# A report ends with its findings: what makes the step slower than necessary, where, and the
# remedy. In Python findings are data.

# %%
finding = next(f for f in on_gpu.findings if f.path == "patch_drop" and f.rule == "sorted-indexing")
print(finding.title)
print(finding.seen)
print("→", finding.remedy)

# %% [markdown]
# ## And in a trace viewer?
#
# `trace=` also writes the recording, with a track of nested `backward: …` spans below each thread
# and each GPU stream. Open it at [ui.perfetto.dev](https://ui.perfetto.dev) and search for
# `backward: patch_drop`. A click on a span shows what the module costs.

# %%
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    trace = Path(folder) / "vit.trace.json.gz"
    backspot.profile(step, model, steps=1, warmup=1, trace=trace)
    print(f"{trace.name}: {trace.stat().st_size / 1e6:.1f} MB")

# %% [markdown]
# Next: [reading a trace on a laptop without torch](02_read_a_trace.ipynb), and [did the fix
# help?](03_fix_and_compare.ipynb)
