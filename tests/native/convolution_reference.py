"""Convolution and its gradients in NumPy's float64, and one-node models of them on ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import helper
from optimizer_sessions import element_type, session

OPERATORS = ("Conv", "ConvInputGradient", "ConvWeightGradient")


@dataclass(frozen=True)
class Convolution:
    """One convolution: shapes and attributes."""

    batch: int
    group: int
    inputs: int  # per group
    outputs: int  # per group
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    bias: bool = field(default=False)

    @property
    def windows(self):
        rank = len(self.size)
        extents = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        padded = [n + self.pads[axis] + self.pads[rank + axis] for axis, n in enumerate(self.size)]
        return tuple(max((n - e) // s + 1, 0) for n, e, s in zip(padded, extents, self.strides, strict=True))

    @property
    def x_shape(self):
        return (self.batch, self.group * self.inputs, *self.size)

    @property
    def y_shape(self):
        return (self.batch, self.group * self.outputs, *self.windows)

    @property
    def w_shape(self):
        return (self.group * self.outputs, self.inputs, *self.kernel)

    @property
    def attributes(self):
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": self.pads,
            "group": self.group,
        }

    def draw(self, dtype, seed=0):
        """Random x, w, dy and b."""
        rng = np.random.default_rng(seed)
        shapes = (self.x_shape, self.w_shape, self.y_shape, self.w_shape[:1])
        return [np.asarray(rng.standard_normal(shape), dtype) for shape in shapes]

    def positions(self):
        """Per position in the kernel, where all windows have it in the padded x."""
        for position in np.ndindex(*self.kernel):
            starts = [d * k for d, k in zip(self.dilations, position, strict=True)]
            yield (
                position,
                tuple(
                    slice(start, start + s * (n - 1) + 1, s)
                    for start, s, n in zip(starts, self.strides, self.windows, strict=True)
                ),
            )

    def padding(self):
        rank = len(self.size)
        return [(0, 0)] * 3 + [(self.pads[axis], self.pads[rank + axis]) for axis in range(rank)]

    def by_group(self, array, axis=1):
        shape = array.shape
        parts = (self.group, shape[axis] // self.group)
        return np.asarray(array, np.float64).reshape(*shape[:axis], *parts, *shape[axis + 1 :])

    def forward(self, x, w, b):
        padded, weights = np.pad(self.by_group(x), self.padding()), self.by_group(w, axis=0)
        y = np.zeros((self.batch, self.group, self.outputs, *self.windows))
        if 0 not in self.windows:
            for position, at in self.positions():
                y += np.einsum("ngc...,goc->ngo...", padded[(..., *at)], weights[(..., *position)])
        y = y.reshape(self.y_shape)
        return y + np.asarray(b, np.float64).reshape(-1, *[1] * len(self.size)) if self.bias else y

    def input_gradient(self, dy, w):
        gradients, weights = self.by_group(dy), self.by_group(w, axis=0)
        dx = np.pad(np.zeros((self.batch, self.group, self.inputs, *self.size)), self.padding())
        if 0 not in self.windows:
            for position, at in self.positions():
                dx[(..., *at)] += np.einsum("ngo...,goc->ngc...", gradients, weights[(..., *position)])
        inner = tuple(slice(before, before + n) for (before, _), n in zip(self.padding()[3:], self.size, strict=True))
        return dx[(..., *inner)].reshape(self.x_shape)

    def weight_gradient(self, dy, x):
        gradients, padded = self.by_group(dy), np.pad(self.by_group(x), self.padding())
        dw = np.zeros((self.group, self.outputs, self.inputs, *self.kernel))
        if 0 not in self.windows:
            for position, at in self.positions():
                # Summed over the batch and all spatial axes.
                count = int(np.prod(self.windows))
                images = padded[(..., *at)].reshape(self.batch, self.group, self.inputs, count)
                flat = gradients.reshape(self.batch, self.group, self.outputs, count)
                dw[(..., *position)] = np.einsum("ngop,ngcp->goc", flat, images)
        return dw.reshape(self.w_shape)

    def expected(self, operator, x, w, dy, b):
        if operator == "Conv":
            return self.forward(x, w, b)
        return self.input_gradient(dy, w) if operator == "ConvInputGradient" else self.weight_gradient(dy, x)

    def feeds(self, operator, x, w, dy, b):
        """The inputs of a node, by name and in order."""
        if operator == "Conv":
            return {"x": x, "w": w, "b": b} if self.bias else {"x": x, "w": w}
        if operator == "ConvInputGradient":
            return {"dy": dy, "w": w, "x_shape": np.array(x.shape, np.int64)}
        return {"dy": dy, "x": x}


def run(path, operator, feeds, attributes, threads=1):
    """The output of one node, whose inputs are named and in order."""
    made = session(
        path,
        [helper.make_node(operator, list(feeds), ["out"], domain="onnxtrain", **attributes)],
        [(name, element_type(array), [None] * np.ndim(array)) for name, array in feeds.items()],
        [("out", element_type(next(iter(feeds.values()))), None)],
        threads=threads,
    )
    return made.run(None, feeds)[0]
