"""Inspect a model: its parameters, and the gradients of its operators."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff import registry
from onnxtrain.autodiff.expand import find_body
from onnxtrain.autodiff.missing import missing_rules
from onnxtrain.autodiff.node import describe
from onnxtrain.autodiff.path import Forward
from onnxtrain.data.model_inputs import FixedBatch
from onnxtrain.editing.working_copy.inputs import mark_first_axes
from onnxtrain.editing.working_copy.kv_cache import remove_cache_inputs
from onnxtrain.editing.working_copy.stops import stop_as_program
from onnxtrain.editing.working_copy.training_modes import find_layers, set_inference
from onnxtrain.editing.working_copy.widening import in_file, widen
from onnxtrain.errors.formatting import count, html_facts, html_table, text_table
from onnxtrain.errors.hints import Hint
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.declared_shapes import declared_otherwise
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import Dimension, dimensions, is_float
from onnxtrain.losses.heads import is_float_tensor, named_output
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.parameters.ties import declared_learned, find_copies, find_repeated
from onnxtrain.parameters.trainable import Initializer, other_tensors, parameter_table
from onnxtrain.training.advice.hints import dropped_biases, find_hints, proved_time_first


@dataclass(frozen=True)
class Operator:
    """An operator type of a model."""

    domain: str
    name: str
    count: int
    gradient: str


@dataclass(frozen=True)
class Port:
    """An input or output of a model."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...] | None


_GRADIENTS = {
    "rule": "yes",
    "body": "yes, through its definition",
    "none": "none: its output does not vary smoothly",
    "missing": "MISSING",
}


@dataclass(frozen=True, repr=False)
class Inspection:
    """Result of :func:`inspect`; it prints as tables, also in notebooks."""

    opset: int
    ir_version: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    initializers: tuple[Initializer, ...]
    operators: tuple[Operator, ...]
    missing: tuple[str, ...]
    hints: tuple[str, ...]
    surprises: tuple[str, ...] = ()
    cache_inputs: tuple[str, ...] = ()
    fixed_batch_inputs: tuple[str, ...] = ()

    @property
    def trainable_size(self) -> int:
        """Number of trainable elements."""
        return sum(row.size for row in self.initializers if row.trainable)

    def __repr__(self) -> str:
        facts = self.facts()
        width = max(map(len, facts))
        lines = "\n".join(
            f"{name if not index else '':{width}}  {line}"
            for name, value in facts.items()
            for index, line in enumerate(value.split("\n"))
        )
        tables = (text_table(rows, most=60) for rows in (self.initializer_rows(), self.operator_rows()) if rows)
        return "\n\n".join([lines, *tables, *(f"hint: {hint}" for hint in self.hints)])

    def _repr_html_(self) -> str:
        tables = (html_table(rows) for rows in (self.initializer_rows(), self.operator_rows()) if rows)
        return html_facts(self.facts(), notes=self.hints) + "".join(tables)

    def facts(self) -> dict[str, str]:
        """Name the format, inputs, outputs and the number of trainable elements in words."""
        rows = {"format": f"opset {self.opset}, IR version {self.ir_version}"}
        for label, ports in (("inputs", self.inputs), ("outputs", self.outputs)):
            rows[label] = "\n".join(f"{port.name}: {port.dtype} {_shape(port.shape)}" for port in ports)
        everything = sum(row.size for row in self.initializers)
        return rows | {"trainable": f"{count(self.trainable_size)} of {count(everything)} elements"}

    def initializer_rows(self) -> list[dict[str, str]]:
        """List the initializers in words, one row each."""
        return [
            {
                "name": row.name if not row.paths else f"{row.name} ({', '.join(row.paths)})",
                "shape": _shape(row.shape),
                "type": row.dtype,
                "size": count(row.size),
                "zeros": f"{row.sparsity:.1%}" if row.sparsity else "",
                "trainable": "yes" if row.trainable else "no",
                "why not": row.reason,
            }
            for row in self.initializers
        ]

    def operator_rows(self) -> list[dict[str, str]]:
        """List the operators in words, one row each."""
        return [
            {
                "operator": f"{row.domain}::{row.name}" if row.domain else row.name,
                "nodes": count(row.count),
                "gradient": _GRADIENTS[row.gradient],
            }
            for row in self.operators
        ]


def _shape(shape: Sequence[Dimension] | None) -> str:
    if shape is None:
        return "of any shape"
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


