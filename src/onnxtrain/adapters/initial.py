"""Initial values of adapters: random, principal singular values (PiSSA), the error of quantization (LoftQ)."""

from __future__ import annotations

import math
import os
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array, Entry
from onnxtrain.adapters.fitting import name_of
from onnxtrain.adapters.layers import Layer, LayerPart, Part, find_layers
from onnxtrain.adapters.merging import is_quantized
from onnxtrain.adapters.values import columns_of, matrix
from onnxtrain.errors import OptionError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.file import ModelFile

Init = Literal["kaiming", "gaussian", "pissa", "loftq"]
INITS: tuple[Init, ...] = ("kaiming", "gaussian", "pissa", "loftq")


def random_entry(
    layer: Layer, part: Part | None, rank: int, scale: float, init: Init, random: np.random.Generator
) -> Entry:
    """Return an adapter that adds zero: A random and B zero, for embeddings the reverse."""
    dtype, outputs = _dtype(layer), layer.outputs if part is None else part.size
    if layer.is_embedding:
        a = np.zeros((layer.inputs, rank), dtype)
        return Entry(a, random.standard_normal((rank, outputs)).astype(dtype), scale, embedding=True)
    shape = (rank, layer.inputs, *layer.window) if layer.window else (layer.inputs, rank)
    if init == "gaussian":
        a = (random.standard_normal(shape) / rank).astype(dtype)
    else:
        bound = 1 / math.sqrt(math.prod((layer.inputs, *layer.window)))
        a = random.uniform(-bound, bound, shape).astype(dtype)
    ones = (1,) * len(layer.window)
    return Entry(a, np.zeros((outputs, rank, *ones) if layer.window else (rank, outputs), dtype), scale)


def principal_entry(layer: Layer, part: Part | None, rank: int, scale: float) -> Entry:
    """Return the adapter of a weight's largest singular values: scale A B is its best approximation of this rank."""
    return _entry_of(layer, part, columns_of(layer, part, matrix(layer)), rank, scale)


class Residuals:
    """Errors of quantization by layer: the original weight minus the quantized one."""

    def __init__(self, original: str | os.PathLike[str]) -> None:
        self._label = str(original)
        self._layer_parts: dict[str, LayerPart] = {}
        for layer in find_layers(infer_shapes(ModelFile.load(original).training_model())):
            for name in layer.names:
                self._layer_parts.setdefault(name, (layer, None))
            for part in layer.parts:
                self._layer_parts.setdefault(part.name, (layer, part))

    def entry(self, layer: Layer, part: Part | None, rank: int, scale: float) -> Entry | None:
        """Return the best adapter of this rank for a layer's residual; ``None`` for a layer that is not quantized."""
        if not is_quantized(layer):
            return None
        weight = columns_of(layer, part, matrix(layer))
        names = layer.names if part is None else (part.name,)
        original = next((self._layer_parts[name] for name in names if name in self._layer_parts), None)
        if original is None:
            raise OptionError(
                f"{self._label!r} has no layer {name_of(layer, part)!r}, so that the error of its quantization is not "
                "known; give the float model that the quantized one was made from, or take another init."
            ).about(self._label, wanted=name_of(layer, part))
        before = columns_of(*original, matrix(original[0]))
        if before.shape != weight.shape:
            raise OptionError(
                f"{self._label!r} has the weight of {name_of(layer, part)!r} in the shape {before.shape}, the "
                f"quantized model in {weight.shape}; give the float model that the quantized one was made from."
            ).about(name_of(layer, part), got=before.shape, wanted=weight.shape)
        return _entry_of(layer, part, before - weight, rank, scale)


def _entry_of(layer: Layer, part: Part | None, weight: Array, rank: int, scale: float) -> Entry:
    """Return the adapter whose scale A B approximates a dense matrix of the layer's form."""
    flat = weight.reshape(len(weight), -1).T if layer.is_convolution else weight
    if rank > min(flat.shape):
        raise OptionError(
            f"rank is {rank}, but the weight of {name_of(layer, part)!r} has only {min(flat.shape)} singular values; "
            "give a smaller rank, or another init."
        )
    a, b = (side.astype(_dtype(layer)) for side in principal(flat, rank, scale))
    if layer.is_convolution:
        a = np.ascontiguousarray(a.T).reshape(rank, layer.inputs, *layer.window)
        b = np.ascontiguousarray(b.T).reshape(-1, rank, *(1,) * len(layer.window))
    return Entry(a, b, scale, embedding=layer.is_embedding)


def principal(weight: Array, rank: int, scale: float = 1.0) -> tuple[Array, Array]:
    """Return A [m, rank] and B [rank, n] in float64 whose scale A B is the best approximation of a matrix [m, n].

    With W = U S V, A = U sqrt(S / scale) and B = sqrt(S / scale) V. The vectors of one side are eigenvectors of the
    smaller of W Wᵀ and Wᵀ W, which takes a fraction of the time of a singular value decomposition. Where a singular
    value is zero, one of the two sides is zero and the other a unit vector, so that gradients do not vanish.
    """
    wide = weight.astype(np.float64)
    transposed = wide.shape[0] > wide.shape[1]
    wide = wide.T if transposed else wide
    squares, vectors = np.linalg.eigh(wide @ wide.T)
    vectors = vectors[:, ::-1][:, :rank]
    values = np.sqrt(np.maximum(squares[::-1][:rank], 0))
    root = np.where(values > 1e-7 * max(float(values[0]), 1e-300), np.sqrt(values / abs(scale)), 1.0)
    left, right = vectors * root, (vectors / root).T @ wide / scale
    return (right.T, left.T) if transposed else (left, right)


def _dtype(layer: Layer) -> type[np.floating]:
    return np.float64 if layer.y.dtype == ir.DataType.DOUBLE else np.float32
