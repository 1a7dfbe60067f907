"""Layers get the former mean and spread of their outputs back after structures were removed."""

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.editing.working import Working
from onnxtrain.plugins.pruning.choose_structures import STRUCTURES, removal_order
from onnxtrain.plugins.pruning.recalibrate import recalibrated, spreads_of
from onnxtrain.plugins.pruning.structures import without
from onnxtrain.plugins.structures.axes import find_structures

IMAGES = np.random.default_rng(0).normal(size=(64, 3, 6, 6)).astype(np.float32)
TOKENS = np.random.default_rng(1).normal(size=(64, 5, 8)).astype(np.float32)

CASES = {
    "convolutions, one without a bias": (
        "a = Conv(x, w1) r = Relu(a) b = Conv(r, w2, b2) s = Relu(b) t = ConvTranspose(s, w3, b3) g = GlobalMaxPool(t)"
        " v = Flatten(g) y = Gemm<transB = 1>(v, head, b4)",
        "float[n, 3, 6, 6] x",
        "float[n, 5] y",
        {
            "w1": (12, 3, 3, 3),
            "w2": (16, 12, 3, 3),
            "b2": (16,),
            "w3": (16, 8, 2, 2),
            "b3": (8,),
            "head": (5, 8),
            "b4": (5,),
        },
        IMAGES,
        ["a", "b", "t", "y"],
    ),
    "matrix multiplications on tokens, with a bias that two layers share": (
        "a = MatMul(x, w1) b = Add(a, b1) r = Relu(b) c = MatMul(r, w2) d = Add(b1, c) s = Relu(d) e = MatMul(s, w3)"
        " y = Add(e, b3)",
        "float[n, 5, 8] x",
        "float[n, 5, 4] y",
        {"w1": (8, 16), "b1": (16,), "w2": (16, 16), "w3": (16, 4), "b3": (4,)},
        TOKENS,
        ["b", "d", "y"],
    ),
    "a layer across the tokens, whose last axis stays": (
        "a = MatMul(x, w1) b = Add(a, b1) r = Relu(b) u = Transpose<perm = [0, 2, 1]>(r) c = MatMul(u, w2)"
        " d = Add(c, b2) t = Transpose<perm = [0, 2, 1]>(d) e = MatMul(t, w3) y = Add(e, b3)",
        "float[n, 5, 8] x",
        "float[n, 5, 4] y",
        {"w1": (8, 16), "b1": (16,), "w2": (5, 5), "b2": (5,), "w3": (16, 4), "b3": (4,)},
        TOKENS,
        ["b", "d", "y"],
    ),
}


def model_of(nodes, inputs, outputs, sizes, opset):
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> f ({inputs}) => ({outputs}) {{ {nodes} }}'
    )
    rng = np.random.default_rng(2)
    for name, shape in sizes.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    return model


def values(model, names, x):
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(None, {"x": x}), strict=True))


def statistics(array, channels):
    axes = tuple(axis for axis in range(array.ndim) if axis != channels % array.ndim)
    return array.mean(axis=axes), array.std(axis=axes)


@pytest.mark.parametrize("opset", [10, 18])
@pytest.mark.parametrize("name", CASES)
def test_the_layers_have_their_former_statistics(name, opset):
    nodes, inputs, outputs, sizes, x, layers = CASES[name]
    model = model_of(nodes, inputs, outputs, sizes, opset)
    structures = find_structures(Working(model).model)
    removed = removal_order(structures, STRUCTURES)[::3]
    kept = structures.kept(removed)
    small = without(model, removed)
    channels = -1 if x.ndim == 3 else 1
    result = recalibrated(
        without(model, ()), small, lambda name, axis: structures.kept_along(name, axis, kept), {"x": x}
    )
    onnx.checker.check_model(result, full_check=True)
    before, cut, after = values(model, layers, x), values(small, layers, x), values(result, layers, x)
    for layer in layers:
        stays = structures.kept_along(layer, channels, kept)
        wanted = [array if stays is None else array[stays] for array in statistics(before[layer], channels)]
        found = statistics(after[layer], channels)
        ratio = wanted[1] / statistics(cut[layer], channels)[1]
        near = (ratio > 0.5) & (ratio < 2)
        assert near.any()
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-3 * np.abs(wanted[0]).max())
        np.testing.assert_allclose(found[1][near], wanted[1][near], rtol=0.3 if layer != layers[0] else 1e-3)
    assert any(
        not np.allclose(
            statistics(cut[layer], channels)[0].mean(), statistics(before[layer], channels)[0].mean(), rtol=0.05
        )
        for layer in layers[1:]
    )


def test_the_spread_of_the_layers_inputs():
    nodes, inputs, outputs, sizes, x, _ = CASES["convolutions, one without a bias"]
    model = model_of(nodes, inputs, outputs, sizes, 18)
    found = spreads_of(model, {"x", "r", "v"}, {"x": x})
    expected = values(model, ["r", "v"], x)
    assert found.keys() == {"r", "v"}  # inputs of the model have no structures
    for name in found:
        np.testing.assert_allclose(found[name], statistics(expected[name], 1)[1], rtol=1e-4)


def test_structures_that_add_nothing_go_first():
    """A unit with large weights whose input never changes goes before one with small weights."""
    model = onnxtrain.examples.mlp((4, 8, 3))
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor).copy() for tensor in model.graph.initializer}
    arrays["layer1.weight"][5] *= 100
    arrays["layer1.bias"][5] = -1e4  # Relu gives zero
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))
    x = np.random.default_rng(3).normal(size=(60, 4)).astype(np.float32)
    result = onnxtrain.prune(
        model, (x, np.arange(60) % 3), loss="softmax_cross_entropy", structure="hidden", sparsity=0.1, epochs=0,
        fine_tune_epochs=0,
    )  # fmt: skip
    assert result.removed_structures == 1
    assert not result.masks["layer1.weight"][5].any()


def test_frozen_weights_keep_their_values():
    points = onnxtrain.examples.points()
    model = onnxtrain.examples.mlp((4, 16, 16, 3))
    how = {"loss": "softmax_cross_entropy", "structure": "hidden", "flops": 0.5, "epochs": 0, "fine_tune_epochs": 0}
    given = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}["layer2.weight"]
    for options, kept in ({"freeze": "layer2.*"}, True), ({}, False):
        small = onnxtrain.prune(model, points, **how, **options).model()
        left = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in small.graph.initializer}["layer2.weight"]
        assert left.size < given.size
        assert np.isin(left, given).all() == kept
