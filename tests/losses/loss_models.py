"""Models of a loss alone, from a prediction and a target to the loss."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnxruntime

import onnxtrain
from onnxtrain.graph import Builder
from onnxtrain.losses.base import reduced


def loss_model(loss, arrays, *, dynamic, weight=False) -> onnx.ModelProto:
    """Build a model with one input for each array, of which the first two are the prediction and the target.

    Its output is ``loss``; with ``weight`` the loss is not divided yet, and ``weight`` is the second output.
    """
    inputs = []
    for name, array in arrays.items():
        shape = [f"{name}_{axis}" if dynamic else size for axis, size in enumerate(array.shape)]
        inputs.append(ir.Value(name=name, type=ir.TensorType(ir.tensor(array).dtype), shape=ir.Shape(shape)))
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18}, name="loss")
    op = Builder(graph, 18)
    terms = loss.build(op, *map(op.wrap, inputs[:2]))
    outputs = {"loss": terms.loss, "weight": terms.weight} if weight else {"loss": reduced(loss, terms).loss}
    for name, term in outputs.items():
        result = op.Identity(term)
        result.ir.name = name
        graph.outputs.append(result.ir)
    return ir.to_proto(ir.Model(graph, ir_version=8))


def loss_and_gradient(loss, arrays, *, dynamic=False):
    """The loss and the gradient of the prediction, in standard operators on ONNX Runtime."""
    prediction = next(iter(arrays))
    model = onnxtrain.gradient(loss_model(loss, arrays, dynamic=dynamic), "loss", [prediction])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    given = {name: array for name, array in arrays.items() if name in names}
    return session.run(["loss", f"{prediction}_grad"], given)
