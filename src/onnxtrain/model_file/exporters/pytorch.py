"""PyTorch's newer exporter, ``torch.onnx.export(dynamo=True)``: its names, and its metadata about the program.

It records the kind of each initializer (parameter, buffer, tensor in the code), the call and the modules behind each
node, and the values from which it computed an initializer. Optimizing, which is its default, folds batch
normalization, leaves out biases of zeros, factors of one and ``detach``, and computes what depends on parameters alone.
``optimize=False`` keeps all of these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import onnx_ir as ir

from onnxtrain.graph.clone import all_nodes
from onnxtrain.graph.domains import REPLACED_WEIGHT
from onnxtrain.graph.value import is_float
from onnxtrain.model_file.exporters.exporter import Exporter
from onnxtrain.operators.call_text import read_literal

_RESULTS: Final = (
    r"(abs|add|addmm|alias|amax|amin|arange|argmax|argmin|argsort|asin|atan|atan2|bartlett_window|blackman_window|bmm"
    r"|broadcast_to|cat|ceil|chunk|clamp|clamp_max|clamp_min|clone|constant_pad_nd|contiguous|copy|cos|cosh|cumprod"
    r"|cumsum|detach|detach_|diag|diag_embed|diagonal|diff|div|einsum|embedding|empty_like|eq|erf|exp|exp2|expand"
    r"|expand_as|expm1|eye|fill|flatten|flip|floor|floor_divide|fmod|full_like|ge|getitem|gt|hamming_window"
    r"|hann_window|hstack|index|index_put|index_select|kaiser_window|layer_norm|le|lift_fresh_copy|linalg_norm"
    r"|linalg_vector_norm|linear|linspace|log|log10|log1p|log2|logical_and|logical_not|logical_or|logspace|lt"
    r"|masked_fill|matmul|max|maximum|mean|meshgrid|min|minimum|mm|movedim|mul|ne|neg|ones|ones_like|outer|permute|pow"
    r"|prod|reciprocal|relu|remainder|repeat|repeat_interleave|reshape|roll|rot90|round|rsqrt|rsub|scalar_tensor"
    r"|scatter|select|sigmoid|sign|sin|sinc|sinh|slice|slice_scatter|softmax|softplus|sort|split|sqrt|square|squeeze"
    r"|stack|std|sub|sum|t|tan|tanh|tile|to|topk|transpose|tril|triu|trunc|type_as|unbind|unflatten|unfold"
    r"|unsafe_view|unsqueeze|view|vstack|where|zeros|zeros_like|(fft|special)_\w+)(_\d+)?$"
)

EXPORTER: Final = Exporter(
    "torch.onnx.export(dynamo=True)",
    {
        # torch.export puts the path of the module whose code has a literal before its name.
        "made": r"^(?i:(c_)?_?(val|tensor|scalar_tensor(_default)?|clone|full|arange)(_\d+)*$)"
        r"|(?i:(^|\.)(c_)?_?(lifted_tensor|tensor_constant)_?\d*$)",
        "result": rf"^_?{_RESULTS}",
        "bounded": r"^(exp|sigmoid|softplus|tanh)(_\d+)?$",
        "literal": r"^(c_)?_?tensor_?\d+$|(^|\.)(c_)?_?(lifted_tensor|tensor_constant)_?\d+$"
        r"|^(arange|eye|full|(lin|log)space|(bartlett|blackman|hamming|hann|kaiser)_window)(_\d+)?$",  # of numbers
    },
)

KIND: Final = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata key of an initializer: what it is in the program, such as PARAMETER or BUFFER."""

CALL: Final = "pkg.torch.onnx.fx_node"
"""Metadata key of a node: its call in the exported program."""

_SCOPES: Final = "pkg.torch.onnx.name_scopes"
"""Metadata key of a node: the modules around it."""

_SIGNATURE: Final = "pkg.torch.export.ExportedProgram.graph_signature"
"""Metadata key of a graph: the inputs of the program, parameters among them."""

_FOLDED: Final = "pkg.onnxscript.optimizer.folded_from"
"""Metadata key of an initializer that the exporter computed: a list of values behind it."""

_PARAMETER: Final = re.compile(r"PARAMETER target='([^']*)'")

_STATISTIC: Final = re.compile(r"BUFFER target='([^']*)\.running_mean'")

_LAYOUT: Final = re.compile(
    r"(t|numpy_t|transpose|permute|movedim|view|_unsafe_view|reshape|flatten|unflatten|squeeze|unsqueeze|expand|repeat|"
    r"slice|select|split|chunk|getitem|cat|stack|contiguous|clone|alias|detach_?|to|_to_copy|val|"
    r"zeros|ones|full|arange)(_\d+)?"
)
"""Values that hold the elements of others, or constants: by these a parameter is only arranged or repeated."""

