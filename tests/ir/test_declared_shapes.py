"""Declared shapes that contradict each other do not stop inference."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import parser

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes

# As TorchScript's exporter writes scatter_reduce: the shapes declared in the branches are those of a branch that
# is never taken.
BRANCHES = """<ir_version: 10, opset_import: ["" : 18]>
agraph (float[2, 3] x) => (float[2, 6] y)
<float[2, 3] w = {1, 2, 3, 4, 5, 6}, bool never = {0}>
{
    t = Mul (x, w)
    z = If (never) <
        then_branch = flat () => (float[6] a) { shape = Constant <value_ints = [-1]> () a = Reshape (t, shape) },
        else_branch = same () => (float[6] b) { b = Identity (t) }
    >
    s = Add (x, z)
    r = Tanh (s)
    y = Mul (r, x)
}"""


def _model() -> onnx.ModelProto:
    return parser.parse_model(BRANCHES)


def test_types_behind_contradicting_shapes_are_inferred() -> None:
    model = infer_shapes(ir.from_proto(_model()))
    assert {output.dtype for node in model.graph for output in node.outputs} == {ir.DataType.FLOAT}
    (y,) = model.graph.outputs
    assert y.shape is not None
    assert len(y.shape) == 2


def test_gradients_through_contradicting_shapes() -> None:
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    w = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    gradient = onnxtrain.gradient(_model(), "y", ["w"])
    session = onnxruntime.InferenceSession(gradient.SerializeToString(), providers=["CPUExecutionProvider"])
    _, dw = session.run(None, {"x": x})
    np.testing.assert_allclose(dw, (1 - np.tanh(x + x * w) ** 2) * x * x, rtol=1e-5, atol=1e-6)


def test_types_that_nothing_tells_leave_shapes_as_they_are() -> None:
    text = """<ir_version: 10, opset_import: ["" : 18, "my.domain" : 1]>
    agraph (float[2, 3] x) => (float[2, 3] y)
    <float[2, 3] z>
    {
        s = my.domain.Strange (x)
        z = Identity (s)
        y = Add (z, x)
    }"""
    model = infer_shapes(ir.from_proto(parser.parse_model(text)))
    assert model.graph.outputs[0].shape == ir.Shape([2, 3])


def test_initializers_have_the_shapes_of_their_tensors() -> None:
    model = parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
    agraph (float[N, 2] x, float[k] b) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2] b = {5, 6}>
    { h = Gemm (x, w, b)  y = Tanh (h) }""")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, ["rows", "?"]))
    rows = {row.name: row for row in onnxtrain.inspect(model).initializers}
    assert [(row.shape, row.size, row.trainable) for row in rows.values()] == [((2, 2), 4, True), ((2,), 2, True)]
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.Adam(), threads=1)
    trainer.train_step(np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32))
    assert dict(trainer.weights)["w"].shape == (2, 2)


def test_a_rank_that_the_inputs_contradict_is_not_believed() -> None:
    """As jax2onnx declares it for a layer with several axes of features: ONNX Runtime computes [N, 8]."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
    agraph (float[N, 6] x) => (float[N, 3] y)
    <float[6, 8] w, float[8, 3] v, int64[2] to = {-1, 8}, float[N, 2, 4] h, float[N, 2, 4] r>
    {
        h = Gemm (x, w)
        r = Tanh (h)
        f = Reshape (r, to)
        y = Gemm (f, v)
    }"""
    generator = np.random.default_rng(0)
    model = parser.parse_model(text)
    weights = {name: generator.normal(size=size).astype(np.float32) for name, size in (("w", (6, 8)), ("v", (8, 3)))}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.1)")
    x, target = generator.normal(size=(5, 6)).astype(np.float32), np.zeros((5, 3), np.float32)
    h = np.tanh(x @ weights["w"])
    y = h @ weights["v"]
    assert np.isclose(trainer.train_step(x, target), (y**2).mean(), rtol=1e-5)
    dy = 2 * y / y.size
    np.testing.assert_allclose(trainer.parameters["v"], weights["v"] - 0.1 * h.T @ dy, rtol=1e-4, atol=1e-6)
    dw = x.T @ ((dy @ weights["v"].T) * (1 - h**2))
    np.testing.assert_allclose(trainer.parameters["w"], weights["w"] - 0.1 * dw, rtol=1e-4, atol=1e-6)
