"""User-defined losses: a function that emits nodes, or an ONNX model of (prediction, target)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.data.conversion import kind_of
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.clone import Values, clone_nodes
from onnxtrain.graph.value import Dimension, dimensions
from onnxtrain.losses.base import (
    Loss,
    TargetForm,
    TargetKind,
    check_weight,
    class_axis,
    examples,
    fits_shape,
    label_axis,
    node_rank,
)
from onnxtrain.lowering.training_info.recipe import LossTerms
from onnxtrain.metrics.base import MetricInput, PredictionKind


@checks_arguments
@dataclass(frozen=True)
class CustomLoss(Loss):
    """A user-defined loss: a function that emits nodes and returns a 0-d value.

    Targets have the prediction's type and shape where the data fit them, else the shape of the data and their
    type: int64 for integers, bool for booleans. Micro-batches are weighted by their number of examples.

    Args:
        function: Called with the builder, the prediction and the target. Numbers and NumPy arrays are accepted
            wherever a value is.
        kind: Kind of targets, class indices or values; "values" by default.
        shape: The shape of targets, batch first, where the data do not determine it beforehand (an iterable of batches,
            an export): a number, a name or ``None`` per axis. By default the data's shape.
        dtype: Their element type, such as ``"int64"``.
        predicts: Meaning of predictions for metrics: ``"classes"`` (scores along a class axis),
            ``"binary"`` (independent logits) or ``"numbers"``.
        axis: The class axis of predictions; by default inferred from labels, as in ``SoftmaxCrossEntropy``.
        weight: Factor of the loss, 0 or more.

    Example:
        >>> loss = CustomLoss(lambda op, prediction, target: op.ReduceMean(abs(prediction - target) ** 1.5))
        >>> from onnxtrain import Trainer, examples
        >>> trainer = Trainer(examples.mlp((2, 1)), loss=loss)
        >>> trainer.train_step(np.ones((4, 2)), np.ones((4, 1))) > 0
        True
    """

    name: ClassVar[str] = "custom"
    has_text: ClassVar[bool] = False

    function: Callable[[Builder, Value, Value], Value]
    kind: TargetKind = "values"
    shape: Sequence[Dimension] | None = None
    dtype: str | np.dtype[Any] | None = None
    predicts: PredictionKind | None = None
    axis: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_weight(self.name, self.weight)
        if self.kind not in ("values", "indices"):
            raise OptionError(f"kind is {self.kind!r}; it is 'values' or 'indices'.")
        if self.predicts not in (None, "classes", "binary", "numbers"):
            raise OptionError(f"predicts is {self.predicts!r}; it is 'classes', 'binary' or 'numbers'.")
        if self.dtype is not None:
            try:
                ir.DataType.from_numpy(np.dtype(self.dtype))
            except TypeError as error:
                raise OptionError(f"dtype is {self.dtype!r}; it needs the name of a NumPy type.") from error

    @property
    def shape_hint(self) -> str:  # type: ignore[override]
        """Advice on declaring targets of another shape; empty where they are declared."""
        declared = "CustomLoss(function, shape=..., dtype=...)"
        return f" Targets of another shape are declared by {declared}." if self.shape is None else ""

    @property
    def target_kinds(self) -> tuple[TargetKind, ...]:  # type: ignore[override]
        """The given kind alone."""
        return (self.kind,)

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Return the declared type; else int64 for class indices, and the type of the prediction for values."""
        if self.dtype is not None:
            return ir.DataType.from_numpy(np.dtype(self.dtype))
        return super().target_dtype(prediction, kind)

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the declared shape; else that of the prediction, without its class axis for class indices."""
        shape = prediction.shape
        if self.shape is not None:
            return tuple(self.shape)
        if kind == "values" or shape is None:
            return shape
        axis = self._axis(prediction)
        return tuple(size for index, size in enumerate(shape) if index != axis)

    def first_form(self, prediction: Value, kind: TargetKind | None) -> TargetForm:
        """Return the prediction's own type and shape, or the first type and shape that the function accepts.

        The data decide in the end. Where the function accepts none, :meth:`build` reports why.
        """
        own = super().first_form(prediction, kind)
        if self.shape is not None or prediction.shape is None or not prediction.shape:
            return own
        # Labels have one axis less; the other ranks are for functions that index or reduce.
        ranks = dict.fromkeys([max(1, len(prediction.shape) - 1), 1, 2, 3, 4])
        shapes = [*((prediction.shape[0], *[None] * (rank - 1)) for rank in ranks), prediction.shape]
        tried = [own] + [
            TargetForm(self.kind, dtype=dtype, shape=shape)
            for dtype in (prediction.dtype, ir.DataType.INT64, ir.DataType.BOOL)
            for shape in shapes
        ]
        return next((form for form in tried if self._takes(prediction, form)), own)

    def _takes(self, prediction: Value, form: TargetForm) -> bool:
        """Return whether the function accepts targets of a form."""
        loss = self.with_form(form)
        inputs = [
            ir.Value(name="prediction", type=prediction.ir.type, shape=prediction.ir.shape),
            ir.Value(
                name="target",
                type=ir.TensorType(loss.target_dtype(prediction, form.kind)),
                shape=ir.Shape(loss.target_shape(prediction, form.kind) or ()),
            ),
        ]
        op = Builder(ir.Graph(inputs, [], nodes=[]), prediction.op.opset)
        try:
            loss.build(op, *map(op.wrap, inputs))
        except Exception:
            return False
        return True

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the prediction's own form where the data fit it, else the form of the data."""
        own = prediction.shape
        if self.shape is not None or own is None or kind_of(dtype) in ("string", "other"):
            return now
        if self.kind == "indices" and len(shape) == len(own) - 1:
            if self.axis is not None:
                return replace(now, dtype=None, shape=None)
            preferred = class_axis(len(own)) if now.axis is None else now.axis
            return replace(now, axis=label_axis(own, shape, sizes, preferred), dtype=None, shape=None)
        if self.kind == "values" and _same_elements(own, shape):
            # Also [N] for [N, 1], which would broadcast to [N, N]: the shape check refuses it.
            return replace(now, axis=None, dtype=None, shape=None)
        found = {"integer": ir.DataType.INT64, "boolean": ir.DataType.BOOL}.get(kind_of(dtype), prediction.dtype)
        sizes_found: Sequence[Dimension] = shape[1:]
        if now.shape is not None and len(now.shape) == len(shape):
            # An axis that was seen with two sizes is dynamic.
            sizes_found = [old if old == new else None for old, new in zip(now.shape[1:], shape[1:], strict=True)]
        sized = (own[0] if own else None, *sizes_found)
        return replace(now, axis=None, dtype=None if self.dtype is not None else found, shape=sized)

    def with_form(self, form: TargetForm) -> Self:
        """Return the loss for targets of the data's type and shape."""
        given: dict[str, Any] = {}
        if form.shape is not None and self.shape is None:
            given["shape"] = form.shape
        if form.dtype is not None and self.dtype is None:
            given["dtype"] = form.dtype.numpy()
        if form.axis is not None and self.axis is None:
            given["axis"] = form.axis
        return replace(self, **given) if given else self

    def metric_input(self, prediction: Value, target: Value) -> MetricInput:
        """Return the declared meaning of predictions; labels imply scores over classes."""
        if self.predicts == "classes" or (self.predicts is None and self.kind == "indices"):
            return MetricInput(self.name, "classes", self._axis(prediction))
        return super().metric_input(prediction, target)

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Call the function and check what it returns.

        Raises:
            OptionError: The function takes other arguments, does not return a loss, or emits nodes that ONNX rejects.
                Its own exceptions propagate.
        """
        name = getattr(self.function, "__name__", type(self.function).__name__)
        _check_arguments(self.function, name)
        before = len(op.emitted)
        loss = self.function(op, prediction, target)
        _check_result(loss, prediction, name)
        _check_nodes(op, op.emitted[before:], name)
        return LossTerms(_scalar(op, loss, prediction, name), examples(op, prediction))

    def _axis(self, prediction: Value) -> int:
        rank = node_rank(prediction)
        if self.axis is None:
            return class_axis(rank)
        if not -rank <= self.axis < rank or self.axis % rank == 0:
            raise OptionError(f"axis is {self.axis}, but the prediction {prediction.name!r} has rank {rank}.")
        return self.axis % rank


def _same_elements(wanted: Sequence[Dimension], found: Sequence[int]) -> bool:
    """Return whether an array has the shape of the prediction, apart from axes of size 1."""
    if fits_shape(wanted, found):
        return True
    return fits_shape([0, *(size for size in wanted[1:] if size != 1)], [0, *(size for size in found[1:] if size != 1)])


def _check_arguments(function: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in functions have no signature
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        raise OptionError(
            f"The loss function {name!r} takes the arguments {signature}; it is called with three: the builder, the "
            "prediction and the target."
        ) from None


def _check_result(loss: object, prediction: Value, name: str) -> None:
    if isinstance(loss, Value):
        if _depends(loss.ir, prediction.ir):
            return
        raise OptionError(
            f"The loss function {name!r} returned a value that does not depend on the prediction, so nothing would be "
            "trained."
        )
    what = "None" if loss is None else f"a {type(loss).__name__}"
    raise OptionError(
        f"The loss function {name!r} returned {what}; it needs to return one value of the graph, computed from the "
        "prediction by operators, such as op.ReduceMean(abs(prediction - target), keepdims=0)."
    )


def _depends(value: ir.Value, source: ir.Value) -> bool:
    """Return whether a value is computed from another; bodies of operators may read it by name."""
    seen, waiting = {value}, [value]
    while waiting:
        current = waiting.pop()
        if current is source:
            return True
        node = current.producer()
        if node is None:
            continue
        if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
            return True
        read = {given for given in node.inputs if given is not None} - seen
        waiting += read
        seen |= read
    return False


def _scalar(op: Builder, loss: Value, prediction: Value, name: str) -> Value:
    """Reshape and cast a result of one element to a 0-d value of the prediction's type."""
    if loss.ir.dtype is not None and not loss.is_float:
        raise OptionError(
            f"The loss function {name!r} returned a value of type {loss.dtype.name}; a loss is a floating number."
        )
    if loss.shape is not None and any(size != 1 for size in loss.shape):
        raise OptionError(
            f"The loss function {name!r} returned a value of shape {loss.shape}, but a loss is one number; reduce it, "
            "such as by op.ReduceMean(value, keepdims=0)."
        )
    if loss.shape != ():
        loss = op.reshape(loss, op.ints()).with_shape(())
    return loss if loss.ir.dtype is None else op.cast(loss, prediction.dtype)


