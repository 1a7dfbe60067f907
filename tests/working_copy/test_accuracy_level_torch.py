"""Training at accuracy_level=None computes int4 layers as onnxruntime-genai does."""

from __future__ import annotations

import numpy as np
import pytest

import onnxtrain

pytest.importorskip("torch", reason="PyTorch is not installed")
genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

pytestmark = [pytest.mark.torch, pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]

TOKENS = np.arange(3, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from zoo import genai_models

    parent = tmp_path_factory.mktemp("llama")
    genai_models.checkpoint("LlamaForCausalLM", parent / "checkpoint")
    return genai_models.build(parent / "checkpoint", parent / "int4", "int4").parent


def of_genai(folder):
    """Return the logits of onnxruntime-genai for the last token."""
    model = genai.Model(str(folder))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=len(TOKENS) + 1, do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(TOKENS.astype(np.int32))
    return np.asarray(generator.get_output("logits"))[0, -1]


@pytest.mark.parametrize(("level", "low", "high"), [(None, 0, 1e-3), (4, 0, 1e-3), (0, 1e-3, 1)])
def test_logits_are_those_of_genai(folder, level, low, high):
    """With float activations (level 0, the default) they differ by the rounding to 8 bits."""
    runtime = onnxtrain.RuntimeOptions(accuracy_level=level)
    settings = {"loss": "next_token", "output": "logits", "lora": onnxtrain.Lora(rank=2), "runtime": runtime}
    trainer = onnxtrain.Trainer(folder / "model.onnx", **settings)
    inputs = {"input_ids": TOKENS[None], "attention_mask": np.ones((1, len(TOKENS)), int)}
    logits = trainer.predict(inputs)["logits"][0, -1]
    wanted = of_genai(folder)
    assert low <= np.abs(logits - wanted).max() / np.abs(wanted).max() < high
    loss = trainer.train_step(inputs, TOKENS[None])  # the step computes what predict does
    shifted = trainer_loss(logits=onnxtrain.Trainer(folder / "model.onnx", **settings).predict(inputs)["logits"][0])
    assert loss == pytest.approx(shifted, rel=1e-5)


def trainer_loss(logits):
    """Mean loss of the next tokens."""
    scores = logits[:-1].astype(np.float64)
    scores -= scores.max(1, keepdims=True)
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), TOKENS[1:]]))
