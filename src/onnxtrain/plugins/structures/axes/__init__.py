"""Find structures (channels, heads, hidden units): the entries of all tensors that can be removed together.

A structure is the output channel of a convolution, an attention head or a hidden unit. It owns indices of many tensors,
which can only be removed together. Each operator has a rule that relates the axes of its inputs and outputs.
"""

from __future__ import annotations

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.plugins.structures.axes import rules as rules  # its modules register their rules
from onnxtrain.plugins.structures.axes.analysis import CHANGED_OUTPUT, Structures, find_structures

__all__ = ["CHANGED_OUTPUT", "Structures", "find_structures"]
