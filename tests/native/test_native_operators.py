"""The operators inside ONNX Runtime: grouping, types, shapes, threads, in place, and omitted declarations."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from optimizer_reference import draw, stepwise
from optimizer_sessions import GROUPS, REQUIRED, element_type, node, optimizer_session, run, run_in_place, session

from onnxtrain import kernels
from onnxtrain.runtime.native import custom_ops_library

PATH = str(custom_ops_library())
STATES = {"Adagrad": 1, "Adam": 2, "LAMB": 2, "Momentum": 1, "SSGD": 0}
SHAPES = [(3,), (2, 3, 5), (), (0,), (1, 70), (17, 33), (4, 0, 2), (40_000,)]


def expected(name, R, T, variables, **attributes):
    """Outputs in the operator's order, from kernels or pseudo-code tested elsewhere."""
    results = []
    for X, G, *states in variables:
        if name in ("LAMB", "SSGD"):
            X, *states = (array.copy() for array in (X, *states))
            step = {"step": int(T)} if name == "LAMB" else {}
            getattr(kernels, f"{name.lower()}_")([X], [G], states, learning_rate=R, **step, **attributes)
            results.append([X, *states])
        else:
            results.append(stepwise(name, R, T, X, G, *states, **{**REQUIRED.get(name, {}), **attributes}))
    return [result[output] for output in range(len(results[0])) for result in results]


def assert_all_equal(actual, values):
    assert len(actual) == len(values)
    for a, b in zip(actual, values, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def mixed(name, count, seed=0):
    """Variables of mixed shapes and types."""
    rng = np.random.default_rng(seed)
    types = (np.float32, np.float64, np.float32)
    return [draw(rng, SHAPES[i % len(SHAPES)], types[i % 3], STATES[name]) for i in range(count)]


@pytest.mark.parametrize("how", [run, run_in_place])
@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("name", GROUPS)
def test_variables_of_mixed_shapes_and_types(library_path, name, count, how):
    variables = mixed(name, count)
    R, T = np.float64(0.1), np.int64(3)
    assert_all_equal(how(library_path, name, R, T, variables), expected(name, R, T, variables))


@pytest.mark.parametrize("how", [run, run_in_place])
@pytest.mark.parametrize("name", GROUPS)
def test_results_do_not_depend_on_the_number_of_threads(name, how):
    variables = mixed(name, 20)
    one, three = (how(PATH, name, np.float32(0.1), np.int64(3), variables, threads=n) for n in (1, 3))
    assert_all_equal(one, three)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "Momentum"])
def test_every_tail_out_of_place(library_path, name, dtype):
    rng = np.random.default_rng(5)
    variables = [draw(rng, count, dtype, STATES[name]) for count in range(71)]
    R, T = np.float64(0.1), np.int64(3)
    assert_all_equal(run(library_path, name, R, T, variables), expected(name, R, T, variables))


@pytest.mark.parametrize("R", [np.float32(0.1), np.float64(0.1), np.full((1, 1), 0.1, np.float32)])
@pytest.mark.parametrize("T", [np.int64(4), np.full(1, 4)])
def test_learning_rate_and_count_are_one_element_of_any_rank(R, T):
    variables = mixed("Adam", 3)
    assert_all_equal(
        run(PATH, "Adam", R, T, variables), expected("Adam", R.reshape(-1)[0], T.reshape(-1)[0], variables)
    )


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    ("gradient", "parameter"),
    [
        ((), (5000,)),
        ((1,), (3, 700)),
        ((700,), (3, 700)),
        ((3, 1), (3, 700)),
        ((2, 1, 5), (2, 300, 5)),
        ((1, 300, 1), (2, 300, 5)),
        ((300, 1), (2, 300, 5)),
        ((2, 1, 4, 1), (2, 3, 4, 50)),
        ((1, 3), (0, 3)),
        ((2, 3), (1, 2, 3)),
    ],
)
def test_a_gradient_may_broadcast_to_its_parameter(name, gradient, parameter):
    rng = np.random.default_rng(6)
    X, _, *states = draw(rng, parameter, np.float32, STATES[name])
    G = np.asarray(rng.standard_normal(gradient), np.float32)
    R, T = np.float32(0.1), np.int64(0)
    full = np.ascontiguousarray(np.broadcast_to(G, parameter))
    for how in (run, run_in_place):
        values = how(PATH, name, R, T, [[X, G, *states]])
        assert_all_equal(values, expected(name, R, T, [[X, full, *states]]))


def test_unrequested_outputs_are_skipped():
    variables = mixed("Adam", 8)
    R, T = np.float32(0.1), np.int64(2)
    everything = expected("Adam", R, T, variables)
    only_x = run(PATH, "Adam", R, T, variables, wanted=[f"X{i}_new" for i in range(8)])
    assert_all_equal(only_x, everything[:8])
    one = run(PATH, "Adam", R, T, variables, wanted=["X0_new", "H1_new"])
    assert_all_equal(one, [everything[0], everything[17]])


