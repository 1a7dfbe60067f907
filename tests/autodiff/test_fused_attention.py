"""Attention of this project's domain: operators of its gradient, special rows, second derivatives."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from autodiff.case import gradients_alone, normal
from onnxtrain.autodiff.engine import Backward
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.native import custom_ops_library, kernels_available
from onnxtrain.runtime.testing import check_gradient, projected_gradient

BATCH, QUERIES, KEYS, HEADS, SIZE, VALUE_SIZE = 2, 3, 4, 2, 3, 5
Y = (BATCH, QUERIES, HEADS, VALUE_SIZE)
FEEDS = {
    "q": normal(BATCH, QUERIES, HEADS, SIZE),
    "k": normal(BATCH, KEYS, HEADS, SIZE, seed=1),
    "v": normal(BATCH, KEYS, HEADS, VALUE_SIZE, seed=2),
    "bias": np.where(np.arange(KEYS) > QUERIES - np.arange(QUERIES)[:, None], -np.inf, 0.5),
}
NAMES = ["q", "k", "v"]


def model(kind: int = onnx.TensorProto.DOUBLE, outputs: tuple[str, ...] = ("y",), **attributes) -> onnx.ModelProto:
    node = helper.make_node("Attention", list(FEEDS), list(outputs), domain=ONNXTRAIN_DOMAIN, scale=0.7, **attributes)
    shapes = {"y": Y, "log_sum": (BATCH, HEADS, QUERIES)}
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, array.shape) for name, array in FEEDS.items()],
        [helper.make_tensor_value_info(name, kind, shapes[name]) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def fused(given: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in given.graph.node if node.domain == ONNXTRAIN_DOMAIN}


def gradient(given: onnx.ModelProto, names: list[str], projections: dict[str, np.ndarray], **options):
    return projected_gradient(given, names, projections, "static", **options)


def test_the_gradient_of_a_mask_is_not_asked_for():
    found = gradient(model(), NAMES, {"y": normal(*Y)}, kernels=True)
    assert fused(found) == {"Attention", "AttentionGradient"}
    produced = {name for node in found.graph.node for name in node.output}
    assert "y/Attention_1" in produced  # log_sum, which the model did not have


def test_the_gradient_of_a_bias_is_an_output_of_the_kernel():
    found = gradient(model(), [*NAMES, "bias"], {"y": normal(*Y)}, kernels=True)
    assert fused(found) == {"Attention", "AttentionGradient"}


def test_the_gradient_of_the_log_sum_is_written_in_standard_operators():
    projections = {"y": normal(*Y), "log_sum": normal(BATCH, HEADS, QUERIES)}
    found = gradient(model(outputs=("y", "log_sum")), NAMES, projections, kernels=True)
    assert fused(found) - {"Elementwise"} == {"Attention", "SoftmaxGradient"}


def test_half_precision_gets_bodies():
    projections = {"y": normal(*Y).astype(np.float16)}
    found = gradient(model(onnx.TensorProto.FLOAT16, ("y", "log_sum")), NAMES, projections, kernels=True)
    assert not fused(found)


def test_without_kernels_all_is_standard():
    found = gradient(model(), NAMES, {"y": normal(*Y)})
    assert not fused(found)
    assert ONNXTRAIN_DOMAIN not in {entry.domain for entry in found.opset_import}
    onnx.checker.check_model(found, full_check=True)


@pytest.mark.parametrize("zero_empty_rows", [0, 1])
def test_second_derivative(zero_empty_rows):
    first = gradient(model(zero_empty_rows=zero_empty_rows), NAMES, {"y": normal(*Y, seed=5)}, kernels=True)
    assert "AttentionGradient" in fused(first)
    check_gradient(gradients_alone(first), FEEDS, wrt=NAMES)


def test_second_derivative_of_a_bias():
    first = gradient(model(), [*NAMES, "bias"], {"y": normal(*Y, seed=5)}, kernels=True)
    assert "AttentionGradient" in fused(first)
    check_gradient(gradients_alone(first), FEEDS, wrt=["q", "bias"])


@pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")
@pytest.mark.parametrize("zero_empty_rows", [0, 1])
def test_kernel_and_body_agree_on_special_rows(zero_empty_rows):
    """Rows that see no key, and rows with NaN and infinity."""
    feeds = {name: array.astype(np.float32) for name, array in FEEDS.items()}
    feeds["bias"][1] = -np.inf
    feeds["q"][0, 0, 0, 0] = np.nan
    feeds["q"][1, 2, 1, 0] = np.inf
    given = model(onnx.TensorProto.FLOAT, ("y", "log_sum"), zero_empty_rows=zero_empty_rows)
    projections = {"y": normal(*Y).astype(np.float32)}
    found, wanted = (run(gradient(given, NAMES, projections, kernels=kernels), feeds) for kernels in (True, False))
    assert any(np.isnan(array).any() for array in wanted)  # log_sum at least
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_body_of_the_operator_alone():
    working = infer_shapes(ir.from_proto(model(onnx.TensorProto.FLOAT, ("y", "log_sum"))))
    resolve_fused(working, Backward(), kernels=False)
    y, log_sum = run(ir.to_proto(working), {name: array.astype(np.float32) for name, array in FEEDS.items()})
    scores = 0.7 * np.einsum("bshd,bthd->bhst", FEEDS["q"], FEEDS["k"]) + FEEDS["bias"]
    sums = np.exp(scores).sum(-1)
    np.testing.assert_allclose(log_sum, np.log(sums), atol=1e-6)
    wanted = np.einsum("bhst,bthe->bshe", np.exp(scores) / sums[..., None], FEEDS["v"])
    np.testing.assert_allclose(y, wanted, atol=1e-6)


def run(given: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    if fused(given):
        options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(given.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)
