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
# # Read a trace
#
# A colleague's training is slow. You have a trace file and a laptop, but no GPU, no model and no
# PyTorch. That is enough.

# %%
import sys

import backspot

report = backspot.locate("../tests/data/h200/resnet_channels_last.trace.json.gz")
print("torch imported:", "torch" in sys.modules)
report

# %% [markdown]
# A ResNet-18 on an H200, two steps, recorded under `backspot.instrument(model)`. In a terminal,
# `backspot show TRACE` prints the same. `report.show()` displays the whole page in the notebook,
# with the module tree and the details of each module.
#
# ## Is it the backward at all?
#
# First: where does the step go, and how busy is the GPU?

# %%
for phase in report.phases:
    ms = phase.wall_ns / 1e6
    print(f"{phase.name:10}{ms:6.2f} ms, the GPU busy for {phase.utilisation:4.0%} of it")

# %% [markdown]
# The forward takes longer than the backward, and the GPU is idle during most of it: with such a
# small model, the host is the bottleneck. Good to know before tuning any kernel.
#
# ## Is it one bad layer, or a kind of layer?
#
# Twenty convolutions of 2% each answer nothing. Add them up, by class or by repeated layer.

# %%
for by in ("class", "pattern"):
    print(f"by {by}")
    for row in report.top(4, by=by):
        print(f"  {row.wall_ms:5.2f} ms  {report.share(row):4.0%}  {row.name}")

# %% [markdown]
# ## What is inside `layer1`?

# %%
print(report["layer1"])

# %% [markdown]
# ## Is the GPU busy, or does it wait?
#
# The report says how each row's wall time is spent. In `maxpool` the GPU works. In
# `layer4.1.conv2` it mostly waits for the host to launch something.

# %%
for row in report.top(5):
    works, waits = row.wall_on.gpu_ns / 1e6, row.wall_on.host_ns / 1e6
    print(f"{row.name:16}{row.wall_ms:5.2f} ms:", end="")
    print(f"{works:5.2f} the GPU works,{waits:5.2f} it waits for the host")

# %% [markdown]
# ## Which autograd nodes?

# %%
for operator in report.operators[:4]:
    print(f"{operator.wall_ns / 1e6:5.2f} ms  {operator.name}, most in {operator.path}")

# %% [markdown]
# ## Can I have it as a table?
#
# Yes: as pandas, with times in nanoseconds; as JSON, which loads as an equal report; as text, CSV,
# Markdown and flame graphs. The suffix of the file decides.

# %%
frame = report.to_pandas()
frame.sort_values("gpu_ns", ascending=False)[["path", "class_name", "wall_ns", "gpu_ns"]].head(4)

# %%
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    for name in ("report.json", "report.csv", "report.md", "resnet.speedscope.json"):
        path = report.save(Path(folder) / name)
        print(f"{path.stat().st_size:7} bytes  {name}")
    print("reads back equal:", backspot.Report.load(Path(folder) / "report.json") == report)

# %% [markdown]
# ## And a trace without Backspot's labels?
#
# This one is from the tests of HolisticTraceAnalysis: a recommendation model on several GPUs,
# recorded years ago. It names no modules, and the report says so in its warnings. Only autograd's
# own names are left.

# %%
foreign = backspot.locate("../tests/data/foreign/hta_recommender_control.json.gz")
for warning in foreign.warnings:
    print("!", warning)
for operator in foreign.operators[:4]:
    print(f"{operator.wall_ns / 1e6:6.2f} ms  {operator.name}")

# %% [markdown]
# ## What do you tell your colleague?
#
# Findings need no module names: they look at kernels and copies.

# %%
for finding in foreign.findings:
    print(f"{finding.wall_ns / 1e6:.1f} ms a step: {finding.title}.")
    print(f"  {finding.seen}")
    print(f"  → {finding.remedy}\n")

# %% [markdown]
# With two steps of one rank, this is where to look first, not a verdict.
#
# ## And if the trace has no backward?
#
# Then you get one line that says why.

# %%
try:
    backspot.locate("../tests/data/foreign/tracelens_qwen_forward_only.json.gz")
except backspot.BackspotError as error:
    print(error)