_REPEATS: Final = re.compile(r"(expand|repeat|stack|cat)(_\d+)?")
_RENORM: Final = re.compile(r"target=torch\.ops\.aten\.embedding_renorm\.")
_BIASED: Final = re.compile(r"target=torch\.ops\.aten\.(linear|layer_norm|addmm|conv\w*)\..*%p_\w*bias\b")
_DETACHED: Final = re.compile(r"detach_?(_\d+)?")
_EMBEDDING: Final = re.compile(r"target=torch\.ops\.aten\.embedding\.default\]\(args = \(%\w+, %\w+, (-?\d+)(, True)?")

BEGINNINGS: Final = {"PARAMETER": "p_", "BUFFER": "b_", "CONSTANT_TENSOR": "c_"}
"""Beginnings of the names of initializers in a program, by what they are there."""

_STOPPING: Final = ("%detach", "aten.embedding.")

_COMPUTES: Final = re.compile(
    r"target=torch\.ops\.aten\.(add|sub|rsub|addmm|addmv|addbmm|baddbmm|addr|addcmul|addcdiv|logaddexp2?|"
    r"scaled_dot_product_attention)\."
)
"""Calls of several nodes that scale an operand or take its exponential: ``val`` is then no other layout."""


def scopes(metadata: Mapping[str, str]) -> Sequence[str] | None:
    """Return the paths of the modules around a node and its name, from the outermost; ``None`` without the record."""
    text = metadata.get(_SCOPES)
    if text is None:
        return None
    try:
        listed = read_literal(text)
    except ValueError:  # another tool's text
        return ()
    return [scope for scope in listed if isinstance(scope, str)] if isinstance(listed, (list, tuple)) else ()


def has_biased_call(node: ir.Node) -> bool | None:
    """Return whether the call behind a node has a bias among its parameters; ``None`` without the record."""
    call = node.metadata_props.get(CALL)
    return None if call is None else _BIASED.search(call) is not None


def is_affine_call(node: ir.Node) -> bool | None:
    """Return whether the call behind a node is a normalization with the parameter of this Mul or Add."""
    call = node.metadata_props.get(CALL)
    return None if call is None else "norm" in call and len(re.findall(r"%p_\w+", call)) > (node.op_type == "Add")


def is_detached(name: str) -> bool:
    """Return whether a value of the program is the result of ``detach``."""
    return _DETACHED.fullmatch(name) is not None


def arguments(call: str) -> list[str]:
    """Return the values that a call of the program takes.

    Example:
        >>> arguments("%sum : [num_users=1] = call_function[target=torch.sum](args = (%x, %detach), kwargs = {})")
        ['x', 'detach']
    """
    return re.findall(r"%(\w+)", call.partition("](args = ")[2])


def embedding_call(node: ir.Node) -> tuple[int, bool] | None:
    """Return ``padding_idx`` (negative for none) and ``scale_grad_by_freq`` of a lookup, where they are recorded."""
    found = _EMBEDDING.search(node.metadata_props.get(CALL, ""))
    return None if found is None else (int(found[1]), found[2] is not None)


def name_in_program(value: ir.Value) -> str:
    """Return the name that a value has in the program."""
    name = value.name or ""
    return BEGINNINGS.get(declared_kind(value), "") + name.replace(".", "_") if value.is_initializer() else name


def forget_traces(model: ir.Model) -> None:
    """Remove node metadata that nothing reads from a working copy, in place: source lines are most of its bytes."""
    for node in (node for part in (model.graph, *model.functions.values()) for node in all_nodes(part)):
        if node.metadata_props:
            kept = {
                key: node.metadata_props[key] for key in (_SCOPES, CALL, REPLACED_WEIGHT) if key in node.metadata_props
            }
            if node.op_type not in ("Mul", "Add") and not any(part in kept.get(CALL, "") for part in _STOPPING):
                kept.pop(CALL, None)
            node.metadata_props.clear()
            node.metadata_props.update(kept)


def declared_kind(value: ir.Value) -> str:
    """Return what an initializer is in the program; "" where the file does not say."""
    return value.metadata_props.get(KIND, "")


def folded_parameters(value: ir.Value) -> tuple[str, ...]:
    """Return the parameters of the program that the exporter computed an initializer from; none for other layouts."""
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
    """Return whether the exporter computed an initializer from constants and buffers alone, by the file's record."""
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


def folded_norms(graph: ir.Graph, lost: Collection[str]) -> list[str]:
    """Return the modules of lost parameters that had running statistics, which the file lacks, too."""
    statistics = _STATISTIC.findall(graph.metadata_props.get(_SIGNATURE, ""))
    gone = {module for module in statistics if f"{module}.running_mean" not in graph.initializers}
    return [*dict.fromkeys(module for name in lost if (module := name.rpartition(".")[0]) in gone)]


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
