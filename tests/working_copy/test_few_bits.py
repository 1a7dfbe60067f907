"""Models with low-bit weights: earlier layers train, and low-bit weights do not change."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from sentences import raises_sentence

WIDTH, BLOCK = 48, 16


def network(level: int = 4) -> onnx.ModelProto:
    """A linear layer before a matmul with an int4 weight."""
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.normal(size=(8, WIDTH)).astype(np.float32) / 3,
        "w": rng.integers(0, 256, (3, WIDTH // BLOCK, BLOCK // 2), np.uint8),
        "scales": rng.uniform(0.02, 0.05, (3, WIDTH // BLOCK)).astype(np.float32),
    }
    attributes = {"K": WIDTH, "N": 3, "bits": 4, "block_size": BLOCK, "accuracy_level": level}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMulNBits", ["t", "w", "scales"], ["y"], domain="com.microsoft", **attributes),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def trainer(model, **options):
    return onnxtrain.Trainer(model, loss="mean_squared_error", optimizer="sgd(lr=0.1)", **options)


X = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)
Y = np.random.default_rng(2).normal(size=(32, 3)).astype(np.float32)


@pytest.mark.parametrize("kernels", [False, None])
def test_training_lowers_the_loss_and_keeps_the_file(kernels, tmp_path):
    model = network()
    made = trainer(model, runtime=onnxtrain.RuntimeOptions(kernels=kernels))
    assert list(made.parameters) == ["a"]
    losses = [made.train_step(X, Y) for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    made.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    assert [node.SerializeToString() for node in saved.graph.node] == [
        node.SerializeToString() for node in model.graph.node
    ]
    for before, after in zip(model.graph.initializer, saved.graph.initializer, strict=True):
        assert (before.SerializeToString() == after.SerializeToString()) == (before.name != "a")


def test_products_round_their_inputs_only_where_asked():
    """At level 4, ONNX Runtime rounds activations to 8 bits."""

    def loss(level):
        return trainer(network(), runtime=onnxtrain.RuntimeOptions(accuracy_level=level)).train_step(X, Y)

    def predicted(level):
        session = onnxruntime.InferenceSession(network(level).SerializeToString(), providers=["CPUExecutionProvider"])
        return float(np.mean((session.run(None, {"x": X})[0].astype(np.float64) - Y) ** 2))

    assert loss(0) == pytest.approx(predicted(0), rel=1e-6)
    assert loss(None) == pytest.approx(predicted(4), rel=1e-6)
    assert trainer(network()).train_step(X, Y) == loss(0)
    assert abs(predicted(4) - predicted(0)) > 1e-5 * predicted(0)


def test_levels_that_do_not_exist_are_refused():
    with raises_sentence("accuracy_level_option", what="accuracy_level", got=5):
        onnxtrain.RuntimeOptions(accuracy_level=5)
