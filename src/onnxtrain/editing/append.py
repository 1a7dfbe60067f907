"""Append layers to a model."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.editing.layers import Layer
from onnxtrain.editing.working import Model, Working
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.operands import Value
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.validity import refuses_invalid


@checks_arguments
@refuses_invalid()
def append(model: Model, *layers: Layer, output: str | None = None, seed: int = 0) -> onnx.ModelProto:
    """Return a model with further layers behind one of its outputs, whose result replaces the output.

    Args:
        model: A path or a loaded model; it is not changed.
        *layers: From :mod:`onnxtrain.editing.layers`, in order.
        output: The output to build on; by default the first floating one.
        seed: Seed of the new weights.

    Returns:
        The longer model; it holds all its data. The new weights are called ``{layer.name}.weight`` and
        ``{layer.name}.bias``, with a number behind the layer's name if that name is taken.

    Raises:
        ModelError: The model cannot be read.
        OptionError: There is no such output, or a layer does not fit its input.

    Example:
        >>> from onnxtrain.editing.layers import Activation, Linear
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 2] x) => (float[n, 2] y) { y = Tanh(x) }''')
        >>> longer = append(model, Linear(8), Activation("Relu"), Linear(3))
        >>> [node.op_type for node in longer.graph.node], [tensor.name for tensor in longer.graph.initializer]
        (['Tanh', 'Gemm', 'Relu', 'Gemm'], ['head.weight', 'head.bias', 'head2.weight', 'head2.bias'])
    """
    if not layers:
        raise OptionError("append was given no layer; give some of onnxtrain.editing.layers, such as Linear(10).")
    working = Working(model)
    end = working.output(output)
    op = Builder(working.graph, working.opset)
    random = np.random.default_rng(seed)
    x = op.wrap(end)
    for layer in layers:
        if not isinstance(layer, Layer):
            raise OptionError(
                f"append was given {layer!r}; it takes layers of onnxtrain.editing.layers, such as Linear(10)."
            )
        op.scope = working.free_name(layer.name)
        x = layer.build(op, x, _Weights(working, op, x.dtype), random)
        infer_shapes(working.model)  # the next layer may read the shape
    made = x.ir
    made.name = working.free_name("output")
    working.graph.outputs[list(working.graph.outputs).index(end)] = made
    return working.finish()


class _Weights:
    """Factory of the weights of one layer, in the type of its input."""

    def __init__(self, working: Working, op: Builder, dtype: ir.DataType) -> None:
        self._working, self._op, self._dtype = working, op, dtype

    def __call__(self, role: str, values: npt.NDArray[np.generic]) -> Value:
        array = values.astype(self._dtype.numpy())
        return self._op.wrap(self._working.initializer(f"{self._op.scope}.{role}", array, self._dtype))
