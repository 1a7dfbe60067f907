"""Optimizer nodes without a kernel, and the rounding of their states, in standard operators."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from onnxtrain.errors import OperatorError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import all_graphs, all_nodes
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.passes import clean, forget_unused_domains
from onnxtrain.graph.prng import draw, upper_bits
from onnxtrain.graph.replace import remove_nodes, replace_values
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import attributes_of, have_one_shape
from onnxtrain.lowering.patterns import Match, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule
from onnxtrain.lowering.training_info.rounding import DECODE, ENCODE, OPERATOR
from onnxtrain.lowering.updates import variables_of
from onnxtrain.operators.checks import group
from onnxtrain.operators.evaluation import emit
from onnxtrain.operators.nodes import check_node, has_kernel
from onnxtrain.operators.registry import OPTIMIZERS, find
from onnxtrain.operators.schema import OptimizerSchema

OPSET_WITHOUT_IMPORT = 18
"""Version of ONNX's own operators for a model that imported none, because it had only optimizers."""


def lower_optimizers(model: ir.Model, kept: Collection[ir.Node] = ()) -> ir.Model:
    """Replace every optimizer node by its body in standard operators, in place.

    Nodes in subgraphs and in functions are replaced, too (such functions are inlined). A model-local function
    that defines an operator of the same domain and name has precedence: its calls stay.

    Requires: a graph without Gradient nodes. Ensures: a sorted graph without dead nodes.
    """
    _inline_functions(model)
    domains = {entry.schema.domain for entry in OPTIMIZERS.values()}
    optimizers = _optimizers(model)
    if not optimizers:
        forget_unused_domains(model, domains)
        return model
    for node in optimizers:
        check_node(node, model.graph.opset_imports.get(node.domain, 1))
    model.graph.opset_imports.setdefault("", OPSET_WITHOUT_IMPORT)
    infer_shapes(model)
    for number, node in enumerate(node for node in optimizers if node not in kept):
        assert isinstance(node.graph, ir.Graph)
        builder = Builder(node.graph, model.graph.opset_imports[""], before=node)
        builder.scope = f"{node.name or node.op_type}_{number}"  # the runtime wants unique names
        _lower(builder, node, optimizers[node])
    for graph in all_graphs(model.graph):
        graph.sort()
    clean(model)
    forget_unused_domains(model, domains)
    return infer_shapes(model)


def _lower(builder: Builder, node: ir.Node, schema: OptimizerSchema) -> None:
    attributes = schema.complete(attributes_of(node))
    R, T, *tensors = [builder.wrap(value) for value in node.inputs if value is not None]
    count = group(schema, attributes, len(tensors))
    results = emit(builder, schema, R, T, [tensors[index::count] for index in range(count)], attributes)
    news = [value for role in zip(*results, strict=True) for value in role]
    pairs = [(old, new.ir) for old, new in zip(node.outputs, news, strict=True) if old.name]
    replace_values(builder.graph, pairs)
    remove_nodes(builder.graph, [node])


def _schema_of(model: ir.Model, node: ir.Node) -> OptimizerSchema | None:
    return None if node.op_identifier() in model.functions else find(node.domain, node.op_type)


def _optimizers(model: ir.Model) -> dict[ir.Node, OptimizerSchema]:
    """Return the optimizer nodes of a model, those in bodies included."""
    return {node: schema for node in all_nodes(model.graph) if (schema := _schema_of(model, node)) is not None}


def _inline_functions(model: ir.Model) -> None:
    """Inline the functions that contain optimizer nodes, and those that call such functions."""
    holding: set[ir.OperatorIdentifier] = set()
    while True:
        found = {
            name
            for name, function in model.functions.items()
            if name not in holding
            and any(
                node.op_identifier() in holding or _schema_of(model, node) is not None for node in all_nodes(function)
            )
        }
        if not found:
            break
        holding |= found
    if holding:
        common.InlinePass(criteria=lambda function: function.identifier() in holding)(model)


def lower_without_kernel(model: ir.Model) -> ir.Model:
    """Replace the optimizer nodes without a native kernel, such as SSGD with a registered measure, in place.

    Requires: a graph without Gradient nodes. Ensures: a sorted graph; without such nodes nothing changes.
    """
    optimizers = _optimizers(model)
    kept = frozenset(node for node in optimizers if has_kernel(node))
    return model if len(kept) == len(optimizers) else lower_optimizers(model, kept)


