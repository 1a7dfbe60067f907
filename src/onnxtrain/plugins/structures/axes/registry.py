"""Registry of axis rules, by operator, domain and opset range; operators without a rule, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from onnxtrain.errors import OptionError
from onnxtrain.graph.rule_registry import NEWEST, RuleRegistry, canonical
from onnxtrain.plugins.structures.axes.node import Node, Outputs

Rule = Callable[[Node], Outputs]
"""Gets the node, returns the axes of its outputs: one list per output, or the list of the only one."""


class Entry(NamedTuple):
    """A registered rule."""

    operator: str
    domain: str
    since: int
    until: int
    function: Rule | None
    reason: str = ""


_rules: RuleRegistry[Entry] = RuleRegistry("An axis rule", OptionError)


def axes_of(*operators: str, domain: str = "", since: int = 1, until: int = NEWEST) -> Callable[[Rule], Rule]:
    """Register a function as the axis rule of operators."""

    def decorate(function: Rule) -> Rule:
        for operator in operators:
            _rules.add(Entry(operator, canonical(domain), since, until, function))
        return function

    return decorate


def no_rule(*operators: str, domain: str = "", reason: str) -> None:
    """List operators whose inputs and outputs keep all their axes."""
    for operator in operators:
        _rules.add(Entry(operator, canonical(domain), 1, NEWEST, None, reason))


def find(operator: str, domain: str, version: int) -> Entry | None:
    """Return the entry for an operator at a version of its domain."""
    return _rules.find(operator, domain, version)


def entries() -> Iterator[Entry]:
    """All registered entries."""
    yield from _rules
