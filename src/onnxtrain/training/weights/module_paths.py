"""What a weight is called in the program that was exported, where its name in the file does not say so.

PyTorch's exporters write the weight of a ``Linear`` as ``val_8`` or ``onnx::MatMul_26``. The node that reads it knows
its module: by metadata (the newer exporter), or by its own name, ``/layer.1/head/MatMul`` (the older one).
"""

from __future__ import annotations

import ast

import onnx_ir as ir

from onnxtrain.graph.clone import all_nodes
from onnxtrain.training.weights.names import Origin, origin_of
from onnxtrain.training.weights.readers import Functions, arrivals, role_of

_SCOPES = "pkg.torch.onnx.name_scopes"

CALL = "pkg.torch.onnx.fx_node"
"""Metadata of a node: the call in the exported program that it was made from."""

_KEPT = (_SCOPES, CALL)

_BIASES = {("Gemm", 2), ("Conv", 2), ("ConvTranspose", 2), ("Add", 0), ("Add", 1)}


def module_paths(value: ir.Value, functions: Functions | None = None) -> tuple[str, ...]:
    """The names that an initializer has in the program that was exported; none where its name in the file is one.

    Args:
        value: An initializer.
        functions: Model-local functions.

    Example:
        >>> weight, x = ir.Value(name="onnx::MatMul_26"), ir.Value(name="x")
        >>> node = ir.Node("", "MatMul", [x, weight], name="/encoder/layer.1/query/MatMul")
        >>> module_paths(weight)
        ('encoder.layer.1.query.weight',)
    """
    if origin_of(value.name or "") is not Origin.EXPORTER:
        return ()
    found: dict[str, None] = {}
    for node, index in arrivals(value, functions):
        module = module_of(node)
        if module:
            role = "bias" if (node.op_type, index) in _BIASES else role_of(node.op_type, index) or "weight"
            found[f"{module}.{role}"] = None
    return tuple(found)


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


def module_of(node: ir.Node) -> str:
    """The path of the module that a node belongs to, "" where it is not known."""
    scopes = node.metadata_props.get(_SCOPES)
    if scopes is not None:
        try:
            listed = ast.literal_eval(scopes)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return ""
        named = [scope for scope in listed if isinstance(scope, str)] if isinstance(listed, list) else []
        return named[-2] if len(named) > 1 else ""
    name = node.name or ""
    path: list[str] = []
    for part in name.strip("/").split("/")[:-1] if name.startswith("/") else ():
        if path and part.startswith(f"{path[-1]}."):  # /body/body.2: a Sequential that was called
            path.pop()
        path.append(part)
    return ".".join(path)
