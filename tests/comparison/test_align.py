"""Modules of two reports are matched: gone, new or moved."""

import time
from dataclasses import replace

import pytest

from backspot import compare
from backspot.comparison.align import aligned
from backspot.results.comparison import Move
from support.sample_reports import node, report, row, vit, vit_rows


def renamed(rows, old, new):
    """The rows with ``old`` at the start of each path replaced."""
    made = []
    for one in rows:
        fits = one.path == old or one.path.startswith(f"{old}.")
        made.append(replace(one, path=new + one.path[len(old) :]) if fits else one)
    return made


def wrapped(rows):
    """The rows of the model inside a DistributedDataParallel."""
    inner = [
        replace(one, path=f"module.{one.path}".rstrip("."))
        if one.is_module and one.root == ""
        else one
        for one in rows
    ]
    return [*inner, row("", "DistributedDataParallel", wall=9_000)]


def linear(path, wall=3_000_000, **more):
    return row(path, wall=wall, nodes=(node("AddmmBackward0", wall),), **more)


def test_gone_and_new_modules_are_told_apart():
    found = compare(report([linear("a"), row("old", "Conv2d", wall=9_000)]), report([linear("a")]))
    assert found["old"].verdict == "gone"
    assert found["old"].after_ms == 0
    found = compare(report([linear("a")]), report([linear("a"), row("more", "Conv2d", wall=9_000)]))
    assert found["more"].verdict == "new"
    assert found["more"].before_path is None
    assert found["more"].percent is None


def test_a_renamed_module_is_moved_and_not_gone_and_new():
    found = compare(report([linear("a"), linear("head")]), report([linear("a"), linear("fc")]))
    assert (found["fc"].verdict, found["fc"].before_path) == ("moved", "head")
    assert found.moves == (Move("head", "fc", 1),)
    assert len(found.changes) == 2


def test_a_moved_module_can_be_slower_as_well():
    found = compare(
        report([linear("a"), linear("head")]), report([linear("a"), linear("fc", 30_000_000)])
    )
    assert (found["fc"].verdict, found["fc"].before_path) == ("longer", "head")


def test_a_renamed_container_takes_its_modules_along():
    found = compare(vit(), report(renamed(vit_rows(), "blocks", "layers")))
    assert found.moves == (Move("blocks", "layers", 120),)
    assert found["layers.7.attn.qkv"].before_path == "blocks.7.attn.qkv"
    assert not {"new", "gone"} & {change.verdict for change in found.changes}


def test_a_wrapped_model_is_the_same_model():
    found = compare(vit(), report(wrapped(vit_rows())))
    assert [move.before for move in found.moves] == [""]
    assert found["module.patch_drop"].before_path == "patch_drop"
    assert found["module"].before_path == ""
    assert [c.path for c in found.changes if c.verdict in ("new", "gone")] == [""]
    back = compare(report(wrapped(vit_rows())), vit())
    assert back["patch_drop"].before_path == "module.patch_drop"
    assert back.moves[0].after == ""


def test_a_layer_renamed_in_every_block_is_one_move():
    rows = [replace(one, path=one.path.replace(".qkv", ".to_qkv")) for one in vit_rows()]
    found = compare(vit(), report(rows))
    assert found.moves == (Move("*.qkv", "*.to_qkv", 12),)
    assert found["blocks.3.attn.to_qkv"].before_path == "blocks.3.attn.qkv"


@pytest.mark.slow
def test_a_wrapped_model_of_two_thousand_modules_is_matched_quickly():
    rows = vit_rows(blocks=200)
    since = time.process_time()
    found = compare(report(rows), report(wrapped(rows)))
    assert time.process_time() - since < 10
    assert [move.modules for move in found.moves] == [2007]


@pytest.mark.slow
def test_a_layer_renamed_in_each_of_thousands_of_blocks_takes_its_modules_along():
    """By the square of the blocks this takes minutes."""

    def paths(name):
        return {
            path: one
            for block in range(8_000)
            for path, one in (
                (f"b.{block}.{name}", linear(f"b.{block}.{name}")),
                (f"b.{block}.{name}.act", row(f"b.{block}.{name}.act", "GELU")),
            )
        }

    pairs, moves = aligned(paths("qkv"), paths("to_qkv"))
    assert moves == (Move("*.qkv", "*.to_qkv", 16_000),)
    assert ("b.7.qkv.act", "b.7.to_qkv.act") in pairs
    assert not [pair for pair in pairs if None in pair]


def test_modules_that_look_the_same_are_not_guessed():
    found = compare(report([linear("a"), linear("b")]), report([linear("x"), linear("y")]))
    assert found.moves == ()
    assert sorted(change.verdict for change in found.changes) == ["gone", "gone", "new", "new"]


@pytest.mark.parametrize(
    "other",
    [
        row("fc", "Conv2d", wall=9_000, nodes=(node("AddmmBackward0", 9_000),)),
        row("fc", wall=9_000, nodes=(node("MulBackward0", 9_000),)),
        row("fc"),
    ],
    ids=["another class", "other nodes", "no nodes"],
)
def test_modules_that_differ_have_not_moved(other):
    found = compare(report([linear("head")]), report([other]))
    assert found.moves == ()
    assert found["fc"].verdict == "new"
