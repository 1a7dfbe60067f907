"""Activations that the backward pass reads from their gradient's node instead of keeping them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.runtime.native import custom_ops_library
from zoo.language_model import LAYERS, WORDS, language_model

HEADER = """
<ir_version: 8, opset_import: ["": 20, "com.microsoft": 1, "ai.onnx.preview.training": 1]>
f (float[5, 3] x, float[3, 4] v, float[4, 2] w) => (float[3, 4] dv, float[4, 2] dw)
<float low = {-0.5}, float high = {0.5}, int64[2] flat = {5, 4}, int64[3] deep = {5, 1, 4}, float[5, 4] a,
 float[4] scale = {0.5, 2, 1, -1}, float[4] bias = {1, 0, -1, 0.5}>
"""
GRADIENT = """
  y = ReduceSum<keepdims = 0>(s)
  dv, dw = ai.onnx.preview.training.Gradient<xs = ["v", "w"], y = "y">(v, w)
"""
LINEAR = "p = MatMul(a, w) s = Mul(p, p)"


def model(activation: str, rest: str = LINEAR) -> ir.Model:
    text = f"{HEADER} {{ m = MatMul(x, v) {activation} {rest} {GRADIENT} }}"
    return infer_shapes(ir.from_proto(parser.parse_model(text)))


def lowered(text: tuple[str, ...], *, kernels: bool) -> ir.Model:
    made = model(*text)
    lower_graph(made, kernels=kernels)
    return infer_shapes(made)


def givers(made: ir.Model) -> list[ir.Node]:
    """Return the gradient nodes that return the activation, too."""
    return [node for node in made.graph if any(str(value.name).startswith("again/") for value in node.outputs[1:])]


def run(made: ir.Model) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    proto = ir.to_proto(made)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {value.name: rng.standard_normal(value.shape).astype(np.float32) for value in session.get_inputs()}
    return session.run(None, feeds)


@pytest.mark.parametrize(
    "text",
    [
        ("a = Clip(m, low, high)",),
        ("a = Clip(m, low)",),
        ("a = Clip(m, , high)",),
        ("a = Gelu(m)",),
        ('a = Gelu<approximate = "tanh">(m)',),
        ("a = com.microsoft.Gelu(m)",),
        ("a = com.microsoft.FastGelu(m)",),
        ("g = Sigmoid(m) a = Mul(m, g)",),
        ("g = Sigmoid(m) a = Mul(g, m)",),
        ("b = Clip(m, low, high) a = Reshape(b, flat)",),
        ("b = Clip(m, low, high) c = Reshape(b, deep) a = Flatten<axis = 2>(c)",),
        ("c = Clip(m, low) d = Mul(c, c) b = Clip(m, low, high) a = Add(b, d)", "p = MatMul(b, w) s = Mul(p, p)"),
        ("a = LayerNormalization(m, scale)",),
        ("a = LayerNormalization<epsilon = 0.25>(m, scale, bias)",),
        ("a = LayerNormalization<axis = 1>(m, scale, bias)",),
        ("a = SimplifiedLayerNormalization(m, scale)",),
        ("b = LayerNormalization(m, scale, bias) a = Reshape(b, flat)",),
    ],
)
def test_gradients_read_what_the_gradient_gives_again(text):
    found = lowered(text, kernels=True)
    (giver,) = givers(found)
    assert giver.outputs[-1].uses()
    kinds = ("Clip", "Gelu", "FastGelu", "Mul", "Elementwise", "LayerNormalization", "SimplifiedLayerNormalization")
    activation = next(n for n in found.graph if n.op_type in kinds and n.outputs[0].name in ("a", "b"))
    readers = {node for node, _ in activation.outputs[0].uses()}
    order = list(found.graph)
    assert all(order.index(node) < order.index(giver) for node in readers)
    for a, b in zip(run(found), run(lowered(text, kernels=False)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        ("a = Clip(m, low, high)", "b = Mul(a, a) s = MatMul(b, w)"),  # dy is a multiple of a
        ("a = Clip(m, low, high)", "s = Add(a, a) t = Mul(w, w)"),  # no gradient reads a
        ("n = Neg(m) a = Relu(n)",),  # its gradient reads a itself
        ("a = LayerNormalization(m, scale)", "b = Mul(a, a) s = MatMul(b, w)"),
    ],
)
def test_left_alone(text):
    assert not givers(lowered(text, kernels=True))


GATED = "u = Tanh(m) g = Gelu(m) a = Mul(g, u)"


def test_products_with_a_value_that_is_kept_are_recomputed():
    text = (GATED, LINEAR)
    found = lowered(text, kernels=True)
    (giver,) = givers(found)
    product = giver.outputs[1]  # a gate's gradient multiplies by the other factor itself
    assert [reader.op_type for reader, _ in product.uses()] == ["LinearWeightGradient"]
    forward = next(node for node in found.graph if node.outputs[0].name == "a")
    assert [reader.op_type for reader, _ in forward.outputs[0].uses()] == ["Linear"]
    for a, b in zip(run(found), run(lowered(text, kernels=False)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_standard_operators_keep_it():
    assert not givers(lowered(("a = Clip(m, low, high)",), kernels=False))


def test_clipping_again_gives_the_same_bits():
    text = ("a = Clip(m, low, high)",)
    kept = lowered(text, kernels=True)
    (giver,) = givers(kept)
    forward = next(node for node in kept.graph if node.op_type == "Clip")
    again = run(kept)
    for reader, place in list(giver.outputs[1].uses()):
        reader.replace_input_with(place, forward.outputs[0])
    giver.resize_outputs(1)
    for a, b in zip(again, run(kept), strict=True):
        np.testing.assert_array_equal(a, b)


def trained(bits: int | None, **options) -> tuple[onnxtrain.Trainer, list[float]]:
    trainer = onnxtrain.Trainer(language_model(bits=bits), loss="next_token", output="logits", **options)
    ids = np.random.default_rng(0).integers(0, WORDS, (2, 9))
    data = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    return trainer, [trainer.train_step(data, ids) for _ in range(3)]


def again(trainer: onnxtrain.Trainer) -> Counter[str]:
    graph = trainer.executor.session._steps[0].step.model.graph
    return Counter(node.op_type for node in graph for value in node.outputs if str(value.name).startswith("again/"))


@pytest.mark.parametrize(("bits", "adapters"), [(None, False), (None, True), (4, True)])
def test_a_language_model_keeps_no_norms_and_no_gated_products(
    bits: int | None, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"lora": onnxtrain.Lora(rank=2, targets="all-linear")} if adapters else {}
    trainer, losses = trained(bits, **options)
    found = again(trainer)
    norms = 2 * LAYERS - adapters  # the first norm reads the embedding, which has no gradient unless it is trained
    assert found["RMSNormalizationGradient"] >= norms
    assert (found["GeluGradient"], found["Mul"]) == (LAYERS, 0)  # the gated product, too
    monkeypatch.setattr(pipeline, "reuse_activations", lambda graph, backward: None)
    kept, same = trained(bits, **options)
    assert not again(kept)
    np.testing.assert_allclose(losses, same, rtol=1e-5)
    for name, value in kept.parameters.items():
        np.testing.assert_allclose(trainer.parameters[name], value, atol=2e-3)
