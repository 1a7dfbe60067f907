"""Batch normalization in training mode: selection for the native kernel, and results."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.rules.kernels import use_kernels
from onnxtrain.runtime.native import custom_ops_library

TYPES = {"float": np.float32, "double": np.float64}
SHAPES = [(5, 3), (64, 70), (1, 4, 3), (2, 3, 17), (3, 5, 4, 4), (2, 40, 1, 1), (4, 2, 9, 11), (1, 3, 60, 60)]


def model(shape: tuple[int, ...], kind: str = "float", attributes: str = "training_mode = 1") -> onnx.ModelProto:
    sizes, channels = ", ".join(map(str, shape)), f"{kind}[{shape[1]}]"
    outputs = "y, m, v" if "training_mode = 1" in attributes else "y"
    declared = f", {channels} m, {channels} v" if "," in outputs else ""
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> f ({kind}[{sizes}] x, {channels} scale, {channels} bias, '
        f"{channels} mean, {channels} variance) => ({kind}[{sizes}] y{declared}) "
        f"{{ {outputs} = BatchNormalization<{attributes}>(x, scale, bias, mean, variance) }}"
    )


def replaced(proto: onnx.ModelProto) -> onnx.ModelProto:
    working = ir.from_proto(proto)
    use_kernels(working)
    return ir.to_proto(working)


def domains(proto: onnx.ModelProto) -> list[str]:
    return [node.domain for node in proto.graph.node]


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], threads: int = 1) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(custom_ops_library()))
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)


def draw(shape: tuple[int, ...], kind: str, offset: float = 0.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    vectors = {name: rng.standard_normal(shape[1]) for name in ("scale", "bias", "mean")}
    vectors |= {"x": rng.standard_normal(shape) * 3 + offset, "variance": rng.random(shape[1]) + 0.5}
    return {name: array.astype(TYPES[kind]) for name, array in vectors.items()}


def expected(feeds: dict[str, np.ndarray], momentum: float, epsilon: float) -> list[np.ndarray]:
    given = {name: array.astype(np.float64) for name, array in feeds.items()}
    x, axes = given["x"], (0, *range(2, feeds["x"].ndim))
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, variance = x.mean(axes), x.var(axes)
    y = (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + epsilon)
    y = y * given["scale"].reshape(shape) + given["bias"].reshape(shape)
    running = [momentum * given["mean"] + (1 - momentum) * mean]
    return [y, *running, momentum * given["variance"] + (1 - momentum) * variance]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_numpy_for_any_number_of_threads(shape: tuple[int, ...], kind: str) -> None:
    proto = replaced(model(shape, kind, "training_mode = 1, momentum = 0.75, epsilon = 0.0078125"))
    assert domains(proto) == ["onnxtrain"]
    feeds = draw(shape, kind)
    found = run(proto, feeds)
    for result, right in zip(found, expected(feeds, 0.75, 1 / 128), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5 if kind == "float" else 1e-12)
    for result, again in zip(found, run(proto, feeds, threads=3), strict=True):
        np.testing.assert_array_equal(result, again)


def test_defaults_are_those_of_the_standard() -> None:
    proto, feeds = model((4, 6, 5, 5)), draw((4, 6, 5, 5), "float")
    for found, right in zip(run(replaced(proto), feeds), run(proto, feeds), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 40), (8, 3, 20, 20)], ids=str)
def test_a_mean_far_from_zero_costs_no_digits(shape: tuple[int, ...]) -> None:
    feeds = draw(shape, "float", offset=10_000)
    found = run(replaced(model(shape)), feeds)[0]
    np.testing.assert_allclose(found, expected(feeds, 0.9, 1e-5)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attributes", ["training_mode = 0", "epsilon = 0.1"])
def test_given_statistics_stay(attributes: str) -> None:
    assert domains(replaced(model((2, 3, 4), attributes=attributes))) == [""]


def test_an_input_of_one_axis_stays() -> None:
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (float[5] x, float[1] s) => (float[5] y, float[1] m, float[1] v) '
        "{ y, m, v = BatchNormalization<training_mode = 1>(x, s, s, s, s) }"
    )
    assert domains(replaced(proto)) == [""]


def test_inputs_of_two_types_stay() -> None:
    proto = model((2, 3, 4))
    for value in proto.graph.input[3:]:
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    assert domains(replaced(proto)) == [""]


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3,), "must have a batch and a channel axis"), ((2, 4), r"\(scale\) has shape \[3\]"), ((0, 3), "have elements")],
)
def test_other_shapes_are_refused(shape: tuple[int, ...], message: str) -> None:
    proto = replaced(model((2, 3)))
    del proto.graph.input[0].type.tensor_type.shape.dim[:], proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    feeds = draw((2, 3), "float") | {"x": np.ones(shape, np.float32)}
    with pytest.raises(Exception, match=message):
        run(proto, feeds)


def test_a_training_has_the_losses_of_the_standard_operator(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (float[N, 3, 6, 6] x) => (float[N, 4] y) '
        "<float[4, 3, 3, 3] w, float[4] scale = {1, 2, 3, 4}, float[4] bias = {0, 1, 0, 1}, "
        "float[4] mean = {0, 0, 0, 0}, float[4] variance = {1, 1, 1, 1}> { c = Conv(x, w) "
        "n = BatchNormalization(c, scale, bias, mean, variance) r = Relu(n) p = GlobalAveragePool(r) y = Flatten(p) }"
    )
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(proto, tmp_path / "model.onnx")
    x = np.random.default_rng(1).standard_normal((12, 3, 6, 6)).astype(np.float32)
    used: list[bool] = []

    def trained() -> tuple[list[float], dict[str, np.ndarray]]:
        options = {"loss": "softmax_cross_entropy", "optimizer": "sgd(lr=0.1)", "batch_norm": "train"}
        trainer = onnxtrain.Trainer(tmp_path / "model.onnx", **options)
        losses = [trainer.train_step(x, np.arange(12) % 4) for _ in range(5)]
        graph = trainer.executor.session._steps[0].step.model.graph
        used.append(any(node.op_identifier()[:2] == ("onnxtrain", "BatchNormalization") for node in graph))
        return losses, {name: np.array(trainer.weights[name]) for name in ("mean", "variance")}

    monkeypatch.setattr(pipeline, "fuse_batch_norm", lambda model: None)  # which takes all nodes of one process
    losses, statistics = trained()
    monkeypatch.setattr(pipeline, "use_kernels", lambda model: None)
    others, right = trained()
    assert used == [True, False]
    np.testing.assert_allclose(losses, others, rtol=1e-5)
    for name, array in statistics.items():
        np.testing.assert_allclose(array, right[name], rtol=1e-5, atol=1e-6)
