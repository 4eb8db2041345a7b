"""94 small architectures, from timm by name and from transformers by configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.accuracy import steps

Built = tuple[torch.nn.Module, Callable[[], torch.Tensor]]

TIMM = (
    "beit_base_patch16_224", "bat_resnext26ts", "botnet26t_256", "cait_xxs24_224", "coat_tiny",
    "coatnet_nano_cc_224", "convit_tiny", "convmixer_768_32", "convnext_atto", "convnextv2_atto",
    "crossvit_tiny_240", "cs3darknet_m", "cspresnet50", "davit_tiny", "deit_tiny_patch16_224",
    "densenet121", "dla34", "dpn48b", "edgenext_xx_small", "efficientformer_l1", "efficientnet_b0",
    "efficientvit_b0", "eva02_tiny_patch14_224", "fastvit_t8", "focalnet_tiny_srf", "gcvit_xxtiny",
    "ghostnet_100", "gmlp_ti16_224", "halonet26t", "hardcorenas_a", "hgnet_tiny", "hrnet_w18_small",
    "inception_v3", "lambda_resnet26t", "lcnet_050", "levit_128s", "maxvit_pico_rw_256",
    "mixer_s32_224", "mnasnet_small", "mobilenetv3_small_050", "mobilevit_xxs", "mobileone_s0",
    "mvitv2_tiny", "nest_tiny", "nf_resnet26", "nfnet_f0", "pit_ti_224", "poolformer_s12",
    "pvt_v2_b0", "regnetx_002", "repvgg_a0", "res2net50_26w_4s", "resmlp_12_224", "resnest14d",
    "resnet18", "resnext26ts", "rexnet_100", "sequencer2d_s", "skresnet18", "starnet_s1",
    "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_ns_224", "tiny_vit_5m_224", "tf_mixnet_s",
    "twins_svt_small", "vgg11_bn", "visformer_tiny", "vit_tiny_patch16_224", "volo_d1_224",
    "xcit_nano_12_p16_224", "xception41",
)  # fmt: skip

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128,
}  # fmt: skip
_TEXT = {**_LAYERS, **_SPECIAL, "vocab_size": 199}
_IMAGE = {**_LAYERS, "image_size": 64, "patch_size": 8}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_SEQ2SEQ = {
    **_SPECIAL, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 199,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "decoder_start_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
_STAGES = {"depths": [1, 1, 2], "embed_dim": 24, "num_heads": [1, 2, 4]}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 199}
_DISTIL = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128, "vocab_size": 199}

# The classes of configuration and model, what the configuration says, what goes in.
_HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "albert": ("Albert", "Model", {**_TEXT, "embedding_size": 32}, "ids"),
    "bart": ("Bart", "Model", _SEQ2SEQ, "both"),
    "beit": ("Beit", "Model", _IMAGE, "pixels"),
    "bert": ("Bert", "ForMaskedLM", _TEXT, "ids"),
    "convnext": ("ConvNext", "Model", {"depths": [1, 1, 2, 1]}, "pixels"),
    "deit": ("DeiT", "Model", _IMAGE, "pixels"),
    "distilbert": ("DistilBert", "Model", _DISTIL, "ids"),
    "electra": ("Electra", "Model", {**_TEXT, "embedding_size": 32}, "ids"),
    "falcon": ("Falcon", "Model", _TEXT, "ids"),
    "gemma": ("Gemma", "ForCausalLM", _GROUPED, "ids"),
    "gpt2": (
        "GPT2", "LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199}, "ids"
    ),
    "gpt_neox": ("GPTNeoX", "Model", _TEXT, "ids"),
    "llama": ("Llama", "ForCausalLM", _GROUPED, "ids"),
    "mistral": ("Mistral", "Model", _GROUPED, "ids"),
    "mixtral": ("Mixtral", "Model", {**_GROUPED, "num_local_experts": 4}, "ids"),
    "opt": ("OPT", "Model", {**_TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}, "ids"),
    "phi": ("Phi", "Model", _TEXT, "ids"),
    "qwen2": ("Qwen2", "ForCausalLM", _GROUPED, "ids"),
    "roberta": ("Roberta", "Model", _TEXT, "ids"),
    "segformer": ("Segformer", "Model", {"depths": [1, 1, 1, 1]}, "pixels"),
    "swin": ("Swin", "Model", {**_STAGES, "image_size": 64, "window_size": 4}, "pixels"),
    "t5": ("T5", "Model", _T5, "both"),
    "vit": ("ViT", "Model", _IMAGE, "pixels"),
}  # fmt: skip

SMALL = ("resnet18",)
NAMES = (*TIMM, *(f"hf-{name}" for name in _HUGGING_FACE))


def build(name: str, device: str) -> Built:
    """A model in training mode, and its forward with a loss."""
    if not name.startswith("hf-"):
        model, data = steps.build_timm(name, device)
        return model, lambda: steps.loss_of(model(data))
    import transformers

    family, kind, options, takes = _HUGGING_FACE[name.removeprefix("hf-")]
    steps.seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, family + kind)(config).to(device).train()
    if takes == "pixels":
        inputs = {"pixel_values": torch.randn(steps.BATCH, 3, 64, 64, device=device)}
    else:
        inputs = {"input_ids": torch.randint(3, 199, (steps.BATCH, 48), device=device)}
        if takes == "both":
            inputs["decoder_input_ids"] = torch.randint(3, 199, (steps.BATCH, 24), device=device)
    return model, lambda: steps.loss_of(model(**inputs))
