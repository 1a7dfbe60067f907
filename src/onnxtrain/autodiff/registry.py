"""Registry of operators: gradient rules per operator, domain and opset range, bodies, operators without gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from onnxtrain.autodiff.node import Node
from onnxtrain.errors import GradientError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Value
from onnxtrain.graph.rule_registry import NEWEST, RuleRegistry, canonical, for_each

Gradients = Sequence[Value | None] | Value | None
"""The result of a rule: one gradient or ``None`` per input; a bare value is the first input's gradient."""

Rule = Callable[..., Gradients]

Body = Callable[[Node], Sequence[Value | None]]
"""Emits other operators for a node: gets the node, returns its outputs (``None`` for one without readers)."""


class Entry(NamedTuple):
    """A registered rule."""

    operator: str
    domain: str
    since: int
    until: int
    broadcasts: bool
    function: Rule | None
    reason: str = ""
    through_integers: bool = False
    quantized: tuple[int, ...] = ()


_rules: RuleRegistry[Entry] = RuleRegistry("A gradient", GradientError)

_straight_through: dict[tuple[str, str], Entry] = {}
"""The rules that replace others with the straight-through option, by domain and operator."""

_bodies: dict[tuple[str, str], Body] = {}
"""The functions that emit standard operators for an operator, by domain and operator."""


@checks_arguments
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
    domain = canonical(domain)
    return for_each(operators, lambda name, rule: _rules.add(Entry(name, domain, since, until, broadcasts, rule)))


def straight_through(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the rule that replaces an operator's rule with the straight-through option."""

    def replace(operator: str, function: Rule) -> None:
        entry = Entry(operator, canonical(domain), 1, NEWEST, False, function, through_integers=True)
        _straight_through[canonical(domain), operator] = entry

    return for_each(operators, replace)


def register_body(*operators: str, domain: str) -> Callable[[Body], Body]:
    """Register a body in standard operators, for operators that no rule and no schema covers."""
    return for_each(operators, lambda name, body: _bodies.update({(canonical(domain), name): body}))


@checks_arguments
def no_gradient(*operators: str, domain: str = "", reason: str) -> None:
    """List operators through which no gradient flows.

    Their output does not vary with their inputs, or in steps only.
    """
    for operator in operators:
        _rules.add(Entry(operator, canonical(domain), 1, NEWEST, False, None, reason))


def only_straight_through(operator: str, *quantized: int) -> None:
    """List an operator on quantized inputs, which passes gradients with the straight-through option only."""
    reason = "it computes with quantized integers"
    _rules.add(Entry(operator, "", 1, NEWEST, False, None, reason, quantized=quantized))


@checks_arguments
def unregister_gradient(operator: str, domain: str = "") -> None:
    """Forget every rule of an operator, so that another can take its place."""
    _rules.remove(operator, domain)


def find(operator: str, domain: str, version: int, *, straight_through: bool = False) -> Entry | None:
    """The entry for an operator at a version of its domain, or ``None``: then it may have a body."""
    if straight_through and (replacing := _straight_through.get((canonical(domain), operator))) is not None:
        return replacing
    entry = _rules.find(operator, domain, version)
    has_body = straight_through and entry is not None and entry.quantized and find_registered_body(operator, domain)
    return None if has_body else entry


def find_registered_body(operator: str, domain: str) -> Body | None:
    """The registered body of an operator, or ``None``."""
    return _bodies.get((canonical(domain), operator))


def entries() -> Iterator[Entry]:
    """All registered entries."""
    yield from _rules


def straight_through_entries() -> list[Entry]:
    """All entries that replace others with the straight-through option."""
    return list(_straight_through.values())


def registered_bodies() -> list[tuple[str, str]]:
    """(domain, operator) of all operators with a registered body."""
    return list(_bodies)
