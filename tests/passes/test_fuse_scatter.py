"""Rows added at indices become one node with the same sums and gradients; scatters of anything else stay."""

import numpy as np
import pytest
from onnx import TensorProto, helper, parser
from ways import operators, operators_of_step, passed, trained_both_ways

import onnxtrain
from onnxtrain.lowering.rules.rows import fuse_scatter

CONSTANTS = "int64[1] last = {1}, int64[2] none = {0, 0}, int64[1] first = {0}, float[4] g = {1, -2, 0.5, 3}"
ZEROS = "like = Shape(x) zeros = ConstantOfShape(like) "
COLUMN = "column = Unsqueeze(i, last) wanted = Shape(u) places = Expand(column, wanted) "
WAYS = {
    "scatter_add": ZEROS + COLUMN + 'y = ScatterElements <reduction = "add"> (zeros, places, u)',
    "scatter_add with a slice": ZEROS
    + COLUMN
    + 'end = Shape(places) cut = Slice(u, none, end) y = ScatterElements <reduction = "add"> (zeros, places, cut)',
    "into others": COLUMN + 'y = ScatterElements <axis = -2, reduction = "add"> (x, places, u)',
    "index_put": ZEROS + 'tuples = Unsqueeze(i, last) y = ScatterND <reduction = "add"> (zeros, tuples, u)',
    "index_put into others": 'tuples = Unsqueeze(i, last) y = ScatterND <reduction = "add"> (x, tuples, u)',
}


def model(nodes, kind="float"):
    constants = CONSTANTS.replace("float", kind)
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f ({kind}[n, 4] x, {kind}[e, 4] u, int64[e] i, int64[e, 4] each, '
        f"int64[e, 2] pairs, {kind}[e] flat) => ({kind}[n, 4] y) <{constants}> {{ {nodes} }}"
    )


@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_rows_are_added_by_one_node(nodes):
    found = operators(passed(model(nodes), fuse_scatter))
    assert found.count("GatherGradient") == 1
    assert not {"ScatterElements", "ScatterND", "Expand", "ConstantOfShape"} & set(found)
    assert ("Add" in found) == ("ConstantOfShape" not in nodes)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (WAYS["scatter_add"].replace('reduction = "add"', 'reduction = "mul"'), "products"),
        (WAYS["scatter_add"].replace('<reduction = "add">', ""), "replaced"),
        (WAYS["index_put"].replace('reduction = "add"', 'reduction = "max"'), "maxima"),
        (WAYS["into others"].replace("axis = -2", "axis = 1"), "along the row"),
        (WAYS["into others"].replace("Unsqueeze(i, last)", "Unsqueeze(i, first)"), "a row of indices"),
        (ZEROS + 'y = ScatterElements <reduction = "add"> (zeros, each, u)', "an index for every element"),
        (ZEROS + 'y = ScatterND <reduction = "add"> (zeros, pairs, flat)', "an index for every element"),
    ],
)
def test_others_stay(nodes, reason):
    proto = model(nodes)
    before = operators(proto)
    assert operators(passed(proto, fuse_scatter)) == before, reason


def test_half_of_a_row_stays():
    """ScatterElements may cover a part of the columns; rows are whole."""
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> f (float[n, 4] x, float[e, 2] u, int64[e] i) => (float[n, 4] y) '
        "<int64[1] last = {1}> { column = Unsqueeze(i, last) wanted = Shape(u) places = Expand(column, wanted) "
        'y = ScatterElements <reduction = "add"> (x, places, u) }'
    )
    assert operators(passed(proto, fuse_scatter)) == operators(proto)


@pytest.mark.parametrize("size", [1, "k"])
def test_a_list_of_one_index_is_repeated(size):
    """The list may have one index for all rows, which an Expand repeats along its own axis, too."""
    proto = model(WAYS["into others"])
    proto.graph.input[2].CopyFrom(helper.make_tensor_value_info("i", TensorProto.INT64, [size]))
    found = passed(proto, fuse_scatter)
    assert operators(found).count("GatherGradient") == 1
    assert operators(found).count("Expand") == 1


@pytest.mark.parametrize("targets", [1, 3])
def test_training_with_lists_of_unknown_length(targets):
    """A graph network reads sources and targets as inputs of one shape, whose flattened lengths have no common name."""
    body = f"""t = Reshape(target, all) s = Reshape(source, all) h = Mul(x, g) m = Gather(h, s) u = Mul(m, m) {ZEROS}
        column = Unsqueeze(t, last) wanted = Shape(u) places = Expand(column, wanted)
        y = ScatterElements <reduction = "add"> (zeros, places, u)"""
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> f (float[n, 4] x, int64[n, d] source, int64[n, e] target) => '
        f"(float[n, 4] y) <{CONSTANTS}, int64[1] all = {{-1}}> {{ {body} }}"
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(3, 4)).astype(np.float32)
    inputs = {"x": x, "source": random.integers(0, 3, (3, 1)), "target": np.array([[2], [0], [2]])[:, :1]}
    if targets == 1:  # a single target, to which every message goes
        inputs = {"x": x[:1], "source": np.zeros((1, 5), np.int64), "target": np.zeros((1, 1), np.int64)}
    (plain_losses, plain), (losses, trainer) = trained_both_ways(proto, "g", inputs, np.ones_like(inputs["x"]))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    assert "ScatterElements" in operators_of_step(plain)
    assert not {"ScatterElements", "GatherElements"} & set(operators_of_step(trainer))


@pytest.mark.parametrize("nodes", WAYS.values(), ids=WAYS)
def test_training_is_as_without_kernels(nodes):
    """Messages along constant edges: the gradients of the rows, of the base and of the messages."""
    edges = "int64[9] i = {0, 3, 3, -1, 0, 2, 3, -5, 4}, int64[9] source = {1, 1, 0, 2, 4, 4, 3, 0, 1}"
    constants = f"{CONSTANTS}, {edges}"
    body = f"h = Mul(x, g) u = Gather(h, source) {nodes} both = Add(h, y) out = Tanh(both)"
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f (float[n, 4] x) => (float[n, 4] out) <{constants}> {{ {body} }}'
    )
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    (plain_losses, plain), (losses, trainer) = trained_both_ways(proto, "g", x, np.ones_like(x))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert losses[-1] < losses[0]
    step = operators_of_step(trainer)
    assert "GatherElements" not in step  # the gradient of a sum of rows takes rows
    assert not {"ScatterElements", "ScatterND"} & set(step)
    assert {"ScatterElements", "ScatterND"} & set(operators_of_step(plain))


def test_sums_are_the_same_for_any_number_of_threads():
    random = np.random.default_rng(1)
    edges, rows = 3000, 700
    given = ", ".join(str(each) for each in random.integers(0, rows, edges))
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> f (float[{rows}, 64] x) => (float[{rows}, 64] y) '
        f"<int64[1] last = {{1}}, float[64] g = {{{', '.join(['0.5'] * 64)}}}, int64[{edges}] i = {{{given}}}> {{ "
        f"h = Mul(x, g) u = Gather(h, i) {ZEROS}{COLUMN}"
        'y = ScatterElements <reduction = "add"> (zeros, places, u) }'
    )
    x = random.normal(size=(rows, 64)).astype(np.float32)
    losses = []
    for threads in (1, 2, 2):
        runtime = onnxtrain.RuntimeOptions(threads=threads, kernels=True)
        trainer = onnxtrain.Trainer(proto, loss="mean_squared_error", train="g", runtime=runtime)
        losses.append([trainer.train_step(x, x) for _ in range(3)])
    assert losses[0] == losses[1] == losses[2]
