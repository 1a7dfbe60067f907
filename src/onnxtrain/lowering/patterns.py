"""Patterns of nodes: a formula is declared as nested operators and found in a graph.

    x, scale = Var("x"), Var("scale")
    mean = Op("ReduceMean", OneOf(Op("Pow", x, 2), Op("Mul", x, x)), Var("axes"))
    NORM = Pattern("RMS norm", Op("Mul", Op("Div", x, Op("Sqrt", mean)), scale), anchors={"ReduceMean"})

A match never contains a value that anything else needs: a graph output, a value that another node reads, or one that a
Gradient node names. A Gradient node names the value that the model's author saw, without reading it, so a named value
stays, and what depended on it goes on depending on it.

With the logger ``onnxtrain.lowering`` at level DEBUG, :func:`find` logs for every anchor node outside all matches why
the pattern does not match there.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph.sizes import computed_content
from onnxtrain.graph.value import constant_array, constant_number, dimensions, producer_of

_log = logging.getLogger("onnxtrain.lowering")

_COMMUTATIVE = ("Add", "Mul")


@dataclass(slots=True, eq=False)
class Match:
    """Nodes that compute a formula."""

    y: ir.Value
    nodes: tuple[ir.Node, ...] = ()
    captures: tuple[tuple[str, Any], ...] = ()
    failures: list[tuple[Match, ir.Value | None, str]] | None = None
    context: Any = None
    found: Any = None

    @property
    def graph(self) -> ir.Graph | ir.Function | None:
        """The graph that the result is computed in."""
        node = self.y.producer()
        return None if node is None else node.graph

    def __getitem__(self, name: str) -> Any:
        return next(found for key, found in self.captures if key == name)

    def get(self, name: str) -> Any:
        """Return the first capture of a name, or ``None``."""
        return next((found for key, found in self.captures if key == name), None)

    def all(self, *names: str) -> list[Any]:
        """Return all captures of some names, in the order in which they were found."""
        return [found for key, found in self.captures if key in names]

    def capture(self, name: str, found: Any) -> Match:
        """Return the match with one more capture."""
        return Match(self.y, self.nodes, (*self.captures, (name, found)), self.failures)

    def through(self, *nodes: ir.Node) -> Match:
        """Return the match with more nodes."""
        return Match(self.y, (*self.nodes, *nodes), self.captures, self.failures)

    def fail(self, value: ir.Value | None, expected: object) -> None:
        """Record that a value is not as the pattern expects."""
        if self.failures is not None:
            self.failures.append((self, value, str(expected)))


class Term:
    """Part of a pattern: describes the computation of a value."""

    roots: frozenset[str] = frozenset()

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:
        """Yield each way in which the term describes the value."""
        raise NotImplementedError


@dataclass(frozen=True)
class Var(Term):
    """Any value, the same one wherever the name occurs; with ``repeats`` each occurrence captures its own value."""

    name: str
    repeats: bool = False

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        known = None if self.repeats else found.get(self.name)
        if value is None or (known is not None and known is not value):
            found.fail(value, self.name)
        else:
            yield found if known is value else found.capture(self.name, value)


class Number(Term):
    """A constant of one element: any number, or one of those given, within a relative tolerance."""

    def __init__(self, *values: float, name: str | None = None, tolerance: float = 0.0) -> None:
        self.values, self.name, self.tolerance = values, name, tolerance

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        number = constant_number(value)
        if number is None or (self.values and not any(self._is(number, wanted) for wanted in self.values)):
            found.fail(value, self)
        else:
            yield found if self.name is None else found.capture(self.name, number)

    def _is(self, number: float, wanted: float) -> bool:
        return math.isclose(number, wanted, rel_tol=self.tolerance)

    def __str__(self) -> str:
        return f"constant {' or '.join(f'{value:.6g}' for value in self.values)}".rstrip()


@dataclass(frozen=True)
class Optional(Term):
    """An input that may be left out."""

    term: Term

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        yield from (found,) if value is None else self.term.matches(value, found)


class OneOf(Term):
    """The first of several terms that leads to a match."""

    def __init__(self, *terms: Term) -> None:
        self.terms = terms
        self.roots = frozenset().union(*(term.roots for term in terms))

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        for term in self.terms:
            yield from term.matches(value, found)


class Op(Term):
    """A node of an operator."""

    def __init__(
        self,
        operator: str,
        *inputs: Term | float,
        name: str | None = None,
        output: int = 0,
        outputs: int | None = None,
        **attributes: Sequence[object],
    ) -> None:
        self.operator, self.name, self.output, self.outputs = operator, name, output, outputs
        self.inputs = [term if isinstance(term, Term) else Number(term) for term in inputs]
        self.attributes = attributes
        self.roots = frozenset({operator})
        # Operators first: they fail sooner than variables, which match anything.
        self._order = sorted(range(len(inputs)), key=lambda index: isinstance(inputs[index], Var))

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        if self.name is not None and (known := found.get(self.name)) is not None:
            yield from (found,) if known.outputs[self.output] is value else ()
            return
        node = producer_of(value)
        if value is None or node is None or not self._is(node, value, found):
            found.fail(value, self)
            return
        given = [*node.inputs, *[None] * (len(self.inputs) - len(node.inputs))]
        if any(extra is not None for extra in given[len(self.inputs) :]):
            found.fail(value, f"{self} with {len(self.inputs)} inputs")
            return
        found = found.through(node)
        found = found if self.name is None else found.capture(self.name, node)
        yield from self._operands(given, found, 0)
        if self.operator in _COMMUTATIVE and given[0] is not given[1]:
            yield from self._operands(given[::-1], found, 0)

    def _operands(self, given: Sequence[ir.Value | None], found: Match, done: int) -> Iterator[Match]:
        if done == len(self._order):
            yield found
            return
        index = self._order[done]
        for longer in self.inputs[index].matches(given[index], found):
            yield from self._operands(given, longer, done + 1)

    def _is(self, node: ir.Node, value: ir.Value, found: Match) -> bool:
        if node.op_type != self.operator or node.domain or node.graph is not found.graph:
            return False
        if value is not node.outputs[self.output] or self.outputs not in (None, len(node.outputs)):
            return False
        return all(
            (node.attributes[name].value if name in node.attributes else None) in accepted
            for name, accepted in self.attributes.items()
        )

    def __str__(self) -> str:
        accepted = [f"{name} in {tuple(values)}" for name, values in self.attributes.items()]
        return self.operator + (f" ({', '.join(accepted)})" if accepted else "")


class Node(Term):
    """A node of one of some operators, whatever it reads; further conditions are the guard's."""

    def __init__(self, *operators: str) -> None:
        self.roots = frozenset(operators)

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        node = producer_of(value)
        if node is not None and node.op_type in self.roots:
            yield found.through(node)


