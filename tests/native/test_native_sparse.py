"""Sparse linear layers and convolutions against dense ones, and packed weights that are refused."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from kernel_case import Case
from kernel_session import run
from onnx import helper, numpy_helper
from optimizer_sessions import session
from sparse_cases import CONSTANTS, dense_matrix

from onnxtrain.plugins.sparse.operators import pack

RNG = np.random.default_rng(0)
NONE = np.float32(0)


def blocks_of(outputs, depth, block, density=0.2):
    kept = RNG.random((outputs // block, 1, depth)) < density
    matrix = RNG.standard_normal((outputs // block, block, depth)).astype(np.float32) * kept
    return matrix.reshape(outputs, depth)


def linear(matrix, x, bias=None, residual=NONE, threads=2, path=None, **limits):
    packed = pack(matrix)
    bias = np.zeros(len(matrix), np.float32) if bias is None else bias
    feeds = {"x": x, "values": packed.values, "deltas": packed.deltas, "bias": bias, "residual": np.asarray(residual)}
    case = Case("SparseLinear", feeds, {"shape": packed.shape, **limits}, constants=CONSTANTS)
    return run(case, path, threads)[0]


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("rows", [1, 7, 8, 33, 130])
@pytest.mark.parametrize(("outputs", "depth"), [(16, 1), (80, 130), (80, 700)])
def test_linear(library_path, block, rows, outputs, depth):
    matrix = blocks_of(outputs, depth, block)
    x, bias = RNG.standard_normal((rows, depth), np.float32), RNG.standard_normal(outputs, np.float32)
    residual = RNG.standard_normal((rows, outputs), np.float32)
    sums = x.astype(np.float64) @ matrix.T + bias
    np.testing.assert_allclose(linear(matrix, x, bias, path=library_path), sums, rtol=1e-4, atol=1e-4)
    found = linear(matrix, x, bias, residual, path=library_path, lower=0.0, upper=1.0)
    np.testing.assert_allclose(found, np.clip(sums + residual, 0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [1, 7, 21])
def test_outputs_beside_whole_vectors(library_path, outputs):
    matrix = blocks_of(outputs, 50, 1)
    for rows in (1, 8, 9, 40):
        x = RNG.standard_normal((rows, 50), np.float32)
        np.testing.assert_allclose(linear(matrix, x, path=library_path), x @ matrix.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [8, 32])
def test_rows_at_any_address(library_path, rows):
    matrix, memory = blocks_of(16, 85, 1), RNG.standard_normal(rows * 85 + 16, np.float32)
    for first in range(16):
        x = memory[first : first + rows * 85].reshape(rows, 85)
        np.testing.assert_allclose(linear(matrix, x, path=library_path), x @ matrix.T, rtol=1e-4, atol=1e-4)


def test_slices_of_x_that_many_outputs_read(library_path):
    matrix, x = blocks_of(520, 900, 1), RNG.standard_normal((32, 900), np.float32)
    found = [linear(matrix, x, threads=threads, path=library_path) for threads in (1, 2, 3)]
    np.testing.assert_allclose(found[0], x @ matrix.T, rtol=1e-4, atol=1e-4)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


CONVOLUTIONS = [
    # outputs, channels, kernel, strides, pads, dilations, size
    (16, 5, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (14, 14)),
    (20, 3, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (9, 12)),
    (16, 8, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (8, 8)),
    (16, 8, (1, 1), (2, 2), (0, 0, 0, 0), (1, 1), (7, 7)),
    (4, 2, (7, 7), (2, 2), (3, 3, 3, 3), (1, 1), (30, 30)),
    (5, 2, (3, 2), (2, 3), (0, 2, 1, 0), (2, 1), (11, 10)),
    (16, 2, (3,), (2,), (1, 0), (1,), (40,)),
    (80, 100, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (70, 20)),  # in strips and slices of channels, with more outputs
    (16, 64, (3, 3), (2, 2), (0, 2, 1, 1), (2, 1), (120, 47)),
    (16, 16, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (91, 91)),
    (16, 3, (2, 2), (3, 3), (1, 1, 1, 1), (1, 1), (31, 200)),
]


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(library_path, case, block):
    outputs, channels, kernel, strides, pads, dilations, size = case
    if outputs % block:
        pytest.skip("no whole blocks")
    matrix = blocks_of(outputs, channels * int(np.prod(kernel)), block, 0.3)
    x, bias = RNG.standard_normal((2, channels, *size), np.float32), RNG.standard_normal(outputs, np.float32)
    window = {"kernel_shape": kernel, "strides": strides, "pads": pads, "dilations": dilations}
    weight = matrix.reshape(outputs, channels, *kernel)
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **window)
    graph = helper.make_graph(
        [node],
        "conv",
        [helper.make_tensor_value_info("x", 1, x.shape)],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": x})[0]
    residual = RNG.standard_normal(expected.shape, np.float32)
    packed = pack(matrix)
    feeds = {"x": x, "values": packed.values, "deltas": packed.deltas, "bias": bias}
    attributes = {"shape": packed.shape, **window}
    for last, limits, wanted in (
        (NONE, {}, expected),
        (residual, {"lower": 0.0}, np.maximum(expected + residual, 0)),
    ):
        case = Case("SparseConv", {**feeds, "residual": np.asarray(last)}, attributes | limits, constants=CONSTANTS)
        found = run(case, library_path)[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(found, run(case, library_path, 3)[0])  # the same bits with any number of threads


BORDERS = [
    # around x, around y, around the residual
    ((0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 1, 1)),
    ((0, 0, 0, 0), (1, 2, 0, 3), (0, 0, 0, 0)),
    ((2, 1, 0, 3), (0, 0, 0, 0), (2, 0, 1, 1)),
    ((1, 0, 1, 2), (0, 1, 0, 0), (0, 1, 3, 0)),
]


def bordered(array, border, value=0.0):
    axes = len(border) // 2
    return np.pad(array, [(0, 0), (0, 0), *zip(border[:axes], border[axes:], strict=True)], constant_values=value)


def bordered_x(x, border, pads):
    """Zeros where windows may read them, and NaN around these."""
    zeros = tuple(map(min, border, pads))
    return bordered(bordered(x, zeros), tuple(np.subtract(border, zeros)), np.nan)


UNPADDED = (16, 5, (3, 3), (1, 1), (0, 0, 0, 0), (1, 1), (9, 9))


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize(
    ("case", "borders"),
    [
        *((case, BORDERS[index % len(BORDERS)]) for index, case in enumerate(CONVOLUTIONS)),
        *((UNPADDED, borders) for borders in BORDERS),
    ],
    ids=str,
)
def test_borders_in_memory(library_path, case, borders, block):
    """Around x only zeros that take the place of padding are read, around the residual nothing; around y are zeros."""
    outputs, channels, kernel, strides, pads, dilations, size = case
    axes = len(kernel)
    if outputs % block:
        pytest.skip("no whole blocks")
    x_pads, y_pads, residual_pads = (tuple(border[: 2 * axes]) for border in borders)
    packed = pack(blocks_of(outputs, channels * int(np.prod(kernel)), block, 0.3))
    x = RNG.standard_normal((2, channels, *size), np.float32)
    feeds = {"x": x, "values": packed.values, "deltas": packed.deltas, "bias": np.ones(outputs, np.float32)}
    window = {"kernel_shape": kernel, "strides": strides, "pads": pads, "dilations": dilations, "shape": packed.shape}
    plain = run(Case("SparseConv", {**feeds, "residual": NONE.reshape(())}, window, constants=CONSTANTS), library_path)[
        0
    ]
    residual = RNG.standard_normal(plain.shape, np.float32)
    around = {"x_pads": x_pads, "y_pads": y_pads, "residual_pads": residual_pads}
    feeds |= {"x": bordered_x(x, x_pads, pads), "residual": bordered(residual, residual_pads, np.inf)}
    found = run(Case("SparseConv", feeds, window | around | {"upper": 9.0}, constants=CONSTANTS), library_path)[0]
    wanted = bordered(np.minimum(plain + residual, np.float32(9)), y_pads)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found == 0, wanted == 0)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"y_pads": [1, 1, 1]}, r"attribute 'y_pads' is \[1, 1, 1\]: it must have 2 sizes that are not negative"),
        ({"residual_pads": [0, -1]}, r"attribute 'residual_pads' is \[0, -1\]: it must have 2 sizes that are not"),
        ({"x_pads": [2, 2]}, r"input 0 \(x\) has shape \[1, 5, 3\]: it is smaller than attribute 'x_pads', \[2, 2\]"),
        ({"x_pads": [2**62, 2**62]}, r"x_pads|does not fit into 64 bits"),
        ({"y_pads": [2**62, 2**62]}, r"does not fit into 64 bits"),
        ({"residual_pads": [1, 0]}, r"input 4 \(residual\) has shape \[1, 4, 3\], and must have shape \[1, 4, 4\]"),
    ],
)
def test_hostile_borders_are_refused(attributes, message):
    feeds = GOOD | {"x": np.ones((1, 5, 3), np.float32), "residual": np.zeros((1, 4, 3), np.float32)}
    case = Case("SparseConv", feeds, {"shape": [4, 5, 1], "kernel_shape": [1], **attributes}, constants=CONSTANTS)
    with pytest.raises(Exception, match=rf"SparseConv: .*({message})"):
        run(case)


def in_turn(x, matrices, path, threads=2, panels=(), residual=False):
    """Layers after one another that exchange rows transposed in panels, or as they are."""
    nodes, initializers, name = [], [numpy_helper.from_array(NONE.reshape(()), "none")], "x"
    if panels:
        nodes.append(helper.make_node("TransposeRows", ["x"], ["x_t"], domain="onnxtrain", panel=panels[0]))
        name = "x_t"
    for index, matrix in enumerate(matrices):
        packed = pack(matrix)
        arrays = {"values": packed.values, "deltas": packed.deltas, "bias": np.ones(len(matrix), np.float32)}
        initializers += [numpy_helper.from_array(array, f"{label}{index}") for label, array in arrays.items()]
        rows = dict(zip(("x_panel", "y_panel"), (*panels, 0)[index:], strict=False)) if panels else {}
        inputs = [name, *(f"{label}{index}" for label in arrays), name if residual and index == 1 else "none"]
        name = f"y{index}"
        settings = {"shape": packed.shape, "lower": -1.5, "upper": 2.0, **rows}
        nodes.append(helper.make_node("SparseLinear", inputs, [name], domain="onnxtrain", **settings))
    made = session(
        path, nodes, [("x", 1, list(x.shape))], [(name, 1, None)], threads=threads, initializers=initializers
    )
    return made.run(None, {"x": x})[0]


@pytest.mark.parametrize("rows", [1, 8, 16, 40, 48, 128, 144, 160, 200, 256, 384])
@pytest.mark.parametrize(
    ("blocks", "panels"), [((1, 4, 16), (128, 64, 64)), ((4, 16, 1), (64, 96, 128)), ((16, 1, 4), (5, 128, 1000))]
)
def test_the_same_results_with_transposed_rows(library_path, blocks, panels, rows):
    """With any number of rows: those that do not fill equal panels of whole vectors are exchanged as they are."""
    sizes = [(96, 37), (96, 96), (48, 96)]
    matrices = [blocks_of(*size, block, 0.3) for size, block in zip(sizes, blocks, strict=True)]
    x = RNG.standard_normal((rows, 37), np.float32)
    sums = x
    for matrix in matrices:
        sums = np.clip(sums @ matrix.T + 1, -1.5, 2.0)
    found = in_turn(x, matrices, library_path, panels=panels)
    np.testing.assert_allclose(found, sums, rtol=1e-4, atol=1e-4)
    for threads in (1, 3):
        np.testing.assert_array_equal(in_turn(x, matrices, library_path, threads, panels), found)


@pytest.mark.parametrize("rows", [16, 96, 128, 144])
def test_a_residual_is_laid_out_like_the_result(library_path, rows):
    matrices = [blocks_of(64, 64, block, 0.3) for block in (1, 4, 1)]
    x = RNG.standard_normal((rows, 64), np.float32)
    first = np.clip(x @ matrices[0].T + 1, -1.5, 2.0)
    second = np.clip(first @ matrices[1].T + 1 + first, -1.5, 2.0)
    wanted = np.clip(second @ matrices[2].T + 1, -1.5, 2.0)
    for panels in ((), (64, 64, 64)):
        found = in_turn(x, matrices, library_path, panels=panels, residual=True)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("operator", "name"), [("SparseLinear", "x_panel"), ("SparseLinear", "y_panel"), ("TransposeRows", "panel")]
)
def test_negative_panels_are_refused(operator, name):
    linear = operator == "SparseLinear"
    feeds, attributes = (GOOD, {"shape": [4, 5, 1]}) if linear else ({"x": GOOD["x"]}, {})
    case = Case(operator, feeds, {**attributes, name: -1}, constants=CONSTANTS if linear else ())
    with pytest.raises(Exception, match=rf"{operator}: attribute '{name}' is -1: it must be a number of rows, or 0"):
        run(case)


def test_rows_without_columns_take_no_time():
    x = np.zeros((2**58, 0), np.float32)
    assert run(Case("TransposeRows", {"x": x}, {"panel": 64}))[0].shape == x.shape


def test_rows_without_an_axis_are_refused():
    with pytest.raises(Exception, match=r"TransposeRows: input 0 \(x\) has shape \[\]: it must have at least one axis"):
        run(Case("TransposeRows", {"x": np.ones((), np.float32)}, {}))


def test_the_same_bits_with_any_number_of_threads():
    matrix, x = blocks_of(512, 512, 4), RNG.standard_normal((100, 512), np.float32)
    found = [linear(matrix, x, threads=threads) for threads in (1, 2, 3)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_gaps_of_more_than_16_bits():
    matrix = np.zeros((64, 4096), np.float32)
    matrix[0, 3], matrix[40, 5], matrix[63, 4095] = 1, 2, 3
    packed = pack(matrix)
    assert len(packed.deltas) == 3 + 2 + 1
    np.testing.assert_array_equal(dense_matrix(packed.shape, packed.values, packed.deltas), matrix)
    x = RNG.standard_normal((9, 4096), np.float32)
    np.testing.assert_allclose(linear(matrix, x), x @ matrix.T, rtol=1e-6)
    np.testing.assert_array_equal(linear(np.zeros((64, 4096), np.float32), x), np.zeros((9, 64)))


VALUES, DELTAS = np.ones((3, 1), np.float32), np.array([1, 2, 3], np.uint16)
GOOD = {"x": np.ones((2, 5), np.float32), "values": VALUES, "deltas": DELTAS, "bias": np.zeros(4, np.float32),
        "residual": NONE.reshape(())}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "attributes", "message"),
    [
        ({"deltas": np.array([1, 2, 17], np.uint16)}, {}, r"leads to index 20 at element 2, beyond the 20 blocks"),
        ({"deltas": np.array([1, 0, 3], np.uint16)}, {}, r"is 0 at element 1: every block after the first needs"),
        ({"deltas": DELTAS[:2]}, {}, r"input 1 \(values\) has type float and shape \[3, 1\]: .* shape \[2, 1\]"),
        ({"values": np.ones((3, 4), np.float32)}, {}, r"it must be float with shape \[3, 1\], a row for each delta"),
        ({"deltas": DELTAS.reshape(3, 1)}, {}, r"input 2 \(deltas\) .* must be uint16 with one axis"),
        ({}, {"shape": [4, 5]}, r"attribute 'shape' is \[4, 5\]: it must be \[block rows, depth, block\]"),
        ({}, {"shape": [4, 5, 2]}, r"with a block of 1, 4 or 16"),
        ({}, {"shape": [2**40, 2**40, 1]}, r"fewer than 2147483648 elements"),
        ({}, {"shape": [-4, 5, 1]}, r"attribute 'shape'"),
        ({"x": np.ones((2, 6), np.float32)}, {}, r"input 0 \(x\) has shape \[2, 6\]: its last axis must have size 5"),
        ({"bias": np.zeros(3, np.float32)}, {}, r"input 3 \(bias\) has shape \[3\], and must have shape \[4\]"),
        ({"residual": np.zeros((2, 3), np.float32)}, {}, r"input 4 \(residual\) .* must have shape \[2, 4\]"),
    ],
)
def test_hostile_files_are_refused(changed, attributes, message):
    case = Case("SparseLinear", GOOD | changed, {"shape": [4, 5, 1], **attributes}, constants=CONSTANTS)
    with pytest.raises(Exception, match=rf"SparseLinear: .*{message}"):
        run(case)


def test_computed_weights_are_refused():
    with pytest.raises(
        Exception, match=r"SparseLinear: input [12] \((values|deltas)\) is computed: it must be an initializer"
    ):
        run(Case("SparseLinear", GOOD, {"shape": [4, 5, 1]}))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"kernel_shape": [2]}, r"a depth of 5: it must be a multiple of the 2 elements of attribute 'kernel_shape'"),
        ({"kernel_shape": [1, 1, 1]}, r"attribute 'kernel_shape' is \[1, 1, 1\]: it must have one or two sizes"),
        ({"kernel_shape": [5]}, r"input 0 \(x\) has shape \[2, 5\]: it must have 3 axes and 1 channels"),
        ({"kernel_shape": [5], "strides": [0]}, r"attribute 'strides' is \[0\]"),
    ],
)
def test_hostile_convolutions_are_refused(attributes, message):
    case = Case("SparseConv", GOOD, {"shape": [4, 5, 1], **attributes}, constants=CONSTANTS)
    with pytest.raises(Exception, match=rf"SparseConv: .*{message}"):
        run(case)
