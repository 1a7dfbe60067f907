"""Reverse-mode differentiation of a graph: what depends on what, and the chain rule.

Everything that all rules share is here and nowhere else: which nodes matter, the expansion of functions,
zero gradients of outputs that nothing reads, the reduction of broadcast gradients, accumulation, and the
check of what a rule returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.autodiff import registry
from onnxtrain.autodiff.body_types import learn_types
from onnxtrain.autodiff.expand import expand, expand_registered, find_body
from onnxtrain.autodiff.floating import seen_as_floating
from onnxtrain.autodiff.registry import Node, describe, too_large
from onnxtrain.errors import GradientError, OnnxTrainError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import captured_values, subgraphs
from onnxtrain.graph.inference import infer_outputs
from onnxtrain.graph.limits import TooLargeError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import is_float


@dataclass(frozen=True)
class Request:
    """A derivative to build.

    Attributes:
        y: The value to differentiate; seeded with ones where ``seed`` is not given.
        xs: The independent variables.
        fixed: Values that y may depend on but that are held constant (the Gradient operator's ``zs``).
        seed: The gradient of the final objective with respect to y, of y's shape.
    """

    y: ir.Value
    xs: Sequence[ir.Value]
    fixed: Sequence[ir.Value] = ()
    seed: ir.Value | None = None


@dataclass(frozen=True)
class _Route:
    """From where to where a gradient flows: back from the ys to the xs, not through what is fixed."""

    ys: tuple[ir.Value, ...]
    xs: tuple[ir.Value, ...]
    fixed: tuple[ir.Value, ...]


def _route(request: Request) -> _Route:
    return _Route((request.y,), tuple(request.xs), tuple(request.fixed))


@dataclass
class Backward:
    """What an engine has emitted so far.

    Attributes:
        nodes: All of it, in order.
        arriving: The gradients with respect to the forward nodes' outputs.
    """

    nodes: list[ir.Node] = field(default_factory=list)
    arriving: set[ir.Value] = field(default_factory=set)

    def __iadd__(self, other: Backward) -> Backward:
        self.nodes += other.nodes
        self.arriving |= other.arriving
        return self


class Engine:
    """Differentiates values of one graph.

    Args:
        graph: The graph; functions on the way from x to y are expanded in it, gradients appended to it.
        opsets: Versions of the domains that the graph uses.
        functions: Model-local functions.
        op: Emits the gradients; by default at the end of the graph.
        straight_through: Whether operators that round or quantize pass gradients on as if they did not.
    """

    def __init__(
        self,
        graph: ir.Graph,
        opsets: Mapping[str, int],
        functions: Mapping[ir.OperatorIdentifier, ir.Function] | None = None,
        op: Builder | None = None,
        *,
        straight_through: bool = False,
    ) -> None:
        self.graph = graph
        self.opsets = opsets
        self.functions = functions or {}
        self.straight_through = straight_through
        self.op = Builder(graph, opsets.get("", 1)) if op is None else op
        self.backward = Backward()
        self._renamed: dict[ir.Value, ir.Value] = {}

    def current(self, value: ir.Value) -> ir.Value:
        """The object that stands for a value now, after functions were expanded."""
        while value in self._renamed:
            value = self._renamed[value]
        return value

    def gradients(self, request: Request) -> list[ir.Value]:
        """Append the nodes that compute dy/dx for every x.

        Returns:
            One value per x, of its type and shape; zeros where y does not depend on it.

        Raises:
            GradientError: Operators on the way have no rule (all are listed), y or an x is not floating.
        """
        for value in (request.y, *request.xs):
            if not is_float(value):
                raise GradientError(
                    f"A gradient needs floating tensors, but {value.name!r} is "
                    f"{'of unknown type' if value.dtype is None else value.dtype.name.lower()}."
                )
        seed = self.op.ones_like(self.op.wrap(self.current(request.y))).ir if request.seed is None else request.seed
        found = self.pull_back([(request.y, seed)], request.xs, request.fixed)
        xs = [self.op.wrap(self.current(x)) for x in request.xs]
        return [(self.op.zeros_like(x) if dx is None else dx).ir for x, dx in zip(xs, found, strict=True)]

    def pull_back(
        self,
        seeds: Sequence[tuple[ir.Value, ir.Value]],
        xs: Sequence[ir.Value],
        fixed: Sequence[ir.Value] = (),
    ) -> list[Value | None]:
        """Append the nodes that carry gradients with respect to several values back to the xs.

        Args:
            seeds: Pairs of a value and the gradient of the final objective with respect to it.
            xs: The independent variables; in the body of an operator also values that it captures.
            fixed: Values that are held constant.

        Returns:
            One gradient per x, ``None`` where no value depends on it.

        Raises:
            GradientError: Operators on the way have no rule (all are listed).
        """
        route = _Route(tuple(y for y, _ in seeds), tuple(xs), tuple(fixed))
        missing = self._expand_functions(route)
        if missing:
            raise GradientError(missing_rules_message(missing, self.opsets))
        path = self._path(route)
        collected: dict[ir.Value, list[Value]] = {}
        for y, seed in seeds:
            collected.setdefault(self.current(y), []).append(self.op.wrap(seed))
        current = [self.current(x) for x in xs]
        self.op.variables.update(current)
        before = set(self.graph)
        self._backward(path, collected, set(current))
        self.backward.nodes += [node for node in self.graph if node not in before]
        return [self.op.sum_of(collected[x]) if x in collected else None for x in current]

    def missing(self, request: Request) -> list[ir.Node]:
        """The nodes between xs and y that have neither a rule nor a body; nothing else is built."""
        return self._expand_functions(_route(request))

    def reached(self, request: Request) -> set[ir.Value]:
        """The xs that y depends on through floating values and operators that pass a gradient on."""
        self._expand_functions(_route(request))
        xs = set(request.xs)
        path = self._path(_route(request))
        return {value for node in path for value in _read(node) if value in xs} | ({request.y} & xs)

    def inner(self, op: Builder) -> Engine:
        """An engine for the body of an operator of this graph."""
        return Engine(op.graph, self.opsets, self.functions, op, straight_through=self.straight_through)

    def _missing_inside(self, node: ir.Node, route: _Route) -> list[ir.Node]:
        """What has no rule in the bodies of an operator with subgraphs."""
        active = set(route.xs) | {output for other in self._path(route) for output in other.outputs}
        captured = [value for value in captured_values(node) if value in active]
        found: list[ir.Node] = []
        for graph in subgraphs(node):
            inputs = [value for value in graph.inputs if _may_carry(value)]
            outputs = [value for value in graph.outputs if _may_carry(value)]
            inner = Engine(graph, self.opsets, self.functions, straight_through=self.straight_through)
            found += inner._expand_functions(_Route(tuple(outputs), (*inputs, *captured), ()))
        return found

    def _expand_functions(self, route: _Route) -> list[ir.Node]:
        """Expand functions on the path until every node has a rule, or neither rule nor body."""
        while True:
            while self.graph.opset_imports and learn_types(self.graph, self.opsets.get("", 1)):
                self._infer_shapes()
            missing = []
            expanded = False
            path = self._path(route)
            given = {output for node in path for output in node.outputs}
            for node in path:
                entry = self._entry(node)
                if entry is not None and (entry.function is None or _loses_quantized(node, given)):
                    missing.append(node)
                    continue
                if entry is not None:
                    missing += self._missing_inside(node, route) if subgraphs(node) else []
                    continue
                body = find_body(node, self.opsets, self.functions)
                written = registry.find_registered_body(node.op_type, node.domain)
                if body is not None:
                    expand(node, body, self._renamed, self.functions)
                elif written is not None:
                    op = Builder(self.graph, self.opsets.get("", 1), before=node)
                    expand_registered(node, written, op, self._renamed, self)
                else:
                    missing.append(node)
                    continue
                expanded = True
            if not expanded:
                return missing
            if self.graph.opset_imports:  # a main graph: rules profit from the shapes inside the bodies
                self._infer_shapes()
            else:  # behind calls in the body of an operator
                for node in self.graph:
                    if any(output.type is None for output in node.outputs):
                        infer_outputs(node)

    def _infer_shapes(self) -> None:
        infer_shapes(ir.Model(self.graph, ir_version=10, functions=list(self.functions.values())))

    def _entry(self, node: ir.Node) -> registry.Entry | None:
        if node.op_identifier() in self.functions:
            return None if not _registered(node) else registry.find(node.op_type, node.domain, 1)
        version = self.opsets.get(node.domain, 1)
        return registry.find(node.op_type, node.domain, version, straight_through=self.straight_through)

    def _path(self, route: _Route) -> list[ir.Node]:
        """The nodes through which a y depends on an x, in the order of the graph."""
        fixed = {self.current(value) for value in route.fixed}
        active = {self.current(x) for x in route.xs}
        through: list[ir.Node] = []
        for node in self.graph:
            read = [value for value in _read(node) if value in active]
            if not read:
                continue
            entry = self._entry(node)
            if entry is not None and entry.function is None and not _hands_on(node, entry, active):
                continue
            # Without passing straight through, these are followed to find what would lose a gradient.
            quantizes = entry is not None and bool(entry.quantized)
            integers = self.straight_through or quantizes or not all(map(_may_carry, read))
            outputs = [v for v in node.outputs if (_may_carry(v) or (integers and _is_number(v))) and v not in fixed]
            if outputs:
                active.update(outputs)
                through.append(node)
        needed = {self.current(y) for y in route.ys}
        path = []
        for node in reversed(through):
            if any(output in needed for output in node.outputs):
                path.append(node)
                needed.update(value for value in _read(node) if value in active)
        return path[::-1]

    def _backward(self, path: Sequence[ir.Node], collected: dict[ir.Value, list[Value]], keep: set[ir.Value]) -> None:
        wanted = keep | {output for node in path for output in node.outputs}
        for node in reversed(path):
            if not any(output in collected for output in node.outputs):
                continue
            entry = self._entry(node)
            assert entry is not None
            captured = captured_values(node)
            view = Node(node, self.op, captured, engine=self, wanted=wanted)
            self.op.scope = f"gradient of {self.op.bare_name(node.name or node.op_type)}"
            dys = [self._output_gradient(collected, output, output in keep) for output in node.outputs]
            if not entry.through_integers:
                view, dys = seen_as_floating(view, wanted, dys, self.opsets)
            returned = self._apply(entry, view, dys)
            for x, dx in zip((*node.inputs, *captured), returned, strict=True):
                if x is None or dx is None or x not in wanted:
                    continue
                others = collected.setdefault(x, [])
                fitted = self._fit(entry, view, dx, self.op.wrap(x))
                others.append(self.op.cast(fitted, others[0].dtype) if others and not is_float(x) else fitted)
        self.op.scope = ""

    def _output_gradient(self, collected: dict[ir.Value, list[Value]], output: ir.Value, keep: bool) -> Value | None:
        if output in collected:
            total = self.op.sum_of(collected[output])
            self.backward.arriving.add(total.ir)
            if keep:
                collected[output] = [total]
            else:
                del collected[output]
            return total
        if is_float(output):
            return self.op.zeros_like(self.op.wrap(output))
        return None

    def _apply(self, entry: registry.Entry, node: Node, dys: Sequence[Value | None]) -> list[Value | None]:
        assert entry.function is not None
        try:
            result = entry.function(node, *dys)
        except TooLargeError as error:
            raise too_large(node.ir, error) from error
        except (LookupError, ValueError, OverflowError) as error:
            if node.ir.domain or isinstance(error, OnnxTrainError):
                raise
            raise GradientError(
                f"The gradient of {describe(node.ir)} cannot be built, as its attributes do not fit its inputs "
                f"({error}); export the model again."
            ) from error
        returned = [result] if result is None or isinstance(result, Value) else list(result)
        count = len(node.inputs) + len(node.captured)
        if isinstance(result, Value):
            returned += [None] * (count - 1)  # the others configure the operator
        if len(returned) > count and all(item is None for item in returned[count:]):
            returned = returned[:count]
        if len(returned) != count:
            raise GradientError(
                f"The gradient rule of {describe(node.ir)} returned {len(returned)} gradients, "
                f"but the node has {count} inputs; return one gradient or None for each."
            )
        return returned

    def _fit(self, entry: registry.Entry, node: Node, dx: Value, x: Value) -> Value:
        """Give a gradient the type and shape of the value that it belongs to."""
        if dx.dtype != x.dtype and not (self.straight_through and _is_number(x.ir) and not x.is_float):
            source = x.ir.producer()
            if x.dtype == ir.DataType.UNDEFINED and source is not None:
                raise GradientError(
                    f"The type of {x.name!r} is not known: shape inference does not accept the inputs and attributes "
                    f"of the {describe(source)}; export the model again, or declare the type in its "
                    "value_info."
                )
            if dx.ir.dtype is not None:
                raise GradientError(
                    f"The gradient rule of {describe(node.ir)} returned {dx.dtype.name.lower()} for the "
                    f"{x.dtype.name.lower()} input {x.name!r}; a gradient has the type of its value."
                )
            dx.ir.dtype = x.dtype
        if entry.broadcasts:
            if dx.shape is None:
                dx.with_shape(node.y.shape)
            return self.op.reduce_to(dx, x)
        if dx.shape is not None and x.shape is not None and len(dx.shape) != len(x.shape):
            raise GradientError(
                f"The gradient rule of {describe(node.ir)} returned shape {dx.shape} for the input "
                f"{x.name!r} of shape {x.shape}; a gradient has the shape of its value."
            )
        return dx if x.shape is None else dx.with_shape(x.shape)


def missing_rules_message(nodes: Iterable[ir.Node], opsets: Mapping[str, int]) -> str:
    """One sentence for every operator without a rule, then how to add one; another for those that quantize."""
    nodes = list(nodes)
    quantized = [node for node in nodes if _is_listed(node, opsets)]
    known = [node for node in nodes if node not in quantized and _find(node, opsets) is not None]
    unknown = [node for node in nodes if node not in quantized and node not in known]
    parts = [quantized_message(quantized)] * bool(quantized) + [bodies_message(known)] * bool(known)
    return " ".join(parts + [unknown_message(unknown, opsets)] * bool(unknown))


def _is_listed(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    entry = _find(node, opsets)
    return entry is not None and entry.function is None


def _find(node: ir.Node, opsets: Mapping[str, int]) -> registry.Entry | None:
    return registry.find(node.op_type, node.domain, opsets.get(node.domain, 1))


def bodies_message(nodes: Sequence[ir.Node]) -> str:
    """What is wrong with bodies that read quantized values of their surroundings."""
    return (
        f"{_some(nodes)} reads quantized values in its bodies, into which no gradient passes straight; quantize inside "
        "of the bodies, or freeze the parameters before them (freeze=)."
    )


def _some(nodes: Sequence[ir.Node]) -> str:
    return ", ".join(describe(node) for node in nodes[:3]) + (", ..." if len(nodes) > 3 else "")


def quantized_message(nodes: Sequence[ir.Node]) -> str:
    """What is wrong with a gradient that arrives where values are quantized."""
    return (
        f"Between the parameters and the loss values are handed on as quantized integers, whose gradient is zero, by "
        f"{_some(nodes)}. Let gradients pass straight through (straight_through=True), or freeze the parameters "
        "before them (freeze=)."
    )


def unknown_message(nodes: Iterable[ir.Node], opsets: Mapping[str, int]) -> str:
    """What is wrong where operators have no rule."""
    operators: dict[tuple[str, str], list[ir.Node]] = {}
    for node in nodes:
        operators.setdefault((node.domain, node.op_type), []).append(node)
    parts = []
    for (domain, operator), found in operators.items():
        parts.append(f"{domain or 'ai.onnx'}::{operator} (opset {opsets.get(domain, 'not imported')}): {_some(found)}")
    return (
        f"No gradient rule for {len(operators)} operator{'s' if len(operators) > 1 else ''} between the "
        f"parameters and the loss: {'; '.join(parts)}. Freeze the parameters before them (freeze=), or add a "
        "rule with @onnxtrain.register_gradient."
    )


def _registered(node: ir.Node) -> bool:
    return registry.find(node.op_type, node.domain, 1) is not None


def _read(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None] + captured_values(node)


def _hands_on(node: ir.Node, entry: registry.Entry, active: Collection[ir.Value]) -> bool:
    """Whether values on which a gradient is asked for go on through a node as integers."""
    return any(place < len(node.inputs) and node.inputs[place] in active for place in entry.quantized)


def _loses_quantized(node: ir.Node, given: Collection[ir.Value]) -> bool:
    """Whether bodies read quantized values, into which no gradient is carried."""
    return bool(subgraphs(node)) and any(value in given and value.dtype in _QUANTIZED for value in _read(node))


_QUANTIZED = frozenset(
    {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT4, ir.DataType.UINT4}
)
"""Types of quantized values; wider integers are mostly indices and sizes."""


def _is_number(value: ir.Value) -> bool:
    """Whether it is a tensor of numbers of any type."""
    return value.dtype not in (None, ir.DataType.BOOL, ir.DataType.STRING)


def _may_carry(value: ir.Value) -> bool:
    """Whether a gradient can flow through: floating tensors, and sequences and optionals of them."""
    kind = value.type
    while isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        kind = kind.elem_type
    if kind is None:
        return True
    return kind.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
