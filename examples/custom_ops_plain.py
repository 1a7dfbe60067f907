"""Use onnxtrain's native operators from ONNX Runtime alone, without importing onnxtrain.

Adam minimizes (x - 3)^2. The gradient 2 (x - 3) and the operator are in one graph; parameter and state are inputs
and outputs bound to the same memory, so every run of the session is one training step in place.

Run it with the path of the library, which `python -c "import onnxtrain; print(onnxtrain.custom_ops_library())"`
prints.
"""

import sys

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

TRAINING = "ai.onnx.preview.training"


def model() -> bytes:
    """One training step: loss, gradient and Adam."""
    state = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "v", "h")]
    new_state = [helper.make_tensor_value_info(f"{value.name}_new", TensorProto.FLOAT, [1]) for value in state]
    nodes = [
        helper.make_node("Constant", [], ["three"], value_float=3.0),
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Sub", ["x", "three"], ["distance"]),
        helper.make_node("Mul", ["distance", "distance"], ["loss"]),
        helper.make_node("Mul", ["two", "distance"], ["gradient"]),
        helper.make_node(
            "Adam",
            ["learning_rate", "step", "x", "gradient", "v", "h"],
            ["x_new", "v_new", "h_new"],
            domain=TRAINING,
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "training_step",
        [
            helper.make_tensor_value_info("learning_rate", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            *state,
        ],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [1]), *new_state],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(TRAINING, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def main(library: str) -> None:
    """Train for 500 steps and print x."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(model(), options, providers=["CPUExecutionProvider"])

    arrays = {name: np.zeros(1, np.float32) for name in ("x", "v", "h")}
    learning_rate, step = np.array(0.05, np.float32), np.array(0, np.int64)
    binding = session.io_binding()
    for name, array in {**arrays, "learning_rate": learning_rate, "step": step}.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, array in arrays.items():
        binding.bind_output(f"{name}_new", "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    binding.bind_output("loss")

    for count in range(1, 501):
        step[...] = count
        session.run_with_iobinding(binding)
        if count % 100 == 0:
            loss = binding.get_outputs()[-1].numpy()[0]
            print(f"step {count}: loss = {loss:.6f}, x = {arrays['x'][0]:.4f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python custom_ops_plain.py path/to/libonnxtrain_kernels.so")
    main(sys.argv[1])
