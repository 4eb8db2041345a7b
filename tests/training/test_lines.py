"""No wrong line: each node's line is the one that anomaly mode's traceback ends with."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from support.modules import Block, Checkpointed, Custom  # noqa: E402
from support.source_lines import assert_true_lines  # noqa: E402
from support.training import tells_creation  # noqa: E402


class Slices(nn.Module):
    """Parts of memory are written in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        y = self.first(x)
        y[:, :2] = self.second(y * 1)[:, :2]
        view = y.view(-1, 2, 3)
        view[:, 1].add_((y[:, :3] * 1).tanh())
        left, right = y.chunk(2, dim=1)
        z = torch.cat([left * 2, right], dim=1)
        z[0] = 0
        z[:, 1:3].mul_(
            3,
        )
        return self.second(z)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        out, (state, _) = self.rnn(x)
        return self.head(out[:, -1]).sum() + state.square().mean()


# The least that PyTorch's own modules make of it: before torch 2.14 theirs alone have lines.
MODELS = {
    "in-place": (lambda: nn.Sequential(Block(), Block()), (3, 4), 6, 10),
    "slices": (Slices, (4, 6), 4, 18),
    "LSTM": (Recurrent, (3, 2, 4), 3, 7),
    "custom function": (Custom, (3, 4), 1, 7),
    "reentrant checkpoints": (lambda: Checkpointed(reentrant=True), (3, 4), 2, 11),
    "checkpoints": (lambda: Checkpointed(reentrant=False), (3, 4), 6, 14),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        (2, 3, 8),
        9,
        15,
    ),
    "parallel branches": (lambda: nn.Bilinear(4, 4, 2), None, 1, 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_line_is_the_one_that_made_the_node(name, tmp_path):
    make, shape, torch_own, all_nodes = MODELS[name]
    model = make()
    inputs = [torch.randn(3, 4)] * 2 if shape is None else [torch.randn(shape)]
    least = all_nodes if tells_creation else torch_own
    # Code that a reentrant checkpoint runs again outside of any module has no line.
    unknown = 3 if name == "reentrant checkpoints" else 0
    forward = lambda: model(*inputs).sum()  # noqa: E731
    assert_true_lines(model, forward, tmp_path, least=least, unknown=unknown)


@pytest.mark.slow
@pytest.mark.timm
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "patch_drop_rate": 0.5, "depth": 3}),
        ("resnet18", {}),
        ("convnext_atto", {}),
        ("densenet121", {"memory_efficient": True, "block_config": (2, 2, 2, 2)}),
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 32, "window_size": 2, "depths": (2, 2, 2, 2)},
        ),
        ("efficientnet_lite0", {}),
        ("mixer_s32_224", {"img_size": 32}),
        ("maxvit_rmlp_pico_rw_256", {"img_size": 64, "depths": (1, 1, 1, 1)}),
    ],
)
def test_every_line_of_a_real_model_is_the_one_that_made_the_node(name, options, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=3, **options)
    size = options.get("img_size", 32)
    x = torch.randn(2, 3, size, size)
    assert_true_lines(model, lambda: model(x).sum(), tmp_path, least=40)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_every_line_of_a_checkpointed_vit_is_the_one_that_made_the_node(
    reentrant, set_reentrant, tmp_path
):
    timm = pytest.importorskip("timm")

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=3)
    model.set_grad_checkpointing()
    set_reentrant(reentrant)
    x = torch.randn(2, 3, 32, 32)
    assert_true_lines(model, lambda: model(x).sum(), tmp_path, least=10)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_every_line_of_a_language_model_is_the_one_that_made_the_node(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "bert":
        config = transformers.BertConfig(vocab_size=50, intermediate_size=64, **small)
        model = transformers.BertForMaskedLM(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)
        model = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        config = transformers.LlamaConfig(vocab_size=50, intermediate_size=64, **small)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2)
        config.decoder_start_token_id = config.pad_token_id = 0
        model = transformers.T5ForConditionalGeneration(config)
    model.train()
    tokens = torch.randint(1, 50, (2, 12))
    forward = lambda: model(input_ids=tokens, labels=tokens).loss  # noqa: E731
    # GPT-2 is mostly of classes that are not PyTorch's own.
    least = 20 if tells_creation or name != "gpt2" else 15
    assert_true_lines(model, forward, tmp_path, least=least)
