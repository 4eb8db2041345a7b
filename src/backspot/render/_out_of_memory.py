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


def headline(failure: OutOfMemory) -> str:
    """One sentence: in which step and module, what was asked for, and what was in use."""
    step = "" if failure.step is None else f" in step {failure.step:,}"
    request = (
        "" if failure.asked_bytes is None else f", which asked for {size(failure.asked_bytes)}"
    )
    sentence = f"The training ran out of memory{step}, {where(failure)}{request}"
    if not failure.total_bytes:
        return f"{sentence}."
    if failure.is_elsewhere:
        free = f"{size(failure.free_bytes)} of the {size(failure.total_bytes)} of {failure.limit}"
        return f"{sentence}: of pinned memory of the host, or in a library, as {free} were free."
    pieces = (
        f", {size(failure.pieces_bytes)} of it free in pieces" if _is_in_pieces(failure) else ""
    )
    used = f"{size(failure.used_bytes)} of the {size(failure.total_bytes)} of {failure.limit}"
    return f"{sentence}: {used} were in use{pieces}."


def where(failure: OutOfMemory) -> str:
    """In what: ``in the backward of blocks.3.mlp (Mlp)``."""
    if failure.phase == "optimizer":
        return "in an optimizer"
    label = failure.label
    if failure.phase == "other":
        return f"in a method of {label}" if label else "outside of all modules"
    begin = {"forward": "in the forward", "evaluation": "in an evaluation"}.get(
        failure.phase, "in the backward"
    )
    if failure.is_nearby:
        return f"{begin}, in {failure.node} next to {label}"
    if label:
        return f"{begin} of {label}"
    return f"{begin}, in {failure.node}" if failure.node else begin


def source(failure: OutOfMemory) -> str:
    """How it is known."""
    if failure.source == "history":
        return "Who holds it is from the allocator's history at that moment."
    if failure.source == "snapshot" and any(not holder.blocks for holder in failure.held):
        return (
            "Parameters, gradients and states are known by their tensors; all else is what the "
            "allocator counted at that moment, as it tells no blocks."
        )
    if failure.source == "snapshot":
        return (
            "Who holds it is from the sizes of the allocator's blocks at that moment, without a "
            "history: --memory also tells which modules keep activations."
        )
    if failure.is_host and not failure.in_use_bytes:
        return "Sizes are not known: the error is of another process, as of a loader's worker."
    module = "The module is from the frames of the exception; sizes" if failure.label else "Sizes"
    why = "PyTorch's allocator was not asked"
    if failure.is_host:
        why = "a CPU's allocator has no history"
    elif failure.error == "OutOfMemoryError" or not failure.reserved_bytes:
        why = "this allocator of PyTorch's does not tell the moment"
    return f"{module} are those of the process when the error had ended the script: {why}."


def holders(failure: OutOfMemory) -> list[tuple[str, HeldMemory]]:
    """Who holds what is in use, each as people read it; what is known of no kind comes too.

    None where it was not the memory of the GPU that was short.
    """
    if failure.is_elsewhere:
        return []
    named = [(_name(holder, failure), holder) for holder in failure.held]
    rest = failure.in_use_bytes - sum(holder.bytes for holder in failure.held)
    if rest > 0:
        named.append((_OF_PROCESS, HeldMemory("other", rest, 0)))
    if failure.others_bytes:
        outside = HeldMemory("other", failure.others_bytes, 0)
        those = "CUDA, libraries, other processes"
        name = (
            f"not PyTorch's: {those}" if failure.reserved_bytes else f"not told: tensors, {those}"
        )
        named.append((name, outside))
    others = failure.used_bytes - failure.in_use_bytes if failure.is_host else 0
    if others > 0:
        is_of_addresses = failure.limit == _ADDRESSES
        name = "addresses this process has reserved" if is_of_addresses else _OF_SYSTEM
        named.append((name, HeldMemory("other", others, 0)))
    if failure.pieces_bytes:
        named.append(("free, in pieces", HeldMemory("other", failure.pieces_bytes, 0)))
    return sorted(named, key=lambda item: -item[1].bytes)


def _name(holder: HeldMemory, failure: OutOfMemory) -> str:
    name = _SAID[holder.kind]
    if holder.kind == "other" and not any(other.kind == "activation" for other in failure.held):
        return f"activations and {name}"
    if holder.kind != "activation":
        return name
    if not holder.class_name:
        return "activations of other modules"
    number = f"{holder.members} × " if holder.members > 1 else ""
    return f"{name} of {number}{_label(holder)}"


def _label(holder: HeldMemory) -> str:
    return f"{holder.path} ({holder.class_name})" if holder.path else holder.class_name