def keep_provider_optimizers(model: ir.Model, operators: Collection[str]) -> frozenset[ir.Node]:
    """Return the optimizer nodes that a provider has kernels for, with their gradients expanded in place.

    The kernels accept only gradients of their parameter's shape: where the shape is not certain, an Expand is added.
    Nodes in subgraphs, of other operators, with blocks of weights or a registered measure, and of types other than
    float and double are not returned.

    Requires: a graph without Gradient nodes. Ensures: the order of the nodes.
    """
    candidates = {
        node: schema
        for node, schema in _optimizers(model).items()
        if node.graph is model.graph
        and node.op_type in operators
        and has_kernel(node)
        and "block" not in node.attributes
    }
    if not candidates:
        return frozenset()
    for node in candidates:
        check_node(node, model.graph.opset_imports.get(node.domain, 1))
    infer_shapes(model)
    floating = {node: found for node, schema in candidates.items() if (found := variables_of(node, schema)) is not None}
    for node, variables in floating.items():
        _fit_gradients(model.graph, node, len(variables))
    return frozenset(floating)


def _fit_gradients(graph: ir.Graph, node: ir.Node, count: int) -> None:
    op = Builder(graph, before=node)
    op.scope = f"{node.name or node.op_type}/gradients"
    for index in range(2 + count, 2 + 2 * count):
        x, gradient = node.inputs[index - count], node.inputs[index]
        assert x is not None
        assert gradient is not None
        if not have_one_shape(gradient, x):
            expanded = op.Expand(op.wrap(gradient), op.Shape(op.wrap(x)))
            expanded.ir.type, expanded.ir.shape = x.type, x.shape
            node.replace_input_with(index, expanded.ir)


# bfloat16 has 8 significant bits, float32 has 24: between two neighbours of bfloat16, u apart, lie 2^16 numbers. With
# an average such as H_new = 0.999 H + 0.001 G^2 the new value is almost always nearer to the old one than u / 2:
# rounded to nearest, H would never fall. So rounding is stochastic, to the lower neighbour t or the upper one t + u,
# such that the expected value is the number:
#
#     RoundStochastic(x) = sign(x) (t + u)  where (|x| - t) + r 2^-16 u >= u, else sign(x) t
#
# with r, of 16 bits, drawn from (seed, count, index of the element) as in onnxtrain.graph.prng. Finite values stay
# finite: above the largest bfloat16 they become the largest.
# Source: S. Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015.

_LARGEST = np.float32((2 - 2.0**-7) * 2.0**127)
_TINY = np.float32(0.6 * 2.0**-133)
_STEP = np.float32(0.6 * 2.0**-7)
"""Relative and, with ``_TINY``, absolute increment that is nearer to u than to 0 or 2 u."""


def check_states(graph: ir.Graph) -> None:
    """Refuse states in 8 bits outside the update of a kernel.

    Requires: a graph after the passes that move states into updates. Ensures: it is unchanged and has no such states.
    """
    for node in graph:
        if node.domain == ONNXTRAIN_DOMAIN and node.op_type in (DECODE, ENCODE):
            raise OperatorError(
                f"{node.op_type}: states in 8 bits are decoded and encoded by the native kernels, inside the update of "
                "their optimizer alone; give Precision(states='bfloat16'), or leave it out, in graphs for any runtime "
                "and where something else reads a state."
            ).about(node.op_type)


def _emit_rounded(op: Builder, match: Match) -> Value:
    (node,) = match.nodes
    x, count = (op.wrap(value) for value in node.inputs if value is not None)
    if x.dtype != ir.DataType.FLOAT:
        raise OperatorError(f"{OPERATOR}: x has type {x.dtype.name}; it must be float.").about("x", got=x.dtype.name)
    match.y.dtype, match.y.shape = ir.DataType.BFLOAT16, x.ir.shape
    return _rounded(op, x, count, node.attributes["seed"].as_int())


round_states = Rewrite(Rule(operators("rounding", OPERATOR, domain=ONNXTRAIN_DOMAIN), _emit_rounded))
"""Write RoundStochastic in standard operators; inside an update the kernel does it."""


def _rounded(op: Builder, x: Value, count: Value, seed: int) -> Value:
    r = op.reshape_like(op.cast(upper_bits(op, draw(op, seed, count, x), 16), ir.DataType.FLOAT), x)
    size = op.Abs(x)
    largest = op.constant(_LARGEST)
    nearest = op.Min(_nearest(op, size), largest)
    below = _nearest(op, nearest - _less_than_two_steps(op, nearest))
    t = op.Where(op.Greater(nearest, size), below, nearest)
    above = op.Min(_nearest(op, t + _less_than_two_steps(op, t)), largest)
    u = above - t
    rounded = op.Where(op.GreaterOrEqual((size - t) + r * (u * 2.0**-16), u), above, t)
    finite = op.LessOrEqual(size, op.constant(np.finfo(np.float32).max))
    rounded = op.Where(finite, rounded, size)
    return op.cast(op.Where(op.Less(x, op.scalar(0.0, x)), op.Neg(rounded), rounded), ir.DataType.BFLOAT16)


def _nearest(op: Builder, x: Value) -> Value:
    return op.cast(op.cast(x, ir.DataType.BFLOAT16), ir.DataType.FLOAT)


def _less_than_two_steps(op: Builder, x: Value) -> Value:
    return op.Max(op.Mul(x, op.constant(_STEP)), op.constant(_TINY))
