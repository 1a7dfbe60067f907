"""The book of operators: gradient rules per operator, domain and opset range, bodies, and what has no gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from onnxtrain.autodiff.node import Node
from onnxtrain.errors import GradientError
from onnxtrain.ir import Value
from onnxtrain.ir.domains import is_default_domain
from onnxtrain.spelling import checks_arguments

Gradients = Sequence[Value | None] | Value | None
"""What a rule returns: one gradient or ``None`` per input; a bare value stands for a single one."""

Rule = Callable[..., Gradients]

Body = Callable[[Node], Sequence[Value | None]]
"""Writes an operator in others: gets the node, returns its outputs (``None`` for one that nobody can ask for)."""

NEWEST = 10_000
"""An upper end of an opset range that no operator set reaches."""


class Entry(NamedTuple):
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


class _Page:
    """All that the book says of one operator.

    Attributes:
        entries: Its rules, for opset ranges that do not overlap.
        straight_through: What takes their place where straight-through gradients are asked for.
        body: Writes it in standard operators.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.straight_through: Entry | None = None
        self.body: Body | None = None


_book: dict[tuple[str, str], _Page] = {}
"""The pages by domain and operator."""

_BLANK = _Page()


def _page(domain: str, operator: str) -> _Page:
    """The page of an operator, to read."""
    return _book.get((_canonical(domain), operator), _BLANK)


def _page_to_write(domain: str, operator: str) -> _Page:
    return _book.setdefault((_canonical(domain), operator), _Page())


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

    def decorate(function: Rule) -> Rule:
        for operator in operators:
            _add(Entry(operator, _canonical(domain), since, until, broadcasts, function))
        return function

    return decorate


def straight_through(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register what takes the place of an operator's rule where straight-through gradients are asked for."""

    def decorate(function: Rule) -> Rule:
        for operator in operators:
            entry = Entry(operator, _canonical(domain), 1, NEWEST, False, function, through_integers=True)
            _page_to_write(domain, operator).straight_through = entry
        return function

    return decorate


def register_body(*operators: str, domain: str) -> Callable[[Body], Body]:
    """Register how operators are written in standard ones, for those that no rule and no schema covers.

    Where a gradient goes through such a node, the nodes of the body take its place.
    """

    def decorate(function: Body) -> Body:
        for operator in operators:
            _page_to_write(domain, operator).body = function
        return function

    return decorate


@checks_arguments
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
    page = _page_to_write(entry.domain, entry.operator)
    for other in page.entries:
        if entry.since <= other.until and other.since <= entry.until:
            raise GradientError(
                f"A gradient of {entry.domain or 'ai.onnx'}::{entry.operator} is registered for versions "
                f"{other.since} to {_last(other.until)} already; the new one says {entry.since} to "
                f"{_last(entry.until)}. "
                "Give them ranges that do not overlap (since=, until=), or unregister the first."
            )
    page.entries.append(entry)


@checks_arguments
def unregister_gradient(operator: str, domain: str = "") -> None:
    """Forget every rule of an operator, so that another can take its place."""
    _page_to_write(domain, operator).entries.clear()


def find(operator: str, domain: str, version: int, *, straight_through: bool = False) -> Entry | None:
    """The entry for an operator at a version of its domain, or ``None``: then it may have a body."""
    page = _page(domain, operator)
    if straight_through and page.straight_through is not None:
        return page.straight_through
    for entry in page.entries:
        if entry.since <= version <= entry.until:
            return None if straight_through and entry.quantized and page.body is not None else entry
    return None


def find_registered_body(operator: str, domain: str) -> Body | None:
    """The registered body of an operator, or ``None``."""
    return _page(domain, operator).body


def entries() -> Iterator[Entry]:
    """All registered entries."""
    for page in _book.values():
        yield from page.entries


def straight_through_entries() -> list[Entry]:
    """All entries that straight-through gradients use in the place of others."""
    return [page.straight_through for page in _book.values() if page.straight_through is not None]


def registered_bodies() -> list[tuple[str, str]]:
    """(domain, operator) of all operators with a registered body."""
    return [key for key, page in _book.items() if page.body is not None]


def _canonical(domain: str) -> str:
    return "" if is_default_domain(domain) else domain


def _last(version: int) -> str:
    return "the newest" if version == NEWEST else str(version)
