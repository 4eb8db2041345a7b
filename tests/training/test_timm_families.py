"""A sample of timm, a model a family: training is the same with labels, and all of it has an owner.

``benchmarks/accuracy/timm_sweep.py`` does the same for every name; this is its sample for each
change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")
timm_sweep = pytest.importorskip("benchmarks.accuracy.timm_sweep")

pytestmark = [pytest.mark.timm, pytest.mark.xdist_group("timm")]

FAMILIES = (
    "beit_base_patch16_224",
    "coat_tiny",
    "coatnet_nano_cc_224",
    "convnext_atto",
    "cspresnet50",
    "davit_tiny",
    "densenet121",
    "dla34",
    "efficientnet_b0",
    "eva02_tiny_patch14_224",
    "ghostnet_100",
    "inception_v3",
    "levit_128s",
    "maxvit_pico_rw_256",
    "mixer_s32_224",
    "mobilenetv3_small_050",
    "nf_regnet_b0",
    "pvt_v2_b0",
    "regnetx_002",
    "repvgg_a0",
    "resnet18",
    "swin_tiny_patch4_window7_224",
    "vit_tiny_patch16_224",
    "xcit_nano_12_p16_224",
)

SMALLER: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"depth": 3, "embed_dim": 192, "num_heads": 3},
    "coat_tiny": {"parallel_depth": 2},
    "coatnet_nano_cc_224": {"depths": (2, 2, 2, 2)},
    "davit_tiny": {"depths": (1, 1, 1, 1)},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "eva02_tiny_patch14_224": {"depth": 3},
    "maxvit_pico_rw_256": {"depths": (1, 1, 1, 1)},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2, 2, 2)},
    "vit_tiny_patch16_224": {"depth": 3},
    "xcit_nano_12_p16_224": {"depth": 3},
}
"""With fewer of the blocks that are all alike."""


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    import torch

    pytest.importorskip("timm")
    threads, was = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(was)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_the_same_and_is_covered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    create = partial(timm.create_model, **SMALLER.get(name, {}))
    monkeypatch.setattr(timm, "create_model", create)
    found = timm_sweep.examine({"name": name}, lambda *_: None, "cpu")
    assert found["reproducible_loss"]
    assert found["reproducible_gradients"]
    assert found["same_loss"]
    assert found["same_gradients"]
    assert found["same_graph"]
    assert found["executed"] == found["nodes"]
    assert found["hooks_left"] == 0
    assert found["modules_skipped"] == 0
    assert found["nodes_owned"] >= 0.97
    # Where branches run side by side, autograd goes to and fro between modules.
    assert found["marker_share"] >= 0.8
