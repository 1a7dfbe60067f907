"""Masks of attention: the kernels read them once and skip hidden keys; results are those of softmax over all keys."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from autodiff.case import normal
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.runtime.native import custom_ops_library

BATCH, HEADS, LENGTH, KEYS, SIZE, VALUE_SIZE = 2, 3, 150, 203, 8, 5
SCALE = 0.6
QUERY, KEY = np.arange(LENGTH)[:, None], np.arange(KEYS)
ENDS, BEGINS = (np.array(keys).reshape(2, 1, 1, 1) for keys in ([120, 7], [0, 130]))
DOCUMENTS = np.searchsorted([40, 41, 100], np.arange(KEYS), side="right")

HIDDEN = {
    "causal": KEY > QUERY,
    "causal, with a past": KEY > QUERY + (KEYS - LENGTH),
    "window": (KEY > QUERY) | (KEY < QUERY - 20),
    "documents": (KEY > QUERY) | (DOCUMENTS[KEY] != DOCUMENTS[QUERY]),
    "padding": ENDS <= KEY,
    "padding and causal": (KEY > QUERY) | (ENDS <= KEY),
    "padding on the left": BEGINS > KEY,
    "windows by head": np.abs(KEY - QUERY) > np.array([1, 30, 200]).reshape(3, 1, 1),
    "holes": (KEY > QUERY) | ((KEY % 3 == 1) & (KEY != QUERY)),
    "nothing": np.zeros((1, KEYS), bool),
}


def results(kind: type, bias: np.ndarray, **changed: np.ndarray) -> dict[str, np.ndarray]:
    """Run the kernels of attention and of its gradient."""
    feeds = {**tensors(kind), "bias": bias.astype(kind), **changed}
    names = {"y": "y", "log_sum": "log_sum", "dq": "q", "dk": "k", "dv": "v"}
    nodes = [
        helper.make_node("Attention", ["q", "k", "v", "bias"], ["y", "log_sum"], domain=ONNXTRAIN_DOMAIN, scale=SCALE),
        helper.make_node(
            "AttentionGradient",
            ["dy", "q", "k", "v", "y", "log_sum", "bias"],
            ["dq", "dk", "dv"],
            domain=ONNXTRAIN_DOMAIN,
            scale=SCALE,
        ),
    ]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    inputs = [helper.make_tensor_value_info(name, element, array.shape) for name, array in feeds.items()]
    outputs = [helper.make_tensor_value_info(name, element, None) for name in names]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
    model = helper.make_model(helper.make_graph(nodes, "masks", inputs, outputs), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, feeds), strict=True))


def tensors(kind: type) -> dict[str, np.ndarray]:
    shapes = {
        "q": (BATCH, LENGTH, HEADS, SIZE),
        "k": (BATCH, KEYS, HEADS, SIZE),
        "v": (BATCH, KEYS, HEADS, VALUE_SIZE),
        "dy": (BATCH, LENGTH, HEADS, VALUE_SIZE),
    }
    return {name: normal(*shape, seed=seed).astype(kind) for seed, (name, shape) in enumerate(shapes.items())}


def expected(bias: np.ndarray) -> dict[str, np.ndarray]:
    """Attention and its gradient in NumPy, over all keys."""
    q, k, v, dy = (array.astype(np.float64) for array in tensors(np.float32).values())
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * SCALE + bias
    largest = scores.max(-1, keepdims=True)
    exponentials = np.exp(scores - largest)
    sums = exponentials.sum(-1, keepdims=True)
    p = exponentials / sums
    dp = np.einsum("bqhe,bkhe->bhqk", dy, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * SCALE
    return {
        "y": np.einsum("bhqk,bkhe->bqhe", p, v),
        "log_sum": (largest + np.log(sums))[..., 0],
        "dq": np.einsum("bhqk,bkhd->bqhd", ds, k),
        "dk": np.einsum("bhqk,bqhd->bkhd", ds, q),
        "dv": np.einsum("bhqk,bqhe->bkhe", p, dy),
    }


@pytest.mark.parametrize("lowest", ["infinity", "finite"])
@pytest.mark.parametrize("mask", HIDDEN)
def test_masks(mask: str, lowest: str) -> None:
    hidden = -np.inf if lowest == "infinity" else float(np.finfo(np.float32).min)
    bias = np.where(HIDDEN[mask], hidden, 0.0)
    found, right = results(np.float32, bias), expected(np.where(HIDDEN[mask], -np.inf, 0.0))
    for name, array in right.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def test_a_bias_that_does_more_than_hide_is_read() -> None:
    bias = np.where(HIDDEN["causal"], -np.inf, -0.1 * np.abs(KEY - QUERY))
    bias[0, 0] = 0.0
    found = results(np.float64, bias)
    right = expected(bias)
    np.testing.assert_allclose(found["y"], right["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["dk"], right["dk"], rtol=1e-5, atol=1e-6)


def test_one_more_value_in_the_last_row_is_seen() -> None:
    bias = np.where(HIDDEN["causal"], -np.inf, 0.0)
    bias[-1, 60] = 1.5
    found, right = results(np.float32, bias), expected(bias)
    np.testing.assert_allclose(found["y"], right["y"], rtol=2e-4, atol=2e-5)


def test_hidden_keys_are_not_read() -> None:
    """Also where the mask has the lowest finite number: a NaN there would spread otherwise."""
    bias = np.where(HIDDEN["padding"], np.finfo(np.float32).min, 0.0)
    k = tensors(np.float32)["k"]
    k[:, 128:] = np.nan
    found, clean = results(np.float32, bias, k=k), results(np.float32, bias)
    np.testing.assert_array_equal(found["y"], clean["y"])
    np.testing.assert_array_equal(found["dq"], clean["dq"])


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_a_row_that_hides_all_keys_is_as_in_softmax(kind: type) -> None:
    """Finite numbers give the mean of all values, infinity gives NaN, and the other rows what they give alone."""
    bias = np.where(HIDDEN["causal"], float(np.finfo(kind).min), 0.0)
    bias[3] = float(np.finfo(kind).min)
    y = results(kind, bias)["y"]
    np.testing.assert_allclose(y[:, 3], tensors(kind)["v"].mean(1), rtol=1e-4, atol=1e-5)
    bias[3] = -np.inf
    y = results(kind, bias)["y"]
    assert np.isnan(y[:, 3]).all()
    assert np.isfinite(y[:, 4:]).all()
