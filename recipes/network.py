"""Build a recipe's model node by node with ``onnx.helper``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET, IR_VERSION = 18, 8


class Network:
    """Nodes and initializers of a model.

    Attributes:
        rng: Generator of the random weights.
        dtype: Type of weights, inputs and outputs.
    """

    def __init__(self, seed: int, dtype: object = np.float32) -> None:
        self.dtype = np.dtype(dtype)
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, name: str, value: object, dtype: object = None) -> str:
        """Add an initializer, and return its name."""
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype or self.dtype), name))
        return name

    def uniform(self, name: str, bound: float, *shape: int) -> str:
        """Add a weight with values between -bound and bound."""
        return self.constant(name, self.rng.uniform(-bound, bound, shape))

    def normal(self, name: str, deviation: float, *shape: int) -> str:
        """Add a weight with normally distributed values."""
        return self.constant(name, self.rng.normal(0, deviation, shape))

    def zeros(self, name: str, *shape: int) -> str:
        """Add an initializer of zeros, such as a bias."""
        return self.constant(name, np.zeros(shape))

    def node(self, operator: str, *inputs: str, output: str, **attributes: object) -> str:
        """Add a node with one output, and return the output's name."""
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def gradient(self, y: str, *xs: str) -> None:
        """Add the standard's Gradient node: the outputs `{y}_{x}` are the derivatives of the sum of y by each x."""
        outputs = [f"{y}_{x}" for x in xs]
        self.nodes.append(
            helper.make_node("Gradient", xs, outputs, domain="ai.onnx.preview.training", xs=list(xs), y=y)
        )

    def model(
        self,
        inputs: Mapping[str, Sequence[int | str]],
        outputs: Mapping[str, Sequence[int | str]],
        input_type: int | None = None,
    ) -> onnx.ModelProto:
        """Return the model with inputs and outputs of these shapes."""
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        infos = [helper.make_tensor_value_info(name, input_type or kind, shape) for name, shape in inputs.items()]
        results = [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()]
        graph = helper.make_graph(self.nodes, "recipe", infos, results, self.initializers)
        versions = {"": OPSET} | {node.domain: 1 for node in self.nodes if node.domain}
        imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
