"""The table of operations agrees with itself and with PyTorch."""

from __future__ import annotations

import inspect

import pytest

from backspot.trace.operations import (
    FOREACH,
    FUSED,
    VIEWS,
    Kind,
    is_view,
    kind_of,
    names_of,
    of_node,
    of_operator,
    operators_of,
)

EVERY = sorted(names_of(*Kind))


def node_of(name: str) -> str:
    """What PyTorch's code generator calls the node of an operation."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) + "Backward0"


def test_an_operation_has_one_kind() -> None:
    assert len(EVERY) == sum(len(names_of(kind)) for kind in Kind)


@pytest.mark.parametrize("kind", Kind)
def test_operators_and_nodes_of_a_kind_are_known_by_both_of_their_names(kind) -> None:
    for operator in operators_of(kind):
        assert kind_of(of_operator(operator)) is kind
        assert kind_of(of_operator(f"{operator}_")) is kind
    for name in names_of(kind):
        assert kind_of(of_node(node_of(name))) is kind


def test_an_operator_of_another_library_is_of_no_kind() -> None:
    assert kind_of(of_operator("mine::view")) is None
    assert not is_view("mine::view")
    assert is_view("aten::view")


def test_every_operation_of_the_table_is_one_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    of_python = {"bfloat16", "double", "float", "half"}  # they call aten::to
    newer = {"_grouped_mm"}
    assert {name for name in EVERY if not hasattr(torch.ops.aten, name)} <= of_python | newer


def test_what_pytorch_marks_as_a_view_is_one_and_nothing_that_computes_is() -> None:
    torch = pytest.importorskip("torch")

    def marked(name: str) -> bool:
        packet = getattr(torch.ops.aten, name, None)
        overloads = [] if packet is None else packet.overloads()
        return any(getattr(packet, one).is_view for one in overloads)

    # PyTorch marks what copies only where it must, too.
    alike = (*VIEWS, Kind.COPY, Kind.CAST)
    views = [name for name in EVERY if marked(name)]
    assert not [name for name in views if kind_of(of_operator(f"aten::{name}")) not in alike]
    core = ("alias", "as_strided", "detach", "diagonal", "expand", "permute", "select", "slice")
    assert all(marked(name) and is_view(f"aten::{name}") for name in core)


def test_optimizers_have_the_forms_of_the_table() -> None:
    torch = pytest.importorskip("torch")
    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer):
            options = inspect.signature(cls.__init__).parameters
            assert ("fused" in options) is (name in FUSED), name
            assert ("foreach" in options) is (name in FOREACH), name
