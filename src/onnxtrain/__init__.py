"""The training half of ONNX: train, fine-tune and prune ONNX models on stock ONNX Runtime.

``__init__.pyi`` lists the public names. Each is imported at its first use, so that importing the package is cheap.
"""

from onnxtrain.errors.start import catch_early_interrupt, check_onnxruntime

catch_early_interrupt()
check_onnxruntime()

import importlib  # noqa: E402 - Ctrl-C may come meanwhile
import sys  # noqa: E402
import types  # noqa: E402
from importlib.machinery import ModuleSpec  # noqa: E402

import lazy_loader  # noqa: E402

__version__ = "0.1.0"

_MODULES = {
    "audio": "plugins.audio",
    "backend": "interop.backend",
    "callbacks": "training.callbacks",
    "examples": "training.examples",
    "flower": "interop.flower",
    "hub": "interop.hub",
    "images": "plugins.images",
    "kernels": "runtime.kernels",
    "layers": "editing.layers",
    "parallel": "distributed",
    "pruning": "plugins.pruning",
    "ray": "interop.ray",
    "schedules": "training.schedules",
    "sklearn": "interop.sklearn",
    "testing": "runtime.testing",
    "tables": "plugins.tables",
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


class _PublicModules:
    """Finds public modules by their names, wherever they live: ``from onnxtrain.callbacks import EarlyStopping``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        is_public = package == __name__ and inner.partition(".")[0] in _MODULES
        return ModuleSpec(name, self) if is_public else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        _, name, *names = spec.name.split(".")
        module = importlib.import_module(".".join([__name__, _MODULES[name], *names]))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # of where it lives


sys.meta_path.insert(0, _PublicModules())  # type: ignore[arg-type]  # first: a module is imported under one name
