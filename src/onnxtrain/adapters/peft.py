"""Folders of adapters as PEFT writes and reads them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.errors import ModelError
from onnxtrain.model.writing import AtomicFiles

CONFIG, WEIGHTS, MANIFEST = "adapter_config.json", "adapter_model.safetensors", "onnxtrain.json"
_PREFIX = "base_model.model."
_ENDS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}

_LINEAR_ENDS = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING_ENDS = (".lora_embedding_A", ".lora_embedding_B")


def read_folder(folder: Path) -> Adapter:
    """The adapter of a folder.

    Raises:
        ModelError: It has none, or one of a kind that is not known here.
    """
    config = _config(folder)
    tensors = _tensors(folder)
    found: dict[str, dict[str, Array]] = {}
    for name, array in tensors.items():
        end = next((end for end in sorted(_ENDS, key=len, reverse=True) if name.endswith(end)), None)
        if end is None:
            raise ModelError(
                f"{str(folder)!r} has a tensor {name!r}, which belongs to no low-rank adapter; adapters with biases or "
                "whole modules of their own cannot be taken over."
            )
        layer = name.removeprefix(_PREFIX).removesuffix(end)
        found.setdefault(layer, {})[_ENDS[end]] = array.astype(np.promote_types(array.dtype, np.float32))
    entries = {layer: _entry(str(folder), layer, parts, _scale(config, layer)) for layer, parts in found.items()}
    if not entries:
        raise ModelError(f"{str(folder)!r} has an adapter for no layer.")
    return Adapter(
        entries,
        int(config["r"]),
        float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        base=_base(folder),
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{str(folder)!r} has no {CONFIG}, so it is no adapter that PEFT has written.") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{str(path)!r} cannot be read ({error}).") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ModelError(f"{str(path)!r} describes an adapter of the kind {kind!r}; LORA is what can be taken over.")
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        raise ModelError(f"{str(path)!r} lacks a number of 'r' or 'lora_alpha'.")
    return config


def _tensors(folder: Path) -> Mapping[str, Array]:
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    if not path.exists():
        raise ModelError(f"{str(folder)!r} has no {WEIGHTS}; save the adapter with safe_serialization=True.")
    try:
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise ModelError(f"{str(path)!r} cannot be read ({error}).") from error


def _base(folder: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("base") if isinstance(found, dict) else None


def _scale(config: Mapping[str, Any], layer: str) -> float:
    rank = _by_pattern(config.get("rank_pattern"), layer, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), layer, config["lora_alpha"])
    return float(alpha / np.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _by_pattern(patterns: object, layer: str, default: float) -> float:
    """What a pattern says of a layer: its name, or the end of its path."""
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if layer == pattern or layer.endswith(f".{pattern.removeprefix('^')}"):
            return float(value)
    return default


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


def write_folder(folder: Path, adapter: Adapter) -> None:
    """Write an adapter as PEFT reads it.

    Raises:
        ModelError: It cannot be written.
    """
    from safetensors.numpy import save

    tensors: dict[str, Array] = {}
    for name, entry in adapter.entries.items():
        layer = _PREFIX + (entry.alias or name)
        if entry.is_convolution:
            tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"] = entry.a, entry.b
        else:
            ends = _EMBEDDING_ENDS if entry.embedding else _LINEAR_ENDS
            for end, array in zip(ends, (entry.a, entry.b), strict=True):
                tensors[layer + end] = np.ascontiguousarray(array.T)
        if entry.magnitude is not None:
            ones = (1,) * (entry.a.ndim - 2)
            shape = (1, -1, *ones) if entry.is_convolution else (-1,)
            tensors[f"{layer}.lora_magnitude_vector"] = entry.magnitude.reshape(shape)
    content = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with AtomicFiles() as files:
        for name, data in (
            (WEIGHTS, save(content, {"format": "pt"})),
            (CONFIG, _json(_config_of(adapter))),
            (MANIFEST, _json({"base": adapter.base})),
        ):
            with files.create(folder / name) as file:
                file.write(data)


def _config_of(adapter: Adapter) -> dict[str, Any]:
    """The settings as PEFT has them; a layer of another rank or scale than most has its own."""
    entries = {entry.alias or name: entry for name, entry in adapter.entries.items()}
    ranks = {name: entry.rank for name, entry in entries.items() if entry.rank != adapter.rank}
    root = np.sqrt if adapter.rslora else float
    alphas = {name: entry.scale * float(root(entry.rank)) for name, entry in entries.items()}
    usual = adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": _whole(usual),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "target_modules": sorted(entries),
        "rank_pattern": ranks,
        "alpha_pattern": {name: _whole(alpha) for name, alpha in alphas.items() if abs(alpha - usual) > 1e-6 * usual},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }


def _whole(number: float) -> float:
    """A whole number where it is one, as PEFT writes it."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-6 * max(1.0, abs(number)) else number


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
