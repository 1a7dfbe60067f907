"""Import onnx-ir without sympy, which it imports for symbolic dimensions (workarounds: sympy at every start).

Packages whose modules import onnx-ir import this module first. Only onnx-ir gets the deferred modules: they are removed
from ``sys.modules`` after its import.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _DeferredModule(ModuleType):
    """Placeholder module that imports the real one when an attribute is read."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


_deferred = {name: _DeferredModule(name) for name in ("sympy", "onnx_ir._symbolic_shapes") if name not in sys.modules}
sys.modules.update(_deferred)
try:
    import onnx_ir as onnx_ir
finally:
    for _name, _module in _deferred.items():
        if sys.modules.get(_name) is _module:
            del sys.modules[_name]
