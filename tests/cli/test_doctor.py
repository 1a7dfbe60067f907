from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxtrain import examples
from onnxtrain.plugins.doctor.diagnosis import Severity, diagnose, trains

STOPS, CHANGES, NOTE = Severity


def text(body: str, opset: int = 18, more: str = "", **weights) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}{more}]>\n{body}')
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def trees() -> onnx.ModelProto:
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", n_targets=1, nodes_treeids=[0], nodes_nodeids=[0],
        nodes_featureids=[0], nodes_modes=["LEAF"], nodes_values=[0.0], nodes_hitrates=[1.0], nodes_truenodeids=[0],
        nodes_falsenodeids=[0], nodes_missing_value_tracks_true=[0], target_treeids=[0], target_nodeids=[0],
        target_ids=[0], target_weights=[1.0],
    )  # fmt: skip
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", s]) for n, s in (("x", 2), ("y", 1))]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:]), opset_imports=imports, ir_version=8)


W = np.random.default_rng(0).normal(size=(2, 2)).astype(np.float32)

CASES = {
    "sixteen bits": (
        text("f (float16[n, 2] x) => (float16[n, 2] y) { y = MatMul(x, w) }", w=W.astype(np.float16)),
        [(STOPS, "1 tensor (4 elements) of float16 cannot be trained")],
    ),
    "layout of one kind of CPU": (
        text(
            "f (float[n, 2] x) => (float[n, 2] y) { h = MatMul(x, w)  y = com.microsoft.nchwc.ReorderOutput(h) }",
            more=', "com.microsoft.nchwc": 1', w=W,
        ),
        [(STOPS, "have no gradient: com.microsoft.nchwc::ReorderOutput")],
    ),
    "trees": (trees(), [(STOPS, "computes with TreeEnsembleRegressor, through which no gradient flows")]),
    "no weights": (text("f (float[n, 2] x) => (float[n, 2] y) { y = Relu(x) }"), [(STOPS, "the model has none")]),
    "no gradient": (
        text(
            'f (float[n, 2] x) => (float[n, 2] y) { h = MatMul(x, w)  y = own.Strange(h) }', more=', "own": 1', w=W
        ),
        [(STOPS, "have no gradient: own::Strange")],
    ),
    "quantized": (
        text(
            "f (float[n, 2] x) => (float[n, 2] y) { h = MatMul(x, w)  q = QuantizeLinear(h, s, z)  "
            "y = DequantizeLinear(q, s, z) }",
            w=W, s=np.float32(0.1), z=np.uint8(0),
        ),
        [(STOPS, "quantized values (DequantizeLinear, QuantizeLinear)")],
    ),
    "fixed batch": (
        text("f (float[1, 2] x) => (float[1, 2] y) { y = MatMul(x, w) }", w=W),
        [(NOTE, "'x' takes 1 example a step")],
    ),
    "an adjacency matrix": (
        text(
            "f (float[n, 2, 3] x, float[2, 2] adjacency) => (float[n, 2, 2] y) "
            "{ h = MatMul(adjacency, x)  y = MatMul(h, w) }",
            w=np.ones((3, 2), np.float32),
        ),
        [],
    ),
    "old opset": (text("f (float[n, 2] x) => (float[n, 2] y) { y = MatMul(x, w) }", 11, w=W), [(NOTE, "opset 11")]),
    "dropout": (
        text("f (float[n, 2] x) => (float[n, 2] y) { h = MatMul(x, w)  y = Dropout(h, r, t) }",
             w=W, r=np.float32(0.5), t=np.array(True)),
        [(CHANGES, "sets 1 Dropout node to training mode"), (NOTE, "does nothing")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_found(case):
    model, expected = CASES[case]
    findings = diagnose(model)
    assert [finding.severity for finding in findings] == [severity for severity, _ in expected], findings
    for finding, (_, part) in zip(findings, expected, strict=True):
        assert part in finding.what
    assert trains(findings) == (STOPS not in [severity for severity, _ in expected])


def test_folded_normalization():
    body = (
        "f (float[n, 2, 5, 5] x) => (float[n, 2, 5, 5] y) { a = Conv(x, w, p)  b = Conv(a, w, q)  y = Conv(b, w, r) }"
    )
    kernel, bias = W.reshape(2, 2, 1, 1), W[0]
    model = text(body, w=kernel, p=bias, q=bias + 1, r=bias + 2)
    assert any("folded it into them" in finding.what for finding in diagnose(model))
    normalized = text(
        body.replace("y = Conv(b, w, r)", "c = Conv(b, w, r)  y = BatchNormalization(c, p, p, p, o)"),
        w=kernel, p=bias, q=bias + 1, r=bias + 2, o=np.float32([1, 1]),
    )  # fmt: skip
    assert not any("folded" in finding.what for finding in diagnose(normalized))


def test_the_command_says_it_and_how_it_ends(files, run):
    result = run("doctor", "model.onnx")
    assert (result.code, result.err) == (0, "")
    onnx.save(CASES["sixteen bits"][0], files / "half.onnx")
    result = run("doctor", "half.onnx")
    assert result.code == 1
    assert "stops training: 1 tensor (4 elements) of float16" in result.out
    assert "Export in float32: torch.onnx.export(model.float().eval(), ..., dynamo=True)." in result.out
    result = run("doctor", "half.onnx", "--json")
    assert [row["severity"] for row in json.loads(result.out)] == ["stops"]
    onnx.save(examples.mlp((4, 3)), files / "good.onnx")
    assert run("doctor", "good.onnx").out == "Nothing stands in the way of training good.onnx.\n"
    assert run("doctor", "missing.onnx").code == 2
