"""The digits, their brightness, and a model file with two outputs."""

import numpy as np
import onnx
from onnx import helper
from sklearn.datasets import load_digits

import onnxtrain


def digits_and_ink():
    """Images [N, 64], their digits, and their standardized brightness."""
    x, y = load_digits(return_X_y=True)
    ink = x.mean(1, keepdims=True)
    return x / 16, y, (ink - ink.mean()) / ink.std()


def write_model(path):
    """A perceptron with a shared hidden layer and the outputs ``digit`` [N, 10] and ``ink`` [N, 1]."""
    model = onnxtrain.examples.mlp((64, 64, 10))
    graph = model.graph
    graph.node[-1].output[0] = graph.output[0].name = "digit"
    weight = np.random.default_rng(0).normal(0, 0.1, (64, 1)).astype(np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(weight, "ink.weight"))
    graph.node.append(helper.make_node("MatMul", [graph.node[-1].input[0], "ink.weight"], ["ink"]))
    graph.output.append(helper.make_tensor_value_info("ink", onnx.TensorProto.FLOAT, ["N", 1]))
    onnx.save(model, path)