def _check_nodes(op: Builder, nodes: Sequence[ir.Node], name: str) -> None:
    """Run ONNX's checker and shape inference on the nodes alone, where their messages are still clear."""
    made = {output for node in nodes for output in node.outputs}
    outer = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None and value not in made)
    bodies = any(attribute.type == ir.AttributeType.GRAPH for node in nodes for attribute in node.attributes.values())
    if bodies or any(node.domain for node in nodes) or any(value.type is None for value in outer):
        return  # bodies, other domains and unknown types cannot be checked here
    copies: Values = {}
    for value in outer:
        small = value.const_value if value.const_value is not None and value.const_value.size <= 64 else None
        copies[value] = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=small)
    feeds = [copy for copy in copies.values() if copy is not None and copy.const_value is None]
    constants = [copy for copy in copies.values() if copy is not None and copy.const_value is not None]
    cloned = clone_nodes(nodes, copies)
    for output in (output for node in cloned for output in node.outputs):
        output.type, output.shape = None, None
    graph = ir.Graph(feeds, [], nodes=cloned, initializers=constants, opset_imports={"": op.opset}, name="loss")
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    try:
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        reason = " ".join(str(error).split())
        raise OptionError(f"The loss function {name!r} emits a node that ONNX refuses: {reason}") from error


