"""The role of a process group: by what its collectives do, and by names if these leave it open."""

from __future__ import annotations

from pathlib import Path

import pytest

from backspot.job.reduce import summarize
from backspot.job.roles import role_of
from backspot.job.summary import Call, Purpose
from backspot.results.job import Role


def _call(
    kind: str, purpose: Purpose = "activations", module: str = "layer", *, backward: bool = False
) -> Call:
    return Call(kind, purpose, module, backward=backward)


DATA = Path(__file__).parents[1] / "data" / "ranks" / "parallel"
GRADIENTS = [_call("all_reduce", "gradients", "", backward=True)]
SHARDED = [
    _call("all_gather", "parameters"),
    _call("reduce_scatter", "gradients", "", backward=True),
]
TENSOR = [_call("all_reduce"), _call("all_reduce", backward=True)]
SEQUENCE = [
    _call(kind, backward=backward)
    for kind in ("all_gather", "reduce_scatter")
    for backward in (False, True)
]
STAGES = [_call("send_recv", "", "")]
ALL_TO_ALL = [_call("all_to_all"), _call("all_to_all", backward=True)]
ATTENTION = [_call("all_to_all", "attention"), _call("all_to_all", backward=True)]
OF_LOSS = [_call("all_reduce", "", ""), _call("broadcast"), _call("barrier", "", "")]
STATISTICS = [_call("all_reduce")]
"""Of a module's forward alone: counts of tokens, for instance."""


@pytest.mark.parametrize(
    ("calls", "role"),
    [
        (GRADIENTS, "data"),
        (SHARDED, "sharded"),
        (TENSOR, "tensor"),
        (SEQUENCE, "tensor"),
        (STAGES, "pipeline"),
        (ALL_TO_ALL, "expert_or_context"),
        (ATTENTION, "context"),
        ([_call("all_gather", "attention"), _call("reduce_scatter", backward=True)], "context"),
        ([], "unknown"),
        (STATISTICS, "unknown"),
        # Gathered in the forward alone: the loss of CLIP, a column of a split layer, attention.
        ([_call("all_gather"), _call("reduce_scatter", backward=True)], "unknown"),
        # Transfers within modules are a ring's, or those of a pipeline in one module.
        ([_call("send_recv"), _call("send_recv", backward=True)], "unknown"),
    ],
)
def test_collectives_of_one_kind_of_parallelism_tell_the_role(
    calls: list[Call], role: Role
) -> None:
    assert role_of("", calls, {}) == role
    assert role_of("mesh_default", [*calls, *OF_LOSS], {}) == role


@pytest.mark.parametrize(
    ("calls", "name", "role"),
    [
        ([*GRADIENTS, *TENSOR], "mesh_tp", "tensor"),
        ([*GRADIENTS, *TENSOR], "mesh_dp", "data"),
        ([*GRADIENTS, *TENSOR], "mesh_dp_shard", "unknown"),
        ([*SHARDED, *ALL_TO_ALL], "mesh_dp", "sharded"),
        ([*SHARDED, *ALL_TO_ALL], "mesh_ep", "expert"),
        ([*SHARDED, *ALL_TO_ALL], "mesh_tp", "unknown"),
        ([*STAGES, *GRADIENTS], "mesh_pp", "pipeline"),
    ],
)
def test_a_group_that_does_several_things_is_unknown_unless_its_name_says_for_which(
    calls: list[Call], name: str, role: Role
) -> None:
    assert role_of("default_pg", calls, {}) == "unknown"
    assert role_of(name, calls, {}) == role


@pytest.mark.parametrize(
    ("name", "calls", "role"),
    [
        ("mesh_ep", ALL_TO_ALL, "expert"),
        ("mesh_cp", ALL_TO_ALL, "context"),
        ("mesh_tp", [], "tensor"),
        ("TENSOR_MODEL_PARALLEL_GROUP", OF_LOSS, "tensor"),
        ("mesh_dp_shard_cp", SHARDED, "sharded"),
        ("mesh_dp_replicate", [], "data"),
        ("mesh_dp", SHARDED, "sharded"),
        ("mesh_dp", GRADIENTS, "data"),
        ("mesh_dp", [], "unknown"),  # sharded or not
        ("mesh_tp", GRADIENTS, "unknown"),  # the name is contradicted
        ("mesh_dim_0", TENSOR, "tensor"),
        ("group 3", ALL_TO_ALL, "expert_or_context"),
        ("EXPERT_DATA_PARALLEL_GROUP", GRADIENTS, "data"),
    ],
)
def test_a_name_decides_only_among_what_the_collectives_leave_open(
    name: str, calls: list[Call], role: Role
) -> None:
    assert role_of(name, calls, {}) == role


@pytest.mark.parametrize(
    ("path", "class_name", "role"),
    [
        ("layers.0.moe", "Routed", "expert"),
        ("layers.0.mlp", "MoeBlock", "expert"),
        ("layers.0.self_attn", "Ulysses", "context"),
        ("layers.0.mlp", "Routed", "expert_or_context"),
    ],
)
def test_modules_that_are_named_after_experts_or_attention_decide_on_all_to_all(
    path: str, class_name: str, role: Role
) -> None:
    calls = [_call("all_to_all", module=path), _call("all_to_all", module=path, backward=True)]
    assert role_of("", calls, {path: class_name}) == role


def test_experts_that_gather_their_tokens_are_not_taken_for_split_layers() -> None:
    calls = [
        _call(call.kind, module="layers.0.experts", backward=call.backward) for call in SEQUENCE
    ]
    assert role_of("", calls, {}) == "unknown"
    assert role_of("mesh_ep", calls, {}) == "expert"


def test_statistics_do_not_hide_what_a_group_is_for() -> None:
    assert role_of("", [*GRADIENTS, *STATISTICS], {}) == "data"


@pytest.mark.parametrize(
    ("recorded", "roles"),
    [
        ("fsdp1", {"default_pg": "sharded"}),
        ("tp", {"default_pg": "tensor"}),
        ("sp", {"default_pg": "tensor"}),
        ("ep", {"default_pg": "data", "group 1": "expert_or_context"}),
        ("ulysses", {"default_pg": "data", "group 2": "context"}),
        ("cp", {"default_pg": "context"}),
        ("cp_ring", {"default_pg": "context"}),
        ("pp", {"": "pipeline"}),
        ("mixed", {"default_pg": "unknown"}),
    ],
)
def test_the_roles_of_groups_recorded_with_nccl_are_right(
    recorded: str, roles: dict[str, Role]
) -> None:
    """None of these groups has a description of its own."""
    summary = summarize(DATA / f"{recorded}.rank0.trace.json.gz")
    classes = {module.path: module.class_name for module in summary.modules}
    found = {group.name: role_of(group.name, group.calls, classes) for group in summary.groups}
    assert found == roles