@checks_arguments
@refuses_invalid()
def inspect(
    model: str | os.PathLike[str] | onnx.ModelProto,
    *,
    train: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    output: str | None = None,
) -> Inspection:
    """Inspect a model: trainable parameters and other tensors, operators and their gradients.

    Args:
        model: A path or a loaded model.
        train: Glob patterns of the initializers to train.
        freeze: Glob patterns of the initializers to freeze.
        output: Consider only tensors that this output depends on; by default the first floating one, like a trainer.

    Returns:
        Tables to read or print.

    Raises:
        ModelError: The model cannot be read.
        OptionError: A pattern matches no initializer, or there is no such output.
    """
    file = ModelFile.load(model)
    working = infer_shapes(file.training_model())
    graph = working.graph
    ports = tuple(_port(v) for v in graph.inputs), tuple(_port(v) for v in graph.outputs)
    operators = _operators(working)
    cache_inputs = tuple(remove_cache_inputs(working))
    if cache_inputs:
        infer_shapes(working)
    dropped = dropped_biases(working)
    halves = widen(working)
    layers = find_layers(working)
    unstopped = stop_as_program(working)
    set_inference(working)
    copy = working.clone()
    loss = None
    if output is not None:
        from onnxtrain.editing.derivatives import find_value

        loss = find_value(copy.graph, output, "output")
    elif any(map(is_float_tensor, copy.graph.outputs)):
        loss = named_output(copy.graph, None)
    mark_first_axes(working.graph)
    fixed = FixedBatch.of(working.graph)
    learned = declared_learned(copy, find_repeated(working, None if fixed is None else fixed.size))
    others = partial(other_tensors, file.proto)
    rows = parameter_table(copy, loss, train=train, freeze=freeze, learned=learned, elsewhere=others)
    table = in_file(rows, halves)
    names = [row.name for row in table if row.trainable]
    found = find_hints(
        working,
        names,
        layers,
        find_copies(file, names),
        dropped=dropped,
        unstopped=unstopped,
        table=table,
    )
    found += [*proved_time_first(graph), *(Hint(text, surprising=True) for text in declared_otherwise(graph))]
    return Inspection(
        opset=file.opset,
        ir_version=file.proto.ir_version,
        inputs=ports[0],
        outputs=ports[1],
        initializers=(*(_counted(row, working.graph) for row in table), *others()),
        operators=operators,
        missing=tuple(_missing(copy, names)),
        hints=tuple(hint.text for hint in found),
        surprises=tuple(hint.text for hint in found if hint.surprising),
        cache_inputs=cache_inputs,
        fixed_batch_inputs=() if fixed is None else tuple(sorted(fixed.inputs)),
    )


def _counted(row: Initializer, graph: ir.Graph) -> Initializer:
    tensor = graph.initializers[row.name].const_value if row.name in graph.initializers else None
    if tensor is None or not row.size or tensor.dtype == ir.DataType.STRING:
        return row
    return replace(row, sparsity=1 - int(np.count_nonzero(tensor.numpy())) / row.size)


def _port(value: ir.Value) -> Port:
    dtype = "not a tensor" if value.dtype is None else value.dtype.name.lower()
    return Port(value.name or "", dtype, dimensions(value))


def _operators(model: ir.Model) -> tuple[Operator, ...]:
    counts = Counter((node.domain, node.op_type) for node in model.graph)
    examples = {(node.domain, node.op_type): node for node in model.graph}
    rows = []
    for (domain, name), nodes in sorted(counts.items()):
        rows.append(Operator(domain, name, nodes, _gradient_kind(model, examples[(domain, name)])))
    return tuple(rows)


def _gradient_kind(model: ir.Model, node: ir.Node) -> str:
    opsets = model.graph.opset_imports
    entry = registry.find(node.op_type, node.domain, opsets.get(node.domain, 1))
    if entry is not None:
        return "none" if entry.function is None else "rule"
    if registry.find_registered_body(node.op_type, node.domain) is not None:
        return "body"
    return "missing" if find_body(node, opsets, model.functions) is None else "body"


def _missing(model: ir.Model, names: Sequence[str]) -> list[str]:
    graph = model.graph
    forward = Forward.of(model)
    xs = [graph.initializers[name] for name in names]
    found: dict[str, None] = {}
    for output in list(graph.outputs):
        if is_float(output) and xs:
            for node in missing_rules(forward, output, xs):
                found[describe(node)] = None
    return list(found)
