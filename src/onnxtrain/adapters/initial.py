"""Initial values of adapters: random, principal singular values (PiSSA), the error of quantization (LoftQ)."""

from __future__ import annotations

import math
import os
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Array, Entry
from onnxtrain.adapters.layers import Layer, Target, find_layers
from onnxtrain.adapters.merging import is_quantized
from onnxtrain.adapters.values import matrix
from onnxtrain.errors import OptionError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.model_file.file import ModelFile

Init = Literal["kaiming", "gaussian", "pissa", "loftq"]
INITS: tuple[Init, ...] = ("kaiming", "gaussian", "pissa", "loftq")


def random_entry(target: Target, rank: int, scale: float, init: Init, random: np.random.Generator) -> Entry:
    """Return an adapter that adds zero: A random and B zero, for embeddings the reverse."""
    layer, outputs = target.layer, target.outputs
    dtype = _dtype(layer)
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


def principal_entry(target: Target, rank: int, scale: float) -> Entry:
    """Return the adapter of a weight's largest singular values: scale A B is its best approximation of this rank."""
    return _entry_of(target, target.of_weight(matrix(target.layer)), rank, scale)


class Residuals:
    """Errors of quantization by layer: the original weight minus the quantized one."""

    def __init__(self, original: str | os.PathLike[str]) -> None:
        self._label = str(original)
        self._targets: dict[str, Target] = {}
        for layer in find_layers(infer_shapes(ModelFile.load(original).training_model())):
            for name in layer.names:
                self._targets.setdefault(name, Target(layer))
            for part in layer.parts:
                self._targets.setdefault(part.name, Target(layer, part))

    def entry(self, target: Target, rank: int, scale: float) -> Entry | None:
        """Return the best adapter of this rank for a layer's residual; ``None`` for a layer that is not quantized."""
        if not is_quantized(target.layer):
            return None
        weight = target.of_weight(matrix(target.layer))
        names = target.names if target.part is None else (target.name,)
        original = next((self._targets[name] for name in names if name in self._targets), None)
        if original is None:
            raise OptionError(
                f"{self._label!r} has no layer {target.name!r}, so that the error of its quantization is not "
                "known; give the float model that the quantized one was made from, or take another init."
            ).about(self._label, wanted=target.name)
        before = original.of_weight(matrix(original.layer))
        if before.shape != weight.shape:
            raise OptionError(
                f"{self._label!r} has the weight of {target.name!r} in the shape {before.shape}, the "
                f"quantized model in {weight.shape}; give the float model that the quantized one was made from."
            ).about(target.name, got=before.shape, wanted=weight.shape)
        return _entry_of(target, before - weight, rank, scale)


def _entry_of(target: Target, weight: Array, rank: int, scale: float) -> Entry:
    """Return the adapter whose scale A B approximates a dense matrix of the layer's form."""
    layer = target.layer
    flat = weight.reshape(len(weight), -1).T if layer.is_convolution else weight
    if rank > min(flat.shape):
        raise OptionError(
            f"rank is {rank}, but the weight of {target.name!r} has only {min(flat.shape)} singular values; "
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
