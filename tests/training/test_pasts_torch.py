"""Inputs for past keys and values, as the older exporter of PyTorch writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.advice.doctor import diagnose
from onnxtrain.training.working_copy.kv_cache import leave_out_pasts

NAMES = [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_all_pasts_of_an_exported_cache_are_left_out(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=32, n_embd=8, n_layer=2, n_head=2, attn_implementation="eager"
    )
    network = transformers.GPT2LMHeadModel(config).eval()

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens, mask, *pasts):
            cache = transformers.DynamicCache()
            for layer in range(2):
                cache.update(pasts[2 * layer], pasts[2 * layer + 1], layer)
            found = self.network(tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
            return (found.logits, *(part for one in found.past_key_values.layers for part in (one.keys, one.values)))

    path = tmp_path / "gpt2.onnx"
    past = torch.zeros(1, 2, 3, 4)
    torch.onnx.export(
        Cached(),
        (torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 7, dtype=torch.int64), past, past, past, past),
        path,
        dynamo=False,
        input_names=["input_ids", "attention_mask", *NAMES],
        output_names=["logits", *(name.replace("past_key_values", "present") for name in NAMES)],
        dynamic_axes={"input_ids": {0: "b", 1: "t"}, "attention_mask": {0: "b", 1: "s"}}
        | {name: {0: "b", 2: "p"} for name in NAMES},
    )
    assert leave_out_pasts(ModelFile.load(path).training_model()) == NAMES
    assert any("Training begins without a past: 4 inputs" in finding.what for finding in diagnose(path))
    tokens = np.random.default_rng(0).integers(0, 17, size=(2, 5))
    found = onnxtrain.predict(path, {"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    # The exporter writes the length of its example's past into the graph as a number: the file's own result counts.
    empty = dict.fromkeys(NAMES, np.zeros((2, 2, 0, 4), np.float32))
    session = onnxruntime.InferenceSession(path)
    (expected,) = session.run(["logits"], {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **empty})
    assert isinstance(found, dict)
    np.testing.assert_allclose(found["logits"], expected, atol=1e-5)


def _decoder(second: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        g (float[b, 2, 3, 4] x, float[b, 2, p, 4] past.0.key, float[b, 2, {second}, 4] past.1.key)
        => (float[b, 2, s, 4] y, float z) {{
            y = Concat<axis=2>(past.0.key, x)
            z = ReduceSum<keepdims=0>(past.1.key)
        }}""".replace("past.0.key", "past_0_key").replace("past.1.key", "past_1_key")
    )


def test_pasts_of_one_model_go_together_or_stay() -> None:
    assert leave_out_pasts(ModelFile.load(_decoder("p")).training_model()) == []
    assert leave_out_pasts(ModelFile.load(_decoder("encoder_length")).training_model()) == ["past_0_key"]
    assert leave_out_pasts(ModelFile.load(_decoder("16")).training_model()) == ["past_0_key"]
