"""Adapter files: ``.onnx_adapter``, which ONNX Runtime loads into slots, and PEFT folders.

The tensors of an ``.onnx_adapter`` file are named like the inputs of the model with slots, as Olive's converter writes
them: ``{layer}.lora_A.weight`` [inputs, rank] and ``{layer}.lora_B.weight`` [rank, outputs], which contains the scale;
for DoRA also ``{layer}.lora_gain`` [outputs], magnitudes over norms. A manifest beside it, ``{file}.json``, holds the
settings and hashes of the base model.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters import peft
from onnxtrain.adapters.adapter import (
    GAIN,
    A,
    Adapter,
    Array,
    B,
    Entry,
    check_float,
    checked,
    flag_in,
    mapping_in,
    number_in,
    rank_in,
    text_in,
)
from onnxtrain.adapters.checkpoint import Checkpoint
from onnxtrain.errors import ModelError
from onnxtrain.model_file.small_files import check_regular_file, read_json
from onnxtrain.model_file.writing import check_writable, write_files

SUFFIX = ".onnx_adapter"


def is_adapter_path(path: Path) -> bool:
    """Return whether a path names an adapter: an ONNX Runtime file or a PEFT folder."""
    return path.suffix == SUFFIX or path.is_dir() or not path.suffix


def check_adapter_path(path: Path) -> None:
    """Check before training that an adapter can be written: a file with its manifest, or a PEFT folder."""
    if path.suffix == SUFFIX:
        for file in (path, _manifest_path(path)):
            check_writable(file)
        return
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise ModelError(f"{str(path)!r} cannot be written: {str(existing)!r} is no folder; give another name.")
    for name in (peft.WEIGHTS, peft.CONFIG, peft.MANIFEST):
        check_writable(existing / name)


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read an adapter from its file or folder."""
    path = Path(path)
    if path.is_dir():
        return peft.read_folder(path)
    return _adapter_of(str(path), _read_tensors(path), _read_manifest(_manifest_path(path)))


def _read_tensors(path: Path) -> dict[str, Array]:
    """Read the tensors of an ``.onnx_adapter`` file."""
    import onnxruntime

    try:
        check_regular_file(path)
    except FileNotFoundError as error:
        raise ModelError(
            f"{str(path)!r} does not exist; give an .onnx_adapter file, or a folder that PEFT has written."
        ).about(str(path)) from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{str(path)!r} cannot be read: {peft.reason_of(error)}; give an .onnx_adapter file."
        ) from error
    try:
        values = onnxruntime.AdapterFormat.read_adapter(str(path)).get_parameters()
        return {name: _array(value) for name, value in values.items()}
    except Exception as error:  # ONNX Runtime raises no specific type
        raise ModelError(f"{str(path)!r} is no .onnx_adapter file; give one, or a folder that PEFT has written.").about(
            str(path)
        ) from (error)


def element_types(path: Path) -> dict[str, ir.DataType]:
    """Return the element type of each layer's tensors in an ``.onnx_adapter`` file."""
    arrays = _read_tensors(path).items()
    return {name.removesuffix(A): ir.DataType.from_numpy(array.dtype) for name, array in arrays if A in name}


def write_file(
    path: Path, adapter: Adapter, dtypes: Mapping[str, ir.DataType], gains: Mapping[str, Array] | None = None
) -> None:
    """Write an adapter as an ``.onnx_adapter`` file with its manifest."""
    tensors: dict[str, tuple[Array, ir.DataType]] = {}
    for name, entry in adapter.entries.items():
        dtype = dtypes[name]
        tensors[name + A] = entry.a, dtype
        tensors[name + B] = entry.b * entry.b.dtype.type(entry.scale), dtype
        if entry.magnitude is not None:
            tensors[name + GAIN] = (gains or {})[name], dtype
    for name, array in adapter.tensors.items():
        tensors[name] = array, ir.DataType.from_numpy(array.dtype)
    manifest = {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "rslora": adapter.rslora,
        "dropout": adapter.dropout,
        **adapter.patterns(),
        "scales": {name: entry.scale for name, entry in adapter.entries.items()},
        "embeddings": [name for name, entry in adapter.entries.items() if entry.embedding],
        "aliases": {name: entry.alias for name, entry in adapter.entries.items() if entry.alias},
        "tensors": {name: adapter.aliases.get(name, ()) for name in adapter.tensors},
        "base_model": adapter.checkpoint.base_model,
        "task_type": adapter.checkpoint.task_type,
        "base": adapter.base,
    }
    write_files({path: _exported(tensors), _manifest_path(path): (json.dumps(manifest, indent=1) + "\n").encode()})


def _exported(tensors: Mapping[str, tuple[Array, ir.DataType]]) -> bytes:
    """Serialize an ``.onnx_adapter`` file, through a temporary file, since ONNX Runtime writes to a path only."""
    import onnxruntime

    make = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    kept = {name: np.ascontiguousarray(array.astype(dtype.numpy())) for name, (array, dtype) in tensors.items()}
    bits = {ir.DataType.FLOAT16: np.uint16, ir.DataType.BFLOAT16: np.uint16}
    values = {
        name: make(kept[name].view(bits.get(dtype, kept[name].dtype)), int(dtype))
        for name, (_, dtype) in tensors.items()
    }
    adapter.set_parameters(values)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "adapter")
        adapter.export_adapter(path)
        return Path(path).read_bytes()


