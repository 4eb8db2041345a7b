"""What a process group is for: which kind of parallel training exchanges data in it.

What its collectives do decides. If that leaves several answers, the names decide that the program
gave the group and the modules. Nothing is guessed: a group whose collectives do several things is
``unknown``, unless its name says which of them it is for; and a name that its collectives
contradict counts for nothing.

- Gradients are exchanged: ``data``; parameters are gathered, too: ``sharded``.
- Ranks transfer to each other between the calls of modules: ``pipeline``.
- Modules exchange activations: ``tensor``, if these are reduced in the forward, as the products of
  a layer that is split are; ``context``, if only operators of attention exchange. All-to-all is
  that of experts or of attention.

Collectives that decide nothing are those outside of modules and of backward passes, as for the
loss, and those of activations that have no counterpart in the backward, as for statistics.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TypeAlias

from backspot.job.summary import Call
from backspot.results.job import Role
from backspot.trace.names import ALL_TO_ALL, POINT_TO_POINT

Roles: TypeAlias = Mapping[tuple[str, tuple[int, ...]], Role]
"""The role of each process group, by its name and ranks."""
_Set: TypeAlias = frozenset[Role]
_REDUCTIONS = ("all_reduce", "reduce_scatter")
_EXCHANGES = (*_REDUCTIONS, "all_gather", ALL_TO_ALL, POINT_TO_POINT)
"""What can move activations, and the gradients of these back."""
_WORDS: Mapping[str, _Set] = {
    word: roles
    for words, roles in (
        ("dp data", _Set({"data", "sharded"})),
        ("ddp replicate replicated", _Set({"data"})),
        ("fsdp shard sharded", _Set({"sharded"})),
        ("tp tensor", _Set({"tensor"})),
        ("pp pipe pipeline", _Set({"pipeline"})),
        ("ep expert experts moe", _Set({"expert"})),
        ("cp context ulysses", _Set({"context"})),
    )
    for word in words.split()
}
_EXPERT = re.compile(r"expert|moe", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


def role_of(name: str, calls: Collection[Call], classes: Mapping[str, str]) -> Role:
    """Return what a group of this name is for; ``classes`` has that of each module by its path."""
    of_calls, of_name = _seen(calls, classes), _said(name)
    fitting = of_name.intersection(_Set().union(*of_calls)) if of_calls else of_name
    if of_name:
        return next(iter(fitting)) if len(fitting) == 1 else "unknown"
    if len(of_calls) != 1:
        return "unknown"
    if of_calls[0] == {"expert", "context"}:
        return "expert_or_context"
    return next(iter(of_calls[0])) if len(of_calls[0]) == 1 else "unknown"


def _said(name: str) -> _Set:
    """Return which roles the words of a name can mean: ``dp_shard`` is ``sharded``."""
    meanings = [_WORDS[word] for word in re.findall("[a-z]+", name.lower()) if word in _WORDS]
    all_meanings = _Set().union(*meanings)
    return all_meanings.intersection(*meanings) or all_meanings


def _seen(calls: Collection[Call], classes: Mapping[str, str]) -> list[_Set]:
    """Return for each thing that collectives do the roles in which groups do that."""
    roles = []
    purposes = {call.purpose for call in calls}
    if "parameters" in purposes:
        roles.append(_Set({"sharded"}))
    elif "gradients" in purposes:
        roles.append(_Set({"data"}))
    if any(call.kind == POINT_TO_POINT and not call.purpose for call in calls):
        roles.append(_Set({"pipeline"}))
    moving = [
        call
        for call in calls
        if call.purpose in ("activations", "attention") and call.kind in _EXCHANGES
    ]
    if any(call.backward for call in moving) and not all(call.backward for call in moving):
        roles.append(_of_activations(moving, classes))
    return roles


def _of_activations(calls: Collection[Call], classes: Mapping[str, str]) -> _Set:
    """Return the roles of groups that exchange activations in these ways."""
    forward = [call for call in calls if not call.backward]
    kinds = {call.kind for call in calls}
    modules = [f"{call.module} {classes.get(call.module, '')}" for call in calls]
    for_experts = all(_EXPERT.search(module) for module in modules)
    attends = {call.module for call in forward if call.purpose == "attention"}
    if all(call.purpose == "attention" for call in forward) and all(
        call.module in attends for call in calls
    ):
        return _Set({"context"})
    if kinds == {ALL_TO_ALL}:
        if for_experts:
            return _Set({"expert"})
        return _Set({"context"} if all(map(_ATTENTION.search, modules)) else {"expert", "context"})
    if POINT_TO_POINT in kinds:
        return _Set({"context", "pipeline"})
    reduced = any(call.kind in _REDUCTIONS for call in forward)
    if reduced and ALL_TO_ALL not in kinds and not for_experts:
        return _Set({"tensor"})
    return _Set({"tensor", "context", "expert"})
