"""Checkpoints of transformers: exports with a merged adapter, and trained in full, load with the same logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from onnxtrain.text import save_checkpoint

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import ModelError
from plugins.text.chats import language_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # of PyTorch and its exporter

WORDS = 97
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "attn_implementation": "eager"}
GROUPED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_implementation": "eager"}
IDS = np.arange(12).reshape(2, 6) % 90

MODELS = {
    "llama": ("Llama", GROUPED | {"tie_word_embeddings": False}),
    "tied llama": ("Llama", GROUPED | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 8}),
    "gemma3": ("Gemma3Text", GROUPED | {"head_dim": 8}),
    "phi3": ("Phi3", GROUPED | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}),
    "gpt2": ("GPT2", GPT2),
    "gpt_neox": ("GPTNeoX", SIZES),
}


class Logits(torch.nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, input_ids):
        return self.network(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits


def exported(folder, name, *, dynamo=False, fresh=False):
    """Export a model with random weights, also in norms and biases unless it is fresh, beside its config.json."""
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in () if fresh else network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    network.config.save_pretrained(folder)
    shapes = {"dynamic_axes": {"input_ids": {0: "N", 1: "T"}}}
    if dynamo:
        shapes = {"dynamic_shapes": ({0: torch.export.Dim("N"), 1: torch.export.Dim("T", max=60)},)}
    torch.onnx.export(
        Logits(network),
        (torch.ones(2, 5, dtype=torch.int64),),
        str(folder / "model.onnx"),
        input_names=["input_ids"],
        output_names=["logits"],
        dynamo=dynamo,
        opset_version=18,
        external_data=False,
        verbose=False,
        **shapes,
    )
    return folder / "model.onnx"


def loaded(folder):
    """The logits of a checkpoint, which has all tensors of its model and no other."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values())
    with torch.no_grad():
        return model.eval()(torch.tensor(IDS)).logits.numpy()


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(tmp_path, capsys, name, dynamo):
    path = exported(tmp_path, name, dynamo=dynamo)
    capsys.readouterr()
    lora = onnxtrain.Lora(rank=4, targets="all-linear")
    trainer = onnxtrain.Trainer(path, loss="next_token", optimizer="adam(lr=0.01)", lora=lora)
    for _ in range(3):
        trainer.train_step(IDS, IDS)
    trainer.save(tmp_path / "tuned.onnx_adapter")
    command = ["adapter", "merge", str(path), f"{tmp_path}/tuned.onnx_adapter", "-o", f"{tmp_path}/merged", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"written": f"{tmp_path}/merged"}
    ours = trainer.predict(IDS)
    np.testing.assert_allclose(loaded(tmp_path / "merged"), ours, atol=1e-5)
    assert np.abs(onnxtrain.predict(path, IDS) - ours).max() > 0.01


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["tied llama", "gpt2", "gemma"])
def test_models_trained_in_full(tmp_path, name):
    """A head that is trained apart from its embedding is no longer tied to it."""
    path = exported(tmp_path, name)
    trainer = onnxtrain.Trainer(path, loss="next_token", optimizer="adam(lr=0.01)")
    for _ in range(3):
        trainer.train_step(IDS, IDS)
    trainer.save(tmp_path / "tuned.onnx")
    command = ["checkpoint", f"{tmp_path}/tuned.onnx", "-o", f"{tmp_path}/whole", "--base-model", str(tmp_path)]
    assert main(command) == 0
    np.testing.assert_allclose(loaded(tmp_path / "whole"), trainer.predict(IDS), atol=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma", "gpt_neox"])
def test_norms_of_a_fresh_model_that_the_exporter_merged(tmp_path, name):
    """The newer exporter writes equal scales and biases once, which each module of the checkpoint has."""
    path = exported(tmp_path, name, dynamo=True, fresh=True)
    trainer = onnxtrain.Trainer(path, loss="next_token", optimizer="adam(lr=0.01)")
    for _ in range(3):
        trainer.train_step(IDS, IDS)
    trainer.save(tmp_path / "tuned.onnx")
    if name == "gpt_neox":  # two norms of one value are one node
        with pytest.raises(ModelError, match=r"which module has .*post_attention_layernorm.*optimize=False"):
            save_checkpoint(tmp_path / "tuned.onnx", tmp_path / "whole")
        return
    save_checkpoint(tmp_path / "tuned.onnx", tmp_path / "whole")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.tensor(IDS)).logits.numpy(), trainer.predict(IDS), atol=1e-5)


@pytest.mark.sweep
def test_large_checkpoints_are_divided(tmp_path, monkeypatch):
    path = exported(tmp_path, "llama")
    monkeypatch.setattr("onnxtrain.plugins.text.hugging_face._SHARD", 20_000)
    save_checkpoint(path, tmp_path / "shards")
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    np.testing.assert_allclose(loaded(tmp_path / "shards"), onnxtrain.predict(path, IDS), atol=1e-5)
    (tmp_path / "shards" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has a file model\.safetensors of something else"):
        save_checkpoint(path, tmp_path / "shards", base_model=tmp_path)


def test_what_else_is_in_the_folders(tmp_path):
    """Weights of the hub's GPT-2 have no prefix and old buffers; other files, layers and adapters are no part of it."""
    from safetensors.numpy import load_file, save_file

    path, hub, out = exported(tmp_path, "gpt2"), tmp_path / "hub", tmp_path / "out"
    save_checkpoint(path, out, base_model=tmp_path)
    hub.mkdir()
    weights = {name.removeprefix("transformer."): array for name, array in load_file(out / "model.safetensors").items()}
    weights |= {f"h.{layer}.attn.bias": np.ones((1, 1, 64, 64), np.float32) for layer in range(2)}
    save_file(weights, hub / "model.safetensors")
    save_file({"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)}, hub / "consolidated.safetensors")
    (hub / "config.json").write_text((tmp_path / "config.json").read_text())
    save_checkpoint(path, out, base_model=hub)
    assert not any("wq" in name for name in load_file(out / "model.safetensors"))
    np.testing.assert_allclose(loaded(out), onnxtrain.predict(path, IDS), atol=1e-5)

    save_file({**weights, "h.1.attn.q_norm.weight": np.ones(8, np.float32)}, hub / "model.safetensors")
    with pytest.raises(ModelError, match=r"the model lacks transformer\.h\.1\.attn\.q_norm\.weight of .*hub"):
        save_checkpoint(path, tmp_path / "new", base_model=hub)
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**config, "n_layer": 3}))
    with pytest.raises(ModelError, match=r"the model has 2 layers, but config.json in .*hub' says 3"):
        save_checkpoint(path, tmp_path / "new", base_model=hub)
    (out / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has a file adapter_config.json of something else, which transformers"):
        save_checkpoint(path, out, base_model=tmp_path)


def test_refusals(tmp_path):
    path = language_model(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"needs config.json, but there is none in .*; name the folder"):
        save_checkpoint(path, tmp_path / "out")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"the model does not say which module has|has no embedding"):
        save_checkpoint(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
