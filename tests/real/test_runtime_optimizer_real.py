"""Files of ONNX Runtime's transformer optimizer: gradients and training equal the original model's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

FUSED = {
    "bert": {"EmbedLayerNormalization", "Attention", "SkipLayerNormalization", "BiasGelu"},
    "gpt2": {"SkipLayerNormalization", "FastGelu"},
    "vit": {"SkipLayerNormalization", "BiasGelu"},
    "clip": {"SkipLayerNormalization", "QuickGelu"},
}


def _network(kind: str):
    """A small network with random weights, and its inputs by name."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    size["attn_implementation"] = "eager"
    ids = torch.randint(0, 16, (2, 8))
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=16, max_position_embeddings=16, **size)
        network = transformers.BertModel(config, add_pooling_layer=False)
        feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=16, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager", use_cache=False
        )
        network, feeds = transformers.GPT2Model(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    elif kind == "vit":
        network = transformers.ViTModel(
            transformers.ViTConfig(image_size=8, patch_size=4, **size), add_pooling_layer=False
        )
        feeds = {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        config = transformers.CLIPTextConfig(vocab_size=16, max_position_embeddings=16, **size)
        network, feeds = transformers.CLIPTextModel(config), {"input_ids": ids}
    for parameter in network.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # no two are alike, none is zero

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network.eval()

        def forward(self, *given):
            return self.network(**dict(zip(feeds, given, strict=True))).last_hidden_state

    return Wrapped(), feeds


def _gradients(path: Path, names: list[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    built = onnxtrain.gradient(path, "y", names)
    outputs = [value.name for value in built.graph.output][-len(names) :]
    return onnxruntime.InferenceSession(built.SerializeToString()).run(outputs, feeds)


@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("kind", FUSED)
def test_an_optimized_model_has_the_gradients_of_the_model(kind: str, dynamo: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    network, inputs = _network(kind)
    plain = tmp_path / "plain.onnx"
    if dynamo:
        how = {"dynamic_shapes": (tuple({0: torch.export.Dim.AUTO} for _ in inputs),)}
    else:
        how = {"dynamic_axes": {name: {0: "b"} for name in (*inputs, "y")}, "opset_version": 17}
    torch.onnx.export(
        network, tuple(inputs.values()), plain, dynamo=dynamo, input_names=list(inputs), output_names=["y"], **how
    )
    feeds = {name: value.numpy() for name, value in inputs.items()}
    for level in (0, 1):  # at level 0 the optimizer writes no import of its domain
        fused = tmp_path / f"fused_{level}.onnx"
        found = optimizer.optimize_model(str(plain), kind, num_heads=2, hidden_size=16, opt_level=level)
        onnx.save(found.model, fused)
        assert "com.microsoft" in {node.domain for node in found.model.graph.node}
        counts = Counter(node.op_type for node in found.model.graph.node)
        if not dynamo:
            assert FUSED[kind] <= counts.keys()
        trained = [set(onnxtrain.Trainer(path, loss="mse").parameters) for path in (plain, fused)]
        sizes = [
            {item.name: tuple(item.dims) for item in onnx.load(path, load_external_data=False).graph.initializer}
            for path in (plain, fused)
        ]
        names = sorted(name for name in trained[0] & trained[1] if sizes[0][name] == sizes[1][name])
        assert len(names) > 20
        for name, expected, actual in zip(
            names, _gradients(plain, names, feeds), _gradients(fused, names, feeds), strict=True
        ):
            bound = 0.01 * np.abs(expected).max() + 1e-4
            np.testing.assert_allclose(actual, expected, atol=bound, err_msg=name)
        targets = np.full(onnxruntime.InferenceSession(plain).run(["y"], feeds)[0].shape, 0.5, np.float32)
        losses = []
        for path in (plain, fused):
            trainer = onnxtrain.Trainer(path, loss="mse", optimizer="sgd(0.01)")
            trainer.fit((feeds, targets), epochs=3, batch_size=2, progress=False)
            trainer.save(tmp_path / "saved.onnx")
            session = onnxruntime.InferenceSession(tmp_path / "saved.onnx")
            predicted = session.run(["y"], feeds)[0]
            loss = trainer.evaluate((feeds, targets))["loss"]
            assert np.mean((predicted - targets) ** 2) == pytest.approx(loss, rel=1e-3)
            losses.append(loss)
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
