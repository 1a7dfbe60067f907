"""Adapters: small matrices that are trained beside frozen weights, and the files that hold them."""

import onnxtrain.graph.upstream.lazy_sympy  # noqa: F401 - before any module here imports onnx-ir
from onnxtrain.adapters.lora import Lora
from onnxtrain.adapters.merging import Cost
from onnxtrain.adapters.operations import (
    AdaptableLayer,
    adaptable_layers,
    add_weighted,
    convert_adapter,
    describe_adapter,
    merge_adapter,
)
from onnxtrain.adapters.slots import add_slots
from onnxtrain.errors._internal import public_names

__all__ = [
    "AdaptableLayer",
    "Cost",
    "Lora",
    "adaptable_layers",
    "add_slots",
    "add_weighted",
    "convert_adapter",
    "describe_adapter",
    "merge_adapter",
]

__dir__ = public_names(__name__)