@dataclass(frozen=True)
class ModelLoss(Loss):
    """A model with two inputs, the prediction and the target in this order, and one scalar output."""

    name: ClassVar[str] = "model"
    has_text: ClassVar[bool] = False
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("values", "indices")

    path: Path
    predicts: PredictionKind | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_weight(self.name, self.weight)

    def _graph(self) -> ir.Graph:
        from onnxtrain.model_file.file import ModelFile

        graph: ir.Graph = ModelFile.load(self.path).training_model().graph
        if len(graph.inputs) != 2 or len(graph.outputs) != 1:
            raise OptionError(
                f"The loss {self.path} has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs; it needs "
                "two inputs, the prediction and the target, and one scalar output."
            )
        return graph

    def form_of(
        self, prediction: Value, dtype: np.dtype[Any], shape: tuple[int, ...], sizes: Mapping[str, int], now: TargetForm
    ) -> TargetForm:
        """Return the current form: the model's second input declares type and shape."""
        return now

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """Return the type of the model's second input."""
        dtype = self._graph().inputs[1].dtype
        return prediction.dtype if dtype is None else dtype

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """Return the shape of the model's second input."""
        return dimensions(self._graph().inputs[1])

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Insert copies of the loss model's nodes."""
        graph = self._graph()
        version = graph.opset_imports.get("", op.opset)
        if version > op.opset:
            raise OptionError(
                f"The loss {self.path} is written in opset {version}, the model in {op.opset}; convert one of them."
            )
        values: Values = {graph.inputs[0]: prediction.ir, graph.inputs[1]: target.ir}
        for initializer in graph.initializers.values():
            assert initializer.const_value is not None
            values[initializer] = op.constant(initializer.const_value.numpy()).ir
        nodes = clone_nodes(graph, values, rename=lambda name: f"loss/{name}")
        op.graph.extend(nodes)
        result = values[graph.outputs[0]]
        assert result is not None
        loss = op.wrap(result)
        return LossTerms(op.reshape(loss, op.ints()).with_shape(()), examples(op, prediction))
