"""Invalid or unusual models that pass ONNX's checker: an error of one sentence, or the right result."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, parser

import onnxtrain
from onnxtrain.errors import GradientError, ModelError
from sentences import raises_sentence

HEADER = '<ir_version: 10, opset_import: ["" : 18]>'
LAYER = f"""{HEADER} g (float[n,3] x) => (float[n,2] y) <float[3,2] w = {{1, 2, 3, 4, 5, 6}}>
    {{ m = MatMul(x, w) y = Tanh(m) }}"""
BRANCHES = f"""{HEADER} g (float[3] x, bool c) => (float y) <float[3] w = {{1, 2, 3}}> {{
    z = If(c) <then_branch = t () => (float[3] a) {{ a = Mul(x, w) }},
               else_branch = e () => (float[3] b) {{ b = Add(x, w) }}>
    y = ReduceSum<keepdims=0>(z) }}"""
LOOP = f"""{HEADER} g (float[3] x) => (float y) {{ n = Constant<value_int = 3>()
    z = Loop<body = b (int64 i, bool go, float[3] s) => (bool on, float[3] t)
        {{ on = Identity(go) t = Mul(s, x) }}>(n, , x)
    y = ReduceSum<keepdims=0>(z) }}"""
SCAN = f"""{HEADER} g (float[3] x, float[4,3] q) => (float y) {{
    z = Scan<num_scan_inputs = 1, body = b (float[3] s, float[3] u) => (float[3] t) {{ t = Mul(s, u) }}>(x, q)
    y = ReduceSum<keepdims=0>(z) }}"""


def parsed(text: str) -> onnx.ModelProto:
    return parser.parse_model(text)


def body(model: onnx.ModelProto, name: str) -> onnx.GraphProto:
    attributes = [attribute for node in model.graph.node for attribute in node.attribute]
    return next(attribute.g for attribute in attributes if attribute.name == name)


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = list(dict.fromkeys(output.name for output in session.get_outputs()))
    return dict(zip(names, session.run(names, feeds), strict=True))


def branch_with_two_outputs() -> onnx.ModelProto:
    model = parsed(BRANCHES)
    branch = body(model, "then_branch")
    branch.node.append(helper.make_node("Neg", ["a"], ["second"]))
    branch.output.append(helper.make_tensor_value_info("second", 1, [3]))
    return model


def branch_without_outputs() -> onnx.ModelProto:
    model = parsed(BRANCHES)
    del body(model, "else_branch").output[:]
    return model


def branch_with_an_input() -> onnx.ModelProto:
    model = parsed(BRANCHES)
    body(model, "then_branch").input.append(helper.make_tensor_value_info("extra", 1, [3]))
    return model


def branch_that_is_missing() -> onnx.ModelProto:
    model = parsed(BRANCHES)
    del model.graph.node[0].attribute[1]
    return model


def branch_that_hands_out_its_surroundings() -> onnx.ModelProto:
    model = parsed(BRANCHES)
    branch = body(model, "then_branch")
    del branch.node[:]
    branch.output[0].name = "x"
    return model


def loop_without_a_state() -> onnx.ModelProto:
    model = parsed(LOOP)
    del body(model, "body").output[1:]
    return model


def loop_with_an_input_too_many() -> onnx.ModelProto:
    model = parsed(LOOP)
    body(model, "body").input.append(helper.make_tensor_value_info("extra", 1, [3]))
    return model


def loop_with_an_output_too_many() -> onnx.ModelProto:
    model = parsed(LOOP)
    loop = body(model, "body")
    loop.output.append(copy.deepcopy(loop.output[1]))
    return model


def scan_of_too_many_slices() -> onnx.ModelProto:
    model = parsed(SCAN)
    attribute = next(item for item in model.graph.node[0].attribute if item.name == "num_scan_inputs")
    attribute.i = 7
    return model


def scan_with_an_input_too_few() -> onnx.ModelProto:
    model = parsed(SCAN)
    del body(model, "body").input[1]
    body(model, "body").node[0].input[1] = "s"
    return model


def scan_without_a_body() -> onnx.ModelProto:
    """A fault in a function, which the checker ignores in formats older than functions."""
    model = parsed(SCAN)
    model.ir_version = 6  # which has no functions yet
    inner = onnx.helper.make_node("Scan", ["s"], ["z"])
    opsets = [onnx.helper.make_opsetid("", 18)]
    model.functions.append(onnx.helper.make_function("", "Scan", ["s", "x"], ["z"], [inner], opsets))
    return model


def input_without_an_element_type() -> onnx.ModelProto:
    model = parsed(LAYER)
    model.graph.input[0].type.tensor_type.elem_type = 0
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (branch_with_two_outputs, r"whose then_branch has 2 outputs where the node has 1"),
        (
            branch_without_outputs,
            r"whose else_branch has 0 outputs where the node has 1",
        ),
        (branch_with_an_input, r"whose then_branch has inputs, but a branch only reads"),
        (branch_that_is_missing, r"Required attribute 'else_branch' is missing; export it again"),
        (branch_that_hands_out_its_surroundings, r"Graph output 'x' is not an output of any node in graph"),
        (loop_without_a_state, r"Loop node \(output 'z'\), whose body has 1 output, too few for 1 state variable"),
        (
            loop_with_an_input_too_many,
            r"whose body has 4 inputs, but iteration number, condition and 1 state variable are 3",
        ),
        (loop_with_an_output_too_many, r"whose body has 3 outputs where the node has 1"),
        (scan_of_too_many_slices, r"Scan node \(output 'z'\), which scans 7 inputs but has 2"),
        (scan_with_an_input_too_few, r"whose body has 1 input where the node has 2"),
        (scan_without_a_body, r"has the Scan node \(output 'z'\), which has no attribute 'body'; export it again"),
        (input_without_an_element_type, r"the input 'x' without an element type, which ONNX Runtime needs"),
    ],
)
def test_what_the_checker_does_not_see_is_one_sentence(make: Callable[[], onnx.ModelProto], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        onnxtrain.gradient(make(), "y", ["x"])


@pytest.mark.parametrize("text", [BRANCHES, LOOP, SCAN])
def test_well_formed_ones_are_taken(text: str) -> None:
    onnxtrain.gradient(parsed(text), "y", ["x"])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("z = Transpose<perm = [0, 5]>(x)", "rejected by ONNX Runtime: .*Invalid attribute perm"),
        ("z = Cast<to = 99>(x)", r"The type of 'z' is not known: .* of the Cast node \(output 'z'\)"),
        (
            "z = Concat<axis = 7>(x, x)",
            r"gradient of Concat node \(output 'z'\) cannot be built, as its attributes do not",
        ),
    ],
)
def test_attributes_that_do_not_fit_are_one_sentence(nodes: str, message: str) -> None:
    text = f"{HEADER} g (float[3,4] x) => (float y) {{ {nodes} y = ReduceSum<keepdims=0>(z) }}"
    with pytest.raises((GradientError, ModelError), match=message):
        onnxtrain.gradient(parsed(text), "y", ["x"])


def test_a_mistake_in_a_rule_of_ones_own_is_not_taken_for_the_models() -> None:
    @onnxtrain.register_gradient("Mistaken", domain="malformed.test")
    def mistaken(node, dy):
        raise ValueError("a mistake in the rule")

    try:
        model = parsed(
            '<ir_version: 10, opset_import: ["" : 18, "malformed.test" : 1]> g (float[3] x) => (float y)'
            "<float[3] z> { z = malformed.test.Mistaken(x) y = ReduceSum<keepdims=0>(z) }"
        )
        with pytest.raises(ValueError, match=r"^a mistake in the rule$"):
            onnxtrain.gradient(model, "y", ["x"])
    finally:
        onnxtrain.unregister_gradient("Mistaken", "malformed.test")


DAMAGED = {
    "node name": lambda m: setattr(m.graph.node[0], "name", "ZZZZ"),
    "operator": lambda m: setattr(m.graph.node[1], "op_type", "ZZZZ"),
    "domain": lambda m: setattr(m.graph.node[1], "domain", "ZZZZ"),
    "attribute": lambda m: m.graph.node[0].attribute.append(helper.make_attribute("ZZZZ", 1)),
    "value": lambda m: (m.graph.node[0].output.__setitem__(0, "ZZZZ"), m.graph.node[1].input.__setitem__(0, "ZZZZ")),
    "description": lambda m: setattr(m.graph.node[1], "doc_string", "ZZZZ"),
    "description of the graph": lambda m: setattr(m.graph, "doc_string", "ZZZZ"),
    "metadata": lambda m: m.metadata_props.add(key="ZZZZ", value="ZZZZ"),
    "metadata of a node": lambda m: m.graph.node[0].metadata_props.add(key="a", value="ZZZZ"),
    "size": lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[0], "dim_param", "ZZZZ"),
}


@pytest.mark.parametrize("place", DAMAGED)
def test_text_that_is_not_utf8_is_one_sentence(place: str, tmp_path) -> None:
    model = parsed(LAYER)
    DAMAGED[place](model)
    path = tmp_path / "damaged.onnx"
    path.write_bytes(model.SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xfd\xfc"))
    for use in (onnxtrain.gradient, onnxtrain.inspect):
        with raises_sentence("name_not_utf8", what=f"'{tmp_path}/damaged.onnx'"):
            use(path)


def test_text_that_is_not_utf8_in_a_body(tmp_path) -> None:
    model = parsed(BRANCHES)
    body(model, "then_branch").node[0].doc_string = "ZZZZ"
    path = tmp_path / "damaged.onnx"
    path.write_bytes(model.SerializeToString().replace(b"ZZZZ", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(ModelError, match=r"not UTF-8 text"):
        onnxtrain.gradient(path, "y", ["x"])


def test_an_output_that_is_listed_twice_is_refused() -> None:
    model = parsed(LAYER)
    model.graph.output.append(model.graph.output[0])
    with raises_sentence("outputs_named_twice", what="The model", got="'y'"):
        onnxtrain.gradient(model)


def test_an_output_without_an_element_type_is_refused() -> None:
    model = parsed(LAYER)
    model.graph.output[0].type.tensor_type.elem_type = 0
    with pytest.raises(ModelError, match="the output 'y' without an element type"):
        onnxtrain.gradient(model)


@pytest.mark.parametrize("sizes", [("1,3,8,8", "4,3,3,3"), ("a,b,c,d", "e,f,g,h"), ("1,3,8,8", "")])
def test_a_convolution_may_leave_its_kernel_shape_out(sizes: tuple[str, str]) -> None:
    text = "{{ z = Conv<pads = [1, 0, 0, 1], strides = [1, 2]{}>(x, w) s = Mul(z, z) y = ReduceSum<keepdims=0>(s) }}"
    without = parsed(f"{HEADER} g (float[{sizes[0]}] x, float[{sizes[1]}] w) => (float y) {text.format('')}")
    given = parsed(
        f"{HEADER} g (float[1,3,8,8] x, float[4,3,3,3] w) => (float y) {text.format(', kernel_shape=[3, 3]')}"
    )
    generator = np.random.default_rng(0)
    feeds = {name: generator.normal(size=shape) for name, shape in (("x", (1, 3, 8, 8)), ("w", (4, 3, 3, 3)))}
    arrays = {name: array.astype(np.float32) for name, array in feeds.items()}
    found = run(onnxtrain.gradient(without, "y", ["x", "w"]), **arrays)
    expected = run(onnxtrain.gradient(given, "y", ["x", "w"]), **arrays)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)


EMPTY = {
    "product": ("float[{n},3] x", "float[3,2] w = {{1, 2, 3, 4, 5, 6}}", "z = MatMul(x, w)", (0, 3)),
    "convolution": ("float[{n},1,4,4] x", "float[1,1,2,2] w = {{1, 2, 3, 4}}", "z = Conv(x, w)", (0, 1, 4, 4)),
    "normalization": ("float[{n},4] x", "float[4] w = {{1, 2, 3, 4}}", "z = LayerNormalization(x, w)", (0, 4)),
    "softmax": ("float[{n},4] x", "float[4] w = {{1, 2, 3, 4}}", "q = Mul(x, w) z = Softmax(q)", (0, 4)),
    "pooling": (
        "float[{n},1,4,4] x",
        "float w = {{2}}",
        "q = Mul(x, w) z = MaxPool<kernel_shape=[2, 2]>(q)",
        (0, 1, 4, 4),
    ),
}


@pytest.mark.parametrize("size", ["n", "0"])
@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_of_nothing_has_a_gradient_of_zero(name: str, size: str) -> None:
    given, weights, nodes, shape = EMPTY[name]
    sum_of_squares = "s = Mul(z, z) y = ReduceSum<keepdims=0>(s)"
    text = f"g ({given.format(n=size)}) => (float y) <{weights.format()}> {{ {nodes} {sum_of_squares} }}"
    found = run(onnxtrain.gradient(parsed(f"{HEADER} {text}"), "y", ["x", "w"]), x=np.zeros(shape, np.float32))
    assert found["x_grad"].shape == shape
    np.testing.assert_array_equal(found["w_grad"], 0)
