"""Which initializers of a model are parameters, and why the others are not."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.autodiff.engine import Engine, Request
from onnxtrain.errors import OptionError
from onnxtrain.graph.value import dimensions, is_float


@dataclass(frozen=True)
class Initializer:
    """One row of the table that ``inspect`` prints.

    Attributes:
        name: Name in the model.
        shape: Sizes of its axes.
        dtype: Element type as ONNX names it, in lower case.
        size: Number of elements.
        trainable: Whether training changes it.
        reason: Why it is not trainable; "" when it is.
        uses: The operators that read it.
        sparsity: The fraction of its elements that are zero, where it was counted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    trainable: bool
    reason: str
    uses: tuple[str, ...]
    sparsity: float = 0.0


# Inputs that configure an operator rather than weigh its data: (operator, input index) -> what they are.
_CONFIGURATION = {
    ("BatchNormalization", 3): "running mean of batch normalization",
    ("BatchNormalization", 4): "running variance of batch normalization",
    ("Clip", 1): "bound of Clip",
    ("Clip", 2): "bound of Clip",
    ("Resize", 1): "region of Resize",
    ("Resize", 2): "scales of Resize",
    ("Upsample", 1): "scales of Upsample",
    ("Pad", 2): "padding value",
    ("Dropout", 1): "ratio of Dropout",
    ("OneHot", 2): "values of OneHot",
    ("Range", 0): "bound of Range",
    ("Range", 1): "bound of Range",
    ("Range", 2): "step of Range",
    ("QuantizeLinear", 1): "quantization scale",
    ("DequantizeLinear", 1): "quantization scale",
}

# Operators whose one-element inputs are weights all the same: a bias or slope of a single channel.
_WEIGHING = frozenset(
    {"Gemm", "Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization", "LayerNormalization"}
    | {"GroupNormalization", "RMSNormalization", "PRelu", "MatMul", "LSTM", "GRU", "RNN"}
)


def parameter_table(
    model: ir.Model,
    loss: ir.Value | None,
    *,
    train: str | Sequence[str] | None = None,
    freeze: str | Sequence[str] | None = None,
    straight_through: bool = False,
) -> list[Initializer]:
    """Sort the initializers of a model's main graph into parameters and constants.

    A parameter is a floating weight that the loss depends on through a differentiable path. Scalars and
    values that configure an operator (epsilon, scale factors, Clip bounds, Resize scales, padding values),
    statistics of batch normalization and masks (infinite or huge values) are constants.

    Args:
        model: The working copy; shapes are inferred, functions on the path to the loss are expanded in it.
        loss: The value to train on; ``None`` takes every floating output.
        train: Glob patterns: only matching initializers are trained; a scalar or mask named here without a
            wildcard is trained, too.
        freeze: Glob patterns of what stays as it is; wins over ``train``.
        straight_through: Whether gradients pass through operators that round or quantize.

    Raises:
        OptionError: A pattern matches no initializer.
    """
    patterns = {"train": _patterns(train), "freeze": _patterns(freeze)}
    graph = model.graph
    for option, chosen in patterns.items():
        _check_patterns(option, chosen, graph.initializers)
    given = list(graph.initializers.items())  # the functions that are expanded bring constants of their own
    candidates = [value for _, value in given if is_float(value)]
    reached = _reached(model, loss, candidates, straight_through)
    rows = []
    for name, value in given:
        reason = _reason(name, value, reached, patterns["train"], patterns["freeze"])
        shape = tuple(d for d in dimensions(value) or () if isinstance(d, int))
        dtype = "unknown" if value.dtype is None else value.dtype.name.lower()
        uses = tuple(dict.fromkeys(node.op_type for node in value.consumers()))
        rows.append(Initializer(name, shape, dtype, int(np.prod(shape)), not reason, reason, uses))
    return rows


def _patterns(given: str | Sequence[str] | None) -> list[str] | None:
    if given is None:
        return None
    return [given] if isinstance(given, str) else list(given)


def _check_patterns(option: str, patterns: list[str] | None, names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns or ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise OptionError(
                f"{option}={pattern!r} matches no initializer; the model has {shown or 'none'}. "
                "`onnxtrain inspect MODEL` lists them."
            )


def _reached(
    model: ir.Model, loss: ir.Value | None, candidates: list[ir.Value], straight_through: bool
) -> set[ir.Value]:
    if not candidates:
        return set()
    graph = model.graph
    engine = Engine(graph, graph.opset_imports, model.functions, straight_through=straight_through)
    targets = [value for value in graph.outputs if is_float(value)] if loss is None else [loss]
    reached: set[ir.Value] = set()
    for y in targets:
        reached |= engine.reached(Request(y, candidates))
    return reached


def _reason(
    name: str, value: ir.Value, reached: set[ir.Value], train: list[str] | None, freeze: list[str] | None
) -> str:
    if not is_float(value):
        kind = "unknown" if value.dtype is None else value.dtype.name.lower()
        return f"{kind}, not a floating tensor"
    if value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        assert value.dtype is not None
        return f"{value.dtype.name.lower()}; the optimizers take float and double"
    if value not in reached:
        return "the loss does not depend on it through a differentiable path"
    if freeze is not None and any(fnmatch.fnmatchcase(name, pattern) for pattern in freeze):
        return "frozen"
    if train is not None and name in train:
        return ""
    if train is not None and not any(fnmatch.fnmatchcase(name, pattern) for pattern in train):
        return "not named by train="
    return _constant_reason(value)


def _constant_reason(value: ir.Value) -> str:
    roles = {_CONFIGURATION.get((node.op_type, index)) for node, index in _uses(value)}
    if roles and None not in roles:
        return " and ".join(sorted(role for role in roles if role is not None))
    shape = dimensions(value)
    if shape == ():
        return "a scalar of the computation"
    if shape is not None and all(size == 1 for size in shape) and not _is_bias(value):
        return "a scalar of the computation"
    tensor = value.const_value
    if tensor is not None:
        array = np.asarray(tensor.numpy())
        if array.size == 0:
            return "empty"
        low, high = float(array.min()), float(array.max())
        if not (np.isfinite(low) and np.isfinite(high)) or max(abs(low), abs(high)) >= _HUGE:
            return "a mask: it holds infinite or huge values"
    return ""


_HUGE = 1e9
"""No weight is as large; exporters write masks as -inf or the smallest float."""


def _uses(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Where a value is read, seen through Identity nodes (exporters tie equal initializers with them)."""
    found: list[tuple[ir.Node, int]] = []
    for node, index in value.uses():
        if node.op_type == "Identity" and not node.domain:
            found += _uses(node.outputs[0])
        else:
            found.append((node, index))
    return found


def _is_bias(value: ir.Value) -> bool:
    """Whether a one-element value weighs data: a parameter of a layer, or added to a product with weights."""
    for node, index in _uses(value):
        if node.op_type in _WEIGHING:
            return True
        if node.op_type == "Add":
            other = node.inputs[1 - index]
            producer = None if other is None else other.producer()
            if producer is not None and producer.op_type in ("MatMul", "Gemm", "Conv", "ConvTranspose"):
                return True
    return False


def shared_parameters(model: ir.Model, names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters that several nodes read, with what reads them: training ties all those uses together.

    An embedding that is also the output projection is tied on purpose; equal fresh weights that an exporter
    merged are not.
    """
    found = {}
    for name in names:
        uses = _uses(model.graph.initializers[name])
        readers = {node for node, _ in uses}
        nodes = [node for node in model.graph if node in readers]
        if len(nodes) > 1:
            found[name] = [node.name or f"{node.op_type} ({node.outputs[0].name})" for node in nodes]
    return found
