"""Hugging Face models from tiny configurations, with the loss computed inside the model."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.training import assert_true_owners, check, owners, tells_creation  # noqa: E402

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def bert():
    config = transformers.BertConfig(vocab_size=50, **SMALL)
    return transformers.BertForMaskedLM(config)


def gpt2():
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **SMALL, **options)
    return transformers.LlamaForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def vit():
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **SMALL)
    return transformers.ViTForImageClassification(config)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit}
models = pytest.mark.parametrize("name", MODELS)


def inputs(name):
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}
    tokens = torch.randint(1, 50, (2, 12))
    return {"input_ids": tokens, "labels": tokens.clone()}


def step_of(name):
    def step(model):
        model.train()
        loss = model(**inputs(name)).loss
        loss.backward()
        return loss

    return step


@models
def test_nearly_all_of_the_backward_has_an_owner(name):
    report = check(MODELS[name], step_of(name), warm_up=1)
    assert report.coverage.cpu >= 0.99
    assert "(forward not recorded)" not in owners(report)
    assert len(owners(report)) > 12


@models
def test_every_node_belongs_to_the_module_that_made_it(name, tmp_path):
    if not tells_creation:
        pytest.skip("the truth about nodes made within nodes needs torch 2.14")
    model, step = MODELS[name](), step_of(name)
    assert_true_owners(model, lambda: step(model), tmp_path, least=40)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_leaves_the_owners_as_they_are(reentrant):
    def checkpointed():
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    # Checkpointing does without the cache of keys and values.
    expected = owners(check(lambda: llama(use_cache=False), step_of("llama")))
    report = check(checkpointed, step_of("llama"))
    found = {
        path: {n: c for n, c in nodes.items() if "Checkpoint" not in n}
        for path, nodes in owners(report).items()
    }
    for path, nodes in expected.items():
        # The frozen input's own hook adds to what comes before the first layer alone.
        if path.startswith("model.layers"):
            assert nodes.items() <= found[path].items(), path
    recomputed = {row.path for row in report.modules if row.recompute_ns}
    assert {f"model.layers.{i}.self_attn.q_proj" for i in range(2)} <= recomputed
    assert not {"lm_head", "model.norm", "model.embed_tokens"} & recomputed
