"""The axis rules: one function per operator, in files by what they do with axes.

A rule takes the axes of the inputs (``node.axis``), joins those that correspond and returns the axes of the outputs. An
axis that no rule takes is fixed. Where an attribute or a constant holds sizes or positions of an axis, the rule also
says how they change (``node.on_cut``).

Importing this package imports all of its modules, whose decorators register their rules.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
