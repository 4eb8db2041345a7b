"""What is said of a training that died of memory: where, who held it, and what helps."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from backspot.formatting import counted, percent, size, visible
from backspot.render._sections import Column, Saying, Section, Table, numbers
from backspot.render._words import Part
from backspot.render.view import View
from backspot.results.out_of_memory import HeldKind, HeldMemory, OutOfMemory
from backspot.results.report import Report

_SAID: dict[HeldKind, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients of parameters",
    "optimizer": "states of optimizers",
    "activation": "activations",
    "no_stack": "no Python stack: the backward, or before the history",
    "other": "all else",
}
_ADDRESSES = "ulimit -v"
"""The limit that is one of addresses, which take no memory before they are used."""
_OF_PROCESS = "all else of the process"
_OF_SYSTEM = "other processes and the system"
_STAYS: tuple[HeldKind, ...] = ("parameter", "buffer", "gradient", "optimizer")
_OF_BATCH: tuple[HeldKind, ...] = ("activation", "no_stack")
_WORTH = 0.1
"""Share of what is in use from which it is worth advice: less is lost among fragments and what the
allocator rounds up, and would not let the step end."""
_CONTEXT = 4 << 30
"""Bytes of a GPU that CUDA and libraries may take in one process, beside PyTorch's allocator: its
context, and workspaces of cuBLAS, cuDNN, NCCL and CUDA graphs. What is more is likely others'."""
_ROWS = 14
"""Rows of the table: each kind of memory once, and the modules that have most; the rest is
in the JSON."""


def headline(one: OutOfMemory) -> str:
    """One sentence: in which step and module, what was asked for, and what was in use."""
    step = "" if one.step is None else f" in step {one.step:,}"
    asked = "" if one.asked_bytes is None else f", which asked for {size(one.asked_bytes)}"
    said = f"The training ran out of memory{step}, {where(one)}{asked}"
    if not one.total_bytes:
        return f"{said}."
    if one.is_elsewhere:
        free = f"{size(one.free_bytes)} of the {size(one.total_bytes)} of {one.limit}"
        return f"{said}: of pinned memory of the host, or in a library, as {free} were free."
    pieces = f", {size(one.pieces_bytes)} of it free in pieces" if _is_in_pieces(one) else ""
    used = f"{size(one.used_bytes)} of the {size(one.total_bytes)} of {one.limit}"
    return f"{said}: {used} were in use{pieces}."


def where(one: OutOfMemory) -> str:
    """In what: ``in the backward of blocks.3.mlp (Mlp)``."""
    if one.phase == "optimizer":
        return "in an optimizer"
    of = one.label
    if one.phase == "other":
        return f"in a method of {of}" if of else "outside of all modules"
    begin = {"forward": "in the forward", "evaluation": "in an evaluation"}.get(
        one.phase, "in the backward"
    )
    if one.is_nearby:
        return f"{begin}, in {one.node} next to {of}"
    if of:
        return f"{begin} of {of}"
    return f"{begin}, in {one.node}" if one.node else begin


def source(one: OutOfMemory) -> str:
    """How it is known."""
    if one.source == "history":
        return "Who holds it is from the allocator's history at that moment."
    if one.source == "snapshot" and any(not held.blocks for held in one.held):
        return (
            "Parameters, gradients and states are known by their tensors; all else is what the "
            "allocator counted at that moment, as it tells no blocks."
        )
    if one.source == "snapshot":
        return (
            "Who holds it is from the sizes of the allocator's blocks at that moment, without a "
            "history: --memory also tells which modules keep activations."
        )
    if one.is_host and not one.in_use_bytes:
        return "Sizes are not known: the error is of another process, as of a loader's worker."
    module = "The module is from the frames of the exception; sizes" if one.label else "Sizes"
    why = "PyTorch's allocator was not asked"
    if one.is_host:
        why = "a CPU's allocator has no history"
    elif one.error == "OutOfMemoryError" or not one.reserved_bytes:
        why = "this allocator of PyTorch's does not tell the moment"
    return f"{module} are those of the process when the error had ended the script: {why}."


def holders(one: OutOfMemory) -> list[tuple[str, HeldMemory]]:
    """Who holds what is in use, each as people read it; what is known of no kind comes too.

    None where it was not the memory of the GPU that was short.
    """
    if one.is_elsewhere:
        return []
    found = [(_name(held, one), held) for held in one.held]
    rest = one.in_use_bytes - sum(held.bytes for held in one.held)
    if rest > 0:
        found.append((_OF_PROCESS, HeldMemory("other", rest, 0)))
    if one.others_bytes:
        outside = HeldMemory("other", one.others_bytes, 0)
        those = "CUDA, libraries, other processes"
        name = f"not PyTorch's: {those}" if one.reserved_bytes else f"not told: tensors, {those}"
        found.append((name, outside))
    others = one.used_bytes - one.in_use_bytes if one.is_host else 0
    if others > 0:
        is_of_addresses = one.limit == _ADDRESSES
        name = "addresses this process has reserved" if is_of_addresses else _OF_SYSTEM
        found.append((name, HeldMemory("other", others, 0)))
    if one.pieces_bytes:
        found.append(("free, in pieces", HeldMemory("other", one.pieces_bytes, 0)))
    return sorted(found, key=lambda item: -item[1].bytes)


