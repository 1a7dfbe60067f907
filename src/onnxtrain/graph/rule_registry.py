"""Rules by operator, domain and opset range: the registry behind gradient rules and axis rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.domains import is_default_domain

NEWEST = 10_000
"""An upper end of an opset range that no operator set reaches."""


class Versioned(Protocol):
    """The part of a rule's entry that the registry reads."""

    @property
    def operator(self) -> str: ...  # noqa: D102
    @property
    def domain(self) -> str: ...  # noqa: D102
    @property
    def since(self) -> int: ...  # noqa: D102
    @property
    def until(self) -> int: ...  # noqa: D102


Entry = TypeVar("Entry", bound=Versioned)
Function = TypeVar("Function")


class RuleRegistry(Generic[Entry]):
    """Entries by operator and domain, for opset ranges that do not overlap."""

    def __init__(self, what: str, error: type[OnnxTrainError]) -> None:
        self._what, self._error = what, error
        self._entries: dict[tuple[str, str], list[Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        found = self._entries.setdefault((canonical(entry.domain), entry.operator), [])
        for other in found:
            if entry.since <= other.until and other.since <= entry.until:
                raise self._error(
                    f"{self._what} of {entry.domain or 'ai.onnx'}::{entry.operator} is registered for versions "
                    f"{other.since} to {_last(other.until)} already; the new one says {entry.since} to "
                    f"{_last(entry.until)}. "
                    "Give them ranges that do not overlap (since=, until=), or unregister the first."
                )
        found.append(entry)

    def find(self, operator: str, domain: str, version: int) -> Entry | None:
        """Return the entry for an operator at a version of its domain."""
        for entry in self._entries.get((canonical(domain), operator), ()):
            if entry.since <= version <= entry.until:
                return entry
        return None

    def remove(self, operator: str, domain: str) -> None:
        """Forget all entries of an operator."""
        self._entries.pop((canonical(domain), operator), None)

    def __iter__(self) -> Iterator[Entry]:
        for found in self._entries.values():
            yield from found


def for_each(operators: Sequence[str], register: Callable[[str, Function], object]) -> Callable[[Function], Function]:
    """Return a decorator that registers a function for some operators."""

    def decorate(function: Function) -> Function:
        for operator in operators:
            register(operator, function)
        return function

    return decorate


def canonical(domain: str) -> str:
    """Return the one spelling under which rules of a domain are kept."""
    return "" if is_default_domain(domain) else domain


def _last(version: int) -> str:
    return "the newest" if version == NEWEST else str(version)
