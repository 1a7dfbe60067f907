"""Names of columns and labels in a model's training data, and the form of its images: files beside the model."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from onnx import ModelProto, numpy_helper

from onnxtrain.data.conversion import TensorSpec
from onnxtrain.data.image_form import RESAMPLING, Pixels, Resizing, is_edge, is_number
from onnxtrain.errors import ModelError
from onnxtrain.graph.domains import LABELS, MACHINE_LEARNING_DOMAIN
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.hub import places_of_settings
from onnxtrain.model_file.small_files import RefusedFileError, parse_json, read_json, read_text
from onnxtrain.model_file.writing import AtomicFiles, only_warns
from onnxtrain.operators.call_text import read_literal

Columns = Mapping[str, tuple[str, ...]]
"""Names of columns in the model's order, by input."""

Labels = tuple[str, ...] | Columns
"""Text labels in the order of the classes; by output where several have losses."""


@dataclass(frozen=True)
class DataNames:
    """Names of columns and labels in a model's training data."""

    columns: Columns = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    labels: Labels | None = None
    pixels: Pixels | None = None
    resizing: Resizing | None = None
    output: str | None = None
    targets: Columns = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)

    def learned(self, columns: Columns, left_out: Iterable[str | None]) -> DataNames:
        """Return the names with those of more data; known names are kept."""
        new = {name: names for name, names in columns.items() if name not in self.columns}
        if not new:
            return self
        beside = dict.fromkeys([*self.left_out, *(name for name in left_out if name is not None)])
        return replace(self, columns={**self.columns, **new}, left_out=tuple(beside))

    def specs(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return specs of a model's inputs with the names of their columns and the form of images."""
        return [
            replace(
                spec,
                columns=self.columns.get(spec.name),
                left_out=self.left_out if spec.name in self.columns else (),
                pixels=self.pixels or spec.pixels,
                resizing=self.resizing,
            )
            for spec in specs
        ]

    def of_outputs(self, outputs: Sequence[str], first: str | None) -> DataNames:
        """Return the names with the labels of these outputs alone; ``first`` has those that name no output."""
        labels, only = self.labels, outputs[0] if len(outputs) == 1 else None
        if len(outputs) < 2 and not isinstance(labels, Mapping):
            return self if self.output in (None, only) else replace(self, labels=None, output=None)
        by_output = labels if isinstance(labels, Mapping) else {str(self.output or first): labels or ()}
        own = {name: by_output[name] for name in outputs if by_output.get(name)}
        return replace(self, labels=own.get(only or "") if len(outputs) < 2 else own or None, output=None)

    def record(self) -> dict[str, Any]:
        """Return the names as JSON data, without unknown ones."""
        columns = {name: list(names) for name, names in self.columns.items()}
        return {
            **({"columns": columns} if columns else {}),
            **({"left_out": list(self.left_out)} if columns and self.left_out else {}),
            **({"targets": {name: list(own) for name, own in self.targets.items()}} if self.targets else {}),
            **({} if self.labels is None else {"labels": labels_record(self.labels)}),
            **({} if self.labels is None or self.output is None else {"output": self.output}),
            **({} if self.pixels is None else self.pixels.record()),
            **({} if self.resizing is None else self.resizing.record()),
            **({"kept": dict(self.kept)} if self.kept else {}),
        }

    @classmethod
    def of_record(cls, record: object) -> DataNames:
        """Read names from JSON data; a list holds labels."""
        known = {"labels": record} if isinstance(record, list) else record
        if not isinstance(known, dict) or not known or not known.keys() <= _KEYS:
            raise ValueError("the data has another form")
        columns, labels, targets = known.get("columns", {}), known.get("labels"), known.get("targets", {})
        of_labels = labels.values() if isinstance(labels, dict) and labels else [labels] if "labels" in known else []
        of_columns = (each.values() if isinstance(each, dict) else [None] for each in (columns, targets))
        lists = [*itertools.chain(*of_columns), *of_labels]
        if not all(_is_list_of_texts(names) and names for names in lists):
            raise ValueError("the data has another form")
        left_out, output, kept = known.get("left_out", []), known.get("output"), known.get("kept", {})
        if not _is_list_of_texts(left_out) or not isinstance(output, str | None) or not isinstance(kept, dict):
            raise ValueError("the data has another form")
        return cls(
            {name: tuple(names) for name, names in columns.items()},
            tuple(left_out),
            {name: tuple(own) for name, own in labels.items()}
            if isinstance(labels, dict)
            else labels and tuple(labels),
            Pixels.of_record(known) if known.keys() & {"mean", "std"} else None,
            Resizing.of_record(known) if "resize" in known else None,
            output,
            {name: tuple(names) for name, names in targets.items()},
            kept,
        )


_OF_IMAGES: Final = ("mean", "std", "resize", "crop", "resample", "orient")
_KEYS: Final = {"columns", "left_out", "targets", "labels", "output", "kept", *_OF_IMAGES}


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def labels_record(labels: Labels) -> list[str] | dict[str, list[str]]:
    """Return labels as JSON data."""
    return {name: [*own] for name, own in labels.items()} if isinstance(labels, Mapping) else [*labels]


def labels_text(labels: Labels) -> str:
    """Format labels as a JSON list, or as an object that has them by output."""
    record = labels_record(labels)
    return json.dumps(record if isinstance(record, list) else {"labels": record}, ensure_ascii=False, indent=1)


def names_file(model: Path) -> Path:
    """Return the path of a model's names: ``tuned.labels.json`` beside ``tuned.onnx``."""
    return model.with_suffix(".labels.json")


def write_names(model: Path, names: DataNames) -> None:
    """Write the names beside a model, or remove those of an earlier one; a file that cannot be written is a warning."""
    path, record = names_file(model), names.record()
    if not record:
        with contextlib.suppress(OSError, ValueError):
            DataNames.of_record(read_json(path))
            path.unlink()
        return
    only_labels = record.keys() == {"labels"}
    text = labels_text(names.labels or ()) if only_labels else json.dumps(record, ensure_ascii=False, indent=1)
    with only_warns("Names are not saved"), AtomicFiles() as files, files.create(path) as file:
        file.write(f"{text}\n".encode())


def read_names(model: ModelFile, adapter: str | os.PathLike[str] | None = None) -> DataNames:
    """Read the names beside an adapter, else those beside its model, else the labels in the model's metadata."""
    found = None if adapter is None else _read_file(Path(adapter))
    if found is None and model.home is not None:
        found = _read_file(model.home)
    texts = [entry.value for entry in model.proto.metadata_props if entry.key == LABELS]
    if found is None and texts:
        found = _parsed(texts[0], f"The model's metadata entry {LABELS!r}")
    names = found or DataNames()
    pixels, resizing = read_preprocessor(model.folder)
    return replace(names, pixels=names.pixels or pixels, resizing=names.resizing or resizing)


def names_of_inputs(model: str | os.PathLike[str] | ModelProto) -> DataNames:
    """Read the names beside a model without its labels: those of a model with a new head."""
    return replace(read_names(ModelFile.load(model)), labels=None)


def _read_file(model: Path) -> DataNames | None:
    """Read the names beside a model or an adapter; ``None`` where there is no file."""
    path = names_file(model)
    if not os.path.lexists(path):
        return None
    try:
        return _parsed(read_text(path), repr(str(path)))
    except (OSError, RefusedFileError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ModelError(f"The labels in {str(path)!r} cannot be read: {reason}.") from error


def _parsed(text: str, where: str) -> DataNames:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise ModelError(f"The labels in {where} cannot be read: {error}.") from error
    try:
        return DataNames.of_record(found)
    except ValueError:
        raise ModelError(
            f"{where} must be a JSON list of strings, the labels of the classes in order, or an object with 'labels', "
            "'columns', the names of columns by input, and of images 'mean' and 'std', 'resize', 'crop' and 'resample'."
        ).about(where) from None


def names_of_checkpoint(metadata: Mapping[str, Any]) -> DataNames:
    """Read the names in a checkpoint."""
    written = metadata.get("fingerprint")
    found = written if isinstance(written, dict) else {}
    pixels = metadata.get("pixels")
    record = {
        "columns": found.get("columns"),
        "left_out": metadata.get("left_out"),
        "labels": found.get("labels"),
        "kept": metadata.get("kept"),
        **(pixels if isinstance(pixels, dict) else {}),
    }
    try:
        return DataNames.of_record({key: value for key, value in record.items() if value})
    except ValueError:
        return DataNames()


def recorded_labels(model: ModelFile) -> tuple[str, ...]:
    """Return the labels of the classes as another tool recorded them; () where none did."""
    texts = [entry.value for entry in model.proto.metadata_props if entry.key in _ENTRIES_OF_LABELS]
    found = (_in_order(_literal(text)) for text in texts)
    own = next((labels for labels in found if labels), ()) or _labels_of_nodes(model.proto)
    return own or _in_order(read_settings(model.folder, "config.json").get("id2label"))


_LABELS_OF_NODES: Final = ("classlabels_strings", "classlabels_ints", "classlabels_int64s")


def _labels_of_nodes(model: ModelProto) -> tuple[str, ...]:
    """Return the labels that a classifier of ``ai.onnx.ml``, or the selection of a label from a list, gives out."""
    for node in model.graph.node if any(item.domain == MACHINE_LEARNING_DOMAIN for item in model.opset_import) else ():
        if node.domain != MACHINE_LEARNING_DOMAIN:
            continue
        listed: list[Any] = []
        if node.op_type == "ArrayFeatureExtractor":
            tensors = (tensor for tensor in model.graph.initializer if tensor.name == node.input[0])
            listed = next((numpy_helper.to_array(tensor).ravel().tolist() for tensor in tensors), [])
        for attribute in node.attribute:
            if attribute.name in _LABELS_OF_NODES:
                listed = listed or list(attribute.strings or attribute.ints)
        labels = tuple(each.decode() if isinstance(each, bytes) else str(each) for each in listed)
        if len(set(labels)) == len(labels) > 1:
            return labels
    return ()


_ENTRIES_OF_LABELS: Final = ("names", "labels", "classes", "class_names", "id2label")


def _literal(text: str) -> object:
    """Return the value of a text in JSON or Python's notation; ``None`` where it has neither."""
    with contextlib.suppress(ValueError):
        return parse_json(text)
    with contextlib.suppress(ValueError):
        found: object = read_literal(text)
        return found
    return None


def _in_order(found: object) -> tuple[str, ...]:
    """Return the texts of a list, or of a mapping from class index; () for another value."""
    if isinstance(found, dict):
        by_index = {str(index): label for index, label in found.items()}
        found = [by_index.get(str(index)) for index in range(len(found))]
    return tuple(found) if isinstance(found, list) and _is_list_of_texts(found) else ()


_FILE: Final = "preprocessor_config.json"
"""A file that Hugging Face writes beside a model of images."""

_FOLLOWED: Final = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb", "do_reduce_labels"}
"""Steps that are followed, or that change nothing of the images that are read."""

_BY_SHORTEST_EDGE: Final = ("Bit", "CLIP", "ChineseCLIP", "ConvNext", "Levit", "MobileNet", "MobileViT", "PoolFormer")
"""Beginnings of the types whose size, where it is one number, is that of the shorter edge."""

_WHOLE_EDGE: Final = 384
"""From this size on, ConvNext's images are resized without a crop."""


_LEAST_SHARE: Final = 0.1
"""Of an image, which a crop keeps; those of models are from 0.85 to 1."""


def read_settings(folder: Path | None, name: str) -> dict[str, Any]:
    """Return the settings in a JSON file of a model's folder; {} without one that can be read."""
    for place in [] if folder is None else places_of_settings(folder):
        with contextlib.suppress(OSError, ValueError):
            found = read_json(place / name, finite=False)
            if isinstance(found, dict):
                return found
    return {}


def read_preprocessor(folder: Path | None) -> tuple[Pixels | None, Resizing | None]:
    """Return the normalization and the size of images that the file says; ``None`` where it leaves them open."""
    config = read_settings(folder, _FILE)
    if not config.keys() & {"image_mean", "image_processor_type", "size", "crop_size"}:
        return None, None
    others = sorted(key for key, value in config.items() if key.startswith("do_") and value and key not in _FOLLOWED)
    if config.get("rescale_offset"):
        others.append("rescale_offset")
    besides = f", except {', '.join(others)}, which is not followed" if others else ""
    return _normalization(config, f"as {_FILE} beside the model says{besides}"), _resizing(config)


def _normalization(config: Mapping[str, Any], reason: str) -> Pixels | None:
    if "do_normalize" not in config:
        return None
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    if not is_number(factor) or factor <= 0:
        return None
    scale = 1 / (255 * factor)  # of the numbers that mean and deviation are in
    record: dict[str, Any] = {"mean": [0.0], "std": [1.0]}
    if config["do_normalize"]:
        record = {"mean": config.get("image_mean"), "std": config.get("image_std")}
    with contextlib.suppress(ValueError):
        found = Pixels.of_record(record)
        mean, std = tuple(each * scale for each in found.mean), tuple(each * scale for each in found.std)
        return Pixels(mean, std, reason)
    return None


def _resizing(config: Mapping[str, Any]) -> Resizing | None:
    edges, crop = None, _sides(config.get("crop_size")) if config.get("do_center_crop") else None
    if config.get("do_resize"):
        kind = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
        edges, crop = _edges(str(kind), config, crop)
        if edges is None:
            return None
    if edges is None and crop is None:
        return None
    number = config.get("resample", 2)
    if not isinstance(number, int) or not 0 <= number < len(RESAMPLING):
        return None
    return Resizing(edges or (), crop, RESAMPLING[number])


def _edges(
    kind: str, config: Mapping[str, Any], crop: tuple[int, int] | None
) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
    """Return the edges after resizing, the shorter one alone where the ratio is kept, and the crop."""
    size, share = config.get("size"), config.get("crop_pct")
    if is_edge(size) and kind.startswith(_BY_SHORTEST_EDGE):
        size = {"shortest_edge": size}
    if isinstance(size, dict) and size.keys() == {"shortest_edge"}:
        edge = size["shortest_edge"]
        if not is_edge(edge):
            return None, crop
        if kind.startswith("ConvNext"):
            if edge >= _WHOLE_EDGE:
                return (edge, edge), None
            share, crop = share or 224 / 256, (edge, edge)
        elif kind.startswith("Levit"):
            share = 224 / 256
        if share is not None:
            edge = int(edge / share) if is_number(share) and _LEAST_SHARE <= share <= 1 else None
        return (None if edge is None else (edge,)), crop
    return (None if share else _sides(size)), crop


def _sides(size: object) -> tuple[int, int] | None:
    """Return height and width of a size; ``None`` where it has another form."""
    height, width = (size.get("height"), size.get("width")) if isinstance(size, dict) else (size, size)
    return (height, width) if is_edge(height) and is_edge(width) else None
