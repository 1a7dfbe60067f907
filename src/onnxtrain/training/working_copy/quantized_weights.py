"""Weights whose integers became numbers: integers and scales made of these, and of logarithms of scales, again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtrain.weights.stored import Stored


@dataclass(frozen=True)
class Layout:
    """How scales lie along a tensor.

    Attributes:
        axis: The axis along which there are several.
        block: Elements along it that share one; 0 where there is one scale for each index.
    """

    axis: int
    block: int = 0

    def along(self, scales: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Scales, or zero points, in a shape that broadcasts to the tensor's."""
        if scales.size == 1 and not self.block:
            return scales.reshape(())
        axis = self.axis % len(shape)
        if self.block:
            return np.repeat(scales, self.block, axis=axis).take(np.arange(shape[axis]), axis=axis)
        return scales.reshape([-1 if place == axis else 1 for place in range(len(shape))])


@dataclass(frozen=True)
class Factor:
    """A scale: the exponential of a parameter, or what the file has."""

    name: str
    tensor: ir.TensorProtocol

    def learned(self, trained: Collection[str]) -> bool:
        """Whether it is made from a parameter."""
        return logarithm(self.name) in trained


@dataclass(frozen=True)
class Scales:
    """Makes the scales that the file has of logarithms; that of a bias is the product of two.

    Attributes:
        dtype: Their type.
        shape: Their shape.
        constant: Scales that are not learned, to be multiplied with.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    constant: Sequence[np.ndarray] = ()

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The scales of these logarithms."""
        factors = [*map(np.exp, arrays), *self.constant]
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
        return np.asarray(product, self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Integers:
    """Makes the integers of numbers, which come first, and of the logarithms of their scales.

    Attributes:
        layout: How scales lie.
        dtype: The integers' type.
        zeros: The zero points.
        scales: Makes the scales.
        numbers: The numbers, where they are not trained.
    """

    layout: Layout
    dtype: ir.DataType
    zeros: np.ndarray | None
    scales: Scales
    numbers: Callable[[], np.ndarray] | None = None

    def __call__(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The integers of a number and of logarithms, or of these alone."""
        w, logarithms = (arrays[0], arrays[1:]) if self.numbers is None else (self.numbers(), arrays)
        steps = np.round(w.astype(np.float32) / self.layout.along(self.scales(logarithms), w.shape)).astype(np.float64)
        if self.zeros is not None:
            steps = steps + self.layout.along(self.zeros, w.shape).astype(np.float64)
        clipped: np.ndarray = np.clip(steps, float(self.dtype.min), float(self.dtype.max))
        return clipped.astype(self.dtype.numpy())


@dataclass(frozen=True)
class Weight:
    """A weight of a working copy whose integers became a number.

    Attributes:
        name: Its name.
        integers: What the file has.
        numbers: Makes the number of it.
        made: What those read who read the integers.
        layout: How its scales lie.
        zeros: Its zero points.
        scale: Its scale.
        factors: What the scale is the product of: itself, or those of the product that a bias is added to.
    """

    name: str
    integers: ir.TensorProtocol
    numbers: Callable[[], np.ndarray]
    made: ir.Value
    layout: Layout
    zeros: np.ndarray | None
    scale: Factor
    factors: tuple[Factor, ...]

    @property
    def is_bias(self) -> bool:
        """Whether it is a number itself, and its steps are those of a product."""
        return self.integers.dtype == ir.DataType.INT32

    def stored(self, trained: Collection[str]) -> list[Stored]:
        """How it is written."""
        learned = tuple(logarithm(factor.name) for factor in self.factors if factor.learned(trained))
        constant = [np.asarray(factor.tensor.numpy()) for factor in self.factors if not factor.learned(trained)]
        scales = Scales(self.scale.tensor.dtype.numpy(), tuple(self.scale.tensor.shape.numpy()), constant)
        own: tuple[str, ...] = (self.name,)
        form = Integers(self.layout, self.integers.dtype, self.zeros, scales)
        if self.name not in trained:
            if not (self.is_bias and learned):
                return []
            own, form = (), replace(form, numbers=self.numbers)
        found = [Stored(self.name, (*own, *learned), form)]
        if self.is_bias and learned:
            found.append(Stored(self.scale.name, learned, scales))
        return found


def logarithm(scale: str) -> str:
    """The name of the parameter whose exponential is a scale."""
    return f"{scale}.log"
