"""Derive a model that computes the gradients of another."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.errors import GradientError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.declared_shapes import all_values, declared_otherwise
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import HALVES
from onnxtrain.lowering.build_gradients import Derivative
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rewrite import gradient_nodes
from onnxtrain.model_file.external import with_external_data
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.parameters.trainable import parameter_table
from onnxtrain.training.advice.hints import Hint, warn_of
from onnxtrain.training.working_copy.widening import keep_types, narrow_outputs, widen


@checks_arguments
@refuses_invalid()
def gradient(
    model: str | os.PathLike[str] | onnx.ModelProto,
    y: str | None = None,
    xs: Sequence[str] | str | None = None,
    *,
    straight_through: bool = False,
    recompute: str | Sequence[str] = (),
) -> onnx.ModelProto:
    """Add outputs to a model: the gradient of one of its values.

    For a scalar y and each x, the result has an output ``{x}_grad`` = dy/dx of the type and shape of x, or
    ``{x}_grad2`` where the model has that name, as in a second gradient; a y that is not scalar is summed. The result
    contains standard operators only and runs on any ONNX runtime. A model below opset 18 is upgraded to 18. A float16
    or bfloat16 model computes in float32; its weights, inputs and outputs keep their types, and so do the gradients
    with respect to them.

    Args:
        model: A path or a loaded model.
        y: Name of the floating value to differentiate; by default the only output.
        xs: Names of initializers, graph inputs or intermediate values; by default every trainable parameter
            (see :func:`onnxtrain.inspect`).
        straight_through: Straight-through estimator: pass gradients through rounding operators (Round, Floor, Ceil,
            Sign) unchanged, through QuantizeLinear and DequantizeLinear where the value is within the integers'
            range, and through integer operators (DynamicQuantizeLinear, MatMulInteger, ...) to the values that they
            quantize. By default, gradients of the first two groups are zero, like the derivatives, and a gradient
            that reaches an integer operator is an error.
        recompute: Glob patterns of node names. The gradient recomputes outputs of these nodes instead of keeping them
            in memory (activation checkpointing).

    Returns:
        A model with the original outputs followed by one gradient per x. It contains all its data; save a model above
        2 GiB with ``onnx.save(..., save_as_external_data=True)``.

    Raises:
        GradientError: A name does not exist or is not floating; operators between x and y have no rule or compute with
            quantized integers (the message lists all); a pattern matches no node.
        ModelError: The model cannot be read.
    """
    file = ModelFile.load(model)
    working = file.training_model()
    declared = {str(value.name): value.dtype for value in working.graph.outputs if value.dtype in HALVES}
    halves = widen(working)
    working = infer_shapes(working)
    warn_of(Hint(text, surprising=True) for text in declared_otherwise(working.graph))
    options = GradientOptions.of(straight_through, recompute)
    graph = working.graph
    if gradient_nodes(graph):  # y may depend on them
        infer_shapes(lower_graph(working))
    target = find_value(graph, _only_output(graph) if y is None else y, "y")
    if xs is None:
        names = [
            row.name for row in parameter_table(working, target, straight_through=straight_through) if row.trainable
        ]
        if not names:
            raise GradientError(f"No trainable parameter determines {target.name!r}; name the xs.")
    else:
        names = names_of(xs, "xs")
    made = free_names(graph, [f"{name}_grad" for name in names])
    target = find_value(graph, target.name or "", "y")
    keep_types(working, halves, names)
    working.metadata_props.update(options.entries())
    lower_graph(working, derivative=Derivative(target, [find_value(graph, name, "xs") for name in names], made))
    narrow_outputs(working, declared)
    return with_external_data(ir.to_proto(infer_shapes(working)), file.folder)


def _only_output(graph: ir.Graph) -> str:
    if len(set(graph.outputs)) != 1:  # an output may be listed twice
        names = ", ".join(repr(value.name) for value in graph.outputs)
        raise GradientError(f"The model has {len(graph.outputs)} outputs ({names}); name one with y=.")
    return graph.outputs[0].name or ""


def names_of(given: Sequence[str] | str, argument: str) -> list[str]:
    """Return the names that an argument lists, each once."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        raise GradientError(f"{argument} is {given!r}; it needs a name, or a list of names.").about(argument, got=given)
    return list(dict.fromkeys(names))


def free_names(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """Return names of new values, with a number behind those that the model has, such as ``x_grad2``."""
    taken = {*graph.initializers, *(value.name for value in (*graph.inputs, *all_values(graph)))}
    found = []
    for name in names:
        numbered = (f"{name}{count}" for count in itertools.count(2))
        found.append(name if name not in taken else next(other for other in numbered if other not in taken))
    return found


def find_value(graph: ir.Graph, name: str, argument: str) -> ir.Value:
    """Find a value by its name in the main graph."""
    if not isinstance(name, str):
        raise GradientError(f"{argument} is {name!r}; it needs the name of a value.")
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
