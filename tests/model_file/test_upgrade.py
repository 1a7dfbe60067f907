"""The opset upgrade: results before and after agree, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from model_examples import rich_model
from onnx import ModelProto, helper, numpy_helper, parser

from onnxtrain.errors import ModelError
from onnxtrain.model_file.proto import default_opset
from onnxtrain.model_file.upgrade import upgrade_opset
from sentences import raises_sentence

TARGET = 18


class UpgradeCase(NamedTuple):
    name: str
    opset: int
    graph: str


def _read_cases() -> list[UpgradeCase]:
    cases = []
    for line in Path(__file__).with_name("upgrade_cases.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, opsets, graph = line.split(" | ", 2)
            cases += [UpgradeCase(name, int(opset), graph) for opset in opsets.split()]
    return cases


CASES = _read_cases()


def parse(graph: str, opset: int) -> ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}, "local": 1]> g {graph}')


def run(model: ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)


def random_feeds(model: ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        drawn = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        feeds[value.name] = np.asarray(drawn, dtype)
    return feeds


def make_shapes_symbolic(model: ModelProto) -> None:
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"


def make_ranks_unknown(model: ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """Read every input through a Reshape whose shape is an input too."""
    make_shapes_symbolic(model)
    for value in list(model.graph.input):
        name, array = value.name, feeds.pop(value.name)
        value.name = f"{name}_given"
        feeds |= {f"{name}_given": array, f"{name}_shape": np.array(array.shape, np.int64)}
        model.graph.input.append(helper.make_tensor_value_info(f"{name}_shape", 7, [f"{name}_rank"]))
        model.graph.node.insert(0, helper.make_node("Reshape", [f"{name}_given", f"{name}_shape"], [name]))


def assert_same_results(
    model: ModelProto, feeds: dict[str, np.ndarray], minimum: int = TARGET, tolerance: float = 0
) -> ModelProto:
    before = run(model, feeds)
    serialized = model.SerializeToString()
    upgraded = upgrade_opset(model, minimum)
    assert model.SerializeToString() == serialized, "the given model changed"
    assert default_opset(upgraded.opset_import) == minimum
    assert [value.name for value in upgraded.graph.output] == [value.name for value in model.graph.output]
    for old, new in zip(before, run(upgraded, feeds), strict=True):
        assert old.dtype == new.dtype
        np.testing.assert_allclose(new, old, rtol=tolerance, atol=tolerance)
    return upgraded


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.opset}")
def test_results_are_identical(case: UpgradeCase) -> None:
    for shapes in ("static", "symbolic", "unknown"):
        model = parse(case.graph, case.opset)
        feeds = random_feeds(model)
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        if shapes == "symbolic":
            make_shapes_symbolic(model)
        elif shapes == "unknown" and not any(value.name in feeds for value in model.graph.output):
            make_ranks_unknown(model, feeds)
        assert_same_results(model, feeds)


@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: f"{case.name}-{case.opset}")
@pytest.mark.parametrize("minimum", [20, 23])
def test_results_agree_at_newer_targets(case: UpgradeCase, minimum: int) -> None:
    model = parse(case.graph, case.opset)
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    # onnxruntime has other kernels for newer versions of an operator, which round in another order.
    assert_same_results(model, random_feeds(model), minimum, tolerance=1e-5)


def test_every_operator_that_changed_is_covered() -> None:
    """The table holds each operator with a new version from 8 to 18, but for those listed here."""
    not_run = {
        "Bernoulli",  # random
        "OptionalHasElement",  # needs an optional graph input; Optional itself is in the table
        "ConvInteger",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
    }
    changed = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and 8 <= schema.since_version <= TARGET:
            earlier = onnx.defs.has(schema.name, schema.since_version - 1, "")
            if earlier and schema.since_version > 7:
                changed.add(schema.name)
    used = " ".join(case.graph for case in CASES)
    missing = {name for name in changed - not_run if not any(f" {name}{end}" in used for end in "(<")}
    assert missing == set()


def test_same_object_at_or_above_the_minimum() -> None:
    model = parse("(float[2] x) => (float[2] y) { y = Neg(x) }", 18)
    assert upgrade_opset(model, 18) is model
    assert upgrade_opset(model, 17) is model


def test_softmax_over_the_last_axis_stays_one_node() -> None:
    for axis in (-1, 1):
        model = parse(f"(float[n,3] x) => (float[n,3] y) {{ y = Softmax<axis={axis}>(x) }}", 11)
        assert [node.op_type for node in upgrade_opset(model, 18).graph.node] == ["Softmax"]


def without(message: object, *fields: str) -> object:
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]
    for field in fields:
        copy.ClearField(field)  # type: ignore[attr-defined]
    return copy


def test_all_but_the_changed_nodes_is_as_before() -> None:
    model = rich_model()
    upgraded = upgrade_opset(model, TARGET)
    assert without(upgraded, "graph", "opset_import", "functions") == without(
        model, "graph", "opset_import", "functions"
    )
    assert without(upgraded.graph, "node") == without(model.graph, "node")
    assert [(item.domain, item.version) for item in upgraded.opset_import] == [
        ("", 18),
        ("local", 1),
        ("vendor", 2),
    ]
    nodes = {node.output[0]: node for node in upgraded.graph.node}
    for node in model.graph.node:
        if node.op_type not in ("ReduceMean", "If"):
            assert nodes[node.output[0]] == node
        assert without(nodes[node.output[0]], "input", "attribute") == without(node, "input", "attribute")
    assert len(nodes["c"].input) == 2
    for before, after in zip(model.graph.node[-1].attribute, nodes["y"].attribute, strict=True):
        assert without(before.g, "node") == without(after.g, "node")


def test_functions_are_converted() -> None:
    model = rich_model()
    function = upgrade_opset(model, TARGET).functions[0]
    assert [(item.domain, item.version) for item in function.opset_import] == [("", 18)]
    assert [node.op_type for node in function.node] == ["Add", "Constant", "ReduceMean"]
    assert without(function, "node", "opset_import") == without(model.functions[0], "node", "opset_import")


FUNCTIONS = """
    <ir_version: 8, opset_import: ["": {opset}, "local": 1]>
    g (float[2,3] x) => (float[a] y) {{ h = local.f<axis = 1>(x) y = local.g<axes = [1]>(h) }}
    <domain: "local", opset_import: ["": {inner}]>
    f <axis> (x) => (y) {{ c = Concat<axis: int = @axis>(x, x) y = ReduceMean<axes = [0]>(c) }}
    <domain: "local", opset_import: ["": {inner}]>
    g <axes> (x) => (y) {{ y = ReduceMax<axes: ints = @axes>(x) }}
    """


def test_references_to_attributes_survive() -> None:
    """Concat is the same at 17 and 18, so that its reference stays; ReduceMax is not: inlining resolves it."""
    model = parser.parse_model(FUNCTIONS.format(opset=17, inner=17))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    upgraded = assert_same_results(model, random_feeds(model))
    (function,) = upgraded.functions
    assert function.node[0] == model.functions[0].node[0]
    assert [node.op_type for node in upgraded.graph.node] == ["f", "Constant", "ReduceMax"]


def test_functions_that_cannot_be_upgraded_are_named() -> None:
    model = parser.parse_model(FUNCTIONS.format(opset=18, inner=17))
    with raises_sentence("functions_cannot_be_upgraded", what=["g"]):
        upgrade_opset(model, TARGET)


def test_operators_that_only_the_runtime_has_are_left_alone() -> None:
    """ONNX Runtime had LayerNormalization in ONNX's domain before ONNX had."""
    model = parse(
        "(float[2,4] x) => (float[2] y) <float[4] w = {1, 2, 3, 4}>"
        " { a = LayerNormalization<epsilon = 0.1>(x, w, w) b = SimplifiedLayerNormalization(a, w)"
        " y = ReduceSum<axes = [1], keepdims = 0>(b) }",
        12,
    )
    upgraded = assert_same_results(model, random_feeds(model))
    assert [node for node in upgraded.graph.node if "Layer" in node.op_type] == list(model.graph.node[:2])


