"""Read what PyTorch's newer exporter records of the program behind a file: kinds of initializers, calls, folding."""

from __future__ import annotations

import re
from typing import Final

import onnx_ir as ir

from onnxtrain.graph.value import is_float
from onnxtrain.model_file.embedded_weights import KIND
from onnxtrain.operators.call_text import read_literal

CALL: Final = "pkg.torch.onnx.fx_node"
"""Metadata key of a node: its call in the exported program."""

_SIGNATURE: Final = "pkg.torch.export.ExportedProgram.graph_signature"
"""Metadata key of a graph: the inputs of the program, parameters among them."""

_FOLDED: Final = "pkg.onnxscript.optimizer.folded_from"
"""Metadata key of an initializer that the exporter computed: a list of values behind it."""

_PARAMETER: Final = re.compile(r"PARAMETER target='([^']*)'")

_LAYOUT: Final = re.compile(
    r"(t|numpy_t|transpose|permute|movedim|view|_unsafe_view|reshape|flatten|unflatten|squeeze|unsqueeze|expand|repeat|"
    r"slice|select|split|chunk|getitem|cat|stack|contiguous|clone|alias|detach_?|to|_to_copy|val|"
    r"zeros|ones|full|arange)(_\d+)?"
)
"""Values that hold the elements of others, or constants: by these a parameter is only arranged or repeated."""

_REPEATS: Final = re.compile(r"(expand|repeat|stack|cat)(_\d+)?")
_RENORM: Final = re.compile(r"target=torch\.ops\.aten\.embedding_renorm\.")

_COMPUTES: Final = re.compile(
    r"target=torch\.ops\.aten\.(add|sub|rsub|addmm|addmv|addbmm|baddbmm|addr|addcmul|addcdiv|logaddexp2?|"
    r"scaled_dot_product_attention)\."
)
"""Calls of several nodes that scale an operand or take its exponential: ``val`` is then no other layout."""


def declared_kind(value: ir.Value) -> str:
    """Return what an initializer is in the program; "" where the file does not say.

    PARAMETER is an ``nn.Parameter``, BUFFER a buffer of a module, CONSTANT_TENSOR a tensor written in the code, LITERAL
    a Constant node with the name of such a tensor.
    """
    return value.metadata_props.get(KIND, "")


def folded_parameters(value: ir.Value) -> tuple[str, ...]:
    """Return the parameters of the program that the exporter computed an initializer from; none for other layouts.

    For ``scale.exp()`` the optimizing exporter stores the result, called ``exp``, and leaves ``scale`` out.
    """
    sources, parameters = _folding(value)
    steps = {value.name or "", *sources} - parameters
    unnamed = (value.name or "").startswith("val")
    computes = unnamed and any(_COMPUTES.search(node.metadata_props.get(CALL, "")) for node in value.consumers())
    if not is_float(value) or (all(map(_LAYOUT.fullmatch, steps)) and not computes):
        return ()
    return tuple(name for name in sources if name in parameters)


def is_declared_parameter(value: ir.Value, *, repeated: bool = False) -> bool:
    """Return whether an initializer is an ``nn.Parameter`` of the program, perhaps in another layout or type.

    A repeated parameter is not, unless asked for: its copies are one tensor in the program.
    """
    if declared_kind(value) == "PARAMETER":
        return True
    sources, parameters = _folding(value)
    repeats = not repeated and any(_REPEATS.fullmatch(name) for name in (value.name or "", *sources))
    return not (parameters.isdisjoint(sources) or folded_parameters(value) or repeats)


def is_folded_constant(value: ir.Value) -> bool:
    """Return whether the exporter computed an initializer from constants and buffers alone, by the file's record.

    An example are the weights of linear interpolation, which it computes from the sizes.
    """
    sources, parameters = _folding(value)
    return bool(sources and parameters) and parameters.isdisjoint(sources)


def lost_parameters(graph: ir.Graph) -> tuple[str, ...]:
    """Return the parameters of the program that the file neither holds nor was computed from, by its record.

    The program does not use them, or the exporter left their node out: it removes a factor that is one.
    """
    parameters = dict.fromkeys(_PARAMETER.findall(graph.metadata_props.get(_SIGNATURE, "")))
    held = {*graph.initializers}
    for value in graph.initializers.values():
        held.update(_folding(value)[0])
    return tuple(name for name in parameters if name not in held)


def renormed_tables(graph: ir.Graph) -> tuple[str, ...]:
    """Return the names of embedding tables with ``max_norm``, whose rows the program rescales in place."""
    found = dict.fromkeys(
        source.name or ""
        for node in graph
        if node.op_type == "Gather" and _RENORM.search(node.metadata_props.get(CALL, ""))
        if (source := _source(node.inputs[0])) is not None and source.is_initializer()
    )
    return tuple(found)


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return the value in front of the nodes with one input."""
    while value is not None and (producer := value.producer()) is not None and len(producer.inputs) == 1:
        value = producer.inputs[0]
    return value


def _folding(value: ir.Value) -> tuple[list[str], set[str]]:
    """Return the values behind an initializer that the exporter computed, and all parameters of the program."""
    text = value.metadata_props.get(_FOLDED)
    signature = "" if value.graph is None else value.graph.metadata_props.get(_SIGNATURE, "")
    if text is None or not signature:
        return [], set()
    try:
        sources = [str(name) for name in read_literal(text)]
    except (ValueError, TypeError):  # no literal, or no list
        return [], set()
    return sources, set(_PARAMETER.findall(signature))
