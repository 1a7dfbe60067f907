"""The training half of ONNX: train, fine-tune and prune ONNX models on stock ONNX Runtime.

``__init__.pyi`` lists the public names. Each is imported at its first use, so that importing the package is cheap.
"""

from onnxtrain.errors.start import catch_early_interrupt, check_onnxruntime

catch_early_interrupt()
check_onnxruntime()

import importlib  # noqa: E402 - Ctrl-C may come meanwhile
import sys  # noqa: E402
import types  # noqa: E402

import lazy_loader  # noqa: E402

__version__ = "0.1.0"

_MODULES = {
    "backend": "interop.backend",
    "callbacks": "training.callbacks",
    "examples": "training.examples",
    "flower": "interop.flower",
    "hub": "interop.hub",
    "kernels": "runtime.kernels",
    "layers": "editing.layers",
    "parallel": "distributed",
    "pruning": "plugins.pruning",
    "ray": "interop.ray",
    "schedules": "training.schedules",
    "sklearn": "interop.sklearn",
    "testing": "autodiff.testing",
    "text": "plugins.text",
    "torch": "interop.torch",
}
"""Public modules by name, with the folders where they live."""

_attached, _, _listed = lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted({"__version__", *_listed, *_MODULES})


def __getattr__(name: str) -> object:
    return importlib.import_module(f"{__name__}.{_MODULES[name]}") if name in _MODULES else _attached(name)


def __dir__() -> list[str]:
    return list(__all__)


def _importable(name: str) -> types.ModuleType:
    """Return a module with the names of a public one, for ``from onnxtrain.callbacks import EarlyStopping``."""
    module = types.ModuleType(f"{__name__}.{name}")
    entries = {
        "__getattr__": lambda entry: getattr(__getattr__(name), entry),
        "__dir__": lambda: dir(__getattr__(name)),
    }
    vars(module).update(entries)
    return module


sys.modules.update({f"{__name__}.{name}": _importable(name) for name in _MODULES})
