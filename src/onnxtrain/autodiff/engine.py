"""Reverse-mode differentiation of a graph: the chain rule.

The engine does all that rules share: zero gradients of outputs without readers, the reduction of broadcast gradients,
accumulation, and the check of a rule's results. Where gradients pass straight through quantization, it lets the rules
of floating operators see quantized values as floats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.autodiff import registry
from onnxtrain.autodiff.expand import expand_functions
from onnxtrain.autodiff.missing import missing_rules_message
from onnxtrain.autodiff.node import Node, Seeds, describe, too_large
from onnxtrain.autodiff.path import Forward, Route, is_number, kind_at, kinds_of, reads_index
from onnxtrain.errors import GradientError, OnnxTrainError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import captured_values
from onnxtrain.graph.limits import TooLargeError
from onnxtrain.graph.value import is_float


@dataclass(eq=False)
class Backward:
    """The backward pass that an engine has emitted so far.

    Attributes:
        nodes: Its nodes, in order.
        arriving: The gradients with respect to the forward nodes' outputs.
    """

    nodes: list[ir.Node] = field(default_factory=list)
    arriving: set[ir.Value] = field(default_factory=set)

    def __iadd__(self, other: Backward) -> Backward:
        self.nodes += other.nodes
        self.arriving |= other.arriving
        return self


class Engine:
    """Differentiates values of one graph."""

    def __init__(self, forward: Forward, op: Builder | None = None) -> None:
        self.forward = forward
        self.op = Builder(forward.graph, forward.opset) if op is None else op
        self.backward = Backward()

    def gradients(self, y: ir.Value, xs: Sequence[ir.Value], fixed: Sequence[ir.Value] = ()) -> list[ir.Value]:
        """Append the nodes that compute dy/dx for every x; y is seeded with ones."""
        for value in (y, *xs):
            if not is_float(value):
                kind = "of unknown type" if value.dtype is None else value.dtype.name.lower()
                raise GradientError(f"A gradient needs floating tensors, but {value.name!r} is {kind}.").about(
                    value.name, got=kind
                )
        seed = self.op.ones_like(self.op.wrap(self.forward.current(y)))
        found = self.pull_back([(y, seed.ir)], xs, fixed)
        current = [self.op.wrap(self.forward.current(x)) for x in xs]
        return [(self.op.zeros_like(x) if dx is None else dx).ir for x, dx in zip(current, found, strict=True)]

    def pull_back(self, seeds: Seeds, xs: Sequence[ir.Value], fixed: Sequence[ir.Value] = ()) -> list[Value | None]:
        """Append the nodes that carry gradients with respect to several values back to the xs."""
        path, missing = expand_functions(self.forward, Route(tuple(y for y, _ in seeds), tuple(xs), tuple(fixed)))
        if missing:
            raise GradientError(missing_rules_message(missing, self.forward.opsets))
        collected: dict[ir.Value, list[Value]] = {}
        for y, seed in seeds:
            collected.setdefault(self.forward.current(y), []).append(self.op.wrap(seed))
        current = [self.forward.current(x) for x in xs]
        self.op.variables.update(current)
        before = set(self.forward.graph)
        self._backward(path, collected, set(current))
        self.backward.nodes += [node for node in self.forward.graph if node not in before]
        return [self.op.sum_of(collected[x]) if x in collected else None for x in current]

    def _pull_back_inside(self, op: Builder, seeds: Seeds, xs: Sequence[ir.Value]) -> list[Value | None]:
        """Pull gradients back in the body of an operator of this graph."""
        return Engine(self.forward.inside(op.graph), op).pull_back(seeds, xs)

    def _backward(self, path: Sequence[ir.Node], collected: dict[ir.Value, list[Value]], keep: set[ir.Value]) -> None:
        wanted = keep | {
            output for node in path for output in self.forward.carrying_outputs(node, self.forward.entry(node))
        }
        for node in reversed(path):
            reached = [output for output in node.outputs if output in collected]
            if not reached:
                continue
            entry = self.forward.entry(node)
            assert entry is not None
            captured = captured_values(node)
            view = Node(node, self.op, captured, pull_back=self._pull_back_inside, wanted=wanted, reached=reached)
            self.op.scope = f"gradient of {self.op.bare_name(node.name or node.op_type)}"
            dys = [self._arriving(collected, output, output in keep) for output in node.outputs]
            if not entry.through_integers:
                view, dys = seen_as_floating(view, wanted, dys, self.forward.opsets)
            returned = self._apply(entry, view, dys)
            for x, dx in zip((*node.inputs, *captured), returned, strict=True):
                if x is None or dx is None or x not in wanted:
                    continue
                others = collected.setdefault(x, [])
                fitted = self._fit(entry, view, dx, self.op.wrap(x))
                others.append(self.op.cast(fitted, others[0].dtype) if others and not is_float(x) else fitted)
        self.op.scope = ""

    def _arriving(self, collected: dict[ir.Value, list[Value]], output: ir.Value, keep: bool) -> Value | None:
        """The sum of the gradients collected for an output; zeros where nothing depends on it."""
        if output not in collected:
            return self.op.zeros_like(self.op.wrap(output)) if is_float(output) else None
        total = self.op.sum_of(collected.pop(output))
        self.backward.arriving.add(total.ir)
        if keep:
            collected[output] = [total]
        return total

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
            returned += [None] * (count - 1)  # the other inputs configure the operator
        if len(returned) > count and all(item is None for item in returned[count:]):
            returned = returned[:count]
        if len(returned) != count:
            raise GradientError(
                f"The gradient rule of {describe(node.ir)} returned {len(returned)} gradients, "
                f"but the node has {count} inputs; return one gradient or None for each."
            )
        return returned

    def _fit(self, entry: registry.Entry, node: Node, dx: Value, x: Value) -> Value:
        """Give a gradient the type and shape of its value."""
        if dx.dtype != x.dtype and not (self.forward.straight_through and is_number(x.ir) and not x.is_float):
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
            ).about(x.name, got=dx.shape, wanted=x.shape)
        return dx if x.shape is None else dx.with_shape(x.shape)


Dys = list[Value | None]
"""The gradients of a node's outputs."""


