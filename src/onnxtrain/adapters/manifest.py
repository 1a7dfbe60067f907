"""Identity of an adapter's base model in the manifest, and its check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnxtrain.adapters.layers import Layer
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.description import describe_graph


def describe_base(file: ModelFile, layers: Iterable[Layer]) -> dict[str, Any]:
    """Hash a model's graph and the weights of the adapted layers."""
    return {"graph": describe_graph(file), "weights": _weights(file, layers)}


def check_base(base: Mapping[str, Any] | None, file: ModelFile, layers: Iterable[Layer], adapter: str) -> None:
    """Check that an adapter belongs to a model; an adapter without a manifest passes."""
    if base is None:
        return
    advice = "give the model that it was trained on"
    if base.get("graph") != describe_graph(file):
        raise ModelError(f"{adapter!r} was made for another model: this one has another graph; {advice}.").about(
            adapter
        )
    known = base.get("weights")
    for name, digest in _weights(file, layers).items():
        if not isinstance(known, Mapping) or known.get(name) != digest:
            raise ModelError(f"{adapter!r} was made for another model: the weight {name!r} differs; {advice}.").about(
                name
            )


def _weights(file: ModelFile, layers: Iterable[Layer]) -> dict[str, str]:
    found = {}
    for name in dict.fromkeys(str(layer.weight.name) for layer in layers):
        content = Fingerprint()
        content.add_large_array(file.value(name))
        found[name] = content.digest()
    return found
