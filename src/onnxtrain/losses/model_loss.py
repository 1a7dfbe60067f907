"""A loss that is an ONNX model of (prediction, target)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.ir import Builder, Value
from onnxtrain.ir.clone import Values, clone_nodes
from onnxtrain.ir.value import Dimension, dimensions
from onnxtrain.losses.base import Loss, TargetForm, TargetKind, check_weight, examples
from onnxtrain.metrics.base import PredictionKind
from onnxtrain.training_info.recipe import LossTerms


@dataclass(frozen=True)
class ModelLoss(Loss):
    """A model with two inputs, the prediction and the target in this order, and one scalar output.

    Micro-batches are weighted by their number of examples.

    Args:
        path: The model.
        predicts: What the metrics may take predictions for: ``"classes"``, ``"binary"`` or ``"numbers"``.
        weight: What the loss is multiplied by, 0 or more.
    """

    name: ClassVar[str] = "model"
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
        """Return the form that the model's second input declares."""
        return now

    def target_dtype(self, prediction: Value, kind: TargetKind) -> ir.DataType:
        """The type of the model's second input."""
        dtype = self._graph().inputs[1].dtype
        return prediction.dtype if dtype is None else dtype

    def target_shape(self, prediction: Value, kind: TargetKind) -> tuple[Dimension, ...] | None:
        """The shape of the model's second input."""
        return dimensions(self._graph().inputs[1])

    def build(self, op: Builder, prediction: Value, target: Value) -> LossTerms:
        """Copy the loss model's nodes in."""
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
