"""Bodies on stock ONNX Runtime against the reference.

All but SSGD and LAMB agree to the last bit, in float32 and float64. These sum a tensor in float64 in another
order, so that their scale may differ in the last bits of float64: a float32 result differs by at most one unit in
the last place of the weight and its step, a float64 result by a few.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from operator_cases import ATTRIBUTES, CASES, IDS, TYPES, problem
from operator_graphs import lowered, model_of, run

from onnxtrain.graph import Builder
from onnxtrain.operators import OPTIMIZERS, emit

EXACT = set(OPTIMIZERS) - {"SSGD", "LAMB"}
UNITS = {np.dtype(np.float32): 1, np.dtype(np.float64): 16}


def compare(made, R, T, **how) -> None:
    inputs = [np.asarray(R, np.float32), np.asarray(T, np.int64), *made.tensors]
    wanted = made.run(inputs[0], inputs[1])
    model = lowered(model_of(made.schema.name, inputs, made.attributes, outputs=len(wanted), **how))
    for new, want, old in zip(run(model, inputs), wanted, made.old, strict=True):
        assert new.dtype == want.dtype
        assert new.shape == want.shape
        if made.schema.name in EXACT:
            np.testing.assert_array_equal(new, want, strict=True)
        else:
            unit = np.spacing(np.maximum(np.abs(old), np.abs(want - old)))
            different = ~((np.abs(new - want) <= UNITS[old.dtype] * unit) | (np.isnan(new) & np.isnan(want)))
            assert not different.any(), (new[different], want[different])


@pytest.mark.sampled("T")
@pytest.mark.parametrize("T", [0, 1, 2, 1000])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_body_equals_reference(name, attributes, dtype, T):
    compare(problem(name, attributes, [((7, 19), dtype)], seed=T), 0.1, T)


@pytest.mark.sampled("shapes")
@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_variables_of_mixed_shapes_and_types(name, attributes, shapes):
    variables = [((), np.float32), ((0,), np.float64), ((3, 0), np.float32), ((5,), np.float64), ((2, 3), np.float32)]
    compare(problem(name, attributes, variables), 0.05, 4, shapes=shapes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_variables_share_what_depends_on_r_and_t(name):
    attributes = ATTRIBUTES[name][0]
    sizes = {}
    for count in (1, 2, 50):
        made = problem(name, attributes, [((3, 2), np.float32)] * count)
        inputs = [np.asarray(0.1, np.float32), np.asarray(3), *made.tensors]
        wanted = made.run(inputs[0], inputs[1])
        model = lowered(model_of(name, inputs, attributes, outputs=len(wanted)))
        sizes[count] = len(model.graph.node)
        for new, want in zip(run(model, inputs), wanted, strict=True):
            np.testing.assert_allclose(new, want, rtol=1e-6)
    per_variable = sizes[2] - sizes[1]
    assert sizes[50] == sizes[1] + 49 * per_variable
    assert sizes[1] > per_variable  # something is shared


@pytest.mark.sampled("shapes")
@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize("gradient_shape", [(), (1,), (3,), (2, 1)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_smaller_gradient_broadcasts(name, gradient_shape, shapes):
    made = problem(name, ATTRIBUTES[name][0], [((2, 3), np.float32)])
    made.tensors[1] = np.asarray(np.random.default_rng(0).standard_normal(gradient_shape), np.float32)
    compare(made, 0.1, 1, shapes=shapes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_larger_than_known_fails_in_the_runtime(name):
    made = problem(name, ATTRIBUTES[name][0], [((1, 3), np.float32)])
    made.tensors[1] = np.ones((2, 3), np.float32)
    inputs = [np.asarray(0.1, np.float32), np.asarray(1), *made.tensors]
    model = lowered(model_of(name, inputs, made.attributes, outputs=made.roles - 1, shapes="dynamic"))
    with pytest.raises(Exception, match=r"[Rr]eshape"):
        run(model, inputs)


@pytest.mark.sampled("bad")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_nan_and_infinity(name, attributes, where, bad):
    made = problem(name, attributes, [((6,), np.float32)])
    made.tensors[where][3] = bad
    inputs = [np.asarray(0.1, np.float32), np.asarray(1), *made.tensors]
    model = lowered(model_of(name, inputs, attributes, outputs=made.roles - 1))
    for new, want in zip(run(model, inputs), made.run(inputs[0], inputs[1]), strict=True):
        np.testing.assert_array_equal(np.isnan(new), np.isnan(want))
        np.testing.assert_allclose(new, want, rtol=1e-5)


@pytest.mark.sampled("opset")
@pytest.mark.parametrize("opset", [13, 18, 23, 26])
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_bodies_are_valid_at_every_opset(name, attributes, opset):
    made = problem(name, attributes, [((4,), np.float32)])
    inputs = [np.asarray(0.1, np.float32), np.asarray(1), *made.tensors]
    model = model_of(name, inputs, attributes, outputs=made.roles - 1, shapes="unknown")
    model.opset_import.append(onnx.helper.make_opsetid("", opset))
    model.ir_version = 11 if opset > 22 else 8
    body = lowered(model)
    assert body.opset_import[0].version == opset
    assert np.isfinite(run(body, inputs)[0]).all()


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_r_and_t_of_one_element_and_any_rank(shape):
    made = problem("Adam", {}, [((3,), np.float32)])
    inputs = [np.full(shape, 0.1), np.full(shape, 2, np.int64), *made.tensors]
    body = lowered(model_of("Adam", inputs, {}, outputs=3))
    for new, want in zip(run(body, inputs), made.run(0.1, 2), strict=True):
        np.testing.assert_array_equal(new, want, strict=True)


def test_adagrad_in_a_graph_gives_nan_where_the_reference_raises():
    made = problem("Adagrad", {"decay_factor": 1.0}, [((3,), np.float32)])
    inputs = [np.asarray(0.1, np.float32), np.asarray(-2), *made.tensors]
    x_new, h_new = run(lowered(model_of("Adagrad", inputs, made.attributes, outputs=2)), inputs)
    assert np.isnan(x_new).all()
    assert np.isfinite(h_new).all()


def test_emit_returns_one_tuple_per_variable():
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 18})
    op = Builder(graph, 18)
    R, T = op.constant(0.1, np.float32), op.constant(0, np.int64)
    x, y = op.constant(np.ones((2, 3), np.float32)), op.constant(np.ones(4))
    new = emit(op, OPTIMIZERS["Adagrad"].schema, R, T, [(x, x, x), (y, y, y)], {})
    assert [[(v.dtype.name, v.shape) for v in item] for item in new] == [
        [("FLOAT", (2, 3))] * 2,
        [("DOUBLE", (4,))] * 2,
    ]
