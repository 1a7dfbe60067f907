"""Emit nodes into an onnx-ir graph: one method per operator, typed results, no node twice."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.inference import infer_outputs
from onnxtrain.graph.operands import Operand, Value, as_array, exact, lift_operands
from onnxtrain.graph.passes import NEVER_SHARED, attribute_key
from onnxtrain.graph.value import Dimension, add_initializer


class Builder:
    """Appends nodes to a graph (or before a given node of it).

    ``builder.Relu(x)`` emits one standard operator and returns its output;
    ``builder.several("TopK", x, k, outputs=2)`` returns all outputs of one that has several. Inputs are values;
    numbers and arrays become constants of the type that the operator needs. Keyword arguments are attributes;
    ``domain`` names another operator set. The same operator on the same inputs is emitted once:
    the first result is returned again.
    """

    def __init__(
        self,
        graph: ir.Graph,
        opset: int | None = None,
        *,
        before: ir.Node | None = None,
        outer: Builder | None = None,
    ) -> None:
        self.graph = graph
        self.opset: int = opset or (graph.opset_imports.get("", 1) if outer is None else outer.opset)
        self.scope = ""
        self.variables: set[ir.Value] = set() if outer is None else outer.variables
        """Initializers whose values change: rules must not read them as constants."""
        self.prefix = "" if outer is None else outer.unique_prefix()
        self.emitted: list[ir.Node] = []
        """The nodes that were emitted, in order."""
        self._outer = outer
        self._before = before
        self._shared: dict[tuple[Any, ...], tuple[ir.Value, ...]] = {}
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._sizes: dict[str, Value] = {}
        self._placed: dict[ir.Value, tuple[Value, Value]] = {}
        """Sequences with one nonzero item: the item and its position, counted from the start."""
        self._counter = 0
        self._node_names: set[str | None] | None = None

    def __getattr__(self, operator: str) -> Callable[..., Value]:
        """``builder.Add(a, b)``: emit the standard operator of that name."""
        if not operator[:1].isupper():
            raise AttributeError(f"Builder has no attribute {operator!r}; operators have ONNX's names, such as Relu")

        def emit(*inputs: Operand | None, domain: str = "", **attributes: Any) -> Value:
            return self.several(operator, *inputs, outputs=1, domain=domain, **attributes)[0]

        return emit

    def several(
        self, operator: str, *inputs: Operand | None, outputs: int, domain: str = "", **attributes: Any
    ) -> tuple[Value, ...]:
        """Emit one node of any operator and return all its outputs; attributes that are ``None`` are left out."""
        given = {key: _plain(item) for key, item in attributes.items() if item is not None}
        operands = [item for item in inputs if item is None or isinstance(item, Value)]
        if len(operands) < len(inputs):
            operands = lift_operands(self, operator, inputs, domain)
        if operator == "Pad" and not domain and len(operands) == 4:
            operands = self._padded_on_every_axis(*operands)
        values = [None if value is None else value.ir for value in operands]
        while values and values[-1] is None:
            values.pop()
        compared = attribute_key(given)
        key = (domain, operator, outputs, tuple(map(id, values)), compared)
        shareable = compared is not None and operator not in NEVER_SHARED
        if shareable and key in self._shared:
            made = self._shared[key]
        else:
            made = self._emit(operator, values, outputs, domain, given)
            if shareable:
                self._shared[key] = made
        return tuple(Value(value, self) for value in made)

    def _padded_on_every_axis(
        self, x: Value | None, pads: Value | None, fill: Value | None, axes: Value | None
    ) -> list[Value | None]:
        """Pad's inputs with pads for every axis instead of ``axes``; an unknown rank is computed in the graph.

        ONNX Runtime fails on Pad with axes between transpositions (workarounds: transposed padding).
        """
        if x is None or pads is None or axes is None:
            return [x, pads, fill, axes]
        listed = axes.constant()
        if x.rank is None or listed is None:
            rank = self.Shape(self.Shape(x))
            begins = self.Where(self.binary("Less", axes, 0), axes + rank, axes)
            positions = self.Concat(begins, begins + rank, axis=0)
            none = self.ConstantOfShape(rank + rank, value=ir.tensor(np.zeros(1, np.int64)))
            return [x, self.ScatterElements(none, positions, pads), fill]
        begins_known = listed % x.rank
        positions_known = np.concatenate([begins_known, begins_known + x.rank]).astype(np.int64)
        known = pads.constant()
        every = np.zeros(2 * x.rank, np.int64)
        if known is None:
            return [x, self.ScatterElements(self.constant(every), self.constant(positions_known), pads), fill]
        every[positions_known] = known
        return [x, self.constant(every), fill]

    def _emit(
        self, operator: str, values: list[ir.Value | None], outputs: int, domain: str, given: dict[str, Any]
    ) -> tuple[ir.Value, ...]:
        attributes = [_attribute(key, item) for key, item in given.items()]
        name = self._node_name(operator)
        node = ir.Node(domain, operator, values, attributes, num_outputs=outputs, name=name)
        if self._before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self._before, node)
        if self.prefix:
            for index, output in enumerate(node.outputs):
                output.name = f"{self.prefix}{operator}_{self._counter}_{index}"
        infer_outputs(node)
        self.emitted.append(node)
        return tuple(node.outputs)

    def _node_name(self, operator: str) -> str | None:
        """A name that no node of the graph has: another builder may have used the same scope."""
        self._counter += 1
        if not self.scope:
            return None
        scope = self.scope if self._outer is None else self.prefix + self.scope
        while (name := f"{scope}/{operator}_{self._counter}") in self._names():
            self._counter += 1
        self._names().add(name)
        return name

    def _names(self) -> set[str | None]:
        """The names of the nodes that the graph had at the first call, and of those of all builders that share them."""
        if self._node_names is None:
            self._node_names = {node.name for node in self.graph}
        return self._node_names

    def before(self, node: ir.Node, *, sharing: bool = False) -> Builder:
        """A builder that inserts before a node of this graph, or of a body in it, and shares constants with this one.

        In the same graph it shares computed sizes, too, so call it for nodes in the order of the graph.
        """
        if node.graph is not self.graph:
            assert isinstance(node.graph, ir.Graph)
            return Builder(node.graph, before=node, outer=self)
        self._names()  # once for all of these builders
        other = copy.copy(self)
        other._before, other.emitted = node, []
        if not sharing:
            other._shared = {}
        return other

    def import_domain(self, domain: str, version: int) -> None:
        """Add an operator set to the imports of the main graph, if it is missing."""
        outermost = self
        while outermost._outer is not None:
            outermost = outermost._outer
        outermost.graph.opset_imports.setdefault(domain, version)

    def body(self, inputs: Sequence[ir.Value], name: str) -> Builder:
        """Return a builder for the body of an operator; the body may read values of this graph."""
        return Builder(ir.Graph(inputs, [], nodes=[], name=name), outer=self)

    def output(self, value: Value) -> None:
        """Make a value an output of the graph, through an Identity with a new name."""
        made = self._emit("Identity", [value.ir], 1, "", {})[0]
        made.type, made.shape = value.ir.type, value.ir.shape
        self.graph.outputs.append(made)

    def unique_prefix(self) -> str:
        """Return a prefix of names that is unique in this graph and its bodies."""
        self._counter += 1
        # A scope in the prefix of every level would double the names' length at each.
        return f"{self.prefix}{self._counter}/" if self.prefix else f"{self.scope or 'body'}/{self._counter}/"

    def copied_name(self, name: str) -> str:
        """Return the name in this body for a copy of a value or node of the surrounding graph."""
        return self.prefix + self.bare_name(name)

    def bare_name(self, name: str) -> str:
        """A name of this graph or the surrounding one without its prefix."""
        if self.prefix and name.startswith(self.prefix):
            return name[len(self.prefix) :]
        return name if self._outer is None else name.removeprefix(self._outer.prefix)

    def wrap(self, value: ir.Value) -> Value:
        """An existing value of the graph as an operand."""
        return Value(value, self)

    def constant(self, array: Any, dtype: ir.DataType | np.dtype[Any] | type | None = None) -> Value:
        """A constant tensor, stored as an initializer; equal constants are stored once."""
        if self._outer is not None:
            return self.wrap(self._outer.constant(array, dtype).ir)
        if isinstance(dtype, ir.DataType):
            dtype = dtype.numpy()
        data = np.asarray(array, dtype=dtype)
        key = (data.dtype.str, str(data.dtype), data.shape, data.tobytes())
        if key not in self._constants:
            self._constants[key] = add_initializer(self.graph, ir.Tensor(data, name=self._constant_name()))
        return Value(self._constants[key], self)

    def _constant_name(self) -> str:
        while True:
            name = f"{self.prefix}constant_{len(self.graph.initializers)}_{self._counter}"
            self._counter += 1
            if name not in self.graph.initializers and all(name != v.name for v in self.graph.inputs):
                return name

    def ints(self, *numbers: int) -> Value:
        """A one-dimensional int64 constant: axes, sizes, starts, ends."""
        return self.constant(np.asarray(numbers, dtype=np.int64))

    def scalar(self, number: Any, like: Value) -> Value:
        """A 0-d constant of the element type of ``like``."""
        return self.constant(number, like.dtype)

    def binary(self, operator: str, left: Operand, right: Operand) -> Value:
        """An arithmetic or comparison operator; numbers and arrays take the type of the other side."""
        if isinstance(left, Value) and not isinstance(right, Value):
            if _is_number(right) and _is_neutral(operator, right):
                return left
            right = self._beside(left, right, operator)
        elif isinstance(right, Value) and not isinstance(left, Value):
            if operator in ("Add", "Mul") and _is_number(left) and _is_neutral(operator, left):
                return right
            left = self._beside(right, left, operator)
        assert isinstance(left, Value)
        assert isinstance(right, Value)
        return self.several(operator, left, right, outputs=1)[0]

    def _beside(self, value: Value, operand: Any, operator: str) -> Value:
        """Convert the other operand, a number or an array, to a constant of a value's type."""
        what = f"an operand of {operator}"
        array = as_array(operand, what)
        return self.constant(array if value.ir.dtype is None else exact(array, value.dtype, what))

    def cast(self, value: Value, dtype: ir.DataType) -> Value:
        """The value in another element type; itself where it has that type already."""
        if value.dtype == dtype:
            return value
        return self.Cast(value, to=int(dtype))

    def shape_of(self, value: Value) -> Value:
        """The shape as a one-dimensional int64 value: a constant where it is static."""
        static = value.static_shape
        if static is not None:
            return self.ints(*static)
        return self.Shape(value)

    def dimension(self, value: Value, axis: int) -> Value:
        """The size of one axis as a one-element int64 tensor; the size of a symbol is computed once."""
        size = None if value.shape is None else value.shape[axis]
        if isinstance(size, int):
            return self.ints(size)
        if isinstance(size, str) and size in self._sizes:
            return self.wrap(self._sizes[size].ir)
        found = self.Shape(value, start=axis, end=axis + 1 if axis != -1 else None)
        if isinstance(size, str):
            self._sizes[size] = found
        return found

    def count(self, value: Value, axes: Sequence[int] | None = None) -> Value:
        """The number of elements over ``axes`` (all by default) as a 0-d value of the type of ``value``."""
        static = value.shape
        if static is not None:
            counted = list(range(len(static)) if axes is None else axes)
            number = math.prod(size for a in counted if isinstance(size := static[a], int))
            unknown = [a for a in counted if not isinstance(static[a], int)]
            if not unknown:
                return self.scalar(number, value)
            if len(unknown) == 1 and isinstance(static[unknown[0]], str):
                return self.cast(self.Squeeze(self.dimension(value, unknown[0])), value.dtype) * number
        if axes is None:
            return self.cast(self.Size(value), value.dtype)
        chosen = self.Gather(self.Shape(value), self.ints(*axes))
        return self.cast(self.ReduceProd(chosen, keepdims=0), value.dtype)

    def reshape(self, value: Value, shape: Value | Sequence[int], known: Sequence[Dimension] | None = None) -> Value:
        """Reshape, where a size of zero is zero; ``known`` states the axes of the result as far as they are known."""
        target = shape if isinstance(shape, Value) else self.ints(*shape)
        listed = target.constant()
        has_minus_one = listed is not None and bool((listed == -1).any())
        result = self.Reshape(value, target, allowzero=None if has_minus_one else 1)
        return result.with_shape(tuple(known)) if known is not None else result

    def reshape_like(self, value: Value, like: Value) -> Value:
        """The elements of ``value`` in the shape of ``like``."""
        shape = like.shape
        if shape is not None and shape == value.shape and None not in shape:
            return value
        target = None if shape is None else _constant_target(shape, value.shape)
        if target is not None:
            return self.Reshape(value, self.ints(*target)).with_shape(shape)
        return self.reshape(value, self.shape_of(like)).with_shape(shape)

    def zeros_like(self, value: Value) -> Value:
        """Zeros of the type and shape of ``value``; for a sequence, a sequence of zeros."""
        if value.is_sequence:
            return self.map_sequences([value], lambda items: items[0].op.zeros_like(items[0]))
        return self._filled(value, 0)

    def ones_like(self, value: Value) -> Value:
        """Ones of the type and shape of ``value``."""
        return self._filled(value, 1)

    def _filled(self, value: Value, number: int) -> Value:
        if value.shape == ():
            return self.scalar(number, value)
        fill = np.asarray([number], dtype=value.dtype.numpy())
        result = self.ConstantOfShape(self.shape_of(value), value=ir.tensor(fill))
        result.ir.dtype = value.dtype
        return result.with_shape(value.shape)

    def sum_of(self, values: Sequence[Value]) -> Value:
        """The sum of values of one shape (Add for two, one Sum node for more), or of sequences, item by item."""
        if len(values) == 1:
            return values[0]
        if values[0].is_sequence:
            return self._sum_of_sequences(values)
        if len(values) == 2:
            return values[0] + values[1]
        result = self.Sum(*values)
        return result.with_shape(values[0].shape)

    def _sum_of_sequences(self, values: Sequence[Value]) -> Value:
        """The sum of sequences, item by item; of one with a single item that is not zero, only that is added."""
        single = [value for value in values if value.ir in self._placed]
        whole = [value for value in values if value.ir not in self._placed]
        if not whole:
            whole, single = single[:1], single[1:]
        total = whole[0]
        if len(whole) > 1:
            total = self.map_sequences(whole, lambda items: items[0].op.sum_of(items))
        for item, position in (self._placed[value.ir] for value in single):
            changed = self.SequenceAt(total, position) + item
            total = self.SequenceInsert(self.SequenceErase(total, position), changed, position)
        return total

    def map_sequences(self, values: Sequence[Value], function: Callable[[list[Value]], Value]) -> Value:
        """Apply a function to the items of sequences of equal length, one of each at a time; returns a sequence."""
        body = self.body([], "item")
        items = []
        for value in values:
            item = ir.Value(name=f"{body.unique_prefix()}item", type=ir.TensorType(value.dtype))
            body.graph.inputs.append(item)
            items.append(body.wrap(item))
        body.output(function(items))
        return self.SequenceMap(*values, body=body.graph)

    def placed(self, item: Value, position: Value, like: Value) -> Value:
        """A sequence like another, of zeros but for one item at a position counted from the start."""
        others = self.SequenceErase(self.zeros_like(like), position)
        result = self.SequenceInsert(others, item, position)
        self._placed[result.ir] = item, position
        return result

    def transpose_last(self, value: Value) -> Value:
        """Swap the last two axes, of a value of any rank."""
        rank = value.rank
        if rank is None:
            return self.Einsum(value, equation="...ij->...ji")
        order = list(range(rank))
        order[-1], order[-2] = order[-2], order[-1]
        return self.Transpose(value, perm=order)

    def reduce_to(self, value: Value, like: Value) -> Value:
        """Sum ``value`` over the axes along which ``like`` was broadcast to its shape."""
        from_shape, to_shape = value.shape, like.shape
        if from_shape is None or to_shape is None or len(to_shape) > len(from_shape):
            return self._reduce_dynamically(value, like)
        extra = len(from_shape) - len(to_shape)
        axes = list(range(extra))
        for axis, (source, target) in enumerate(zip(from_shape[extra:], to_shape, strict=True), start=extra):
            if target == 1:
                if source != 1:
                    axes.append(axis)
            elif not isinstance(target, int) and (target is None or source != target) and source != 1:
                return self._reduce_dynamically(value, like)
        if not axes:
            return value
        if axes == list(range(extra)):
            summed = self.ReduceSum(value, self.ints(*axes), keepdims=0)
            return summed.with_shape(to_shape)
        kept = tuple(1 if a in axes else d for a, d in enumerate(from_shape))
        summed = self.ReduceSum(value, self.ints(*axes), keepdims=1).with_shape(kept)
        return summed if not extra else self.reshape_like(summed, like)

    def _reduce_dynamically(self, value: Value, like: Value) -> Value:
        source, target = self.Shape(value), self.Shape(like)
        missing = self.Sub(self.Shape(source), self.Shape(target))
        ones = self.ConstantOfShape(missing, value=ir.tensor(np.asarray([1], dtype=np.int64)))
        padded = self.Concat(ones, target, axis=0)
        differs = self.Not(self.Equal(padded, source))
        axes = self.Reshape(self.NonZero(differs), self.ints(-1))
        summed = self.ReduceSum(value, axes, keepdims=1, noop_with_empty_axes=1)
        result = self.Reshape(summed, target, allowzero=1)
        result.ir.dtype = value.dtype
        return result.with_shape(like.shape)


