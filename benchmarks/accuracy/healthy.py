"""40 models that are trained as they should be: whatever a report finds is in the model itself.

AdamW (fused on a GPU), gradients dropped and not zeroed, the batch in place before the step. On a
GPU under bf16 autocast, images in channels_last. The models are small, so that a step takes about
0.1 to 0.6 s on two cores; on a GPU the batches are larger.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import models
from benchmarks.causes.case import Built, built
from benchmarks.models import Context, made

_TIMM = (
    "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto", "resnet18",
    "efficientnet_b0", "regnetx_002", "maxvit_pico_rw_256", "coatnet_nano_cc_224",
    "mixer_s32_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "xcit_nano_12_p16_224",
    "densenet121", "mobilenetv3_small_100", "levit_128s", "pvt_v2_b0", "poolformer_s12",
    "focalnet_tiny_srf", "hrnet_w18_small", "dla34", "ghostnet_100", "repvgg_a0",
)  # fmt: skip

# Further options of the configuration.
_HUGGING_FACE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama{}ForCausalLM", {"num_key_value_heads": 4}),
    "bert": ("Bert{}ForMaskedLM", {}),
    "gpt_neox": ("GPTNeoX{}ForCausalLM", {}),
    "mixtral": ("Mixtral{}ForCausalLM", {"num_key_value_heads": 4, "num_local_experts": 4}),
    "t5": ("T5{}ForConditionalGeneration", {}),
}

_WORDS = (32_768, 8192, 99)

Sizes = tuple[int, int, int]
"""A size on a GPU, on a CPU, and in a small run."""


def _size(context: Context, sizes: Sizes) -> int:
    return sizes[2] if context.small else sizes[1] if context.device == "cpu" else sizes[0]


def _trained(context: Context, model: nn.Module, loss: Callable[[], torch.Tensor]) -> Built:
    return built(context, model, loss, autocast=context.device != "cpu")


def _labelled(
    context: Context, model: nn.Module, *data: torch.Tensor, shape: Any, classes: int, key: str = ""
) -> Built:
    """Train on random labels of this shape; ``key`` is what is taken of the output."""
    labels = context.randint(classes, *shape)

    def loss() -> torch.Tensor:
        found = model(*data)
        return functional.cross_entropy(found[key] if key else found, labels)

    return _trained(context, model, loss)


def _images(context: Context, model: nn.Module, batch: Sizes, side: Sizes) -> torch.Tensor:
    """Random images, in channels_last on a GPU as the model then is too."""
    length = _size(context, side)
    data = context.randn(_size(context, batch), 3, length, length)
    if context.device == "cpu":
        return data
    model.to(memory_format=torch.channels_last)
    return data.contiguous(memory_format=torch.channels_last)


def _words(context: Context, model: nn.Module, batch: Sizes, length: Sizes) -> Built:
    """Train a language model on its own input."""
    tokens = context.randint(_size(context, _WORDS), _size(context, batch), _size(context, length))

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return _trained(context, model, loss)


# Images ------------------------------------------------------------------------------------------


def _timm(name: str, context: Context) -> Built:
    import timm

    config = timm.get_pretrained_cfg(name)
    side = (config.input_size[-1], 128, 64)
    options = {"img_size": _size(context, side)} if config.fixed_input_size else {}
    model = made(context, lambda: timm.create_model(name, num_classes=1000, **options))
    data = _images(context, model, (128, 4, 2), side)
    return _labelled(context, model, data, shape=(len(data),), classes=1000)


def _video(context: Context) -> Built:
    from torchvision.models.video import r3d_18

    model = made(context, lambda: r3d_18(num_classes=400))
    side, batch = _size(context, (112, 40, 16)), _size(context, (16, 2, 2))
    data = context.randn(batch, 3, 8, side, side)
    return _labelled(context, model, data, shape=(batch,), classes=400)


def _segmentation(context: Context) -> Built:
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large as make

    model = made(context, lambda: make(weights=None, weights_backbone=None, num_classes=21))
    data = _images(context, model, (32, 2, 2), (320, 96, 64))
    shape = (len(data), *data.shape[2:])
    return _labelled(context, model, data, shape=shape, classes=21, key="out")


def _detection(name: str, context: Context) -> Built:
    from torchvision.models import detection

    options = {"num_classes": 10, "weights": None, "weights_backbone": None}
    if name.startswith("fasterrcnn"):
        options["box_batch_size_per_image"] = _size(context, (512, 64, 16))
        options["rpn_post_nms_top_n_train"] = _size(context, (2000, 200, 50))
    model = made(context, lambda: getattr(detection, name)(**options))
    side, batch = _size(context, (320, 160, 64)), _size(context, (16, 2, 2))
    data = [context.randn(3, side, side) for _ in range(batch)]
    places = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.4, 0.3, 0.9, 0.8]], device=context.device)
    targets = [{"boxes": places * side, "labels": context.randint(9, 2) + 1} for _ in range(batch)]
    return _trained(context, model, lambda: torch.stack(list(model(data, targets).values())).sum())


class _Vae(nn.Module):
    """A variational autoencoder of convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.SiLU(), nn.Conv2d(width, 2 * width, 4, 2, 1)
        )
        self.mean = nn.Conv2d(2 * width, 8, 1)
        self.spread = nn.Conv2d(2 * width, 8, 1)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 2 * width, 4, 2, 1),
            nn.SiLU(),
            nn.ConvTranspose2d(2 * width, 3, 4, 2, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.encoder(x))
        mean, spread = self.mean(y), self.spread(y)
        again = self.decoder(mean + torch.randn_like(mean) * (spread / 2).exp())
        divergence = (mean.square() + spread.exp() - 1 - spread).mean() / 2
        return functional.mse_loss(again, x) + divergence


