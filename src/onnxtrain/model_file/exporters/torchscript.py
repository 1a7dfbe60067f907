"""PyTorch's older exporter, ``torch.onnx.export(dynamo=False)``.

It names nodes by the path of their module (``/layer.1/head/MatMul``) and values by their node. Initializers keep the
name of the state dict, unless it computed them: ``onnx::MatMul_26`` is a transposed weight. Tensors in the code are
Constant nodes. It folds batch normalization into convolutions in evaluation mode, and merges equal tensors.
"""

from __future__ import annotations

import re
from typing import Final

from onnxtrain.model_file.exporters.exporter import Exporter

EXPORTER: Final = Exporter(
    "torch.onnx.export(dynamo=False)",
    {
        "made": r"^/|^(?i:onnx)::|^\d+$|_(?i:output)_\d+$",
        "literal": r"^/.*Constant(_\d+)?_output_\d+$",
        "of module": r"^onnx::",
        "folded": r"^onnx::Conv_\d+$",
    },
)

_LITERALS: Final = re.compile(r"(.*/)?Constant(_\d+)?_output_[^/]*|\d+")


def is_literal_node(output: str) -> bool:
    """Return whether a Constant node with this output holds a tensor of the model's code, not a weight."""
    return _LITERALS.fullmatch(output) is not None


def is_path(node: str) -> bool:
    """Return whether a node has a name of this exporter."""
    return node.startswith("/")


def module_of(node: str) -> str:
    """Return the module path in the name of a node; "" where it has none."""
    path: list[str] = []
    for part in node.strip("/").split("/")[:-1] if is_path(node) else ():
        if path and part.startswith(f"{path[-1]}."):  # /body/body.2: a call of a Sequential
            path.pop()
        path.append(part)
    return ".".join(path)
