"""Ordinary models trained as they should be: one of each of 24 timm families, nothing planted.

bf16 autocast, channels_last, cuDNN's search, fused AdamW, batch 64, images on the GPU. Whatever a
report finds is in the model's own code.
"""

from __future__ import annotations

import functools

import torch

from benchmarks.causes.case import Built, Case, Context
from benchmarks.causes.training import train_resnet

__all__ = ["FAMILIES"]

_NAMES = (
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
    "resnet50",
    "efficientnet_b0",
    "regnety_016",
    "maxvit_tiny_rw_224",
    "coatnet_0_rw_224",
    "mixer_b16_224",
    "beit_base_patch16_224",
    "eva02_small_patch14_224",
    "cait_s24_224",
    "xcit_small_12_p16_224",
    "densenet121",
    "mobilenetv3_large_100",
    "levit_256",
    "pvt_v2_b1",
    "poolformer_s12",
    "focalnet_tiny_srf",
    "dm_nfnet_f0",
    "hrnet_w18",
    "dla34",
    "ghostnet_100",
    "tresnet_m",
)


def _build(name: str, context: Context) -> Built:
    import timm

    torch.backends.cudnn.benchmark = True
    with torch.device(context.device):
        model = timm.create_model(name)
    model.to(context.device, memory_format=torch.channels_last).train()
    size = model.pretrained_cfg["input_size"]
    data = context.randn(context.pick(64, 2), *size)
    return train_resnet(context, model, data.contiguous(memory_format=torch.channels_last))


FAMILIES = {
    name: Case(
        name, "as timm has it", "", False, None, {}, 1, 1, functools.partial(_build, name), 1
    )
    for name in _NAMES
}
"""A case for each model, whose findings an expert judges."""
