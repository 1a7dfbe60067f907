"""Layers that can be appended to a model."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnxtrain.errors import OptionError
from onnxtrain.errors._internal import public_names
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.layers import orientation
from onnxtrain.graph.operands import Value

__all__ = ["Activation", "Cosine", "Dropout", "Flatten", "GlobalAveragePool", "Layer", "Linear", "Softmax"]

__dir__ = public_names(__name__)

Weights = Callable[[str, npt.NDArray[Any]], Value]
"""Creates a weight of the model from its short name (``weight``, ``bias``) and its initial values."""


class Layer(abc.ABC):
    """A layer with one input: its computation and its weights."""

    name: str = "layer"
    """Prefix of the names of its weights: ``{name}.weight``."""

    @abc.abstractmethod
    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit the layer.

        Args:
            op: Builder of the graph.
            x: Input of the layer.
            weights: Creates its weights.
            random: Generator of their initial values.
        """


def uniform(random: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> npt.NDArray[np.float32]:
    """Initial values of a weight, uniform within ±1 / sqrt(fan_in), as in PyTorch's ``Linear`` and ``Conv``."""
    bound = 1 / np.sqrt(max(fan_in, 1))
    return random.uniform(-bound, bound, shape).astype(np.float32)


@checks_arguments
@dataclass(frozen=True)
class Linear(Layer):
    """y = x · Wᵀ + b over the last axis of x.

    Weights are initialized uniformly within ±1 / sqrt(features), as in PyTorch.

    Attributes:
        units: Size of y's last axis, at least 1.
        bias: True to add b.
        name: Prefix of the weights: ``{name}.weight`` and ``{name}.bias``.
    """

    units: int
    bias: bool = True
    name: str = "head"

    def __post_init__(self) -> None:
        if isinstance(self.units, bool) or not isinstance(self.units, int | np.integer) or self.units < 1:
            raise OptionError(f"units of Linear is {self.units!r}; it must be an integer of at least 1.")

    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit a Gemm for a matrix, MatMul and Add for more axes."""
        features = None if x.shape is None or not x.shape else x.shape[-1]
        if not isinstance(features, int):
            raise OptionError(
                f"Linear reads {x.name!r}, whose last axis has no fixed size (its shape is {x.shape}); append "
                "Flatten() or GlobalAveragePool() before it, or export the model with that size fixed."
            )
        values = uniform(random, (int(self.units), features), features)
        offset = uniform(random, (int(self.units),), features) if self.bias else None
        if x.rank == 2:
            inputs = [x, weights("weight", values)]
            if offset is not None:
                inputs.append(weights("bias", offset))
            return op.Gemm(*inputs, **orientation())
        y = op.MatMul(x, weights("weight", np.ascontiguousarray(values.T)))
        return y if offset is None else op.Add(y, weights("bias", offset))


@checks_arguments
@dataclass(frozen=True)
class Cosine(Layer):
    """Cosines [N, classes] between embeddings [N, D] and the centre of each class, for the losses ArcFace and CosFace.

    y_ij = x_i · w_j / (|x_i| |w_j|); a vector of length 0 has the cosine 0. After the training, :func:`onnxtrain.cut`
    at the embeddings takes the layer off. The centres are initialized with normal values.

    Attributes:
        classes: The number of classes, at least 1.
        name: Prefix of the centres: ``{name}.weight``.
    """

    classes: int
    name: str = "head"

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int | np.integer) or self.classes < 1:
            raise OptionError(f"classes of Cosine is {self.classes!r}; it must be an integer of at least 1.")

    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit two normalizations and a MatMul."""
        features = None if x.shape is None or x.rank != 2 else x.shape[1]
        if not isinstance(features, int):
            raise OptionError(
                f"Cosine reads {x.name!r} of shape {x.shape}, but needs embeddings [batch, features] with a fixed "
                "number of features; append Flatten() or GlobalAveragePool() before it."
            )
        centres = weights("weight", random.normal(size=(int(self.classes), features)))
        unit = op.LpNormalization(centres, axis=1, p=2)
        return op.MatMul(op.LpNormalization(x, axis=1, p=2), op.Transpose(unit, perm=[1, 0]))


@checks_arguments
@dataclass(frozen=True)
class Activation(Layer):
    """An operator of ONNX with one input and no weights, such as ``Relu``, ``Tanh``, ``Sigmoid``, ``Softplus``.

    Attributes:
        operator: Its name in ONNX.
    """

    operator: str

    def __post_init__(self) -> None:
        if self.operator not in _ACTIVATIONS:
            raise OptionError(f"Activation({self.operator!r}) is none of {', '.join(sorted(_ACTIVATIONS))}.")

    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit the operator."""
        _check_opset(op, self.operator, _ACTIVATIONS[self.operator])
        return op.several(self.operator, x, outputs=1)[0]


_ACTIVATIONS = {
    "Relu": 1,
    "Sigmoid": 1,
    "Tanh": 1,
    "Softplus": 1,
    "Elu": 1,
    "Selu": 1,
    "LeakyRelu": 1,
    "HardSigmoid": 1,
    "HardSwish": 14,
    "Mish": 18,
    "Gelu": 20,
}
"""Operators, and the first opset that has them."""


@checks_arguments
@dataclass(frozen=True)
class Softmax(Layer):
    """Probabilities along an axis.

    Attributes:
        axis: The class axis, -1 the last.
    """

    axis: int = -1

    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit the operator, which worked on a flattened matrix before opset 13."""
        last = x.rank is not None and self.axis in (-1, x.rank - 1)
        if op.opset < 13 and not last:
            raise OptionError(f"Softmax(axis={self.axis}) needs opset 13, the model has {op.opset}; upgrade it.")
        axis = self.axis if op.opset >= 13 or x.rank is None else x.rank - 1
        return op.Softmax(x, axis=axis)


@checks_arguments
@dataclass(frozen=True)
class Flatten(Layer):
    """Flatten all axes but the first."""

    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit the operator."""
        return op.Flatten(x, axis=1)


@checks_arguments
@dataclass(frozen=True)
class GlobalAveragePool(Layer):
    """The mean over all axes after the channels: [N, C, H, W] becomes [N, C]."""

    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit the pooling and a Flatten."""
        if x.rank is not None and x.rank < 3:
            raise OptionError(f"GlobalAveragePool reads {x.name!r} of shape {x.shape}; it needs at least three axes.")
        return op.Flatten(op.GlobalAveragePool(x), axis=1)


@checks_arguments
@dataclass(frozen=True)
class Dropout(Layer):
    """Dropout, which is active only in training with ``dropout=True``.

    Attributes:
        ratio: The fraction of dropped elements, at least 0 and below 1.
    """

    ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise OptionError(f"ratio of Dropout is {self.ratio!r}; it must be at least 0 and below 1.")

    def build(self, op: Builder, x: Value, weights: Weights, random: np.random.Generator) -> Value:
        """Emit the operator; its ratio was an attribute before opset 12."""
        if op.opset < 12:
            return op.Dropout(x, ratio=float(self.ratio))
        return op.Dropout(x, np.float32(self.ratio))


def _check_opset(op: Builder, operator: str, since: int) -> None:
    if op.opset < since:
        raise OptionError(f"{operator} came with opset {since}, and the model has opset {op.opset}; upgrade it.")