def advice(failure: OutOfMemory) -> list[str]:
    """What helps, with numbers where they are known."""
    if failure.is_elsewhere:
        return []
    request_bytes = failure.asked_bytes or 0
    culprit = "the script" if failure.is_nearby else failure.label or "the script"
    if failure.total_bytes and request_bytes > failure.total_bytes:
        return [
            f"No batch size helps: this one request is larger than all {size(failure.total_bytes)} "
            f"of {failure.limit}. Look at the sizes that {culprit} computes with."
        ]
    sentences = []
    if _is_in_pieces(failure):
        sentences.append(
            f"{size(failure.pieces_bytes)} are free, but the largest piece has "
            f"{size(failure.largest_piece_bytes)}: PYTORCH_ALLOC_CONF=expandable_segments:True "
            "(PYTORCH_CUDA_ALLOC_CONF before torch 2.9) lets the allocator use them."
        )
    if failure.reserved_bytes and failure.others_bytes > _CONTEXT:
        sentences.append(
            f"{size(failure.others_bytes)} of {failure.limit} are neither free nor PyTorch's: "
            "other processes may use it; nvidia-smi names them."
        )
    sentences += _checkpointing(failure)
    sentences += _batch(failure)
    if failure.phase == "optimizer" and failure.step == 1:
        sentences.append("An optimizer makes its states in its first step, and keeps them.")
    return sentences


def _checkpointing(failure: OutOfMemory) -> list[str]:
    """What checkpointing repeated layers would free at most: of all but one that is at work."""
    if not failure.layers or failure.layers[0].bytes < _WORTH * failure.in_use_bytes:
        return []
    most = failure.layers[0]
    frees = most.bytes * (most.members - 1) // max(most.members, 1)
    return [
        f"Checkpointing the {most.members} × {_label(most)} frees up to about {size(frees)} of the "
        f"{size(most.bytes)} of activations that they had, for their forward once more."
    ]


def _batch(failure: OutOfMemory) -> list[str]:
    if failure.is_host:
        # Elsewhere it is as likely of data: of a NumPy array, or in a loader's worker.
        if failure.phase == "other" or not failure.in_use_bytes:
            return []
        return [
            "A smaller batch, or checkpointing, frees activations: a part of what is all else of "
            "the process."
        ]
    if not failure.reserved_bytes or not failure.in_use_bytes:
        return []  # it is not known what else the training has
    # Without a history, what is neither is activations and all else.
    changing = _sum_of(failure, _OF_BATCH if failure.source == "history" else (*_OF_BATCH, "other"))
    stays, freed = _sum_of(failure, _STAYS), "activations and what has no Python stack"
    if failure.source != "history":
        freed = "activations and all else"
    if changing < _WORTH * failure.in_use_bytes:
        return [
            f"A smaller batch frees little: {size(stays)} of {size(failure.in_use_bytes)} are "
            "parameters, gradients and states of optimizers."
        ]
    if not failure.batch_size:
        return [f"A smaller batch frees its part of {size(changing)}, {freed}."]
    sample_bytes = changing // failure.batch_size
    return [
        f"A smaller batch frees up to about {size(sample_bytes)} for each sample: a batch of "
        f"{failure.batch_size:,} had {size(changing)} of {freed}."
    ]


def _sum_of(failure: OutOfMemory, kinds: Collection[HeldKind]) -> int:
    return sum(holder.bytes for holder in failure.held if holder.kind in kinds)


def _is_in_pieces(failure: OutOfMemory) -> bool:
    """Whether what was asked for is free, but not in one piece."""
    request_bytes = failure.asked_bytes
    return (
        request_bytes is not None
        and failure.pieces_bytes >= request_bytes > failure.largest_piece_bytes
    )


def caught(failure: OutOfMemory) -> list[str]:
    """How often the allocator had run out of memory before, and something had caught it."""
    if not failure.earlier:
        return []
    return [f"The allocator had run out of memory {counted(failure.earlier, 'time')} before."]


def tables(failure: OutOfMemory) -> list[Table]:
    """Who holds memory, the most first; no table where that is not known."""
    rows = holders(failure)[:_ROWS]
    if not rows:
        return []
    total_bytes = max(failure.used_bytes, failure.in_use_bytes)
    names: list[Part] = [("name", name) for name, _ in rows]
    shares = numbers(
        percent(holder.bytes / total_bytes) if total_bytes else "" for _, holder in rows
    )
    columns = [
        Column("name", "held by", names, least=24, left=True),
        Column("amount", "memory", numbers(size(holder.bytes) for _, holder in rows)),
        Column("share", "share", shares, need=1),
    ]
    return [
        Table(
            f"Memory of {visible(failure.limit)} when there was none left",
            source(failure),
            columns,
        )
    ]


def _sections(report: Report, _: View) -> Sequence[Section]:
    failure = report.out_of_memory
    if failure is None:
        return []
    # The headline is the first warning: every output has it above all else.
    sentences = [visible(text.rstrip(".")) for text in (*advice(failure), *caught(failure))]
    return [
        Section(
            "tables",
            "out-of-memory",
            sentences,
            title="Out of memory",
            tables=tables(failure),
        )
    ]


SAYING = Saying(_sections)
