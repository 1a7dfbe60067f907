"""Activations and RMS norms that exporters write as several nodes, and gradients of gated units, as one node each.

ONNX Runtime fuses activations itself, but not in a training step: gradients read the values between, which then have to
be kept, four or five tensors of the size of the widest layer where one is enough. So they are fused before the gradient
is built, in working copies for sessions of ONNX Runtime only: a step graph for any runtime has standard operators.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnxtrain.autodiff.fused import KERNEL_TYPES, emit
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.domains import MICROSOFT_DOMAIN, ONNXTRAIN_DOMAIN
from onnxtrain.graph.replace import set_inputs, take_over
from onnxtrain.graph.value import constant_ints, dimensions, made_by
from onnxtrain.lowering.patterns import Match, Number, OneOf, Op, Pattern, Product, Var, operators
from onnxtrain.lowering.rewrite import Rewrite, Rule

_X = Var("x")

# Gelu: x (1 + erf(x / sqrt(2))) / 2 and x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2


def _near(number: float) -> Number:
    return Number(number, tolerance=1e-3)


_CUBE = OneOf(Op("Pow", _X, _near(3)), Op("Mul", Op("Mul", _X, _X), _X))
_ERF = Op("Erf", Product(_X, number=math.sqrt(0.5)))
_TANH = Op("Tanh", Product(Op("Add", Product(_CUBE, number=0.044715), _X), number=math.sqrt(2 / math.pi)))
_GELU = Pattern("Gelu", Product(Op("Add", _ERF, _near(1)), _X, number=0.5), {"Erf"})
_FAST_GELU = Pattern("Gelu by tanh", Product(Op("Add", _TANH, _near(1)), _X, number=0.5), {"Tanh"})


def _check_gelu(match: Match) -> str | None:
    x, y = match["x"], match.y
    if x.shape is None or y.shape is None or len(x.shape) != len(y.shape):
        return "a constant of higher rank gives the result more axes, or the ranks are unknown"
    return None if x.dtype == ir.DataType.FLOAT else f"x has type {x.dtype.name}; the kernel takes FLOAT"


def _emit_gelu(op: Builder, match: Match, operator: str = "Gelu") -> Value:
    op.import_domain(MICROSOFT_DOMAIN, 1)
    return op.several(operator, op.wrap(match["x"]), outputs=1, domain=MICROSOFT_DOMAIN)[0]


fuse_activations = Rewrite(
    Rule(_GELU, _emit_gelu, _check_gelu),
    Rule(_FAST_GELU, lambda op, match: _emit_gelu(op, match, "FastGelu"), _check_gelu),
)
"""Replace Gelu, exact or approximated by tanh, by one node of ONNX Runtime's own domain."""


# RMS norm: g x / sqrt(mean(x²) + ε) over the last axis, with a scale g as long as the axis

_MEAN = Op("ReduceMean", OneOf(Op("Pow", _X, 2), Op("Mul", _X, _X)), Var("axes"), keepdims=(None, 1))
_ROOT = Op("Sqrt", Op("Add", _MEAN, Number(name="epsilon")))
_QUOTIENT = OneOf(Op("Div", _X, _ROOT), Op("Mul", OneOf(Op("Reciprocal", _ROOT), Op("Div", 1, _ROOT)), _X))


def _check_norm(match: Match) -> str | None:
    x, scale = match["x"], match["scale"]
    sizes, axes = dimensions(x), constant_ints(match["axes"])
    if not sizes or not isinstance(sizes[-1], int) or x.dtype not in KERNEL_TYPES:
        return f"x has shape {sizes} and type {x.dtype}; the last axis must be known, and the type FLOAT or DOUBLE"
    if axes is None or [axis % len(sizes) for axis in axes] != [len(sizes) - 1]:
        return "the mean is not known to be over the last axis alone"
    if dimensions(scale) != sizes[-1:] or scale.dtype != x.dtype:
        return f"the scale has shape {dimensions(scale)} and type {scale.dtype}; it must be [{sizes[-1]}] of {x.dtype}"
    return None


def _emit_norm(op: Builder, match: Match) -> Value:
    x, scale = op.wrap(match["x"]), op.wrap(match["scale"])
    attributes = {"axis": -1, "epsilon": match["epsilon"], "stash_type": 1}
    return op.several("SimplifiedLayerNormalization", x, scale, outputs=1, **attributes)[0]