def seen_as_floating(node: Node, wanted: Collection[ir.Value], dys: Dys, opsets: Mapping[str, int]) -> tuple[Node, Dys]:
    """Cast the quantized inputs and outputs of a node that need a gradient to floats, so that its rule applies."""
    dtype = next((dy.dtype for dy in dys if dy is not None), None)
    carries = [
        value is not None
        and value.ir in wanted
        and not value.is_float
        and not value.is_sequence
        and not reads_index(node.ir, index, opsets)
        for index, value in enumerate(node.inputs)
    ]
    if dtype is None or not any(carries):
        return node, dys
    kinds, kinds_given = _kinds(node, opsets.get(node.ir.domain, 1))
    carrying = {kind for kind, carried in zip(kinds, carries, strict=True) if carried}
    inputs = [
        value if value is None or kind not in carrying else node.op.cast(value, dtype).with_shape(value.shape)
        for kind, value in zip(kinds, node.inputs, strict=True)
    ]
    outputs = [
        node.op.cast(y, dtype).with_shape(y.shape) if kind in carrying else y
        for kind, y in zip(kinds_given, node.outputs, strict=True)
    ]
    arriving = [
        node.op.zeros_like(y) if dy is None and kind in carrying else dy
        for kind, y, dy in zip(kinds_given, outputs, dys, strict=True)
    ]
    return node.with_values(inputs, outputs), arriving


def _kinds(node: Node, version: int) -> tuple[list[str], list[str]]:
    """The type parameters of the inputs and outputs in the operator's schema."""
    counts = len(node.inputs), len(node.outputs)
    kinds = kinds_of(node.operator, node.ir.domain, version)
    if kinds is None:
        return [f"input {index}" for index in range(counts[0])], [f"output {index}" for index in range(counts[1])]
    return (
        [kind_at(kinds.inputs, index) for index in range(counts[0])],
        [kind_at(kinds.outputs, index) for index in range(counts[1])],
    )
