"""Recover the module path of a weight whose name in the file does not have it.

PyTorch's exporters write the weight of a ``Linear`` as ``val_8`` or ``onnx::MatMul_26``. The node that reads it knows
its module: by metadata (the newer exporter), or by its own name, ``/layer.1/head/MatMul`` (the older one).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

import onnx_ir as ir

from onnxtrain.ir.clone import all_nodes
from onnxtrain.weights.names import Origin, origin_of
from onnxtrain.weights.readers import Functions, arrivals, role_of

_SCOPES = "pkg.torch.onnx.name_scopes"

CALL = "pkg.torch.onnx.fx_node"
"""Metadata of a node: the call in the exported program that it was made from."""

_KEPT = (_SCOPES, CALL)

_BIASES = {("Gemm", 2), ("Conv", 2), ("ConvTranspose", 2), ("Add", 0), ("Add", 1)}


def module_paths(value: ir.Value, functions: Functions | None = None) -> tuple[str, ...]:
    """The names that an initializer has in the program that was exported; none where its name in the file is the one.

    One that several modules read, since an exporter merged equal values or the program shares it, has all their names.

    Args:
        value: An initializer.
        functions: Model-local functions.

    Example:
        >>> weight, x = ir.Value(name="onnx::MatMul_26"), ir.Value(name="x")
        >>> node = ir.Node("", "MatMul", [x, weight], name="/encoder/layer.1/query/MatMul")
        >>> module_paths(weight)
        ('encoder.layer.1.query.weight',)
    """
    name = value.name or ""
    is_made = origin_of(name) is Origin.EXPORTER
    word = "" if is_made else name.rpartition(".")[2]
    found: dict[str, None] = {}
    modules: set[str] = set()
    for node, index in arrivals(value, functions):
        module = module_of(node.name or "", node.metadata_props)
        if module:
            modules.add(module)
            if is_made:
                role = "bias" if (node.op_type, index) in _BIASES else role_of(node.op_type, index) or "weight"
            else:
                role = role_in_module(node.op_type, index) or word
            found[f"{module}.{role}"] = None
    if not is_made and ("." not in name or len(modules) < 2):
        return ()
    return tuple(path for path in found if path != name)


_IN_MODULES = {"scale": "weight", "bias": "bias", "running mean": "running_mean", "running variance": "running_var"}


def role_in_module(operator: str, index: int) -> str:
    """Return PyTorch's name of the parameter at an operator's input slot; "" where the operator has none.

    Example:
        >>> role_in_module("BatchNormalization", 4), role_in_module("Gemm", 2), role_in_module("Mul", 1)
        ('running_var', 'bias', '')
    """
    role = _IN_MODULES.get(role_of(operator, index), "")
    return role or ("bias" if (operator, index) in _BIASES and operator != "Add" else "")


def forget_traces(model: ir.Model) -> None:
    """Take the metadata of nodes that :func:`module_paths` does not read out of a working copy, in place.

    PyTorch's exporter writes the lines of the program that each node was made from: most of the bytes of a graph.
    """
    for part in (model.graph, *model.functions.values()):
        for node in all_nodes(part):
            if node.metadata_props:
                kept = {key: node.metadata_props[key] for key in _KEPT if key in node.metadata_props}
                if node.op_type not in ("Mul", "Add"):
                    kept.pop(CALL, None)
                node.metadata_props.clear()
                node.metadata_props.update(kept)


def node_names(value: ir.Value, functions: Functions | None = None) -> tuple[str, ...]:
    """The names of the nodes that read an initializer, each as such and as a path of modules."""
    names = [node.name or "" for node, _ in arrivals(value, functions)]
    return tuple(dict.fromkeys(other for name in names if name for other in (name, name.strip("/").replace("/", "."))))


def module_of(name: str, metadata: Mapping[str, str]) -> str:
    """The path of the module that a node belongs to, by its name and metadata; "" where it is not known."""
    scopes = metadata.get(_SCOPES)
    if scopes is not None:
        try:
            listed = ast.literal_eval(scopes)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return ""
        named = [scope for scope in listed if isinstance(scope, str)] if isinstance(listed, list) else []
        return named[-2] if len(named) > 1 else ""
    path: list[str] = []
    for part in name.strip("/").split("/")[:-1] if name.startswith("/") else ():
        if path and part.startswith(f"{path[-1]}."):  # /body/body.2: a Sequential that was called
            path.pop()
        path.append(part)
    return ".".join(path)
