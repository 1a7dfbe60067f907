"""Read what PyTorch's newer exporter records of the program behind a file: kinds of initializers, calls, folding."""

from __future__ import annotations

import ast
import re
from typing import Final

import onnx_ir as ir

CALL: Final = "pkg.torch.onnx.fx_node"
"""Metadata key of a node: its call in the exported program."""

_KIND: Final = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata key of an initializer: what it is in the program, such as PARAMETER or BUFFER."""

_SIGNATURE: Final = "pkg.torch.export.ExportedProgram.graph_signature"
"""Metadata key of a graph: the inputs of the program, parameters among them."""

_FOLDED: Final = "pkg.onnxscript.optimizer.folded_from"
"""Metadata key of an initializer that the exporter computed: a list of values behind it."""

_PARAMETER: Final = re.compile(r"PARAMETER target='([^']*)'")

_LAYOUT: Final = re.compile(
    r"(t|numpy_t|transpose|permute|movedim|view|_unsafe_view|reshape|flatten|unflatten|squeeze|unsqueeze|expand|repeat|"
    r"slice|select|split|chunk|getitem|cat|stack|contiguous|clone|alias|detach_?|to|_to_copy|val)(_\d+)?"
)
"""Values that hold the elements of others: by these a parameter is not computed, only arranged or repeated."""


def declared_kind(value: ir.Value) -> str:
    """Return what an initializer is in the program; "" where the file does not say.

    PARAMETER is an ``nn.Parameter``, BUFFER a buffer of a module, CONSTANT_TENSOR a tensor written in the code.
    """
    return value.metadata_props.get(_KIND, "")


def folded_parameters(value: ir.Value) -> tuple[str, ...]:
    """Return the parameters of the program that the exporter computed an initializer from; none for other layouts.

    For ``scale.exp()`` the optimizing exporter stores the result, called ``exp``, and leaves ``scale`` out.
    """
    text = value.metadata_props.get(_FOLDED)
    signature = "" if value.graph is None else value.graph.metadata_props.get(_SIGNATURE, "")
    if text is None or not signature:
        return ()
    try:
        sources = [str(name) for name in ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ()
    parameters = set(_PARAMETER.findall(signature))
    steps = {value.name or "", *sources} - parameters
    if all(map(_LAYOUT.fullmatch, steps)):
        return ()
    return tuple(name for name in sources if name in parameters)
