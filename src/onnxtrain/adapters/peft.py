"""PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.adapters.adapter import (
    A,
    Adapter,
    Array,
    B,
    Entry,
    check_float,
    checked,
    flag_in,
    integral,
    mapping_in,
    number_in,
    rank_in,
    text_in,
)
from onnxtrain.adapters.checkpoint import Checkpoint
from onnxtrain.data.files import map_safetensors
from onnxtrain.errors import DataError, ModelError
from onnxtrain.errors._internal import ignored_warnings
from onnxtrain.model_file.small_files import read_json
from onnxtrain.model_file.writing import write_files

CONFIG, WEIGHTS, MANIFEST = "adapter_config.json", "adapter_model.safetensors", "onnxtrain.json"
COUNTER = "num_batches_tracked"
"""Batch normalization's number of batches, which no ONNX model has."""

WRAPPED = ".base_layer"
"""End of PEFT's name of a module that an adapter wraps."""

_PREFIX = "base_model.model."
_BASE_MODEL, _TASK = "base_model_name_or_path", "task_type"
_ENDS = {
    A: "a",
    B: "b",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}

_MUTATING = ("pissa", "olora", "corda", "lora_ga")
"""Initializations with which PEFT changes the weights of the base."""

_NESTED = re.compile(r"\)\s*[*+{]")
"""Regular expressions that repeat a group, which may contain a repetition."""

_EMBEDDING_ENDS = (".lora_embedding_A", ".lora_embedding_B")


def read_folder(folder: Path) -> Adapter:
    """Read the adapter of a PEFT folder."""
    config = _config(folder)
    tensors = _tensors(folder)
    found: dict[str, dict[str, Array]] = {}
    full: dict[str, Array] = {}
    for name, array in tensors.items():
        end = next((end for end in sorted(_ENDS, key=len, reverse=True) if name.endswith(end)), None)
        if name.endswith(f".{COUNTER}"):
            continue
        if end is None and ".lora_" in name:
            raise ModelError(
                f"{str(folder)!r} has a tensor {name!r}, which is no matrix of a low-rank adapter; train it without."
            ).about(str(folder), got=name)
        check_float(array, repr(name), str(folder))
        if end is None:
            full[name.removeprefix(_PREFIX)] = np.array(array)
            continue
        layer = name.removeprefix(_PREFIX).removesuffix(end)
        found.setdefault(layer, {})[_ENDS[end]] = array.astype(np.promote_types(array.dtype, np.float32))
    label = str(folder)
    rslora = flag_in(config.get("use_rslora"), "use_rslora", label)
    rank, alpha = rank_in(config.get("r"), "r", label), number_in(config.get("lora_alpha"), "lora_alpha", label)
    ranks = {
        key: rank_in(value, name, label) for key, (name, value) in _patterns(config, "rank_pattern", label).items()
    }
    patterns = _patterns(config, "alpha_pattern", label)
    alphas = {key: number_in(value, name, label) for key, (name, value) in patterns.items()}
    entries = {}
    for layer, parts in found.items():
        own = _by_pattern(ranks, layer, rank)
        scale = _by_pattern(alphas, layer, alpha) / (np.sqrt(own) if rslora else own)
        entries[layer] = _entry(label, layer, parts, float(scale))
        if all(array.ndim >= 2 for array in (entries[layer].a, entries[layer].b)) and entries[layer].rank != own:
            raise ModelError(
                f"{label!r} has the rank {own} for {layer!r}, but matrices of the rank {entries[layer].rank}; its "
                "settings belong to another adapter."
            )
    if not entries:
        raise ModelError(f"{label!r} has an adapter for no layer.")
    dropout = number_in(config.get("lora_dropout") or 0.0, "lora_dropout", label, least=0.0, below=1.0)
    checkpoint = Checkpoint(*(text_in(config.get(name), name, label) for name in (_BASE_MODEL, _TASK)))
    base, trained = _manifest(folder)
    adapter = Adapter(entries, rank, alpha, rslora, dropout, base, False, {}, full, trained, {}, checkpoint)
    return checked(adapter, label)


def _config(folder: Path) -> dict[str, Any]:
    """Return the adapter's settings."""
    path = folder / CONFIG
    try:
        config = read_json(path)
    except FileNotFoundError:
        raise ModelError(f"{str(folder)!r} has no {CONFIG}, so it is not an adapter that PEFT saved.") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{str(path)!r} cannot be read: {reason_of(error)}.") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ModelError(f"{str(path)!r} has 'peft_type' = {kind!r}; it needs 'LORA'.")
    if config.get("r") is None or config.get("lora_alpha") is None:
        raise ModelError(f"{str(path)!r} needs numbers for 'r' and 'lora_alpha'.")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_MUTATING):
        raise ModelError(
            f"{str(path)!r} has 'init_lora_weights' = {init!r}, for which PEFT changed the weights of the base model; "
            "save the adapter with path_initial_model_for_weight_conversion=, which makes it fit the original weights."
        ).about(str(path), got=init)
    return config


def _tensors(folder: Path) -> Mapping[str, Array]:
    path = folder / WEIGHTS
    if not os.path.lexists(path):
        raise ModelError(f"{str(folder)!r} has no {WEIGHTS}; save the adapter with safe_serialization=True.")
    try:
        return map_safetensors(path, may_be_empty=True)
    except DataError as error:
        raise ModelError(str(error)) from error