class Product(Term):
    """The product of some terms and a constant, multiplied in any order by Mul and Div; ``number`` to three digits."""

    roots = frozenset({"Mul", "Div"})

    def __init__(self, *terms: Term, number: float) -> None:
        self.terms, self.number = terms, number

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        for number, operands, nodes in _flattened(value, len(self.terms), found.graph):
            if len(operands) < len(self.terms):
                continue
            is_close = math.isclose(number, self.number, rel_tol=1e-3)
            if not is_close and found.failures is None:
                continue
            for match in self._assigned(operands, found.through(*nodes)):
                if is_close:
                    yield match
                else:
                    match.fail(value, f"a product with the constant {self.number:.6g}, not {number:.6g}")

    def _assigned(self, operands: Sequence[ir.Value], found: Match, done: int = 0) -> Iterator[Match]:
        """Yield each way to match the terms with operands; those that are matched already are left out of them."""
        if done == len(self.terms):
            yield found
        for index, operand in enumerate(operands):
            for longer in self.terms[done].matches(operand, found):
                yield from self._assigned([*operands[:index], *operands[index + 1 :]], longer, done + 1)


def _flattened(
    value: ir.Value | None, most: int, graph: object
) -> Iterator[tuple[float, tuple[ir.Value, ...], tuple[ir.Node, ...]]]:
    """Yield each way to read a value as a product: the constant, at most so many other operands, the nodes."""
    number = constant_number(value)
    if number is not None:
        yield number, (), ()
    elif value is not None and most:
        yield 1.0, (value,), ()
        node = value.producer()
        if node is None or node.domain or node.op_type not in ("Mul", "Div") or node.graph is not graph:
            return
        first, second = node.inputs
        for one, left, nodes in _flattened(first, most, graph):
            if node.op_type == "Div":
                divisor = constant_number(second)
                if divisor:
                    yield one / divisor, left, (node, *nodes)
                continue
            for other, right, more in _flattened(second, most - len(left), graph):
                yield one * other, (*left, *right), (node, *nodes, *more)


