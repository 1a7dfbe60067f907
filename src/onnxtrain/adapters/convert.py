"""Operations on adapter files: list the layers of a model, merge, convert, describe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxtrain.adapters.base_model import BaseModel
from onnxtrain.adapters.emit import with_adapters
from onnxtrain.adapters.files import is_adapter_path, read_adapter
from onnxtrain.adapters.layers import find_layers
from onnxtrain.adapters.merging import MOST_LOST, Cost, is_quantized, merged_weights
from onnxtrain.data.data_names import read_names, write_names
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid

Model = str | os.PathLike[str] | onnx.ModelProto
AdapterPath = str | os.PathLike[str]


@dataclass(frozen=True)
class AdaptableLayer:
    """A layer that can have an adapter.

    Attributes:
        name: The name of its adapter.
        kind: Its operator.
        inputs: Number of input features; the number of rows for an embedding.
        outputs: Number of output features.
        bits: Bits per weight.
        weight: Name of the weight's initializer.
        parts: The checkpoint's layers that an exporter packed into this one.
    """

    name: str
    kind: str
    inputs: int
    outputs: int
    bits: int
    weight: str
    parts: tuple[str, ...] = ()


@checks_arguments
@refuses_invalid()
def adaptable_layers(model: Model) -> list[AdaptableLayer]:
    """Return the layers of a model that can have adapters.

    Raises:
        ModelError: The model cannot be read.
    """
    return [
        AdaptableLayer(
            layer.name,
            layer.kind,
            layer.inputs,
            layer.outputs,
            layer.bits,
            str(layer.weight.name),
            tuple(part.name for part in layer.parts),
        )
        for layer in find_layers(infer_shapes(ModelFile.load(model).training_model()))
    ]


@checks_arguments
@refuses_invalid()
def merge_adapter(model: Model, adapter: AdapterPath, output: AdapterPath, *, requantize: bool = False) -> list[Cost]:
    """Merge an adapter into the weights of a model and write the model; only these weights change.

    Where quantizing again would lose more than half of an adapter's change, the layer keeps its weight, and the adapter
    becomes initializers and nodes beside it.

    Args:
        model: A path or a loaded model; it is not changed.
        adapter: An ``.onnx_adapter`` file or a PEFT folder.
        output: The file to write.
        requantize: Quantize the merged weights again, with new scales and zero points of smallest squared error, which
            rounds off a part of the adapter; without it quantized weights are refused.

    Returns:
        The rounding error of each requantized layer, and whether its adapter stays beside it.

    Raises:
        ModelError: A file cannot be read or written, or the adapter belongs to another model.
        OptionError: A weight is quantized and ``requantize`` is false, or several nodes read the weight.
    """
    file = ModelFile.load(model)
    found, targets = BaseModel.of(file).read(adapter)
    adapted = list(zip(targets, found.entries.values(), strict=True))
    costs: dict[str, Cost] = {}
    made = merged_weights(adapted, requantize=requantize, costs=costs)
    beside = set[str]()
    if requantize:
        for name in dict.fromkeys(str(target.layer.weight.name) for target in targets if is_quantized(target.layer)):
            made[name]
        beside = {cost.layer for cost in costs.values() if cost.lost > MOST_LOST}
        made = merged_weights([item for item in adapted if item[0].layer.name not in beside], requantize=True)
    target = with_adapters(file, found.entries, beside) if beside else file
    target.save(output, made | found.tensors)
    write_names(Path(output), read_names(file, adapter))
    return [Cost(cost.layer, 0.0, beside=True) if cost.layer in beside else cost for cost in costs.values()]


@checks_arguments
@refuses_invalid()
def convert_adapter(
    model: Model, adapter: AdapterPath, output: AdapterPath, *, base_model: str | os.PathLike[str] | None = None
) -> None:
    """Convert an adapter to an ``.onnx_adapter`` file or to a PEFT folder.

    Args:
        model: The base model; it provides the names and element types of the layers.
        adapter: An ``.onnx_adapter`` file or a PEFT folder.
        output: The file or folder to write.
        base_model: The PyTorch model that the ONNX model was exported from, a folder or a name on the Hugging Face Hub:
            PEFT's ``AutoPeftModel`` classes load it. By default as in the adapter, else by ``config.json`` beside the
            model.

    Raises:
        ModelError: A file cannot be read or written, or the adapter belongs to another model.
        OptionError: ``output`` has another suffix.
    """
    path = Path(output)
    if not is_adapter_path(path):
        raise OptionError(f"output is {str(path)!r}; it must be a file that ends in .onnx_adapter, or a folder.")
    base = BaseModel.of(ModelFile.load(model))
    base.write(path, *base.read(adapter), base_model)


@checks_arguments
def describe_adapter(adapter: AdapterPath, *, model: Model | None = None) -> dict[str, Any]:
    """Describe an adapter: its settings and its layers, each with rank, sizes and scale.

    Args:
        adapter: An ``.onnx_adapter`` file or a PEFT folder.
        model: Its base model, to check that it belongs to it.

    Returns:
        A JSON-serializable mapping.

    Raises:
        ModelError: A file cannot be read, or the adapter belongs to another model.
    """
    found = read_adapter(adapter) if model is None else BaseModel.of(ModelFile.load(model)).read(adapter)[0]
    full = {**found.tensors, **found.of_modules}
    return {
        "kind": "DoRA" if found.dora else "LoRA",
        "rank": found.rank,
        "alpha": found.alpha,
        "rank_stabilized": found.rslora,
        "dropout": found.dropout,
        "parameters": sum(entry.size for entry in found.entries.values()) + sum(map(np.size, full.values())),
        "base_model": found.checkpoint.base_model,
        "task_type": found.checkpoint.task_type,
        "trained_in_full": sorted(full),
        "names_its_model": found.base is not None,
        "layers": [
            {
                "name": name,
                "rank": entry.rank,
                "inputs": entry.inputs,
                "outputs": entry.outputs,
                "scale": entry.scale,
            }
            for name, entry in found.entries.items()
        ],
    }
