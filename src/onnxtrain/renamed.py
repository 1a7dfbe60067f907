"""Old public names: each works for one version more, with a DeprecationWarning that says the new one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

VALIDATION: Final = "val_"
"""Prefix of the metrics of validation data: ``val_loss``, ``val_accuracy``."""

_OLD_VALIDATION: Final = "validation_"
_PACKAGE: Final = str(Path(__file__).parent)


class RenamedWarning(DeprecationWarning):
    """An old name is used; the command line shows it, too."""


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller outside of this package that a name has a new one.

    Warns:
        RenamedWarning: Always.
    """
    import sys

    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{old} is now {new}; the old name goes with the next version.", RenamedWarning, level)


def metric_name(name: str) -> str:
    """Return a metric's name, where a user may have written its old one.

    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):
    ...     metric_name("validation_loss")
    'val_loss'
    """
    if not name.startswith(_OLD_VALIDATION):
        return name
    warn_renamed(f"The metric {name!r}", repr(current_metric_name(name)))
    return current_metric_name(name)


class MetricValues(dict[str, float]):
    """Metrics by name, which the old names find, too."""

    def __missing__(self, name: str) -> float:
        if isinstance(name, str) and name.startswith(_OLD_VALIDATION):
            return self[metric_name(name)]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and super().__contains__(current_metric_name(name)))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a metric, or the default."""
        return super().get(name if dict.__contains__(self, name) else metric_name(name), default)


def renamed_metrics(values: dict[str, float]) -> MetricValues:
    """Return a row of a file that an earlier version wrote, under today's names."""
    return MetricValues({current_metric_name(name): value for name, value in values.items()})


def current_metric_name(name: str) -> str:
    """Return a metric's name, where a file of an earlier version may have its old one."""
    return VALIDATION + name.removeprefix(_OLD_VALIDATION) if name.startswith(_OLD_VALIDATION) else name


def old_attribute(old: str, new: str, attribute: str | None = None) -> Any:
    """Return a property that reads another attribute, under an old name.

    Args:
        old: The old name.
        new: Its replacement.
        attribute: The attribute to read, with dots for one of an attribute; by default ``new``.

    >>> class Stopping:
    ...     min_delta = 0.5
    ...     minimum_delta = old_attribute("minimum_delta", "min_delta")
    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):
    ...     Stopping().minimum_delta
    0.5
    """

    def read(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", new)
        return attrgetter(attribute or new)(self)

    read.__doc__ = None
    return property(read)


def old_function(old: str, new: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one, under an old name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        warn_renamed(old, new)
        return function(*args, **kwargs)

    call.__name__ = call.__qualname__ = old.rpartition(".")[2]
    call.__doc__ = f"Old name of ``{new}``."
    return call
