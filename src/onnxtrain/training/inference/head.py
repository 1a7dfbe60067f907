"""What a model's output is, for those who read it as a table: how many columns, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.data.naming import rows_to_inputs
from onnxtrain.errors import OptionError
from onnxtrain.ir.shapes import infer_shapes
from onnxtrain.ir.value import dimensions
from onnxtrain.losses.heads import named_output, tensor_spec
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.inference.forward import outputs


@dataclass(frozen=True)
class Head:
    """The output that a loss is for.

    Attributes:
        name: Of the output.
        width: Its number of columns; 1 where it is [N].
        activation: The operator that it ends in.
    """

    name: str
    width: int
    activation: str

    @classmethod
    def of(cls, model: str | os.PathLike[str] | onnx.ModelProto, output: str | None, rows: np.ndarray) -> Self:
        """The head of a model; where its shape does not tell the width, the first row does.

        Args:
            model: A path or a loaded model.
            output: Its name; by default the first floating one.
            rows: Numbers [N, F].

        Raises:
            OptionError: The output is neither [N, C] nor [N].
        """
        graph = infer_shapes(ModelFile.load(model).training_model()).graph
        value = named_output(graph, output)
        name = str(value.name)
        shape: Sequence[Any] | None = dimensions(value)
        if shape is None or not all(isinstance(size, int) for size in shape[1:]):
            inputs = [tensor_spec(item) for item in graph.inputs]
            shape = outputs(model, rows_to_inputs(rows[:1], inputs))[name].shape
        if len(shape) not in (1, 2):
            listed = ", ".join(map(str, shape))
            raise OptionError(f"The output {name!r} has the shape ({listed}); it needs one row [C] for each example.")
        return cls(name, int(shape[1]) if len(shape) == 2 else 1, _activation(value))


def _activation(value: ir.Value) -> str:
    producer = value.producer()
    while producer is not None and producer.op_type in ("Identity", "Cast"):
        source = producer.inputs[0]
        producer = None if source is None else source.producer()
    return "" if producer is None else producer.op_type