def _constant_target(shape: Sequence[Dimension], source: Sequence[Dimension] | None) -> list[int] | None:
    """The shape as integers, with -1 for one unknown axis or 0 for axes that keep their size; ``None`` elsewhere."""
    if 0 in shape:
        return None
    unknown = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(unknown) == 1:
        return [size if isinstance(size, int) else -1 for size in shape]
    known = list(source or ())
    stays = [axis < len(known) and shape[axis] is not None and shape[axis] == known[axis] for axis in unknown]
    if unknown and all(stays):
        return [size if isinstance(size, int) else 0 for size in shape]
    return None


def _plain(item: Any) -> Any:
    return int(item) if isinstance(item, (ir.DataType, np.integer, bool)) else item


def _attribute(name: str, item: Any) -> ir.Attr:
    """An attribute of a node; onnx-ir's own conversion checks protocols, which takes 0.1 ms for a list."""
    if type(item) is int:
        return ir.AttrInt64(name, item)
    if type(item) is str:
        return ir.AttrString(name, item)
    if isinstance(item, (list, tuple)) and item and all(isinstance(number, int) for number in item):
        return ir.AttrInt64s(name, item)
    return ir.convenience.convert_attribute(name, item)


def _is_number(operand: Operand) -> TypeGuard[int | float]:
    return isinstance(operand, int | float) and not isinstance(operand, bool)


def _is_neutral(operator: str, number: float) -> bool:
    if operator in ("Add", "Sub"):
        return number == 0
    return operator in ("Mul", "Div") and number == 1