class Scaled(Term):
    """A term, multiplied or divided any number of times by a constant or by a value of one element."""

    def __init__(self, term: Term, name: str) -> None:
        self.term, self.name = term, name
        self.roots = Product.roots | term.roots

    def matches(self, value: ir.Value | None, found: Match) -> Iterator[Match]:  # noqa: D102
        node = producer_of(value)
        if value is not None and node is not None and (step := _unscaled(value)) is not None:
            scaled, factor = step
            yield from self.matches(scaled, found.through(node).capture(self.name, factor))
        yield from self.term.matches(value, found)


def _unscaled(value: ir.Value) -> tuple[ir.Value, float | tuple[ir.Value, str]] | None:
    """Return the value that one node multiplies, and the factor."""
    node = value.producer()
    if node is None or node.domain or node.op_type not in ("Mul", "Div") or None in node.inputs:
        return None
    first, second = node.inputs
    assert first is not None
    assert second is not None
    number = _known_number(second)
    if number is not None:
        return first, (number if node.op_type == "Mul" else 1 / number if number else math.inf)
    if node.op_type == "Mul":
        number = _known_number(first)
        if number is not None:
            return second, number
        if dimensions(first) in ((), (1,)):
            return second, (first, "Mul")
    return (first, (second, node.op_type)) if dimensions(second) in ((), (1,)) else None


@dataclass(frozen=True)
class Pattern:
    """A formula."""

    name: str
    term: Term
    anchors: Collection[str]
    domain: str = ""

    def has_anchor(self, node: ir.Node) -> bool:
        """Return whether a node is one without which there is no match."""
        return node.op_type in self.anchors and node.domain == self.domain


def operators(name: str, *names: str, domain: str = "") -> Pattern:
    """Return the pattern of the nodes of some operators."""
    return Pattern(name, Node(*names), frozenset(names), domain)


def has_anchor(graph: ir.Graph, pattern: Pattern) -> bool:
    """Return whether a graph has a node without which a pattern does not match."""
    return any(pattern.has_anchor(node) for node in graph)


def find(
    graph: ir.Graph,
    pattern: Pattern,
    named: Collection[str] = (),
    check: Callable[[Match], str | None] = lambda match: None,
    *,
    backwards: bool = False,
    gone: Collection[ir.Node] = (),
) -> Iterator[Match]:
    """Yield the matches of a pattern in a graph, which may be changed between two of them."""
    if not has_anchor(graph, pattern):
        return
    failures: list[tuple[Match, ir.Value | None, str]] | None = [] if _log.isEnabledFor(logging.DEBUG) else None
    taken = set[ir.Node]()
    for node in reversed(list(graph)) if backwards else list(graph):
        if node.op_type not in pattern.term.roots or node.domain != pattern.domain or node.graph is not graph:
            continue
        if node in taken or node in gone:
            continue
        for match in pattern.term.matches(node.outputs[0], Match(node.outputs[0], failures=failures)):
            reason = _refusal(match, named) or check(match)
            if reason is None:
                taken.update(match.nodes)
                yield match
                break
            if failures is not None:
                failures.append((match, None, reason))
    if failures is not None:
        _explain(graph, pattern, taken, failures)