def test_ssgd_has_momentum_where_alpha_is_above_zero():
    rng = np.random.default_rng(7)
    variables = [draw(rng, shape, np.float32, 1) for shape in SHAPES]
    attributes = {"alpha": 0.9, "measure": "p-norm", "p": 0.75, "reweighting": "l1", "regularization": 0.01}
    attributes |= {"norm_coefficient": 0.1, "max_scale": 2.0}
    xs, vs = [x.copy() for x, _, _ in variables], [v.copy() for *_, v in variables]
    kernels.ssgd_(xs, [g for _, g, _ in variables], vs, learning_rate=0.1, **attributes)
    for how in (run, run_in_place):
        assert_all_equal(how(PATH, "SSGD", np.float64(0.1), np.int64(0), variables, **attributes), [*xs, *vs])


def test_a_thousand_steps_in_place_through_one_binding():
    x, v, h = (np.zeros(1, np.float32) for _ in range(3))
    made, feeds = optimizer_session(PATH, "Adam", np.float32(0.1), np.int64(1), [[x, np.ones(1, np.float32), v, h]])
    binding = made.io_binding()
    for key, array in feeds.items():
        binding.bind_input(key, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for key, array in (("X0_new", x), ("V0_new", v), ("H0_new", h)):
        binding.bind_output(key, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for step in range(1, 1001):
        feeds["T"][...] = step
        made.run_with_iobinding(binding)
    assert x[0] == pytest.approx(-100, rel=1e-3)  # a constant gradient: every step is the learning rate


@pytest.mark.parametrize("name", GROUPS)
def test_types_and_shapes_of_one_variable_are_inferred(name):
    inputs, outputs = GROUPS[name]
    values = [(letter, TensorProto.DOUBLE, ["n", 3]) for letter in inputs]
    nodes = [node(name, ["R", "T", *inputs], [f"{out}_new" for out in outputs])]
    nodes += [helper.make_node("Neg", [f"{out}_new"], [f"{out}_negative"]) for out in outputs]
    made = session(
        PATH,
        nodes,
        [("R", TensorProto.FLOAT, []), ("T", TensorProto.INT64, []), *values],
        [(f"{out}_negative", TensorProto.DOUBLE, None) for out in outputs],
    )
    assert [out.shape for out in made.get_outputs()] == [["n", 3]] * len(outputs)


def test_an_unknown_shape_stays_unknown():
    made = session(
        PATH,
        [node("Momentum", ["R", "T", *"XGV"], ["X_new", "V_new"])],
        [("R", TensorProto.FLOAT, []), ("T", TensorProto.INT64, []), *((x, TensorProto.FLOAT, None) for x in "XGV")],
        [("X_new", TensorProto.FLOAT, ["rows", 3]), ("V_new", TensorProto.FLOAT, None)],
    )
    assert made.get_outputs()[0].shape == ["rows", 3]  # the declared shape; a scalar's would conflict


def test_several_variables_take_types_from_onnx_shape_inference():
    arrays = [np.ones(2, np.float32), np.ones((3, 1))]
    inputs = [f"{letter}{i}" for letter in "XGH" for i in range(2)]
    typed = [
        helper.make_tensor_value_info(name, element_type(arrays[int(name[1])]), arrays[int(name[1])].shape)
        for name in inputs
    ]
    typed += [
        helper.make_tensor_value_info("R", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("T", TensorProto.INT64, []),
    ]
    produced = ["X0_new", "X1_new", "H0_new", "H1_new"]
    graph = helper.make_graph(
        [
            node("Adagrad", ["R", "T", *inputs], produced),
            *(helper.make_node("Neg", [out], [f"{out}_negative"]) for out in produced),
        ],
        "optimizer",
        typed,
        [helper.make_tensor_value_info(f"{out}_negative", element_type(arrays[int(out[1])]), None) for out in produced],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.preview.training", 1)]
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8))
    made = session(
        PATH,
        model.graph.node,
        *(
            [
                (v.name, v.type.tensor_type.elem_type, [d.dim_value for d in v.type.tensor_type.shape.dim])
                for v in values
            ]
            for values in (model.graph.input, model.graph.output)
        ),
        value_info=model.graph.value_info,
    )
    assert [out.shape for out in made.get_outputs()] == [[2], [3, 1], [2], [3, 1]]


def test_the_examples_of_the_operator_pages():
    T, R = np.int64(0), np.float32(0.1)
    x, g, v, h = (np.array(a, np.float32) for a in ([1.2, 2.8], [-0.94, -2.5], [1.7, 3.6], [0.1, 0.1]))
    attributes = {"norm_coefficient": 0.001, "alpha": 0.95, "beta": 0.1, "epsilon": 1e-7}
    (x_new, _, _) = run(PATH, "Adam", R, T, [[x, g, v, h]], **attributes)
    G = 0.001 * x.astype(np.float64) + g
    np.testing.assert_allclose(
        x_new, x - 0.1 * (0.95 * v + 0.05 * G) / (np.sqrt(0.1 * h + 0.9 * G * G) + 1e-7), rtol=1e-6
    )
    attributes = {"norm_coefficient": 0.01, "alpha": 0.95, "beta": 1.0, "mode": "nesterov"}
    (x_new, v_new) = run(PATH, "Momentum", R, T, [[x, g, v]], **attributes)
    G = 0.01 * x.astype(np.float64) + g
    np.testing.assert_allclose(v_new, 0.95 * v + G, rtol=1e-6)
    np.testing.assert_allclose(x_new, x - 0.1 * (G + 0.95 * (0.95 * v + G)), rtol=1e-6)
