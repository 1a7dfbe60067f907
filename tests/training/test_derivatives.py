"""Products with Jacobians and Hessians, Jacobians and gradients of each example: closed forms and errors."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import GradientError, OnnxTrainError
from sentences import raises_sentence, warns_sentence


def parse(text: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> {text}')


def run(model: onnx.ModelProto, **feeds: object) -> dict[str, np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    types = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    given = {value.name: np.asarray(feeds[value.name], types[value.type]) for value in session.get_inputs()}
    return dict(zip(names, session.run(names, given), strict=True))


SQUARE = "f (float[n] x) => (float[n] y) { y = Mul(x, x) }"
BOTH = "f (float[2] a, float[2] b) => (float[2] s, float[2] p) { s = Add(a, b)  p = Mul(a, b) }"


def test_products_sum_over_all_inputs_and_outputs() -> None:
    found = run(onnxtrain.jvp(parse(BOTH)), a=[1, 2], b=[3, 4], a_tangent=[1, 0], b_tangent=[0, 1])
    assert list(found) == ["s", "p", "s_jvp", "p_jvp"]
    np.testing.assert_array_equal(found["s_jvp"], [1, 1])
    np.testing.assert_array_equal(found["p_jvp"], [3, 2])
    found = run(onnxtrain.vjp(parse(BOTH)), a=[1, 2], b=[3, 4], s_cotangent=[1, 1], p_cotangent=[10, 0])
    np.testing.assert_array_equal(found["a_vjp"], [31, 1])
    np.testing.assert_array_equal(found["b_vjp"], [11, 1])


def test_named_values_alone_are_differentiated() -> None:
    model = onnxtrain.jvp(parse(BOTH), y="p", xs="b")
    assert [value.name for value in model.graph.input] == ["a", "b", "b_tangent"]
    np.testing.assert_array_equal(run(model, a=[1, 2], b=[3, 4], b_tangent=[1, 1])["p_jvp"], [1, 2])


def test_forward_mode_leaves_no_cotangent_behind() -> None:
    model = onnxtrain.jvp(parse(SQUARE))
    assert [value.name for value in model.graph.input] == ["x", "x_tangent"]
    np.testing.assert_array_equal(run(model, x=[1, 2, 3], x_tangent=[1, 1, 2])["y_jvp"], [2, 4, 12])


def test_an_output_that_does_not_depend_on_an_input_has_zero_derivatives() -> None:
    model = parse("f (float[2] a, float[2] b) => (float[2] y) { y = Exp(a) }")
    np.testing.assert_array_equal(run(onnxtrain.jvp(model, xs="b"), a=[0, 0], b=[1, 1], b_tangent=[1, 1])["y_jvp"], 0)
    np.testing.assert_array_equal(
        run(onnxtrain.jacobian(model, xs="b"), a=[0, 0], b=[1, 1])["b_jacobian"], np.zeros((2, 2))
    )


def test_hessian_vector_product_of_a_cubic() -> None:
    model = parse("f (float[3] x) => (float y) { c = Mul(x, x)  d = Mul(c, x)  y = ReduceSum<keepdims=0>(d) }")
    found = run(onnxtrain.hessian_vector_product(model, xs="x"), x=[1, 2, 3], x_vector=[1, 1, 2])
    assert list(found) == ["y", "x_grad", "x_hvp"]
    np.testing.assert_array_equal(found["x_grad"], [3, 12, 27])
    np.testing.assert_array_equal(found["x_hvp"], [6, 12, 36])


def test_mixed_second_derivatives() -> None:
    model = parse(
        "f (float[2] a, float[2] b) => (float y) { p = Mul(a, b)  q = Mul(p, b)  y = ReduceSum<keepdims=0>(q) }"
    )
    model = onnxtrain.hessian_vector_product(model, "y", ["a", "b"])
    found = run(model, a=[1, 2], b=[3, 4], a_vector=[1, 0], b_vector=[0, 1])
    np.testing.assert_array_equal(found["a_hvp"], [0, 8])  # 2 b v_b
    np.testing.assert_array_equal(found["b_hvp"], [6, 4])  # 2 b v_a + 2 a v_b


@pytest.mark.parametrize("size", ["n", "3"])
def test_jacobian_of_a_linear_map(size: str) -> None:
    model = parse(f"f (float[{size}] x) => (float[2] y) <float[2,3] w = {{1,2,3,4,5,6}}> {{ y = MatMul(w, x) }}")
    found = run(onnxtrain.jacobian(model), x=[1, 1, 1])
    np.testing.assert_array_equal(found["x_jacobian"], [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(found["y"], [6, 15])


def test_jacobian_of_a_scalar_is_the_gradient() -> None:
    model = parse("f (float[3] x) => (float y) { y = ReduceSumSquare<keepdims=0>(x) }")
    np.testing.assert_array_equal(run(onnxtrain.jacobian(model), x=[1, 2, 3])["x_jacobian"], [2, 4, 6])


def test_jacobian_of_each_example_of_a_batch() -> None:
    model = parse("f (float[n, 2] x) => (float[n, 2, 1] y) { s = Mul(x, x)  y = Unsqueeze(s, axes) }".replace(
        "=> (float[n, 2, 1] y)", "=> (float[n, 2, 1] y) <int64[1] axes = {2}>"))  # fmt: skip
    found = run(onnxtrain.jacobian(model, batch=True), x=[[1, 2], [3, 4], [5, 6]])["x_jacobian"]
    assert found.shape == (3, 2, 1, 2)
    np.testing.assert_array_equal(found[:, :, 0], [np.diag(row) for row in ([2, 4], [6, 8], [10, 12])])
    full = run(onnxtrain.jacobian(model), x=[[1, 2], [3, 4], [5, 6]])["x_jacobian"]
    assert full.shape == (3, 2, 1, 3, 2)
    np.testing.assert_array_equal(np.einsum("nabnc->nabc", full), found)


LINEAR = "f (float[n, 2] x, float[n] t) => (float[n] p, float loss) <float[2] w = {1, 1}> " \
    "{ p = MatMul(x, w)  d = Sub(p, t)  s = Mul(d, d)  loss = ReduceMean<keepdims=0>(s) }"  # fmt: skip


def test_gradients_of_each_example() -> None:
    x, t = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), np.array([1.0, 0.0, 10.0])
    model = onnxtrain.per_example_gradients(parse(LINEAR), "loss", "w")
    assert [value.name for value in model.graph.input] == ["x", "t"]
    found = run(model, x=x, t=t)
    errors = x.sum(1) - t
    np.testing.assert_allclose(found["p"], x.sum(1))
    np.testing.assert_allclose(found["loss"], errors**2)
    np.testing.assert_allclose(found["w_grads"], 2 * errors[:, None] * x)


def test_a_shared_input_is_not_cut_into_examples() -> None:
    head = "f (float[n, 2] x, float[k] s) => (float[n] y) <float[2] w = {1, 1}>"
    text = f"{head} {{ p = MatMul(x, w)  m = ReduceSum<keepdims=0>(s)  y = Mul(p, m) }}"
    model = onnxtrain.per_example_gradients(parse(text), "y", "w", inputs="x")
    found = run(model, x=[[1, 2], [3, 4]], s=[1, 1, 1])
    np.testing.assert_array_equal(found["w_grads"], [[3, 6], [9, 12]])


@pytest.mark.parametrize("kind", ["double", "float16"])
def test_other_types(kind: str) -> None:
    model = parse(SQUARE.replace("float", kind))
    found = run(onnxtrain.jvp(model), x=[1, 2, 3], x_tangent=[1, 1, 2])["y_jvp"]
    np.testing.assert_array_equal(found.astype(np.float32), [2, 4, 12])
    jacobian = run(onnxtrain.jacobian(model), x=[1, 2, 3])["x_jacobian"]
    np.testing.assert_array_equal(jacobian.astype(np.float32), np.diag([2, 4, 6]))


def test_integers_stay_constant() -> None:
    text = "f (float[3] x, int64[2] i) => (float[2] y) { y = Gather(x, i) }"
    model = onnxtrain.jvp(parse(text))
    assert [value.name for value in model.graph.input] == ["x", "i", "x_tangent"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: onnxtrain.vjp(m, xs="nothing"), "xs names 'nothing', but the model has no value of that name"),
        (lambda m: onnxtrain.jvp(m, y="nothing"), "y names 'nothing', but the model has no value of that name"),
        (lambda m: onnxtrain.jacobian(m, y="c"), "y names 'c', which is not floating"),
        (lambda m: onnxtrain.jacobian(m), r"The model has 2 floating outputs \('p', 'loss'\); name a value with y="),
        (lambda m: onnxtrain.jacobian(m, y="loss", batch=True), "'loss' has no batch axis"),
        (lambda m: onnxtrain.hessian_vector_product(m), "The model has 3 outputs"),
        (lambda m: onnxtrain.per_example_gradients(m, "loss", "x"), "xs are parameters"),
        (lambda m: onnxtrain.per_example_gradients(m, "loss", "w", inputs="w"), "'w' must be an input whose"),
    ],
)  # fmt: skip
def test_errors(call, message: str) -> None:
    model = parse(LINEAR.replace("float loss)", "float loss, bool[n] c)").replace("loss =", "c = Greater(p, t) loss ="))
    with pytest.raises(GradientError, match=message):
        call(model)


def test_a_fixed_batch_is_refused_and_a_taken_name_gets_a_number() -> None:
    model = parse(LINEAR.replace("[n", "[4"))
    with raises_sentence("no_dynamic_first_axis"):
        onnxtrain.per_example_gradients(model, "loss", "w")
    with raises_sentence("first_axis_not_dynamic", what="x"):
        onnxtrain.per_example_gradients(model, "loss", "w", inputs="x")
    taken = parse("f (float[2] x, float[2] x_tangent) => (float[2] y) { y = Add(x, x_tangent) }")
    assert [value.name for value in onnxtrain.jvp(taken, xs="x").graph.input] == ["x", "x_tangent", "x_tangent2"]


def test_operators_without_a_gradient_are_listed() -> None:
    model = parse("f (float[2] x) => (float[2] y) { y = Unknown(x) }")
    with pytest.raises(OnnxTrainError, match="Unknown"):
        onnxtrain.jvp(model)


def test_half_precision_gradients_of_each_example() -> None:
    text = "f (float16[n, 2] x) => (float16[n] y) <float16[2] w> { p = MatMul(x, w)  y = Mul(p, p) }"
    model = parse(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float16), "w"))
    found = run(onnxtrain.per_example_gradients(model, "y", "w"), x=[[1, 2], [3, 4]])
    np.testing.assert_array_equal(found["y"], [9, 49])
    np.testing.assert_array_equal(found["w_grads"], [[6, 12], [42, 56]])


def test_derivatives_of_derivatives() -> None:
    cubic = parse("f (float[2] x) => (float[2] y) { s = Mul(x, x)  y = Mul(s, x) }")
    slope = onnxtrain.gradient(cubic, "y", "x")
    hessian = run(onnxtrain.jacobian(slope, "x_grad", "x"), x=[1, 2])
    assert list(hessian) == ["y", "x_grad", "x_jacobian"]
    np.testing.assert_array_equal(hessian["x_jacobian"], np.diag([6, 12]))
    pulled = run(onnxtrain.jvp(onnxtrain.vjp(cubic), "x_vjp", "x"), x=[1, 2], y_cotangent=[1, 1], x_tangent=[1, 0])
    np.testing.assert_array_equal(pulled["x_vjp_jvp"], [6, 0])
    third = run(onnxtrain.hessian_vector_product(slope, "x_grad", ["x_grad"]), x=[1, 2], x_grad_vector=[1, 1])
    np.testing.assert_array_equal(third["x_grad"], [3, 12])
    np.testing.assert_array_equal(third["x_grad_grad"], [1, 1])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_gradient_of_a_gradient_of_a_gradient(rank: int) -> None:
    model = parse("f (float[2] x) => (float[2] y) { s = Mul(x, x)  c = Mul(s, x)  y = Mul(c, c) }")
    name = "y"
    for _ in range(rank):
        model = onnxtrain.gradient(model, name, "x")
        name = model.graph.output[-1].name
    assert name == ("x_grad" if rank == 1 else f"x_grad{rank}")
    wanted = {1: [6, 192], 2: [30, 480], 3: [120, 960]}[rank]  # of x to the sixth power at 1 and 2
    np.testing.assert_allclose(run(model, x=[1, 2])[name], wanted)
    assert list(run(onnxtrain.vjp(onnxtrain.vjp(model, name), "x_vjp"), x=[1, 2], **{f"{name}_cotangent": [1, 1]},
                    x_vjp_cotangent=[1, 1]))[-2:] == ["x_vjp2", f"{name}_cotangent_vjp"]  # fmt: skip


def test_a_renamed_gradient_is_read_in_bodies_too() -> None:
    text = """f (float[2] x, bool c) => (float[2] y) { x_grad = Mul(x, x)
        y = If(c) <then_branch = t () => (float[2] a) { a = Mul(x_grad, x) },
                   else_branch = e () => (float[2] b) { b = Neg(x_grad) }> }"""
    session = onnxruntime.InferenceSession(onnxtrain.vjp(parse(text), xs="x").SerializeToString())
    feeds = {"x": np.array([1, 2], np.float32), "c": np.array(True), "y_cotangent": np.ones(2, np.float32)}
    np.testing.assert_array_equal(session.run(["x_vjp"], feeds)[0], [3, 12])


@pytest.mark.parametrize(
    "function",
    [onnxtrain.gradient, onnxtrain.vjp, onnxtrain.jvp, onnxtrain.hessian_vector_product, onnxtrain.jacobian],
)
def test_names_count_once_and_wrong_names_are_refused(function) -> None:
    names = [value.name for value in function(parse(SQUARE), "y", ["x", "x"]).graph.output]
    assert len(names) == len(set(names))
    for xs in ([], 3, ["x", 3]):
        with raises_sentence("names_of_values", what="xs"):
            function(parse(SQUARE), "y", xs)
    with pytest.raises(GradientError, match=r"y is 3; it needs (the|a) name"):
        function(parse(SQUARE), 3, "x")
    (new,) = {"x_grad", "x_vjp", "y_jvp", "x_hvp", "x_jacobian"}.intersection(names[-1:])
    taken = parse(f"f (float[n] x) => (float[n] y) {{ {new} = Mul(x, x)  y = Sin({new}) }}")
    assert [value.name for value in function(taken, "y", "x").graph.output][-1] == f"{new}2"


def test_two_outputs_of_one_name_have_one_product() -> None:
    found = run(onnxtrain.vjp(parse(SQUARE), ["y", "y"], "x"), x=[1, 2], y_cotangent=[1, 1])
    np.testing.assert_array_equal(found["x_vjp"], [2, 4])
    assert list(run(onnxtrain.jvp(parse(SQUARE), ["y", "y"], "x"), x=[1, 2], x_tangent=[1, 1])) == ["y", "y_jvp"]
    with raises_sentence("y_names_values", what="y", got=["s", "p"], number=2):
        onnxtrain.jacobian(parse(BOTH), ["s", "p"])


def test_a_jacobian_of_a_batch_needs_the_batch_in_each_x() -> None:
    model = parse("f (float[4, 3] x, float[2] b) => (float[4, 2] y) <float[3, 2] w = {1,2,3,4,5,6}> "
                  "{ p = MatMul(x, w)  y = Add(p, b) }")  # fmt: skip
    with raises_sentence("jacobian_batch", what="w", got=(3, 2), wanted=(4, 2), y_name="'y'"):
        onnxtrain.jacobian(model, "y", "w", batch=True)
    with pytest.raises(GradientError, match="axis 0 of 'b'"):
        onnxtrain.jacobian(model, "y", "b", batch=True)
    with pytest.raises(GradientError, match="inputs is"):
        onnxtrain.per_example_gradients(parse(LINEAR), "loss", "w", inputs=[])


ENDS = {
    "softmax": "y = Softmax(z)",
    "of another axis": "y = Softmax<axis=0>(z)",
    "moved": "p = Softmax(z)  t = Transpose<perm=[1, 0]>(p)  y = Identity(t)",
    "written out": "e = Exp(z)  t = ReduceSum<keepdims=1>(e, last)  y = Div(e, t)",
    "one minus": "p = Softmax(z)  y = Sub(one, p)",
    "summed": "p = Softmax(z)  y = ReduceSum<keepdims=0>(p, last)",
    "mixed": "p = Softmax(z)  m = Softmax(square)  y = MatMul(p, m)",
}
OTHER_ENDS = {
    "logits": "y = Identity(z)",
    "logarithm": "y = LogSoftmax(z)",
    "sigmoid": "y = Sigmoid(z)",
    "one class": "p = Softmax(z)  y = Gather<axis=1>(p, first)",
    "weighted": "p = Softmax(z)  y = Mul(p, row)",
    "squared": "p = Softmax(z)  y = Mul(p, p)",
}


def ending(nodes: str, shape: str) -> onnx.ModelProto:
    constants = "float one = {1}, int64[1] last = {1}, int64 first = {0}, float[3] row = {1, 2, 4}"
    squares = "float[3,3] square = {1, 2, 3, 4, 5, 7, 6, 8, 9}, float[3,3] w = {1, 2, 0, 0, 1, 3, 2, 0, 1}"
    return parse(f"f (float[2,3] x) => (float{shape} y) <{constants}, {squares}> {{ z = MatMul(x, w)  {nodes} }}")


@pytest.mark.parametrize("function", [onnxtrain.gradient, onnxtrain.per_example_gradients], ids=["whole", "each"])
@pytest.mark.parametrize("end", ENDS)
def test_a_y_whose_sum_is_always_the_same_is_named(end: str, function) -> None:
    shape = {"moved": "[3,n]", "summed": "[n]"}.get(end, "[n,3]")
    model = ending(ENDS[end], shape)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    with warns_sentence("constant_sum", y="y"):
        found = function(model, xs=["w"])
    if function is onnxtrain.gradient:
        np.testing.assert_allclose(run(found, x=[[1, 2, 3], [0, 1, -1]])["w_grad"], 0, atol=1e-6)


@pytest.mark.parametrize("end", OTHER_ENDS)
def test_other_ys_are_differentiated_without_a_hint(end: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = onnxtrain.gradient(ending(OTHER_ENDS[end], "[2]" if end == "one class" else "[2,3]"), xs=["x"])
    assert np.abs(run(found, x=[[0.1, 0.2, 0.3], [0, 0.1, -0.1]])["x_grad"]).max() > 0.01


def test_a_derivative_by_a_part_of_the_proof_is_not_zero() -> None:
    model = ending("p = Softmax(z)  y = Mul(p, one)", "[2,3]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = onnxtrain.gradient(model, xs=["p"])
        scale = onnxtrain.gradient(model, xs=["one"])
        onnxtrain.jacobian(model)
        onnxtrain.vjp(model)
    np.testing.assert_array_equal(run(found, x=np.ones((2, 3)))["p_grad"], np.ones((2, 3)))
    np.testing.assert_allclose(run(scale, x=np.ones((2, 3)))["one_grad"], 2, rtol=1e-6)