def _array(value: Any) -> Array:
    """Copy a tensor of an adapter to an array."""
    if "bfloat16" not in value.data_type():
        return np.array(value.numpy())
    shape = tuple(value.shape())
    size = int(np.prod(shape))
    bits = np.zeros(0, np.uint16)
    if size:
        pointer = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
        bits = np.array(np.ctypeslib.as_array(pointer, (size,)))
    return bits.view(ir.DataType.BFLOAT16.numpy()).reshape(shape)


def _manifest_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest beside an adapter; return an empty one if there is no file."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{str(path)!r} is not an adapter's manifest ({peft.reason_of(error)}); remove it to read the adapter "
            "without its manifest."
        ) from error
    if not isinstance(found, dict):
        raise ModelError(
            f"{str(path)!r} is not an adapter's manifest; remove it to read the adapter without its manifest."
        ).about(str(path))
    return found


def _adapter_of(label: str, arrays: Mapping[str, Array], manifest: Mapping[str, Any]) -> Adapter:
    beside = f"{label}.json"
    scales = mapping_in(manifest.get("scales"), "scales", beside)
    aliases = mapping_in(manifest.get("aliases"), "aliases", beside)
    embeddings = manifest.get("embeddings") or []
    if not isinstance(embeddings, list):
        raise ModelError(
            f"{beside!r} has 'embeddings' that are not a list; remove it to read the adapter without its manifest."
        )
    full = _full_tensors(manifest, beside)
    if missing := [name for name in full if name not in arrays]:
        raise ModelError(f"{label!r} lacks {missing[0]!r}, which its manifest lists; save the adapter again.")
    trained = {name: arrays[name] for name in full}
    arrays = {name: array for name, array in arrays.items() if name not in full}
    for name, array in trained.items():
        check_float(array, repr(name), label)
    entries = {}
    for name, a in arrays.items():
        layer = name.removesuffix(A)
        if layer == name:
            continue
        b = arrays.get(layer + B)
        if b is None:
            raise ModelError(f"{label!r} has {name!r}, but no {layer + B!r}; convert it again.")
        for each, array in ((name, a), (layer + B, b)):
            check_float(array, repr(each), label)
            if array.ndim < 2:
                raise ModelError(f"{label!r} has {each!r} of the shape {array.shape}; it needs a matrix.")
        scale = number_in(scales.get(layer, 1.0), f"scales of {layer}", beside)
        if scale == 0:
            raise ModelError(
                f"{beside!r} has the scale 0 for {layer!r}; remove it to read the adapter without its manifest."
            )
        with np.errstate(over="ignore", invalid="ignore"):  # values that are not finite are refused below
            b = _in_float(b)
            gain = arrays.get(layer + GAIN)
            entries[layer] = Entry(
                _in_float(a),
                b / b.dtype.type(scale),
                scale,
                gain=None if gain is None else _in_float(gain),
                embedding=layer in embeddings,
                alias=str(aliases.get(layer, "")),
            )
    others = [name for name in arrays if not name.endswith((A, B, GAIN))]
    if others or not entries:
        what = f"a tensor {others[0]!r}" if others else "no tensor"
        raise ModelError(f"{label!r} has {what}; an adapter has pairs that end in {A!r} and {B!r}.")
    first = next(iter(entries.values()))
    rank = rank_in(manifest["rank"], "rank", beside) if "rank" in manifest else max(1, first.rank)
    alpha = number_in(manifest["alpha"], "alpha", beside) if "alpha" in manifest else float(rank)
    rslora = flag_in(manifest.get("rslora"), "rslora", beside)
    dropout = number_in(manifest.get("dropout") or 0.0, "dropout", beside, least=0.0, below=1.0)
    base = manifest.get("base")
    base = None if base is None else mapping_in(base, "base", beside)
    checkpoint = Checkpoint(*(text_in(manifest.get(name), name, beside) for name in ("base_model", "task_type")))
    found = Adapter(entries, rank, alpha, rslora, dropout, base, not scales, trained, {}, None, full, checkpoint)
    return checked(found, label)


def _full_tensors(manifest: Mapping[str, Any], label: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the tensors that were trained in full, with their names in the checkpoint if these differ."""
    found = {}
    for name, names in mapping_in(manifest.get("tensors"), "tensors", label).items():
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ModelError(f"{label!r} has {name!r} among its tensors with names that are not a list of texts.")
        found[name] = tuple(names)
    return found


def _in_float(array: Array) -> Array:
    return array if array.dtype == np.float64 else array.astype(np.float32)


def unfolded(adapter: Adapter, scale: float) -> Adapter:
    """Divide B by the scale if the file stores their product; return other adapters unchanged."""
    if not adapter.folded:
        return adapter
    entries = {
        name: replace(entry, b=entry.b / entry.b.dtype.type(scale), scale=scale)
        for name, entry in adapter.entries.items()
    }
    return replace(adapter, entries=entries, folded=False)