def test_large_tensors_are_left_alone() -> None:
    """Weights of the graph, of a subgraph and of a Constant, and external ones, return as they were."""
    model = parse(
        "(float[2,300] x) => (float[a] y) { c = Add(x, w) d = Mul(c, k) yes = Constant<value = bool {1}>()"
        " y = If(yes) <then_branch = t () => (float[2] p) { e = Add(d, inner)"
        " p = ReduceMean<axes = [1], keepdims = 0>(e) },"
        " else_branch = f () => (float[2] q) { q = ReduceMax<axes = [1], keepdims = 0>(d) }> }",
        11,
    )
    large = numpy_helper.from_array(np.arange(300, dtype=np.float32), "w")
    model.graph.initializer.append(large)
    model.graph.node.insert(
        0, helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.ones(300, np.float32)))
    )
    inner = numpy_helper.from_array(np.full(300, 2, np.float32), "inner")
    model.graph.node[-1].attribute[0].g.initializer.append(inner)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    upgraded = assert_same_results(model, random_feeds(model))
    assert upgraded.graph.initializer[0] == large
    assert upgraded.graph.node[0] == model.graph.node[0]
    branch = next(node for node in upgraded.graph.node if node.op_type == "If").attribute[0].g
    assert branch.initializer[0] == inner