fuse_norms = Rewrite(
    Rule(Pattern("RMS norm", Op("Mul", _QUOTIENT, Var("scale")), {"ReduceMean"}), _emit_norm, _check_norm)
)
"""Replace an RMS norm by one node, whose gradient is one node, too."""


# The gradient of SiLU, x s with s = sigmoid(x): dy s + (dy x) (s (1 - s)). The gradient of Gelu with the logistic
# function for P is the same formula, and its kernel reads x only.

_DY, _S = Var("dy"), Var("s")
_SILU_GRADIENT = Pattern(
    "gradient of SiLU",
    Op("Add", Op("Mul", _DY, _S), Op("Mul", Op("Mul", _DY, _X), Op("Mul", _S, Op("Sub", 1, _S)))),
    {"Sub"},
)


def _check_silu(match: Match) -> str | None:
    x: ir.Value = match["x"]
    dy, source = match["dy"], made_by(match["s"], "Sigmoid")
    if source is None or source.inputs[0] is not x:
        return "its factor is no sigmoid of x"
    sizes = [dimensions(value) for value in (x, dy, match.y)]
    if not sizes[0] or any(size != sizes[0] or None in size for size in sizes):
        return "the sizes of x and dy are not known to be equal"
    return None if x.dtype in KERNEL_TYPES and dy.dtype == x.dtype else f"x has type {x.dtype}"


def _emit_silu(op: Builder, match: Match) -> Value:
    dy, x = op.wrap(match["dy"]), op.wrap(match["x"])
    return emit(op, "GeluGradient", dy, x, like=[dy], approximate="sigmoid", alpha=1.0)[0]


fuse_silu = Rewrite(Rule(_SILU_GRADIENT, _emit_silu, _check_silu))
"""Replace the gradient of SiLU, six nodes over tensors of the widest layer, by one node ``GeluGradient``."""


# The gradient of a gated unit y b, y = x P(x)


def _gate(match: Match) -> tuple[ir.Node, ir.Node, ir.Node] | str:
    """Return the nodes of dy = a b, y b and y a."""
    (node,) = match.nodes
    if len(node.outputs) != 2 or len(node.inputs) != 2:
        return "it gives no y, or more than that"
    dy, x = node.inputs
    product, y = made_by(dy, "Mul", alone=True), node.outputs[1]
    if dy is None or x is None or product is None or y.is_graph_output():
        return "its dy is no product, or something else needs dy or y"
    first, second = product.inputs
    values, sizes = (first, second, x), dimensions(dy)
    if first is second or not sizes or None in sizes:
        return "dy is a square or of unknown sizes"
    if any(value is None or dimensions(value) != sizes or value.dtype != x.dtype for value in values):
        return "the sizes or types of x and both factors differ"
    readers = [reader for reader, _ in y.uses()]
    if len(readers) == 2 and all(reader.op_identifier() == ("", "Mul", "") for reader in readers):
        others = [reader.inputs[1] if reader.inputs[0] is y else reader.inputs[0] for reader in readers]
        if others in ([second, first], [first, second]):
            by_second, by_first = readers if others[0] is second else readers[::-1]
            return product, by_second, by_first
    return "y is not multiplied by the factors of dy alone"


def _emit_gate(op: Builder, match: Match) -> None:
    (node,) = match.nodes
    product, by_second, by_first = match.found
    (first, second), x = product.inputs, node.inputs[1]
    node.resize_outputs(3)
    node.resize_inputs(3)
    set_inputs(node, [first, x, second])
    take_over(op.graph, {by_second.outputs[0]: node.outputs[1], by_first.outputs[0]: node.outputs[2]})
    match.nodes = (node, *match.found)


fuse_gates = Rewrite(
    Rule(operators("gradient of a gated unit", "GeluGradient", domain=ONNXTRAIN_DOMAIN), _emit_gate, _gate)
)
"""Let ``GeluGradient`` multiply by the factors of a gated unit, with equal results.

    a, b -> Mul -> dy;  dy, x -> GeluGradient -> dx, y;  y, b -> Mul -> p;  y, a -> Mul -> q

becomes a, x, b -> GeluGradient -> dx, p, q: three reads and three writes of the widest layer instead of seven and four.
"""
