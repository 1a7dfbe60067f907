"""Decoders of further layouts beside PyTorch: attention sinks, and the language model of Qwen 2.5 VL and Gemma 3."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.torch, pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]

WORDS, STEPS = 97, 4
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, WORDS, (4, 8))


def exported(module, path, inputs, axes):
    torch.onnx.export(
        module,
        tuple(torch.from_numpy(array) for array in inputs.values()),
        str(path),
        input_names=[*inputs],
        output_names=["logits"],
        dynamo=False,
        dynamic_axes={**axes, "logits": {0: "N", 1: "T"}},
        opset_version=18,
    )
    return path


def check_losses(module, path, inputs, labels, axes, *, rate=0.3):
    """Losses of some steps are PyTorch's; return the trainer."""
    with torch.no_grad():
        for parameter in module.parameters():  # the exporter merges equal ones
            parameter.add_(torch.randn_like(parameter) * 0.05)
    exported(module, path, inputs, axes)
    trainer = onnxtrain.Trainer(path, loss="next_token", optimizer=f"sgd(lr={rate})", tie=True)
    rule = torch.optim.SGD(module.parameters(), lr=rate)
    found, expected = [], []
    for _ in range(STEPS):
        rule.zero_grad()
        logits = module(*(torch.from_numpy(array) for array in inputs.values()))[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), torch.from_numpy(labels[:, 1:]).reshape(-1))
        loss.backward()
        rule.step()
        expected.append(loss.item())
        found.append(trainer.train_step(inputs, labels))
    assert expected[-1] < expected[0] - 0.01
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    return trainer


class Feed(torch.nn.Module):
    """A feed-forward layer instead of a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 48), torch.nn.Linear(48, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))), None


def test_attention_sinks(tmp_path):
    config = transformers.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.mlp = Feed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    before = model.model.layers[0].self_attn.sinks.detach().clone()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = model

        def forward(self, input_ids):
            return self.network(input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False).logits

    trainer = check_losses(Logits(), tmp_path / "sinks.onnx", {"input_ids": IDS}, IDS, {"input_ids": {0: "N", 1: "T"}})
    after = model.model.layers[0].self_attn.sinks.detach()
    assert (after - before).abs().max() > 1e-4
    same = [value for value in trainer.parameters.values() if value.size == 4]
    assert any(np.allclose(value.reshape(-1), after, atol=1e-5) for value in same)


def qwen():
    rope = {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    config = transformers.Qwen2_5_VLConfig(text_config=SIZES | {"rope_scaling": rope}, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")

    class Decoder(torch.nn.Module):
        """The decoder as Optimum exports it: embeddings of text and images, and positions in three dimensions."""

        def __init__(self):
            super().__init__()
            self.model, self.head = model.model.language_model, model.lm_head

        def forward(self, inputs_embeds, attention_mask, position_ids):
            found = self.model(
                inputs_embeds=inputs_embeds, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
            )
            return self.head(found.last_hidden_state)

    return Decoder()


def test_the_decoder_of_qwen_vl(tmp_path):
    axes = {0: "N", 1: "T"}
    inputs = {
        "inputs_embeds": RNG.normal(size=(4, 8, 64)).astype(np.float32),
        "attention_mask": np.ones((4, 8), np.int64),
        "position_ids": np.broadcast_to(np.arange(8), (3, 4, 8)).copy(),
    }
    shapes = {"inputs_embeds": axes, "attention_mask": axes, "position_ids": {1: "N", 2: "T"}}
    check_losses(qwen(), tmp_path / "qwen.onnx", inputs, IDS, shapes)
    trainer = onnxtrain.Trainer(tmp_path / "qwen.onnx", loss="next_token", lora=onnxtrain.Lora(rank=4))
    assert trainer.train_step(inputs, IDS) > trainer.train_step(inputs, IDS)
    assert len(trainer.fit(inputs, IDS, progress=False).rows) == 1  # one ready batch


def gemma():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    config = transformers.Gemma3Config(
        text_config=SIZES | {"head_dim": 16}, vision_config=vision, mm_tokens_per_image=4, image_token_index=96
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = model

        def forward(self, input_ids, pixel_values):
            return self.network(
                input_ids=input_ids,
                pixel_values=pixel_values,
                attention_mask=torch.ones_like(input_ids),
                use_cache=False,
            ).logits

    return Logits()


def test_gemma_with_images(tmp_path):
    ids = IDS % 90
    ids[:, 1:5] = 96
    inputs = {"input_ids": ids, "pixel_values": RNG.normal(size=(4, 3, 16, 16)).astype(np.float32)}
    axes = {"input_ids": {0: "N", 1: "T"}, "pixel_values": {0: "N"}}
    check_losses(gemma(), tmp_path / "gemma.onnx", inputs, ids % 90, axes, rate=0.03)
