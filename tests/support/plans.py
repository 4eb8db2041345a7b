"""Plans for tests, of the size that a ResNet on a GPU has."""

from __future__ import annotations

from backspot.results.plan import Difference, Plan, Rung

MS = 1_000_000
GB = 10**9

LAYOUT = Rung(
    "channels_last",
    "layout",
    code=(
        "model = model.to(memory_format=torch.channels_last)\n"
        "images = images.to(memory_format=torch.channels_last)"
    ),
    before_ns=94_700_000,
    step_ns=54 * MS,
    low_ns=53_700_000,
    high_ns=54_300_000,
    memory_bytes=51 * GB // 10,
    before_memory_bytes=52 * GB // 10,
    difference=Difference(2e-6, 1.1e-5, 3e-7, 1.2e-7, 4e-7, 0.0),
    verdict="helps",
    kept=True,
)
BF16 = Rung(
    "bf16",
    "precision",
    ("channels_last",),
    code='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = loss_fn(model(x), y)',
    before_ns=54 * MS,
    step_ns=40_100_000,
    low_ns=39_800_000,
    high_ns=40_400_000,
    memory_bytes=32 * GB // 10,
    before_memory_bytes=51 * GB // 10,
    difference=Difference(0.0041, 0.021, 0.0008, 1.2e-7, 4e-7, 0.0),
    verdict="helps",
    kept=True,
)
COMPILED = Rung(
    "torch.compile",
    "compile",
    ("channels_last", "bf16"),
    code="model = torch.compile(model)",
    before_ns=40_100_000,
    step_ns=30_200_000,
    low_ns=29_900_000,
    high_ns=30_600_000,
    memory_bytes=29 * GB // 10,
    before_memory_bytes=32 * GB // 10,
    host_ns=12_300_000,
    device_ns=30 * MS,
    compile_ns=23_000 * MS,
    difference=Difference(0.0043, 0.022, 0.0008, 1.2e-7, 4e-7, 0.0),
    verdict="helps",
    kept=True,
)
LADDER = (LAYOUT, BF16, COMPILED)
TF32 = Rung(
    "TF32",
    "precision",
    before_ns=94_700_000,
    step_ns=94_800_000,
    low_ns=94_100_000,
    high_ns=95_200_000,
    verdict="does not help",
)
FOREACH = Rung(
    "fused optimizer",
    "optimizer",
    ("channels_last", "bf16"),
    before_ns=40_100_000,
    step_ns=40 * MS,
    low_ns=39 * MS,
    high_ns=41 * MS,
    verdict="undecided",
)
BATCH = Rung(
    "batch 1,024",
    "batch",
    ("channels_last", "bf16", "torch.compile"),
    before_ns=30_200_000,
    step_ns=29 * MS,
    low_ns=28_800_000,
    high_ns=29_200_000,
    verdict="helps",
    note="12.0 GB are left",
)
GRAPH = Rung("CUDA graph", "graph", note="the step waits for the GPU")

PLAN = Plan(
    "a copy of ResNet, forward and backward",
    step_ns=94_700_000,
    rungs=(*LADDER, TF32, FOREACH, BATCH, GRAPH),
    rest_ns=1_900_000,
    host_ns=22 * MS,
    device_ns=94 * MS,
    took_ns=58_000 * MS,
    compiling_ns=29_000 * MS,
    allowed_ns=60_000 * MS,
    batch=512,
    next_limit="the loader then limits the step at 46 ms (next: more workers, decode once)",
)
NOTHING_HELPS = Plan(PLAN.what, 94_700_000, (TF32, GRAPH), took_ns=9_000 * MS)
REFUSED = Plan(
    "a copy of ResNet", 94_700_000, why_not="the step runs an optimizer within the backward"
)
