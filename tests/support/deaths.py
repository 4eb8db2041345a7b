"""Trainings that died of memory, with numbers that a large model could show."""

from __future__ import annotations

from dataclasses import replace

from backspot.results import HeldMemory, OutOfMemory

GB = 10**9
STAYS = (
    HeldMemory("parameter", 8 * GB, 200),
    HeldMemory("optimizer", 16 * GB, 400),
    HeldMemory("gradient", 8 * GB, 200),
)
SNAPSHOT = OutOfMemory(
    device=0,
    source="snapshot",
    error="OutOfMemoryError",
    phase="backward",
    step=37,
    path="blocks.3.mlp",
    class_name="Mlp",
    asked_bytes=2_100_000_000,
    total_bytes=79_100_000_000,
    free_bytes=900_000_000,
    limit="GPU 0",
    in_use_bytes=72 * GB,
    reserved_bytes=75_100_000_000,
    pieces_bytes=3_100_000_000,
    largest_piece_bytes=1_900_000_000,
    held=(HeldMemory("other", 40 * GB, 900), *STAYS),
    batch_size=32,
    earlier=2,
)
HISTORY = replace(
    SNAPSHOT,
    source="history",
    pieces_bytes=500_000_000,
    largest_piece_bytes=100_000_000,
    held=(
        HeldMemory("activation", 24 * GB, 48, "blocks.*.mlp.fc1", "Linear", 12),
        HeldMemory("no_stack", 6 * GB, 20),
        HeldMemory("activation", 5 * GB, 1, "head", "Linear", 1),
        HeldMemory("activation", 3 * GB, 40),
        HeldMemory("other", 2 * GB, 40),
        *STAYS,
    ),
    layers=(HeldMemory("activation", 30 * GB, 200, "blocks.*", "Block", 12),),
    earlier=0,
)
PROCESS = replace(
    SNAPSHOT,
    device=-1,
    source="process",
    phase="forward",
    step=1,
    limit="the cgroup",
    in_use_bytes=40 * GB,
    reserved_bytes=0,
    pieces_bytes=0,
    held=STAYS,
    earlier=0,
)
DEATHS = {"snapshot": SNAPSHOT, "history": HISTORY, "process": PROCESS}
