"""FusedAdagrad, FusedAdam, FusedMomentum and FusedSSGD: bit-identical to the operator after a factor and masks."""

import numpy as np
import pytest
from onnx import helper
from optimizer_reference import draw
from optimizer_sessions import REQUIRED, element_type, groups, run, session

from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
STATES = {"Adagrad": 1, "Adam": 2, "Momentum": 1, "SSGD": 0}
SHAPES = [(3,), (), (1030,), (20_000,), (0,), (33, 70)]


def fused(name, R, T, factor, variables, masks=None, threads=1, **attributes):
    """The outputs of the fused node; `masks` is one per variable, or none at all."""
    inputs, outputs = groups(name, attributes)
    count = len(variables)
    columns = {letter: [variable[group] for variable in variables] for group, letter in enumerate(inputs)}
    letters = inputs[:2] + ("M" if masks is not None else "") + inputs[2:]
    columns["M"] = masks
    feeds = {"R": np.asarray(R), "T": np.asarray(T), "factor": np.asarray(factor)}
    feeds |= {f"{letter}{i}": columns[letter][i] for letter in letters for i in range(count)}
    produced = [f"{letter}{i}_new" for letter in outputs for i in range(count)]
    node = helper.make_node(
        f"Fused{name}",
        list(feeds),
        produced,
        domain="onnxtrain",
        **{**REQUIRED.get(name, {}), **attributes},
        **({} if masks is None else {"masked": 1}),
    )
    types = [(out, element_type(feeds[out.removesuffix("_new")]), None) for out in produced]
    values = [(key, element_type(value), None) for key, value in feeds.items()]
    return session(PATH, [node], values, types, threads).run(None, feeds)


@pytest.mark.parametrize("attributes", [{}, {"norm_coefficient": 0.01}])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_it_is_the_operator_on_prepared_gradients(name, masked, dtype, threads, attributes):
    rng = np.random.default_rng(1)
    variables = [draw(rng, shape, dtype, STATES[name]) for shape in SHAPES]
    masks = [np.asarray(rng.random(shape) < 0.4) for shape in SHAPES] if masked else None
    factor = dtype(0.37)
    found = fused(name, 0.1, np.int64(3), factor, variables, masks, threads, **attributes)
    prepared = []
    for i, (X, G, *states) in enumerate(variables):
        gradient = np.where(masks[i], G, dtype(0)) if masks is not None else G
        prepared.append((X, np.asarray(gradient * factor, dtype), *states))
    wanted = run(PATH, name, 0.1, np.int64(3), prepared, **attributes)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_momentum_of_ssgd_and_a_broadcast_gradient():
    rng = np.random.default_rng(2)
    X, V = (rng.standard_normal((40, 50)).astype(np.float32) for _ in range(2))
    G, mask = rng.standard_normal(50).astype(np.float32), rng.random((40, 50)) < 0.5
    found = fused("SSGD", 0.1, np.int64(0), 1.0, [(X, G, V)], [mask], alpha=0.9, regularization=1e-3)
    whole = np.where(mask, G, np.float32(0))
    wanted = run(PATH, "SSGD", 0.1, np.int64(0), [(X, whole, V)], alpha=0.9, regularization=1e-3)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("factor", [np.float32(np.nan), np.float32(np.inf)])
def test_a_factor_that_is_no_number_reaches_masked_elements_too(factor):
    X, G = np.ones(3, np.float32), np.array([0.0, 1.0, -1.0], np.float32)
    (x,) = fused("SSGD", 0.1, np.int64(0), factor, [(X, G)], [np.array([True, False, True])])
    assert np.isnan(x[0])
    assert np.isnan(x[1])


ONES = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("factor", "mask", "sentence"),
    [
        (np.float32(1), np.ones(3, np.float32), r"M of variable 1 of 1 has type float: a mask must be of type bool\."),
        (np.float32(1), np.ones(2, bool), r"M of variable 1 of 1 has shape \[2\] and X has shape \[3\]: a mask must "),
        (np.ones(2, np.float32), None, r"the factor of the gradients, has shape \[2\], and must have exactly one "),
        (np.int64(1), None, r"the factor of the gradients, has type int64, and must be float or double"),
    ],
)
def test_refusals(factor, mask, sentence):
    with pytest.raises(Exception, match=f"FusedAdagrad: {sentence}"):
        fused("Adagrad", 0.1, np.int64(0), factor, [(ONES, ONES, ONES)], None if mask is None else [mask])


def test_the_number_of_tensors_must_be_divisible():
    with pytest.raises(Exception, match=r"FusedAdam: 4 tensors follow R, T and the factor.* multiple of 5\."):
        fused("Adam", 0.1, np.int64(0), 1.0, [(ONES, ONES, ONES, ONES)], masked=1)