def _name(held: HeldMemory, one: OutOfMemory) -> str:
    said = _SAID[held.kind]
    if held.kind == "other" and not any(other.kind == "activation" for other in one.held):
        return f"activations and {said}"
    if held.kind != "activation":
        return said
    if not held.class_name:
        return "activations of other modules"
    number = f"{held.members} × " if held.members > 1 else ""
    return f"{said} of {number}{_label(held)}"


def _label(held: HeldMemory) -> str:
    return f"{held.path} ({held.class_name})" if held.path else held.class_name


def advice(one: OutOfMemory) -> list[str]:
    """What helps, with numbers where they are known."""
    if one.is_elsewhere:
        return []
    asked = one.asked_bytes or 0
    culprit = "the script" if one.is_nearby else one.label or "the script"
    if one.total_bytes and asked > one.total_bytes:
        return [
            f"No batch size helps: this one request is larger than all {size(one.total_bytes)} of "
            f"{one.limit}. Look at the sizes that {culprit} computes with."
        ]
    said = []
    if _is_in_pieces(one):
        said.append(
            f"{size(one.pieces_bytes)} are free, but the largest piece has "
            f"{size(one.largest_piece_bytes)}: PYTORCH_ALLOC_CONF=expandable_segments:True "
            "(PYTORCH_CUDA_ALLOC_CONF before torch 2.9) lets the allocator use them."
        )
    if one.reserved_bytes and one.others_bytes > _CONTEXT:
        said.append(
            f"{size(one.others_bytes)} of {one.limit} are neither free nor PyTorch's: other "
            "processes may use it; nvidia-smi names them."
        )
    said += _checkpointing(one)
    said += _batch(one)
    if one.phase == "optimizer" and one.step == 1:
        said.append("An optimizer makes its states in its first step, and keeps them.")
    return said


def _checkpointing(one: OutOfMemory) -> list[str]:
    """What checkpointing repeated layers would free at most: of all but one that is at work."""
    if not one.layers or one.layers[0].bytes < _WORTH * one.in_use_bytes:
        return []
    most = one.layers[0]
    frees = most.bytes * (most.members - 1) // max(most.members, 1)
    return [
        f"Checkpointing the {most.members} × {_label(most)} frees up to about {size(frees)} of the "
        f"{size(most.bytes)} of activations that they had, for their forward once more."
    ]


def _batch(one: OutOfMemory) -> list[str]:
    if one.is_host:
        # Elsewhere it is as likely of data: of a NumPy array, or in a loader's worker.
        if one.phase == "other" or not one.in_use_bytes:
            return []
        return [
            "A smaller batch, or checkpointing, frees activations: a part of what is all else of "
            "the process."
        ]
    if not one.reserved_bytes or not one.in_use_bytes:
        return []  # it is not known what else the training has
    # Without a history, what is neither is activations and all else.
    changing = _sum_of(one, _OF_BATCH if one.source == "history" else (*_OF_BATCH, "other"))
    stays, what = _sum_of(one, _STAYS), "activations and what has no Python stack"
    if one.source != "history":
        what = "activations and all else"
    if changing < _WORTH * one.in_use_bytes:
        return [
            f"A smaller batch frees little: {size(stays)} of {size(one.in_use_bytes)} are "
            "parameters, gradients and states of optimizers."
        ]
    if not one.batch_size:
        return [f"A smaller batch frees its part of {size(changing)}, {what}."]
    each = changing // one.batch_size
    return [
        f"A smaller batch frees up to about {size(each)} for each sample: a batch of "
        f"{one.batch_size:,} had {size(changing)} of {what}."
    ]


def _sum_of(one: OutOfMemory, kinds: Collection[HeldKind]) -> int:
    return sum(held.bytes for held in one.held if held.kind in kinds)


def _is_in_pieces(one: OutOfMemory) -> bool:
    """Whether what was asked for is free, but not in one piece."""
    asked = one.asked_bytes
    return asked is not None and one.pieces_bytes >= asked > one.largest_piece_bytes


def caught(one: OutOfMemory) -> list[str]:
    """How often the allocator had run out of memory before, and something had caught it."""
    if not one.earlier:
        return []
    return [f"The allocator had run out of memory {counted(one.earlier, 'time')} before."]


def tables(one: OutOfMemory) -> list[Table]:
    """Who holds memory, the most first; no table where that is not known."""
    rows = holders(one)[:_ROWS]
    if not rows:
        return []
    whole = max(one.used_bytes, one.in_use_bytes)
    names: list[Part] = [("name", name) for name, _ in rows]
    shares = numbers(percent(held.bytes / whole) if whole else "" for _, held in rows)
    columns = [
        Column("name", "held by", names, least=24, left=True),
        Column("amount", "memory", numbers(size(held.bytes) for _, held in rows)),
        Column("share", "share", shares, need=1),
    ]
    return [Table(f"Memory of {visible(one.limit)} when there was none left", source(one), columns)]


def _sections(report: Report, _: View) -> Sequence[Section]:
    one = report.out_of_memory
    if one is None:
        return []
    # The headline is the first warning: every output has it above all else.
    said = [visible(text.rstrip(".")) for text in (*advice(one), *caught(one))]
    return [Section("tables", "out-of-memory", said, title="Out of memory", tables=tables(one))]


SAYING = Saying(_sections)
