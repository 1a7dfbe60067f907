"""Rows that are gathered only to be added up are read where they lie, with the same bits."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser
from ways import operators, operators_of_step, passed, trained_both_ways

from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.lowering import pipeline
from onnxtrain.lowering.rules.rows import fuse_gather
from onnxtrain.runtime.native import custom_ops_library

NODES, WIDE, EDGES = 40, 33, 100
SUM = "r = Gather(x, j) y = onnxtrain.GatherGradient<axis = 0>(r, i, size)"
ALONG = "r = Gather<axis = 1>(x, j) y = onnxtrain.GatherGradient<axis = -1>(r, i, size)"


def model(nodes: str, kind: str = "float", index: str = "int64", outputs: str = "") -> onnx.ModelProto:
    table = f"{kind}[{NODES}, {WIDE}]"
    text = (
        f'<ir_version: 10, opset_import: ["": 18, "{ONNXTRAIN_DOMAIN}": 1]> f ({table} x, {table} c, int64[n] i, '
        f"{index}[n] j, int64[a, b] more) => ({table} y{outputs}) <int64[2] size = {{{NODES}, {WIDE}}}> {{ {nodes} }}"
    )
    return parser.parse_model(text.replace("onnxtrain.", f"{ONNXTRAIN_DOMAIN}."))


def fused(proto: onnx.ModelProto) -> onnx.ModelProto:
    return passed(proto, lambda working: fuse_gather(working))


def run(proto: onnx.ModelProto, dtype: type) -> np.ndarray:
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {name: rng.normal(size=(NODES, WIDE)).astype(dtype) for name in ("x", "c")}
    feeds |= {name: rng.integers(-WIDE, WIDE, EDGES) for name in ("i", "j")} | {"more": np.zeros((2, 2), np.int64)}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize(("kind", "dtype"), [("float", np.float32), ("double", np.float64)])
@pytest.mark.parametrize("nodes", [SUM, SUM.replace("size)", "size, c)"), ALONG], ids=["zeros", "other", "columns"])
def test_rows_are_added_where_they_lie(nodes: str, kind: str, dtype: type) -> None:
    proto = model(nodes, kind)
    after = fused(proto)
    assert operators(after) == ["GatherGradient"]
    np.testing.assert_array_equal(run(after, dtype), run(proto, dtype))


@pytest.mark.parametrize(
    ("nodes", "settings", "reason"),
    [
        (SUM, {"outputs": f", float[n, {WIDE}] r"}, "others read the rows"),
        (SUM.replace("Gather(", "Gather<axis = 1>("), {}, "another axis"),
        (SUM, {"index": "int32"}, "another type of index"),
        (SUM.replace("j)", "more)").replace("(r, i", "(r, more"), {}, "indices that are no list"),
    ],
)
def test_others_stay(nodes: str, settings: dict[str, str], reason: str) -> None:
    assert operators(fused(model(nodes, **settings))) == ["Gather", "GatherGradient"], reason


def joined(nodes: str, kind: str = "float", outputs: str = "") -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18, "{ONNXTRAIN_DOMAIN}": 1]> f ({kind}[n, 13] x, {kind}[40, 16] table, '
        f"int64[n, 6] i, int32[n, 6] narrow) => ({kind}[n, m] y{outputs}) <int64[2] flat = {{0, -1}}> {{ {nodes} }}"
    )


JOINED = "r = Gather(table, i) f = Flatten(r) y = Concat<axis = 1>(x, f)"


@pytest.mark.parametrize(("kind", "dtype"), [("float", np.float32), ("double", np.float64)])
@pytest.mark.parametrize("nodes", [JOINED, JOINED.replace("(x, f)", "(f, x)"), JOINED.replace("axis = 1", "axis = -1")])
def test_rows_are_joined_to_a_matrix_at_once(nodes: str, kind: str, dtype: type) -> None:
    proto = joined(nodes, kind)
    after = fused(proto)
    assert operators(after) == ["GatherConcat"]
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {"x": rng.normal(size=(30, 13)).astype(dtype)}
    feeds |= {"table": rng.normal(size=(40, 16)).astype(dtype), "i": rng.integers(-40, 40, (30, 6))}
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    found, right = (
        onnxruntime.InferenceSession(each.SerializeToString(), options).run(
            None, feeds | {"narrow": feeds["i"].astype(np.int32)}
        )[0]
        for each in (after, proto)
    )
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (JOINED, ", float[n, 6, 16] r"),
        (JOINED, ", float[n, 96] f"),
        (JOINED.replace("(table, i)", "(table, narrow)"), ""),
        (JOINED.replace("(x, f)", "(x, f, x)"), ""),
        (JOINED.replace("Concat<axis = 1>(x, f)", "Concat<axis = 0>(f, f)"), ""),
    ],
    ids=["rows read", "columns read", "another type of index", "three parts", "below one another"],
)
def test_rows_that_are_not_joined_at_once(nodes: str, outputs: str) -> None:
    assert "GatherConcat" not in operators(fused(joined(nodes, outputs=outputs)))


def test_messages_are_not_written_out_in_either_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 9, (2, 24))
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> f (float[9, 4] x) => (float[9, 4] y) <int64[1] last = {1}> '
        "{ h = MatMul(x, w) message = Gather(h, source) like = Shape(h) zeros = ConstantOfShape(like) "
        "column = Unsqueeze(target, last) wanted = Shape(message) places = Expand(column, wanted) "
        'y = ScatterElements <axis = 0, reduction = "add"> (zeros, places, message) }'
    )
    weights = {"w": rng.normal(size=(4, 4)).astype(np.float32), "source": source, "target": target}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    x, y = rng.normal(size=(2, 9, 4)).astype(np.float32)
    (plain, _), (losses, trainer) = trained_both_ways(proto, "w", x, y)
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    assert "Gather" not in operators_of_step(trainer)
    assert operators_of_step(trainer).count("GatherGradient") == 2
    monkeypatch.setattr(pipeline, "fuse_gather", lambda graph: None)
    (_, _), (apart, trainer) = trained_both_ways(proto, "w", x, y)
    assert apart == losses
    assert operators_of_step(trainer).count("Gather") == 2


def test_a_graph_without_gathers_is_left_alone() -> None:
    working = ir.from_proto(model("y = Add(x, c)"))
    fuse_gather(working)
    assert [node.op_type for node in working.graph] == ["Add"]