def test_initializers_that_are_inputs_too() -> None:
    model = parse(
        "(float[2,300] x, float[300] w, float[2] b) => (float[a] y) <float[2] b = {1, 2}>"
        " { s = Mul(x, w) r = ReduceSum<axes = [1], keepdims = 0>(s) y = Add(r, b) }",
        11,
    )
    model.graph.initializer.insert(0, numpy_helper.from_array(np.ones(300, np.float32), "w"))
    upgraded = upgrade_opset(model, TARGET)
    assert [value.name for value in upgraded.graph.input] == ["x", "w", "b"]
    feeds = {"x": random_feeds(model)["x"]}
    np.testing.assert_array_equal(run(model, feeds)[0], run(upgraded, feeds)[0])


@pytest.mark.parametrize(
    ("graph", "opset", "message"),
    [
        (
            "(float[2,2,2] x) => (float[2,2,2] y) <float[2,2] s={1,2,3,4}, float[2,2] b={0,1,0,1}>"
            " { y = BatchNormalization<spatial=0>(x, s, b, b, s) }",
            8,
            r"^BatchNormalization \(node 'y'\) has spatial=0, which opset 9 removed.*newer\.$",
        ),
        (
            "(float[2,2] x, float[2] s) => (float[2,2] y, float[2] m)"
            " { y, a, b, m, c = BatchNormalization(x, s, s, s, s) }",
            9,
            r"^BatchNormalization \(node 'y'\) has outputs that are read, 'm', but that opset 14 removed",
        ),
        (
            "(float[1,2] x, float[1,4,2] s) => (float[1,2] y, float[1,4,2] z) { y, z = Scan<num_scan_inputs=1,"
            " body = b (float[2] v, float[2] u) => (float[2] w, float[2] o)"
            " { w = Add(v, u) o = Mul(w, u) }>(, x, s) }",
            8,
            r"^Scan \(node 'y'\) has opset 8, whose batch dimension opset 9 removed",
        ),
        (
            "(float[2,2] x) => (float[2,2] y) { h = Neg(x) y = Unheard(h) }",
            12,
            r"^The operator Unheard \(node 'y'\) cannot be upgraded from opset 12 to 18, which training needs: the "
            r"ONNX standard does not define it; export the model at a newer opset\.$",
        ),
        (
            "(float[2,2] x) => (float[a] y) { h = Neg(x) y, i = TopK(h) }",
            9,
            r"^The operator TopK \(node 'y'\) cannot be upgraded from opset 9 to 18, which training needs: .*"
            r"export the model at a newer opset\.$",
        ),
    ],
    ids=["spatial", "saved_statistics", "batched_scan", "unknown_operator", "missing_attribute"],
)
def test_what_cannot_be_upgraded_is_named(graph: str, opset: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        upgrade_opset(parse(graph, opset), TARGET)
