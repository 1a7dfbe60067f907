"""The gradient rules: one function per operator, its first docstring line the formula.

``x y`` are a node's values, ``dx dy`` their gradients. A rule emits for all inputs; unused gradients are removed
afterwards. The engine handles broadcasting, accumulation and zero gradients.

Importing this package imports all of its modules, whose decorators register their rules.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
