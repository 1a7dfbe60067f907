"""Matmuls of operands rounded to bfloat16: against NumPy, on all instruction sets, for any number of threads.

Sums differ from float64's by at most 8 float32 ulps of the sum of the absolute values of their terms, times the root of
the depth. They are bit-identical to float32 sums in the kernel's order, the same for every instruction set but AMX.
"""

import re

import bfloat16_reference as reference
import low_bit_reference
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from kernel_case import Case
from kernel_session import run
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from optimizer_sessions import element_type
from rounding_reference import BFLOAT16

from onnxtrain.autodiff.engine import Backward
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
REFUSED = (Fail, InvalidArgument, InvalidGraph, RuntimeException)
STORED = [np.float32, np.float16, BFLOAT16]
COMPUTE = {"compute": "bfloat16"}

# Rows, depth and columns around the edges of pairs (2), vectors (4 to 16), tiles (6 or 8 rows, up to 64 columns),
# strips (192 rows) and blocks (512 of the depth).
SIZES = [
    (1, 1, 1),
    (5, 3, 2),
    (7, 65, 129),
    (17, 40, 63),
    (200, 64, 770),
    (300, 1027, 33),
    (3, 2000, 1),
    (0, 4, 5),
    (4, 0, 5),
    (4, 5, 0),
]


