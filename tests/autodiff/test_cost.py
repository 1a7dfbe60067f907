"""Cost of gradients: their nodes against handwritten ones, and the time to build them."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain

pytestmark = pytest.mark.thorough  # it takes seconds


def emitted(model: onnx.ModelProto, **arguments) -> Counter[str]:
    """The operators that a gradient adds to a model."""
    after = Counter(node.op_type for node in onnxtrain.gradient(model, **arguments).graph.node)
    return after - Counter(node.op_type for node in model.graph.node)


def test_a_perceptron_costs_five_nodes_a_layer() -> None:
    """Handwritten: two matmuls and a sum of rows per layer, two nodes per activation."""
    layers = 20
    found = emitted(onnxtrain.examples.mlp([8] * layers + [10]))
    assert found["Gemm"] == 2 * layers - 1  # none to the input, and that of the weights in each
    assert found["ReduceSum"] == layers
    assert found.total() <= 5 * layers + 2


def test_nothing_is_emitted_for_what_is_frozen() -> None:
    """Only the last layer: no matmul or activation before it."""
    model = onnxtrain.examples.mlp([8] * 20 + [10])
    last = [tensor.name for tensor in model.graph.initializer][-2:]
    assert emitted(model, xs=last).total() <= 6


def convolutions(count: int) -> onnx.ModelProto:
    """Convolution, batch normalization in training mode, Relu; a batch of unknown size."""
    nodes, weights, last = [], [], "x"
    generator = np.random.default_rng(0)
    for index in range(count):
        weight = generator.normal(size=(16, 16, 3, 3)).astype(np.float32)
        weights += [
            numpy_helper.from_array(weight, f"w{index}"),
            *(
                numpy_helper.from_array(np.full(16, 1 + at, np.float32), f"{name}{index}")
                for at, name in enumerate("sbmv")
            ),
        ]
        nodes += [
            helper.make_node("Conv", [last, f"w{index}"], [f"c{index}"], pads=[1, 1, 1, 1]),
            helper.make_node(
                "BatchNormalization",
                [f"c{index}", *(f"{name}{index}" for name in "sbmv")],
                [f"n{index}", f"mean{index}", f"variance{index}"],
                training_mode=1,
            ),
            helper.make_node("Relu", [f"n{index}"], [f"r{index}"]),
        ]
        last = f"r{index}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16, 8, 8])
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "convolutions", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_batch_normalization_counts_the_batch_once() -> None:
    names = [f"{name}{index}" for index in range(6) for name in "wsb"]
    found = emitted(convolutions(6), xs=names)
    by_hand = 6 * (2 + 18 + 9 * 3 + 8)  # activation; normalization; three nodes per position of a kernel; around them
    assert found["Shape"] <= 3
    assert found.total() < 2 * by_hand
    assert found["Unsqueeze"] <= 6  # those of the scales


@pytest.mark.parametrize(("layers", "lowered"), [(1000, False), (400, True)])
def test_time_to_build_grows_with_the_nodes_only(layers: int, lowered: bool) -> None:
    """Up to two thousand nodes and as many parameters, in seconds of CPU time."""

    def seconds(layers: int) -> float:
        model = onnxtrain.examples.mlp([8] * layers + [8, 10])
        begin = time.process_time()
        if lowered:
            training = onnxtrain.training_model(model, loss="softmax_cross_entropy", optimizer=onnxtrain.Adam())
            onnxtrain.lower(training, kernels=True)
        else:
            onnxtrain.gradient(model)
        return time.process_time() - begin

    seconds(10)
    small, large = seconds(layers // 4), seconds(layers)
    assert large < 10 * max(small, 0.2)  # four times, were it not for caches and the collector; sixteen if quadratic