def _manifest(folder: Path) -> tuple[Mapping[str, Any] | None, tuple[str, ...] | None]:
    """Return the manifest's description of the base model and the names of tensors; ``None`` without a manifest."""
    path = folder / MANIFEST
    try:
        found = read_json(path)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{str(path)!r} cannot be read: {reason_of(error)}; remove it to read the adapter without its manifest."
        ) from error
    base, names = (found.get("base"), found.get("tensors")) if isinstance(found, dict) else (found, None)
    trained = tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()
    return None if base is None else mapping_in(base, "base", str(path)), trained


def reason_of(error: Exception) -> str:
    """Return why a file cannot be read."""
    return str((isinstance(error, OSError) and error.strerror) or error)


def _patterns(config: Mapping[str, Any], option: str, label: str) -> dict[re.Pattern[str], tuple[str, Any]]:
    """Compile the patterns of ``rank_pattern`` or ``alpha_pattern``: regular expressions for ends of paths."""
    found = {}
    for pattern, value in mapping_in(config.get(option), option, label).items():
        if _NESTED.search(pattern):
            raise ModelError(f"{label!r} has {option!r} for {pattern!r}, which repeats a group; name the layers.")
        try:
            with ignored_warnings():  # of syntax that a later Python may read differently
                found[re.compile(rf"(.*\.)?({pattern})$")] = pattern, value
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ModelError(f"{label!r} has {option!r} for {pattern!r}, which is no pattern: {error}.") from None
    return found


def _by_pattern(patterns: Mapping[re.Pattern[str], float], layer: str, default: float) -> float:
    """Return the value of the first pattern that matches a layer's name."""
    return next((value for pattern, value in patterns.items() if pattern.match(layer)), default)


def _entry(label: str, layer: str, parts: Mapping[str, Array], scale: float) -> Entry:
    if {"embedding_a", "embedding_b"} <= parts.keys():
        a, b = (np.ascontiguousarray(parts[name].T) for name in ("embedding_a", "embedding_b"))
        return Entry(a, b, scale, embedding=True)
    missing = [name for name in ("a", "b") if name not in parts]
    if missing:
        raise ModelError(f"{label!r} has no lora_{missing[0].upper()} for {layer!r}.")
    a, b, magnitude = parts["a"], parts["b"], parts.get("magnitude")
    if a.ndim == 2:
        a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    return Entry(a, b, scale, None if magnitude is None else magnitude.reshape(-1))


def write_folder(folder: Path, adapter: Adapter, full: Mapping[str, Array]) -> None:
    """Write an adapter as a PEFT folder."""
    from safetensors.numpy import save

    tensors: dict[str, Array] = {}
    for name, entry in adapter.entries.items():
        layer = _PREFIX + (entry.alias or name)
        if entry.is_convolution:
            tensors[layer + A], tensors[layer + B] = entry.a, entry.b
        else:
            ends = _EMBEDDING_ENDS if entry.embedding else (A, B)
            for end, array in zip(ends, (entry.a, entry.b), strict=True):
                tensors[layer + end] = np.ascontiguousarray(array.T)
        if entry.magnitude is not None:
            ones = (1,) * (entry.a.ndim - 2)
            shape = (1, -1, *ones) if entry.is_convolution else (-1,)
            tensors[f"{layer}.lora_magnitude_vector"] = entry.magnitude.reshape(shape)
    tensors |= {_PREFIX + name: array for name, array in full.items()}
    content = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    write_files(
        {
            folder / WEIGHTS: save(content, {"format": "pt"}),
            folder / CONFIG: _json(_config_of(adapter, full)),
            folder / MANIFEST: _json({"base": adapter.base, "tensors": sorted(adapter.tensors)}),
        }
    )


def _config_of(adapter: Adapter, full: Iterable[str]) -> dict[str, Any]:
    """Return PEFT's configuration; layers with another rank or scale appear in its patterns."""
    names = sorted(entry.alias or name for name, entry in adapter.entries.items())
    patterns = {
        option: {_key(name, names): value for name, value in found.items()}
        for option, found in adapter.patterns().items()
    }
    checkpoint = adapter.checkpoint.for_layers(names)
    modules = {checkpoint.saved_module(name.rpartition(".")[0]) for name in full}
    biased = {name for name in modules if name.endswith(WRAPPED)}
    return {
        "peft_type": "LORA",
        _TASK: checkpoint.task_type or None,
        _BASE_MODEL: checkpoint.base_model or None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": integral(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "target_modules": names,
        **patterns,
        "bias": "lora_only" if biased else "none",
        "fan_in_fan_out": False,
        "modules_to_save": sorted(modules - biased) or None,
        "init_lora_weights": True,
    }


def _key(name: str, names: Sequence[str]) -> str:
    """Return PEFT's pattern for a layer: its name, which also matches the end of a path unless another one ends so."""
    key = "".join(
        character if character.isalnum() or character in "._-/" else re.escape(character) for character in name
    )
    return f"^{key}" if any(other.endswith(f".{name}") for other in names) else key


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