def draw(sizes, stored=np.float32):
    rows, depth, columns = sizes
    rng = np.random.default_rng(sizes)
    shapes = {"x": (rows, depth), "w": (depth, columns), "b": (columns,), "dy": (rows, columns)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return feeds | {"w": feeds["w"].astype(stored)}


def linear(path, feeds, transposed, threads=1, **attributes):
    w = np.ascontiguousarray(feeds["w"].T) if transposed else feeds["w"]
    given = {"x": feeds["x"], "w": w, "b": feeds.get("b")}
    attributes = {"transB": int(transposed), **COMPUTE, **attributes}
    return run(Case("Linear", given, attributes, types=(np.float32,)), path, threads)[0]


def weight_gradient(path, feeds, transposed, threads=1):
    given, attributes = {name: feeds[name] for name in ("dy", "x")}, {"transB": int(transposed), **COMPUTE}
    dw, db = run(Case("LinearWeightGradient", given, attributes, 2), path, threads)
    return dw.T if transposed else dw, db


def low_bit(path, operator, feeds, attributes, threads=1):
    return run(Case(operator, feeds, attributes | COMPUTE), path, threads)[0]


def draw_low_bit(sizes, bits, block, kind):
    """Feeds without x and dy, attributes and the weight [K, N]."""
    _, inputs, outputs = sizes
    rng = np.random.default_rng(sizes)
    blocks = -(-inputs // block)
    feeds = {
        "integers": rng.integers(0, 256, (outputs, blocks, block * bits // 8), np.uint8),
        "scales": rng.uniform(0.01, 0.1, (outputs, blocks)).astype(np.float32),
    }
    points = np.full((outputs, blocks), 2.0 ** (bits - 1))
    if kind == "packed":
        feeds["packed_zeros"] = rng.integers(0, 256, (outputs, -(-blocks * bits // 8)), np.uint8)
        points = low_bit_reference.unpacked(feeds["packed_zeros"], bits)[:, :blocks]
    elif kind == "numbers":
        points = rng.uniform(0, 2**bits, (outputs, blocks)).astype(np.float32)
        feeds |= {"packed_zeros": np.zeros(0, np.uint8), "zeros": points}
    integers, scales = feeds["integers"], feeds["scales"]
    w = low_bit_reference.weight(integers, scales, points, bits, inputs).astype(np.float32).T
    return feeds, {"K": inputs, "N": outputs, "bits": bits, "block_size": block}, w


def check(found, x, w, bias=0.0):
    exact, magnitude = reference.product(x, w)
    assert found.dtype == np.float32
    assert found.shape == exact.shape
    bound = 8 * np.finfo(np.float32).eps * (magnitude + np.abs(bias)) * max(1, x.shape[1]) ** 0.5
    assert (np.abs(found - (exact + bias)) <= bound).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_products_against_float64(instruction_set, library_path, stored, transposed):
    for sizes in SIZES:
        feeds = draw(sizes, stored)
        check(linear(library_path, feeds, transposed), feeds["x"], feeds["w"].astype(np.float32), feeds["b"])


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weights_against_float64(instruction_set, library_path, transposed):
    for sizes in SIZES:
        feeds = draw(sizes)
        dw, db = weight_gradient(library_path, feeds, transposed)
        check(dw, feeds["x"].T, feeds["dy"])
        np.testing.assert_allclose(db, feeds["dy"].astype(np.float64).sum(0), atol=1e-4)  # not rounded


@pytest.mark.parametrize("kind", ["middle", "packed", "numbers"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_weights_of_low_bit_against_float64(instruction_set, library_path, bits, kind):
    for sizes in SIZES:
        for block in (16, 64):
            feeds, attributes, w = draw_low_bit(sizes, bits, block, kind)
            numbers = draw(sizes)
            y = low_bit(library_path, "MatMulNBits", {"x": numbers["x"], **feeds}, attributes)
            check(y, numbers["x"], w)
            dx = low_bit(library_path, "MatMulNBitsGradient", {"dy": numbers["dy"], **feeds}, attributes)
            check(dx, numbers["dy"], w.T)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_every_instruction_set_has_the_same_bits(instruction_set, library_path, stored, transposed):
    for sizes in SIZES:
        feeds = draw(sizes, stored)
        expected = reference.product_in_order(feeds["x"], feeds["w"].astype(np.float32), feeds["b"])
        np.testing.assert_array_equal(linear(library_path, feeds, transposed), expected)
        dw, _ = weight_gradient(library_path, feeds, transposed)
        np.testing.assert_array_equal(dw, reference.product_in_order(feeds["x"].T, feeds["dy"]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("sizes", [(1025, 300, 200), (8, 784, 512), (40, 64, 1600)], ids=str)
def test_threads_do_not_change_a_bit(sizes, stored, transposed):
    feeds = draw(sizes, stored)
    one, *others = (
        [linear(PATH, feeds, transposed, threads), *weight_gradient(PATH, feeds, transposed, threads)]
        for threads in (1, 2, 3)
    )
    for other in others:
        for first, second in zip(one, other, strict=True):
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("operator", ["MatMulNBits", "MatMulNBitsGradient"])
def test_threads_do_not_change_a_bit_of_low_bit(operator):
    sizes = (300, 900, 300)
    feeds, attributes, _ = draw_low_bit(sizes, 4, 32, "packed")
    left = "x" if operator == "MatMulNBits" else "dy"
    given = {left: draw(sizes)[left], **feeds}
    one, *others = (low_bit(PATH, operator, given, attributes, threads) for threads in (1, 2, 3))
    for other in others:
        np.testing.assert_array_equal(one, other)


# Rows around the edges of tiles (16), of two (32), and beyond a strip of an L2 cache of 2 MiB; the depth around those
# of a tile (32), and two blocks of it.
EDGES = [(15, 31, 16), (16, 32, 17), (33, 33, 31), (47, 64, 65)]
TILES = [*SIZES, *EDGES, (193, 96, 130), (391, 545, 48), (990, 1030, 9)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", STORED)
def test_products_in_tiles(tiles_path, stored, transposed):
    for sizes in TILES:
        feeds = draw(sizes, stored)
        check(linear(tiles_path, feeds, transposed), feeds["x"], feeds["w"].astype(np.float32), feeds["b"])
        check(weight_gradient(tiles_path, feeds, transposed)[0], feeds["x"].T, feeds["dy"])


def test_products_in_tiles_of_low_bit(tiles_path):
    for sizes in TILES:
        feeds, attributes, w = draw_low_bit(sizes, 4, 32, "packed")
        numbers = draw(sizes)
        check(low_bit(tiles_path, "MatMulNBits", {"x": numbers["x"], **feeds}, attributes), numbers["x"], w)
        dx = low_bit(tiles_path, "MatMulNBitsGradient", {"dy": numbers["dy"], **feeds}, attributes)
        check(dx, numbers["dy"], w.T)


def test_tiles_stay_apart(tiles_path):
    """A row of NaN, and room behind the last row, do not reach other rows; the epilogue applies to every tile."""
    feeds = draw((45, 70, 90))
    plain = linear(tiles_path, feeds, False)
    np.testing.assert_array_equal(linear(tiles_path, feeds, False, activation="Relu"), np.maximum(plain, 0))
    feeds["x"][13, 5] = np.nan
    found = linear(tiles_path, feeds, False)
    others = np.arange(45) != 13
    np.testing.assert_array_equal(found[others], plain[others])
    assert np.isnan(found[13]).all()


EDGES = np.array(
    [0, -0.0, 1, 1 + 2**-8, 1 + 3 * 2**-8, 3e38, -3.4e38, 2**-126, -(2**-126), 2**-127, 1e-45, np.inf, -np.inf, np.nan],
    np.float32,
)


@pytest.mark.parametrize("place", ["x", "w", "transposed w", "gradient"])
def test_rounding_of_every_kind_of_number(instruction_set, library_path, place):
    """Ties go to the even neighbour, beyond the largest number is infinity, subnormal numbers are zero."""
    one, numbers = np.ones((1, 1), np.float32), np.tile(EDGES, 3)[:, None]
    with np.errstate(all="ignore"):
        expected = reference.rounded(numbers)
    if place == "gradient":
        found = weight_gradient(library_path, {"dy": one, "x": numbers.T}, False)[0]
    elif place == "x":
        found = linear(library_path, {"x": numbers, "w": one}, False)
    else:
        found = linear(library_path, {"x": one, "w": numbers.T}, place == "transposed w").T
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("stored", [np.float16, BFLOAT16])
def test_every_number_of_16_bits(instruction_set, library_path, stored):
    every = np.arange(1 << 16, dtype=np.uint16).view(stored)[None, :]
    found = linear(library_path, {"x": np.ones((1, 1), np.float32), "w": every}, False)
    with np.errstate(all="ignore"):
        expected = reference.rounded(every.astype(np.float32))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("transposed", [False, True])
def test_nan_stays_in_its_rows(instruction_set, library_path, transposed, value):
    feeds = draw((30, 21, 70))
    feeds["x"][13, 5] = value
    assert (np.isfinite(linear(library_path, feeds, transposed)).all(1) == (np.arange(30) != 13)).all()
    dw, db = weight_gradient(library_path, feeds, transposed)
    assert (np.isfinite(dw).all(1) == (np.arange(21) != 5)).all()
    assert np.isfinite(db).all()


def test_without_the_attribute_nothing_is_rounded():
    feeds = draw((30, 20, 70))
    exact = feeds["x"].astype(np.float64) @ feeds["w"] + feeds["b"]
    np.testing.assert_allclose(linear(PATH, feeds, False, compute="float32"), exact, atol=1e-5)
    assert np.abs(linear(PATH, feeds, False) - exact).max() > 1e-3


@pytest.mark.parametrize(
    ("kinds", "compute", "sentence"),
    [
        ((np.float32, np.float32), "float16", "attribute 'compute' is 'float16': it must be float32 or bfloat16"),
        ((np.float64, np.float64), "bfloat16", "its inputs have type double: they must be float"),
    ],
)
def test_invalid_types_and_attributes_are_refused(kinds, compute, sentence):
    x, w = (np.ones((2, 2), kind) for kind in kinds)
    with pytest.raises(REFUSED, match=re.escape("Linear: ") + ".*" + re.escape(sentence)):
        run(Case("Linear", {"x": x, "w": w}, {"compute": compute}, types=(kinds[0],)))


INPUTS = {"Linear": ("x", "w", "b"), "LinearGradient": ("dy", "w", "x"), "LinearWeightGradient": ("dy", "x")}
OUTPUTS = {"LinearGradient": ("dx", "dw", "db"), "LinearWeightGradient": ("dw", "db")}


@pytest.mark.parametrize("operator", [*INPUTS, "MatMulNBits", "MatMulNBitsGradient"])
def test_bodies_round_alike(operator):
    """The definition in standard operators, as another runtime computes it."""
    sizes = (7, 65, 33)
    feeds = draw(sizes)
    if operator.startswith("Linear"):
        given = {name: feeds[name] for name in INPUTS[operator]}
        attributes = COMPUTE | {"transB": 0}
    else:
        packed, attributes, _ = draw_low_bit(sizes, 4, 16, "packed")
        left = "x" if operator == "MatMulNBits" else "dy"
        given = {left: feeds[left], **packed}
        attributes |= COMPUTE
    outputs = OUTPUTS.get(operator, ("y",))
    node = helper.make_node(operator, list(given), outputs, domain="onnxtrain", **attributes)
    values = [helper.make_tensor_value_info(name, element_type(array), array.shape) for name, array in given.items()]
    wanted = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxtrain", 1)]
    working = ir.from_proto(helper.make_model(helper.make_graph([node], "g", values, wanted), opset_imports=opsets))
    resolve_fused(working, Backward(), kernels=False)
    assert {made.domain for made in working.graph} == {""}
    working.ir_version = 10
    session = onnxruntime.InferenceSession(ir.to_proto(working).SerializeToString(), providers=["CPUExecutionProvider"])
    found = run(Case(operator, given, attributes, len(outputs)))
    for one, other in zip(found, session.run(None, given), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
