"""Heads and boxes for the losses of detectors, and models whose outputs are their parameters."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

R, C = 4, 2
GRIDS = ((3, 4), (2, 2))
"""Rows and columns of the grids of a YOLO-like head; an image is as wide and high as either says."""
RANDOM = np.random.default_rng(0)
HEAD = [RANDOM.normal(size=(3, 4 * R + C, *grid)).astype(np.float32) for grid in GRIDS]
CELLS = np.array(
    [[(x + 0.5) / w, (y + 0.5) / h, 1 / w, 1 / h] for h, w in GRIDS for y in range(h) for x in range(w)], np.float32
)
NONE = (-1.0, 0, 0, 0, 0)
BOXES = np.array(
    [
        [(0, 0.4, 0.45, 0.6, 0.7), (1, 0.6, 0.5, 0.55, 0.8), (1, 0.5, 0.5, 0.01, 0.01)],
        [(1, 0.3, 0.7, 0.5, 0.5), NONE, NONE],
        [NONE, NONE, NONE],
    ],
    np.float32,
)
"""Two boxes that want the same anchors, one with no anchor's centre in it; one box; an image without boxes."""
LOGITS = RANDOM.normal(size=(3, 4, C + 1)).astype(np.float32)
SLOTS = (0.3 + 0.4 * RANDOM.random((3, 4, 4))).astype(np.float32)
CROWD = np.array(
    [[(i % 2, 0.2 + 0.1 * i, 0.5, 0.3, 0.2 + 0.1 * i) for i in range(6)], [NONE] * 6, [NONE] * 6], np.float32
)
"""Six boxes for four slots."""
X = np.zeros((3, 1), np.float32)


def model(values, names=None, outputs=None, extra=()):
    """A model whose outputs are its parameters, so that one step of SGD shows their gradients.

    ``outputs`` and ``extra``: other outputs, and the nodes that compute them.
    """
    names = [f"y{index}" for index in range(len(values))] if names is None else names
    pairs = list(zip(names, values, strict=True))
    nodes = [helper.make_node("ReduceMin", ["x"], ["none"], keepdims=0)]  # x is 0
    nodes += [helper.make_node("Add", ["none", f"{name}_weight"], [name]) for name in names]
    weights = [numpy_helper.from_array(value, f"{name}_weight") for name, value in pairs]
    own = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *value.shape[1:]]) for name, value in pairs]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])]
    graph = helper.make_graph([*nodes, *extra], "outputs", given, outputs or own, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def prediction(levels):
    """The prediction that the loss reads: distributions and logits of anchors, and the grid."""
    flat = np.concatenate([level.reshape(*level.shape[:2], -1) for level in levels], 2).transpose(0, 2, 1)
    return np.concatenate([flat, np.tile(CELLS, (len(flat), 1, 1))], 2).astype(np.float64)
