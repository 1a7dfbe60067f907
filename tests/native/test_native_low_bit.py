"""Matmuls with low-bit weights: against float64, on all instruction sets, for any number of threads."""

import re

import gradient_reference
import low_bit_reference as reference
import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
OPERATOR = "MatMulNBitsGradient"
OPERATORS = ["MatMulNBits", OPERATOR]
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)

# Rows, K and N around the edges of vectors, panels (64 columns at most), strips (192 rows), blocks of the
# depth (256) and parts (768).
SIZES = [
    (1, 1, 1),
    (3, 65, 7),
    (8, 300, 257),
    (17, 1000, 40),
    (70, 16, 520),
    (200, 300, 130),
    (0, 4, 5),
    (4, 0, 5),
    (4, 5, 0),
]


def draw(sizes, bits, block, kind, dtype, operator=OPERATOR):
    """Return feeds, attributes, the result, and the sum of the absolute values of its terms."""
    rows, inputs, outputs = sizes
    rng = np.random.default_rng(sizes)
    blocks = -(-inputs // block)
    integers = rng.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8)
    scales = rng.uniform(0.01, 0.1, (outputs, blocks)).astype(dtype)
    left, columns = ("dy", outputs) if operator == OPERATOR else ("x", inputs)
    feeds = {left: rng.standard_normal((rows, columns)).astype(dtype), "integers": integers, "scales": scales}
    points = np.full((outputs, blocks), 2.0 ** (bits - 1))
    if kind == "packed":
        feeds["packed_zeros"] = rng.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)
        points = reference.unpacked(feeds["packed_zeros"], bits)[:, :blocks]
    elif kind == "numbers":
        feeds["zeros"] = points = rng.uniform(0, 2**bits, (outputs, blocks)).astype(dtype)
        feeds["packed_zeros"] = np.zeros(0, np.uint8)
    attributes = {"K": inputs, "N": outputs, "bits": bits, "block_size": block}
    w = reference.weight(integers, scales, points, bits, inputs)
    w = w if operator == OPERATOR else w.T
    x = feeds[left].astype(np.float64)
    return feeds, attributes, x @ w, np.abs(x) @ np.abs(w)


def run(path, feeds, attributes, threads=1, operator=OPERATOR):
    given = [feeds.get(name) for name in gradient_reference.INPUTS[operator]]
    while given[-1] is None:
        given.pop()
    return gradient_reference.run(path, operator, *given, threads=threads, **attributes)[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["middle", "packed", "numbers"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("operator", OPERATORS)
def test_against_float64(instruction_set, library_path, operator, block, bits, kind, dtype):
    for sizes in SIZES:
        feeds, attributes, expected, magnitude = draw(sizes, bits, block, kind, dtype, operator)
        found = run(library_path, feeds, attributes, operator=operator)
        assert found.dtype == dtype
        assert found.shape == expected.shape
        depth = max(1, sizes[2 if operator == OPERATOR else 1])
        assert (np.abs(found - expected) <= 8 * np.finfo(dtype).eps * magnitude * depth**0.5).all(), sizes


@pytest.mark.parametrize("sizes", [(700, 900, 300), (5, 4000, 300)], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_threads_do_not_change_a_bit(operator, sizes):
    feeds, attributes, _, _ = draw(sizes, 4, 32, "packed", np.float32, operator)
    one, *others = (run(PATH, feeds, attributes, threads, operator) for threads in (1, 2, 3))
    for other in others:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changed", "attributes", "sentence"),
    [
        ({"dy": (3,)}, {}, "input 0 (dy) has shape [3], and must have at least two axes"),
        ({"dy": (2, 4)}, {}, "input 0 (dy) has shape [2, 4], and must have shape [2, 5]"),
        ({"integers": (5, 2, 8)}, {}, "input 1 (integers) has shape [5, 2, 8], and must have shape [5, 3, 8]"),
        ({"scales": (15,)}, {}, "input 2 (scales) has shape [15], and must have shape [5, 3]"),
        ({"packed_zeros": (5, 3)}, {}, "input 3 (packed_zeros) has shape [5, 3], and must have shape [5, 2]"),
        ({}, {"bits": 3}, "attribute 'bits' is 3: it must be 2, 4 or 8"),
        ({}, {"block_size": 24}, "attribute 'block_size' is 24: it must be a power of two from 16 on"),
        ({}, {"K": -1}, "attribute 'K' is -1: no size may be negative"),
    ],
)  # fmt: skip
def test_mismatches_are_refused(changed, attributes, sentence):
    feeds, given, _, _ = draw((2, 40, 5), 4, 16, "packed", np.float32)
    for name, shape in changed.items():
        feeds[name] = np.ones(shape, feeds[name].dtype)
    with pytest.raises(REFUSED, match=re.escape(f"{OPERATOR}: {sentence}")):
        run(PATH, feeds, given | attributes)
