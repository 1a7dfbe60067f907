"""The manifest of an adapter, which identifies its base model, and the check of a model against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from onnxtrain.adapters.layers import Layer
from onnxtrain.data.hashing import Fingerprint
from onnxtrain.errors import ModelError
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.description import describe_graph


def describe_base(file: ModelFile, layers: Iterable[Layer]) -> dict[str, Any]:
    """Hashes of a model's graph, and of the weights of the layers that are adapted."""
    return {"graph": describe_graph(file), "weights": _weights(file, layers)}


def check_base(said: Mapping[str, Any] | None, file: ModelFile, layers: Iterable[Layer], adapter: str) -> None:
    """Refuse an adapter that was made for another model, where it says for which.

    Args:
        said: What its manifest says of its base; ``None`` where there is no manifest.
        file: The model.
        layers: The layers that the adapter is for.
        adapter: What the error calls it.

    Raises:
        ModelError: It was made for another model.
    """
    if said is None:
        return
    way_out = "give the model that it was trained on"
    if said.get("graph") != describe_graph(file):
        raise ModelError(f"{adapter!r} was made for another model: this one has another graph; {way_out}.")
    known = said.get("weights")
    for name, digest in _weights(file, layers).items():
        if not isinstance(known, Mapping) or known.get(name) != digest:
            raise ModelError(f"{adapter!r} was made for another model: the weight {name!r} differs; {way_out}.")


def _weights(file: ModelFile, layers: Iterable[Layer]) -> dict[str, str]:
    found = {}
    for name in dict.fromkeys(str(layer.weight.name) for layer in layers):
        content = Fingerprint()
        content.add_large_array(file.value(name))
        found[name] = content.digest()
    return found
