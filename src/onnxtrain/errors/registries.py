"""Registries through which plugins add losses, metrics, readers, callbacks, passes, commands and flags.

A plugin is a function without arguments that calls the functions of this module. Ours are the functions ``register`` of
the packages in ``plugins/``; other packages name theirs in the entry-point group ``onnxtrain.plugins``. An entry may be
the text ``"module:object"``, which is imported at its first use.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments

if TYPE_CHECKING:
    import onnx_ir as ir

GROUP: Final = "onnxtrain.plugins"
"""Entry points of this group are plugins of other packages."""

T = TypeVar("T")

_OURS = Path(__file__).parent.parent / "plugins"
_entries: dict[str, dict[str, Any]] = {}
_lock = threading.RLock()
_begun = _done = False


@checks_arguments
def register_loss(name: str, loss: type | str) -> None:
    """Add a loss that ``loss="name"`` finds, a class derived from :class:`onnxtrain.losses.Loss`."""
    _add("loss", name, loss)


@checks_arguments
def register_metric(name: str, metric: object) -> None:
    """Add a metric, a function of (y_true, y_pred), a :class:`onnxtrain.metrics.Metric`, or a ``LossMetric``."""
    _add("metric", name, metric)


@checks_arguments
def register_reader(name: str, reader: Callable[[Any, Any], Any] | str) -> None:
    """Add a reader, a function of (source, reading) that converts data of its kind and returns others as they are."""
    _add("reader", name, reader)


@checks_arguments
def register_callback(name: str, callback: type | str) -> None:
    """Add a callback that ``onnxtrain.callbacks`` offers, a class derived from its ``Callback``."""
    _add("callback", name, callback)


@checks_arguments
def register_pass(name: str, change: Callable[[ir.Model], object] | str) -> None:
    """Add a pass, a function that changes an onnx-ir model in place before gradients are built."""
    _add("pass", name, change)


@checks_arguments
def register_command(name: str, module: object) -> None:
    """Add a command of ``onnxtrain``, a module with a function ``command``, ``HELP`` and ``EXAMPLES``."""
    _add("command", name, module)


@checks_arguments
def register_flags(name: str, flags: type | str, *, of: Literal["data", "fit"]) -> None:
    """Add flags of all commands that read data, or of ``fit``, as a frozen dataclass.

    Args:
        name: Name of the group of flags.
        flags: The class, derived from ``onnxtrain.cli.reader_flags.DataFlags`` or ``FitFlags``; its fields are flags.
        of: ``"data"`` for flags of readers, ``"fit"`` for flags of callbacks.
    """
    _add(f"flags of {of}", name, flags)


def _add(kind: str, name: str, entry: object) -> None:
    """Add an entry."""
    if not isinstance(name, str) or not name or any(char in name for char in " (),:"):
        raise OptionError(f"The name {name!r} of a {kind} needs to be a text without spaces, commas and brackets.")
    entries = _entries.setdefault(kind, {})
    if name in entries and entries[name] != entry:
        raise OptionError(f"Two plugins register the {kind} {name!r}; give one of them another name.")
    entries[name] = entry


def _load_plugins() -> None:
    """Call all plugins, once; one that fails is a warning, since the others work without it."""
    global _begun, _done
    if _done:
        return
    with _lock:
        if _begun:  # a plugin asks for an entry while it is loaded
            return
        _begun = True
        for path in sorted(_OURS.glob("*/__init__.py")):
            part = importlib.import_module(f"onnxtrain.plugins.{path.parent.name}")
            getattr(part, "register", lambda: None)()
        from importlib.metadata import entry_points  # takes a while to import

        for found in entry_points(group=GROUP):
            try:
                found.load()()
            except Exception as error:  # of another package
                warnings.warn(
                    f"The plugin {found.name!r} ({found.value}) cannot be loaded: {type(error).__name__}: {error}. "
                    "Update or uninstall its package.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        _done = True


def _loaded(entry: Any) -> Any:
    """Import an entry that is a text."""
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def added(kind: str) -> dict[str, Any]:
    """Return the entries of one kind that plugins registered, by name."""
    _load_plugins()
    return _entries.get(kind, {})


class Registry(Mapping[str, T]):
    """Entries of one kind by name: those of the core, then those of plugins.

    Args:
        kind: The kind, as in messages.
        is_valid: Returns whether an entry of a plugin is what the core needs.
        needs: What it needs to be, for the message.
        built_in: Entries of the core.
    """

    def __init__(
        self, kind: str, is_valid: Callable[[Any], object], needs: str, built_in: Mapping[str, T | str] | None = None
    ) -> None:
        self._kind, self._is_valid, self._needs, self._built_in = kind, is_valid, needs, built_in or {}

    def _added(self) -> dict[str, Any]:
        found = added(self._kind)
        if taken := self._built_in.keys() & found.keys():
            raise OptionError(f"A plugin registers the {self._kind} {min(taken)!r}, which onnxtrain has already.")
        return found

    def __getitem__(self, name: str) -> T:
        if name in self._built_in:
            own: T = _loaded(self._built_in[name])
            return own
        found: T = _loaded(self._added()[name])
        if not self._is_valid(found):
            raise OptionError(f"A plugin registers {found!r} as the {self._kind} {name!r}; it needs {self._needs}.")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._built_in or name in self._added()

    def __iter__(self) -> Iterator[str]:
        yield from self._built_in
        yield from self._added()

    def __len__(self) -> int:
        return len(self._built_in) + len(self._added())


class ClassRegistry(Registry[type[T]]):
    """Entries of one kind that are classes derived from a base."""

    def __init__(self, kind: str, base: type[T], built_in: Mapping[str, type[T] | str] | None = None) -> None:
        def is_valid(given: object) -> bool:
            return isinstance(given, type) and issubclass(given, base)

        super().__init__(kind, is_valid, f"a class derived from {base.__name__}", built_in)

    def class_names(self) -> dict[str, str]:
        """Return the names of entries by the names of the classes that plugins registered."""
        return {
            entry.partition(":")[2] if isinstance(entry, str) else entry.__name__: name
            for name, entry in self._added().items()
        }

    def of_class(self, name: str, module: str) -> type[T]:
        """Return the class that a plugin registered, as an attribute of the core's module.

        Raises:
            AttributeError: There is none.
        """
        if not name[:1].isupper() or name not in (names := self.class_names()):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return self[names[name]]
