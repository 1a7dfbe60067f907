"""Operations on adapter files: list the layers of a model, merge, convert, describe."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter
from onnxtrain.adapters.architectures import Architecture
from onnxtrain.adapters.files import SUFFIX, is_adapter_path, read_adapter, write_adapter
from onnxtrain.adapters.fitting import fit, gains
from onnxtrain.adapters.full_tensors import for_peft
from onnxtrain.adapters.layers import Layer, LayerPart, find_layers
from onnxtrain.adapters.manifest import check_base, describe_base
from onnxtrain.adapters.merging import MOST_LOST, Cost, is_quantized, merged_weights
from onnxtrain.adapters.packing import in_checkpoint
from onnxtrain.adapters.rewriting import with_adapters
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
    found, layer_parts, _ = fitted(file, adapter)
    adapted = [(*layer_part, entry) for layer_part, entry in zip(layer_parts, found.entries.values(), strict=True)]
    costs: dict[str, Cost] = {}
    made = merged_weights(adapted, requantize=requantize, costs=costs)
    beside = set[str]()
    if requantize:
        for layer in {id(layer): layer for layer, _, _ in adapted if is_quantized(layer)}.values():
            made[str(layer.weight.name)]
        beside = {cost.layer for cost in costs.values() if cost.lost > MOST_LOST}
        made = merged_weights([one for one in adapted if one[0].name not in beside], requantize=True)
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
    file = ModelFile.load(model)
    found, layer_parts, model_graph = fitted(file, adapter)
    found = replace(found, checkpoint=found.checkpoint.completed(file.folder, base_model))
    found = replace(found, base=describe_base(file, [layer for layer, _ in layer_parts]))
    dtypes = {
        name: layer.y.dtype or ir.DataType.FLOAT for name, (layer, _) in zip(found.entries, layer_parts, strict=True)
    }
    multiples = gains(layer_parts, found)
    architecture = Architecture.of(model_graph[0].initializers, file.folder, found.checkpoint)
    if path.suffix != SUFFIX:
        found = in_checkpoint(found, model_graph[1], architecture)
    write_adapter(path, found, dtypes, multiples, lambda: for_peft(found, *model_graph, architecture, str(path)))


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
    found = read_adapter(adapter) if model is None else fitted(ModelFile.load(model), adapter)[0]
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


def fitted(file: ModelFile, path: AdapterPath) -> tuple[Adapter, list[LayerPart], tuple[ir.Graph, list[Layer]]]:
    """Read an adapter and match it to a model; returns the model's graph and layers, too."""
    model = infer_shapes(file.training_model())
    layers = find_layers(model)
    found, layer_parts = fit(read_adapter(path), model.graph, layers, str(path), file.folder)
    check_base(found.base, file, [layer for layer, _ in layer_parts], str(path))
    return found, layer_parts, (model.graph, layers)
