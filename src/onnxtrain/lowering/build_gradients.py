"""Build the gradients that Gradient nodes of ``ai.onnx.preview.training``, or a caller, ask for.

Where the specification leaves a choice: a y that is not scalar is seeded with ones; an x that y does not depend on gets
zeros; names are resolved in the main graph, where the node has to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.autodiff.engine import Backward, Engine
from onnxtrain.autodiff.masked_softmax import read_replacements
from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.autodiff.path import Forward
from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder
from onnxtrain.graph.clone import Values, all_nodes, clone_nodes, needed_for, values_read
from onnxtrain.graph.replace import remove_nodes, replace_values
from onnxtrain.graph.shapes import complete_shapes, infer_shapes
from onnxtrain.graph.value import have_one_shape, is_float
from onnxtrain.lowering.rewrite import gradient_nodes


class Derivative(NamedTuple):
    """Derivative that a caller requests, without a Gradient node."""

    y: ir.Value  # the value to differentiate; seeded with ones
    xs: Sequence[ir.Value]  # the independent variables
    names: Sequence[str] | None = None  # the names of their gradients, which are graph outputs; by default ``{x}_grad``


def build_gradients(model: ir.Model, derivative: Derivative | None = None) -> Iterator[Backward]:
    """Replace every Gradient node by the nodes that compute it, then append the derivative, in place, one by one.

    The model's metadata (:class:`~onnxtrain.autodiff.options.GradientOptions`) holds the options of the gradients and
    is removed with them. A gradient may differentiate nodes of an earlier one. If the model replaces NaN in the result
    of a softmax, the softmax's gradient reads the replacement.

    Requires: a sorted graph. Ensures: a sorted graph without Gradient nodes; fused operators are still nodes.
    """
    _check_nested(model)
    options = GradientOptions.read(model.metadata_props)
    GradientOptions.remove(model.metadata_props)
    for index, node in enumerate(gradient_nodes(model.graph)):
        complete_shapes(model)
        backward = _lower(model, node, index, options)
        model.graph.sort()
        yield _masked(model.graph, backward)
    if derivative is not None:
        yield _masked(model.graph, _append(model, derivative, options))


def _masked(graph: ir.Graph, backward: Backward) -> Backward:
    """If the model replaces NaN in a softmax's result, let the softmax's gradient read the replacement."""
    backward.nodes += read_replacements(Builder(graph))
    return backward


def _append(model: ir.Model, derivative: Derivative, options: GradientOptions) -> Backward:
    """Append dy/dx for every x as graph outputs."""
    graph = model.graph
    engine = Engine(Forward.of(model, straight_through=options.straight_through))
    names = derivative.names or [f"{x.name or ''}_grad" for x in derivative.xs]
    gradients = engine.gradients(derivative.y, derivative.xs)
    for name, gradient in zip(names, gradients, strict=True):
        identity = ir.Node("", "Identity", [gradient], num_outputs=1)
        graph.append(identity)
        output = identity.outputs[0]
        output.name, output.type, output.shape = name, gradient.type, gradient.shape
        graph.outputs.append(output)
    return engine.backward


def _check_nested(model: ir.Model) -> None:
    """Refuse Gradient nodes in functions and subgraphs, where names of the main graph mean nothing."""
    nodes = itertools.chain(*map(all_nodes, (model.graph, *model.functions.values())))
    nested = [node for node in gradient_nodes(nodes) if node.graph is not model.graph]
    if nested:
        raise GradientError(
            f"The Gradient node {nested[0].name!r} is in a subgraph or a function, where the tensors of the main "
            "graph cannot be named; move it to the main graph."
        )


def _lower(model: ir.Model, node: ir.Node, index: int, options: GradientOptions) -> Backward:
    graph = model.graph
    x_names, z_names, y_name = _names(node)
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    label = f"Gradient node {node.name or index!r}"
    for name in (*x_names, *z_names, y_name):
        if name not in values:
            raise GradientError(
                f"{label} names {name!r}, but no value of that name is in the graph; "
                "its attributes xs, zs and y name tensors."
            ).about(label, got=name)
    names = (*x_names, *z_names)
    if len(node.inputs) != len(names):
        raise GradientError(
            f"{label} has {len(node.inputs)} inputs, but xs and zs name {len(names)} tensors; give one each."
        )
    if len(node.outputs) > len(x_names):
        raise GradientError(
            f"{label} has {len(node.outputs)} outputs, but xs names {len(x_names)} tensors; one gradient each."
        )
    xs, zs = [values[name] for name in x_names], [values[name] for name in z_names]
    y = values[y_name]
    _check_independent(label, graph, xs, zs)
    given = [values[n] if value is None else value for n, value in zip(names, node.inputs, strict=True)]
    if any(a is not b for a, b in zip(given, (*xs, *zs), strict=True)):
        y, xs, zs = _substitute(graph, y, (*xs, *zs), given, len(xs), index)
        graph.sort()
        infer_shapes(model)
    wanted = [x for x, output in zip(xs, node.outputs, strict=False) if output.name]
    engine = Engine(Forward.of(model, straight_through=options.straight_through))
    gradients = engine.gradients(y, wanted, fixed=zs)
    outputs = [output for output in node.outputs if output.name]
    replace_values(graph, list(zip(outputs, gradients, strict=True)))
    remove_nodes(graph, [node])
    return engine.backward


def _names(node: ir.Node) -> tuple[list[str], list[str], str]:
    for required in ("xs", "y"):
        if required not in node.attributes:
            raise GradientError(f"Gradient node {node.name!r} lacks the attribute {required!r}.")
    xs, zs = (list(node.attributes.get_strings(name, ())) for name in ("xs", "zs"))
    return xs, zs, node.attributes["y"].as_string()


def _check_independent(label: str, graph: ir.Graph, xs: Sequence[ir.Value], zs: Sequence[ir.Value]) -> None:
    """Refuse an x that is computed from another x or z: dy/dx would have two meanings."""
    named = {*xs, *zs}
    depends: dict[ir.Value, ir.Value] = {}
    for node in graph:
        source = next((depends.get(v, v) for v in values_read(node) if v in depends or v in named), None)
        if source is None:
            continue
        for output in node.outputs:
            if output in named and is_float(output):
                raise GradientError(
                    f"{label} lists {output.name!r} and also {source.name!r}, which determines it; "
                    "list independent tensors."
                )
            depends[output] = source


def _substitute(
    graph: ir.Graph,
    y: ir.Value,
    names: Sequence[ir.Value],
    given: Sequence[ir.Value],
    count: int,
    index: int,
) -> tuple[ir.Value, list[ir.Value], list[ir.Value]]:
    """Recompute y from the inputs of the node: copy the nodes between the named tensors and y."""
    # One tensor may be given for two names: an Identity makes each substitute a value of its own.
    fresh: list[ir.Value] = []
    for value in given:
        identity = ir.Node("", "Identity", [value], num_outputs=1)
        graph.append(identity)
        identity.outputs[0].type, identity.outputs[0].shape = value.type, value.shape
        fresh.append(identity.outputs[0])
    mapping: Values = dict(zip(names, fresh, strict=True))
    determines_y = needed_for([y])  # y is named and not read, so the order of nodes does not tell
    affected: set[ir.Value] = set(names)
    copied = []
    for other in graph:
        if other not in determines_y or any(output in mapping for output in other.outputs):
            continue
        if any(value in affected for value in values_read(other)):
            copied.append(other)
            affected.update(other.outputs)
    new = clone_nodes(copied, mapping, rename=lambda name: f"gradient_{index}/{name}")
    if not all(map(have_one_shape, names, given)):
        for copy in new:
            for output in copy.outputs:
                output.shape = None
    graph.extend(new)
    result = mapping.get(y, y)
    assert result is not None
    return result, fresh[:count], fresh[count:]