def _vae(context: Context) -> Built:
    model = made(context, lambda: _Vae(_size(context, (128, 32, 8))))
    data = _images(context, model, (64, 4, 2), (128, 64, 16))
    return _trained(context, model, lambda: model(data))


def _unet(context: Context) -> Built:
    model = made(context, lambda: models.Unet(_size(context, (64, 16, 4))))
    data = _images(context, model, (32, 4, 2), (128, 64, 16))
    return _labelled(context, model, data, shape=(len(data), *data.shape[2:]), classes=16)


# Text --------------------------------------------------------------------------------------------


def _hugging_face(name: str, context: Context) -> Built:
    import transformers

    classes, options = _HUGGING_FACE[name]
    width, layers = _size(context, (1024, 256, 32)), _size(context, (8, 4, 2))
    words = _size(context, _WORDS)
    if name == "t5":
        options = {"d_model": width, "d_kv": width // 8, "d_ff": 4 * width, "num_layers": layers}
        options |= {"decoder_start_token_id": 0}
    else:
        heads = _size(context, (16, 8, 4))
        options = {**options, "hidden_size": width, "num_hidden_layers": layers}
        options |= {"num_attention_heads": heads, "intermediate_size": 4 * width}
    family, kind = classes.split("{}")
    config = getattr(transformers, f"{family}Config")(**options, vocab_size=words)
    model = getattr(transformers, family + kind)(config).to(context.device).train()
    tokens = context.randint(words, _size(context, (16, 4, 2)), _size(context, (512, 64, 8)))
    return _trained(context, model, lambda: model(input_ids=tokens, labels=tokens).loss)


def _gpt(context: Context) -> Built:
    sizes = (1024, 256, 32), (8, 4, 2), (512, 64, 8), _WORDS
    model = made(context, lambda: models.Gpt(*(_size(context, size) for size in sizes)))
    return _words(context, model, (16, 4, 2), sizes[2])


class LstmLanguageModel(nn.Module):
    """Two layers of an LSTM between an embedding and the words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def _lstm(context: Context) -> Built:
    words, width = _size(context, _WORDS), _size(context, (1024, 128, 16))
    model = made(context, lambda: LstmLanguageModel(words, width))
    return _words(context, model, (64, 8, 2), (128, 32, 8))


def _encoder(context: Context) -> Built:
    """Torch's own transformer, with its dropout."""
    width, depth = _size(context, (1024, 256, 32)), _size(context, (8, 4, 2))

    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        return nn.TransformerEncoder(layer, depth)

    model = made(context, make)
    data = context.randn(_size(context, (32, 4, 2)), _size(context, (512, 64, 8)), width)
    return _trained(context, model, lambda: functional.mse_loss(model(data), data))


# Others ------------------------------------------------------------------------------------------


def _mlp(context: Context) -> Built:
    width, rows = _size(context, (4096, 512, 32)), _size(context, (8192, 256, 8))

    def make() -> nn.Module:
        hidden = [part for _ in range(4) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    data = context.randn(rows, width)
    return _labelled(context, made(context, make), data, shape=(rows,), classes=10)


class GraphNetwork(nn.Module):
    """In each layer, a node's own features and the sum over those of its neighbours."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.others = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for own, others in zip(self.own, self.others, strict=True):
            sent = others(x).index_select(0, source)
            heard = torch.zeros(x.shape, dtype=sent.dtype, device=x.device)
            x = functional.relu(own(x) + heard.index_add(0, target, sent))
        return self.head(x)


def _graph(context: Context) -> Built:
    width, nodes = _size(context, (256, 64, 16)), _size(context, (100_000, 4000, 50))
    model = made(context, lambda: GraphNetwork(width, 3))
    edges = (context.randint(nodes, 8 * nodes) for _ in range(2))
    return _labelled(
        context, model, context.randn(nodes, width), *edges, shape=(nodes,), classes=16
    )


def _recommender(context: Context) -> Built:
    """Embeddings of a few thousand rows, most of which a batch uses."""
    rows, width = _size(context, (20_000, 2000, 50)), _size(context, (128, 64, 16))
    model = made(context, lambda: models.Recommender(rows, rows, width, 4 * width))
    batch, length = _size(context, (2048, 64, 4)), 20
    user, history = context.randint(rows, batch), context.randint(rows, batch, length)
    clicked = context.randint(2, batch, length).float()
    loss = functional.binary_cross_entropy_with_logits
    return _trained(context, model, lambda: loss(model(user, history), clicked))


class _Sound(nn.Module):
    """Convolutions over a waveform, then a GRU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, width, 10, 5),
            nn.GroupNorm(1, width),
            nn.GELU(),
            nn.Conv1d(width, width, 8, 4),
            nn.GELU(),
            nn.Conv1d(width, width, 4, 2),
            nn.GELU(),
        )
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 35)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gru(self.convolutions(x).transpose(1, 2))
        return self.head(y.mean(1))


def _sound(context: Context) -> Built:
    model = made(context, lambda: _Sound(_size(context, (512, 64, 8))))
    batch = _size(context, (64, 8, 2))
    data = context.randn(batch, 1, _size(context, (16_000, 4000, 400)))
    return _labelled(context, model, data, shape=(batch,), classes=35)


HEALTHY: dict[str, Callable[[Context], Built]] = {
    "mlp": _mlp,
    "lstm": _lstm,
    "graph": _graph,
    **{f"hf-{name}": functools.partial(_hugging_face, name) for name in _HUGGING_FACE},
    "fasterrcnn": functools.partial(_detection, "fasterrcnn_mobilenet_v3_large_320_fpn"),
    "ssdlite": functools.partial(_detection, "ssdlite320_mobilenet_v3_large"),
    "segmentation": _segmentation,
    "video": _video,
    "encoder": _encoder,
    "gpt": _gpt,
    "unet": _unet,
    "vae": _vae,
    "recommender": _recommender,
    **{name: functools.partial(_timm, name) for name in _TIMM},
    "sound": _sound,
}
"""What builds each model. The first ones are of different kinds, for a run that is cut short."""
