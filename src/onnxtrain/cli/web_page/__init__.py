"""Write a web page that trains a model in the browser (``onnxtrain export --web``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxtrain.errors import ModelError, OptionError

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

    from onnxtrain.model_file.file import ModelFile

WEB_FILES = (
    *("index.html", "page.js", "onnxtrain-web.js", "worker.js"),
    *("model.onnx", "step.onnx", "states.safetensors", "training.json"),
)
"""Files of a page; the first four stand beside this module, the compiled package onnxtrain-web among them."""

RUNTIME = "https://cdn.jsdelivr.net/npm/onnxruntime-web@1.30.0/dist/"
"""Default URL of ONNX Runtime for pages: the version that the tests run."""

EPOCHS, BATCH_SIZE = 40, 8
"""Defaults of the page, for some dozens of examples."""


def write_page(
    folder: Path, model: ModelFile, step: ModelProto, states: bytes, *, learning_rate: float, runtime: str
) -> None:
    """Write a page that trains a model into a folder, creating it if needed."""
    from onnxtrain.model_file.writing import write_files

    settings = {
        "name": model.path.stem if model.path is not None else "model",
        "runtime": runtime,
        "learningRate": learning_rate,
        "epochs": EPOCHS,
        "batchSize": BATCH_SIZE,
        **_drawing(model, step),
    }
    contents = {
        "step.onnx": step.SerializeToString(),
        "states.safetensors": states,
        "training.json": json.dumps(settings, indent=1).encode(),
        **{name: (Path(__file__).parent / name).read_bytes() for name in WEB_FILES[:4]},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{str(folder)!r} cannot be written: {error.strerror or error}.") from error
    model.save(folder / "model.onnx", {})
    write_files({folder / name: content for name, content in contents.items()})


def _drawing(model: ModelFile, step: ModelProto) -> dict[str, Any]:
    """Return the settings for images that a user draws, if the model tells classes of gray images apart."""
    from onnxtrain.lowering.description import Description

    description = Description.read({entry.key: entry.value for entry in step.metadata_props})
    batch = [name for name, role in description.feeds.items() if role == "batch"]
    targets = [name for name, role in description.feeds.items() if role == "target"]
    if description.loss is None or not batch:
        raise OptionError("--web needs a step that takes a batch and returns a loss, not one of accumulated gradients.")
    inputs = {value.name: value for value in step.graph.input}
    image = _image(inputs[batch[0]]) if len(batch) == len(targets) == 1 else None
    classes = _classes(model.proto)
    if image is None or not classes or not _is_index(inputs[targets[0]]):
        return {}
    image |= _normalization(model, batch[0])
    return {"input": batch[0], "target": targets[0], "image": image, "classes": classes}


def _normalization(file: ModelFile, name: str) -> dict[str, float]:
    """Return mean and std for the numbers that the model takes of gray images; {} for 0 to 1, and if not known."""
    from onnxtrain.data.data_names import read_names
    from onnxtrain.data.model_inputs import tensor_spec
    from onnxtrain.editing.working_copy.inputs import mark_image_inputs

    model = file.training_model()
    mark_image_inputs(model)
    specs = read_names(file).specs([tensor_spec(value) for value in model.graph.inputs if value.name == name])
    pixels = next((spec.pixels for spec in specs), None)
    if pixels is None or not len(pixels.mean) == len(pixels.std) == 1:
        return {}
    return {"mean": pixels.mean[0], "std": pixels.std[0]}


def _shape(value: ValueInfoProto) -> list[int]:
    """Return the sizes of a tensor; 0 for dynamic ones."""
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _image(value: ValueInfoProto) -> dict[str, float] | None:
    """Return the size of gray images ([N, 1, height, width], float) if an input takes them."""
    from onnx import TensorProto

    shape = _shape(value)
    is_gray = len(shape) == 4 and shape[1] == 1 and shape[2] > 0 and shape[3] > 0
    if not is_gray or value.type.tensor_type.elem_type != TensorProto.FLOAT:
        return None
    return {"height": shape[2], "width": shape[3]}


def _classes(model: ModelProto) -> int:
    """Return the number of scores per example, or 0 if the model has other outputs."""
    outputs = [_shape(value) for value in model.graph.output]
    return outputs[0][1] if outputs and len(outputs[0]) == 2 else 0


def _is_index(value: ValueInfoProto) -> bool:
    from onnx import TensorProto

    return value.type.tensor_type.elem_type == TensorProto.INT64 and len(_shape(value)) == 1
