"""Gradients of ONNX graphs: the engine, the rule book and the Gradient operator."""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.registry import Node, no_gradient, register_gradient, unregister_gradient
from onnxtrain.errors import GradientError

__all__ = ["Node", "gradient", "no_gradient", "register_gradient", "unregister_gradient"]


def gradient(
    model: str | os.PathLike[str] | onnx.ModelProto,
    y: str | None = None,
    xs: Sequence[str] | str | None = None,
    *,
    straight_through: bool = False,
    recompute: str | Sequence[str] = (),
) -> onnx.ModelProto:
    """A model that computes what the given one does, and the derivative of one of its values.

    For a scalar y and each x the result has an output ``{x}_grad`` = dy/dx of the type and shape of x; a y
    that is not scalar is summed. Only standard operators are used: the result runs on any ONNX runtime. A
    model below opset 18 is upgraded to it.

    Args:
        model: A path or a loaded model.
        y: Name of the floating value to differentiate; by default the only output.
        xs: Names of initializers, graph inputs or intermediate values; by default every trainable parameter
            (see :func:`onnxtrain.inspect`).
        straight_through: Pass gradients through operators that round (Round, Floor, Ceil, Sign) as if they did
            not, and through QuantizeLinear and DequantizeLinear where the value lies in the integers' range; by
            default these gradients are zero, as the derivatives are.
        recompute: Glob patterns of names of nodes: what these compute is not kept for the gradient but computed
            again when it is needed, which takes time and saves memory.

    Returns:
        A model with the original outputs followed by one gradient per x.

    Raises:
        GradientError: A name does not exist or is not floating; operators on the way have no rule (all of
            them are listed); a pattern matches no node.
        ModelError: The model cannot be read.
    """
    from onnxtrain.autodiff.operator import gradient_model, lower_gradients
    from onnxtrain.autodiff.options import GradientOptions
    from onnxtrain.graph.shapes import infer_shapes
    from onnxtrain.model.file import ModelFile
    from onnxtrain.model.parameters import parameter_table

    working = infer_shapes(ModelFile.load(model).training_model())
    options = GradientOptions.of(straight_through, recompute)
    lower_gradients(working)
    graph = working.graph
    target = _find(graph, _only_output(graph) if y is None else y, "y")
    if xs is None:
        names = [
            row.name for row in parameter_table(working, target, straight_through=straight_through) if row.trainable
        ]
        if not names:
            raise GradientError(f"No trainable parameter determines {target.name!r}; name the xs.")
    else:
        names = [xs] if isinstance(xs, str) else list(xs)
    target = _find(graph, target.name or "", "y")
    gradient_model(working, target, [_find(graph, name, "xs") for name in names], options)
    return ir.to_proto(working)


def _only_output(graph: ir.Graph) -> str:
    if len(graph.outputs) != 1:
        names = ", ".join(repr(value.name) for value in graph.outputs)
        raise GradientError(f"The model has {len(graph.outputs)} outputs ({names}); say which with y=.")
    return graph.outputs[0].name or ""


def _find(graph: ir.Graph, name: str, argument: str) -> ir.Value:
    for value in graph.inputs:
        if value.name == name:
            return value
    if name in graph.initializers:
        return graph.initializers[name]
    for node in graph:
        for output in node.outputs:
            if output.name == name:
                return output
    raise GradientError(f"{argument} names {name!r}, but the model has no value of that name.")
