"""A slow backward is planted into one module of a ViT after another: each time it is ranked first.

``benchmarks/accuracy/planted.py`` does this at random over many architectures.
"""

from __future__ import annotations

import pytest

import backspot
from support.choice import slow_except

torch = pytest.importorskip("torch")
_plants = pytest.importorskip("benchmarks.accuracy.plants")

pytestmark = [pytest.mark.timm, pytest.mark.xdist_group("timm")]

MODULES = (
    "patch_embed.proj",
    "patch_embed",
    "pos_drop",
    "blocks.0.norm1",
    "blocks.1.attn",
    "blocks.1.attn.proj",
    "blocks.2.mlp.act",
    "blocks.2",
    "norm",
    "head",
)


@pytest.fixture(scope="module")
def vit():
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    # With more, a busy machine makes whichever module wait that is at work: that is then the
    # slowest in truth.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=10
    )
    images = torch.randn(4, 3, 32, 32)
    yield model, lambda: model(images).square().mean().backward()
    torch.set_num_threads(threads)


def test_these_are_ten_modules_with_a_call_each(vit) -> None:
    model, step = vit
    assert len(set(MODULES)) == 10
    assert {(path, 0) for path in MODULES} <= set(_plants.find_calls(model, step))


@pytest.mark.parametrize("path", slow_except(["blocks.1.attn.proj"], MODULES))
def test_the_planted_module_comes_first(vit, path: str) -> None:
    model, step = vit
    step()
    with (
        _plants.planted(model.get_submodule(path), 0, _plants.spin_for(30, "cpu")) as plant,
        backspot.instrument(model),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        for _ in range(3):
            plant.begin_step()
            step()
    assert plant.ran == 3
    first = first_module(backspot.locate(profiler))
    assert first.path == path
    assert first.nodes[0].name == plant.node_name
    assert sum(first.wall_ns_by_step) >= 90e6
    ancestor = ".".join(path.split(".")[:2])
    assert first_module(backspot.locate(profiler, depth=2)).path == ancestor


def first_module(report: backspot.Report) -> backspot.Row:
    """The first module of the ranked list: what a busy machine holds up is not one."""
    return next(row for row in report.top() if row.is_module)


def test_a_model_is_as_it_was_after_the_plant(vit) -> None:
    model, _ = vit
    with _plants.planted(model.norm, 0, lambda: None):
        assert "forward" in vars(model.norm)
    assert "forward" not in vars(model.norm)