def _refusal(match: Match, named: Collection[str]) -> str | None:
    """Return why the nodes of a match cannot be replaced: something else needs a value between them."""
    inside, last = set(match.nodes), match.nodes[0]
    for output in dict.fromkeys(output for node in match.nodes if node is not last for output in node.outputs):
        if output.is_graph_output():
            return f"{output.name!r} is an output of the graph"
        if output.name in named:
            return f"a Gradient node names {output.name!r}"
        others = [reader for reader, _ in output.uses() if reader not in inside]
        if others:
            return f"{output.name!r} is read by {_shown(others[0])} as well"
    for name, found in match.captures:
        value = found[0] if isinstance(found, tuple) else found
        if isinstance(value, ir.Value) and value.producer() in inside:
            return f"{name} is {value.name!r}, which is computed on the way"
    return None


def _explain(
    graph: ir.Graph,
    pattern: Pattern,
    taken: Collection[ir.Node],
    failures: Sequence[tuple[Match, ir.Value | None, str]],
) -> None:
    """Log for each anchor outside all matches the reason that was found furthest into the pattern."""
    for node in graph:
        if not pattern.has_anchor(node) or node in taken:
            continue
        near = [failure for failure in failures if node in failure[0].nodes]
        if not near:
            readers = ", ".join(_shown(reader) for output in node.outputs for reader, _ in output.uses())
            _log.debug("%s: %s is in no match; it is read by %s.", pattern.name, _shown(node), readers or "no node")
            continue
        _, value, reason = max(near, key=lambda failure: (failure[1] is None, len(set(failure[0].nodes))))
        if value is not None:
            source = value.producer()
            given = f"{value.name!r}" + ("" if source is None else f" of {_shown(source)}")
            reason = f"the pattern has {reason} where the graph has {given}"
        _log.debug("%s: %s is in no match: %s.", pattern.name, _shown(node), reason)


def _shown(node: ir.Node) -> str:
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


# Numbers that a graph computes from shapes that are known, such as the root of a head's size

_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {"Div": np.divide, "Mul": np.multiply, "Sqrt": np.sqrt}
_OF_SIZES = frozenset({"Gather", "Shape", "Slice"})
_FLOATING = (ir.DataType.FLOAT, ir.DataType.DOUBLE)

_DEEPEST = 12
"""Nodes between a number and the shape that it follows from."""


def _known_number(value: ir.Value | None) -> float | None:
    """The number of a value with one element that is a constant, or follows from known sizes; ``None`` for others."""
    array = _array(value, _DEEPEST)
    return float(array.reshape(())) if array is not None and array.size == 1 and _is_known(array) else None


def _array(value: ir.Value | None, depth: int) -> np.ndarray | None:
    known, node = constant_array(value), producer_of(value)
    if value is None or known is not None or node is None or node.domain or not depth:
        return known
    rule = _ARITHMETIC.get(node.op_type) if value.dtype in _FLOATING else None
    if node.op_type == "Cast" and value.dtype is not None and value.dtype in (*_FLOATING, ir.DataType.INT64):
        rule = functools.partial(np.asarray, dtype=value.dtype.numpy())
    if rule is None:  # a product with sizes that are computed in another way is left as it is: other bits
        of_sizes = node.op_type in _OF_SIZES and not (node.op_type == "Shape" and node.attributes)
        if not of_sizes:
            return None
        return computed_content(node, lambda each: _integers(_array(each, depth - 1)), dimensions)
    arrays = [each for item in node.inputs if (each := _array(item, depth - 1)) is not None and _is_known(each)]
    return np.asarray(rule(*arrays)) if len(arrays) == len(node.inputs) else None


def _is_known(array: np.ndarray) -> bool:
    return array.dtype != object or all(isinstance(item, int) for item in array.flat)


def _integers(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None or array.dtype.kind not in "iO" else array.astype(object)
