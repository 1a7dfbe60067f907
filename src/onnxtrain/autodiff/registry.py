"""The book of gradient rules: per operator, domain and opset range, and the list of what has none."""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GradientError
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.limits import TooLargeError
from onnxtrain.graph.value import Dimension

if TYPE_CHECKING:
    from onnxtrain.autodiff.engine import Engine

Gradients = Sequence[Value | None] | Value | None
"""What a rule returns: one gradient or ``None`` per input; a bare value stands for a single one."""

Rule = Callable[..., Gradients]

NEWEST = 10_000
"""An upper end of an opset range that no operator set reaches."""


class Node:
    """What a rule sees of the node that it differentiates.

    Attributes:
        op: The builder to emit nodes with; ``node.op.opset`` is the version they must be valid in.
        inputs: The typed inputs; ``None`` for one that is left out. Absent trailing inputs read as ``None``
            through :meth:`input`.
        outputs: The typed outputs.
        captured: Values of the surrounding graph that the node's subgraphs read. A rule of an operator with
            subgraphs returns one gradient per input followed by one per captured value.
    """

    def __init__(
        self,
        node: ir.Node,
        op: Builder,
        captured: Sequence[ir.Value] = (),
        *,
        engine: Engine | None = None,
        wanted: Collection[ir.Value] | None = None,
    ) -> None:
        self.ir = node
        self.op = op
        self.inputs = tuple(None if value is None else op.wrap(value) for value in node.inputs)
        self.outputs = tuple(op.wrap(value) for value in node.outputs)
        self.captured = tuple(op.wrap(value) for value in captured)
        self._engine = engine
        self._wanted = wanted

    def with_values(self, inputs: Sequence[Value | None], outputs: Sequence[Value] | None = None) -> Node:
        """The same node with other values in the place of its inputs and outputs: another node's rule may serve it."""
        other = copy.copy(self)
        other.inputs = tuple(inputs)
        other.outputs = self.outputs if outputs is None else tuple(outputs)
        return other

    @property
    def operator(self) -> str:
        """The operator's name."""
        return self.ir.op_type

    @property
    def x(self) -> Value:
        """The first input."""
        return self.input_required(0)

    @property
    def y(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def input(self, index: int) -> Value | None:
        """An input, or ``None`` where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def input_required(self, index: int) -> Value:
        """An input that the operator's schema requires."""
        value = self.input(index)
        if value is None:
            raise GradientError(f"{describe(self.ir)} lacks its input {index}, which the operator requires.")
        return value

    def has_output(self, index: int) -> bool:
        """Whether an optional output is there and read or named."""
        return index < len(self.outputs) and self.outputs[index].name != ""

    def output_required(self, index: int, dtype: ir.DataType, shape: tuple[Dimension, ...] | None = None) -> Value:
        """An optional output, which the forward node is made to give where the model does not ask for it."""
        if not self.has_output(index):
            self.ir.resize_outputs(max(index + 1, len(self.ir.outputs)))
            added = self.ir.outputs[index]
            added.name = f"{self.ir.outputs[0].name}/{self.operator}_{index}"
            added.dtype = dtype
            added.shape = None if shape is None else ir.Shape(shape)
            for skipped in self.ir.outputs[:index]:
                skipped.name = skipped.name or ""
            self.outputs = tuple(self.op.wrap(value) for value in self.ir.outputs)
        return self.outputs[index]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute as a Python value (numbers, strings, lists, tensors as arrays), or the default."""
        attribute = self.ir.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            return np.asarray(value.numpy())
        return list(value) if isinstance(value, (tuple, list)) else value

    def wants(self, value: Value | None) -> bool:
        """Whether anybody asks for the gradient of an input or captured value.

        What a rule emits for the others is removed again; only rules that write bodies need to ask.
        """
        return value is not None and value.is_float and (self._wanted is None or value.ir in self._wanted)

    def pull_back(self, op: Builder, seeds: Sequence[tuple[Value, Value]], xs: Sequence[Value]) -> list[Value | None]:
        """Differentiate inside a body that this rule writes, as the engine does in the main graph.

        Args:
            op: The builder of the body.
            seeds: Pairs of a value of the body and the gradient that arrives at it.
            xs: Inputs of the body and values that it captures.

        Returns:
            One gradient per x, ``None`` where no seeded value depends on it.
        """
        assert self._engine is not None
        pairs = [(y.ir, seed.ir) for y, seed in seeds]
        return self._engine.inner(op).pull_back(pairs, [x.ir for x in xs])

    def rank(self, value: Value | None = None) -> int:
        """The rank of a value (the first input by default), for rules that cannot do without.

        Raises:
            GradientError: The rank is not known; the message says how to make it known.
        """
        value = self.x if value is None else value
        if value.rank is None:
            raise GradientError(
                f"{describe(self.ir)}: the gradient needs the rank of {value.name!r}, which shape inference "
                "could not find; add its shape to the model's value_info."
            )
        return value.rank


@dataclass(frozen=True)
class Entry:
    """A registered rule.

    Attributes:
        operator: Name of the operator.
        domain: Its domain.
        since: First opset version (of that domain) that the rule is for.
        until: Last one.
        broadcasts: Whether inputs broadcast to the output's shape, so that the engine sums gradients back.
        function: The rule; ``None`` for an operator whose gradient is zero or does not exist.
        reason: Why there is none.
        through_integers: Whether the gradient also flows through integer inputs and outputs, as straight-through
            rules of quantization need it; it then has the type of the floating values around them.
        quantized: Inputs whose values the operator hands on as integers, so that a gradient of zero would not be
            meant: where one arrives that is not to pass straight through, that is an error.
    """

    operator: str
    domain: str
    since: int
    until: int
    broadcasts: bool
    function: Rule | None
    reason: str = ""
    through_integers: bool = False
    quantized: tuple[int, ...] = ()


Body = Callable[["Node"], Sequence["Value | None"]]
"""Writes an operator in others: gets the node, returns its outputs (``None`` for one that nobody can ask for)."""

_bodies: dict[tuple[str, str], Body] = {}


def register_body(*operators: str, domain: str) -> Callable[[Body], Body]:
    """Register how operators are written in standard ones, for those that no rule and no schema covers.

    Where a gradient goes through such a node, the nodes of the body take its place.
    """

    def decorate(function: Body) -> Body:
        for operator in operators:
            _bodies[_canonical(domain), operator] = function
        return function

    return decorate


def find_registered_body(operator: str, domain: str) -> Body | None:
    """The registered body of an operator, or ``None``."""
    _load_rules()
    return _bodies.get((_canonical(domain), operator))


def registered_bodies() -> list[tuple[str, str]]:
    """(domain, operator) of all operators with a registered body."""
    _load_rules()
    return list(_bodies)


_entries: dict[tuple[str, str], list[Entry]] = {}


def register_gradient(
    *operators: str, domain: str = "", since: int = 1, until: int = NEWEST, broadcasts: bool = False
) -> Callable[[Rule], Rule]:
    """Register a function as the gradient rule of one or more operators.

    The function gets the node and one output gradient per output (zeros where nothing depends on that
    output, ``None`` where it is not a floating tensor) and returns one gradient or ``None`` per input::

        @onnxtrain.register_gradient("Square", domain="my.domain")
        def square(node, dy):
            \"\"\"dx = 2 x dy.\"\"\"
            return 2 * node.x * dy

    Args:
        operators: Names of the operators.
        domain: Their domain; "" is ONNX's own.
        since: First opset version of the domain that the rule holds for.
        until: Last one.
        broadcasts: The inputs broadcast as in NumPy; the engine sums each returned gradient, which has the
            shape of the output (or the one stated by ``with_shape``), back to the shape of its input.

    Raises:
        GradientError: A rule for one of these versions is registered already.
    """

    def decorate(function: Rule) -> Rule:
        for operator in operators:
            _add(Entry(operator, _canonical(domain), since, until, broadcasts, function))
        return function

    return decorate


_straight_through: dict[tuple[str, str], Entry] = {}


def straight_through(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register what takes the place of an operator's rule where straight-through gradients are asked for."""

    def decorate(function: Rule) -> Rule:
        for operator in operators:
            entry = Entry(operator, _canonical(domain), 1, NEWEST, False, function, through_integers=True)
            _straight_through[entry.domain, entry.operator] = entry
        return function

    return decorate


def straight_through_entries() -> list[Entry]:
    """All entries that straight-through gradients use in the place of others."""
    _load_rules()
    return list(_straight_through.values())


def no_gradient(*operators: str, domain: str = "", reason: str) -> None:
    """List operators through which no gradient flows.

    Their output does not vary with their inputs, or in steps only; the reason is said once for all of them.
    """
    for operator in operators:
        _add(Entry(operator, _canonical(domain), 1, NEWEST, False, None, reason))


def only_straight_through(operator: str, *, domain: str = "", quantized: tuple[int, ...], reason: str) -> None:
    """List an operator that computes with quantized values: a gradient passes only where it is asked to pass straight.

    Args:
        operator: Its name.
        domain: Its domain.
        quantized: The inputs that hold the values.
        reason: Why there is no gradient.
    """
    _add(Entry(operator, _canonical(domain), 1, NEWEST, False, None, reason, quantized=quantized))


def _add(entry: Entry) -> None:
    known = _entries.setdefault((entry.domain, entry.operator), [])
    for other in known:
        if entry.since <= other.until and other.since <= entry.until:
            raise GradientError(
                f"A gradient of {entry.domain or 'ai.onnx'}::{entry.operator} is registered for versions "
                f"{other.since} to {_last(other.until)} already; the new one says {entry.since} to "
                f"{_last(entry.until)}. "
                "Give them ranges that do not overlap (since=, until=), or unregister the first."
            )
    known.append(entry)


def unregister_gradient(operator: str, domain: str = "") -> None:
    """Forget every rule of an operator, so that another can take its place."""
    _entries.pop((_canonical(domain), operator), None)


def find(operator: str, domain: str, version: int, *, straight_through: bool = False) -> Entry | None:
    """The entry for an operator at a version of its domain, or ``None``: then it may have a body."""
    _load_rules()
    key = _canonical(domain), operator
    if straight_through and key in _straight_through:
        return _straight_through[key]
    for entry in _entries.get(key, ()):
        if entry.since <= version <= entry.until:
            return None if straight_through and entry.quantized and key in _bodies else entry
    return None


def entries() -> Iterator[Entry]:
    """All registered entries."""
    _load_rules()
    for known in _entries.values():
        yield from known


@functools.cache
def _load_rules() -> None:
    """Import the rule modules once: they register themselves."""
    package = importlib.import_module("onnxtrain.autodiff.rules")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"onnxtrain.autodiff.rules.{module.name}")


def describe(node: ir.Node) -> str:
    """How messages name a node: its operator, its name and its first output."""
    operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    name = f" {node.name!r}" if node.name else ""
    output = f" (output {node.outputs[0].name!r})" if node.outputs and node.outputs[0].name else ""
    return f"{operator} node{name}{output}"


def too_large(node: ir.Node, error: TooLargeError) -> GradientError:
    """What is said where the gradient of a node would write more than is written."""
    return GradientError(
        f"The gradient of {describe(node)} {error}; give the model smaller sizes, or sizes that it finds as it runs."
    )


def _canonical(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _last(version: int) -> str:
    return "the newest" if version == NEWEST else str(version)
