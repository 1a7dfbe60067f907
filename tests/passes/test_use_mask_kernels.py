"""Masks of linear layers: which nodes get them, and a training that equals the one without."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.lowering.rules import linear
from onnxtrain.runtime.native import kernels_available

pytestmark = pytest.mark.skipif(not kernels_available(), reason="the native kernels are not installed")

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((256, 128)).astype(np.float32), RNG.integers(0, 5, 256)
OPTIONS = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "micro-batches": {"accumulate": 2},
    "Momentum": {"optimizer": "momentum(lr=0.1)"},
    "recomputed": {"recompute": ["*"]},
}


def pruned(zeros=0.95, block=1, dtype=np.float32):
    """A perceptron whose two large weights are pruned."""
    model = onnxtrain.examples.mlp((128, 256, 192, 5))
    rng = np.random.default_rng(1)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.ndim == 2 and 5 not in array.shape:
            kept = np.repeat(rng.random((array.shape[0] // block, array.shape[1])) >= zeros, block, axis=0)
            tensor.CopyFrom(numpy_helper.from_array((array * kept).astype(dtype), tensor.name))
    return model


def trainer(model=None, **options):
    given = {"loss": "softmax_cross_entropy", "optimizer": "adam(lr=1e-2)", "masks": "keep"}
    return onnxtrain.Trainer(pruned() if model is None else model, **{**given, **options})


def masked(made, entry=0):
    """The nodes of a step graph that read a mask, beside updates."""
    graph = made.executor.session._steps[entry].step.model.graph
    return [
        node.op_type
        for node in graph
        if node.op_type.startswith("Linear")
        and any(value is not None and str(value.name).endswith("/mask") for value in node.inputs)
    ]


def weights_after(made, steps=4):
    for _ in range(steps):
        made.train_step(X, Y)
    return made.get_weights()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("block", [1, 4])
def test_a_training_equals_the_dense_one(name, block, monkeypatch):
    sparse = trainer(pruned(block=block), **OPTIONS[name])
    found = weights_after(sparse)
    assert {"Linear", "LinearGradient", "LinearWeightGradient"} >= set(masked(sparse))
    assert len(masked(sparse)) >= 4
    monkeypatch.setattr(linear, "LEAST_ZEROS", 2.0)
    dense = trainer(pruned(block=block), **OPTIONS[name])
    expected = weights_after(dense)
    assert not masked(dense)
    first = pruned(block=block)
    for tensor in first.graph.initializer:
        before, after = numpy_helper.to_array(tensor), found[tensor.name]
        np.testing.assert_allclose(after, expected[tensor.name], rtol=2e-3, atol=2e-4)
        if before.ndim == 2 and 5 not in before.shape:
            np.testing.assert_array_equal((after != 0) | (before != 0), before != 0)
            assert np.abs(after - before).max() > 1e-3


def test_without_the_kernels_the_training_is_the_same():
    found = weights_after(trainer())
    expected = weights_after(trainer(runtime=onnxtrain.RuntimeOptions(kernels=False)))
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-3, atol=2e-4)


def test_a_resumed_training_has_the_same_bits(tmp_path):
    options = {"batch_size": 128, "progress": False}
    whole = trainer()
    whole.fit(X, Y, epochs=2, **options)
    trainer().fit(X, Y, epochs=1, checkpoint=tmp_path, **options)
    resumed = trainer()
    resumed.fit(X, Y, epochs=2, checkpoint=tmp_path, resume=True, **options)
    expected = whole.get_weights()
    for name, array in resumed.get_weights().items():
        np.testing.assert_array_equal(array, expected[name])


def test_layers_without_enough_zeros_get_no_mask():
    assert not masked(trainer(pruned(zeros=0.4)))
    assert masked(trainer(pruned(zeros=0.6)))


def test_masks_that_are_set_later_and_taken_away():
    made = trainer(masks=None)
    assert not masked(made)
    made.set_masks("keep")
    assert masked(made)
    made.set_masks({})
    assert not masked(made)


def test_weights_that_were_set_beside_the_mask_count():
    model = pruned()
    made, other = trainer(model), trainer(model, runtime=onnxtrain.RuntimeOptions(kernels=False))
    stray = {name: np.full_like(array, 0.01) for name, array in made.get_weights().items()}
    for one in (made, other):
        one.set_weights(stray)
    loss, expected = made.train_step(X, Y), other.train_step(X, Y)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("options", [{"precision": "bfloat16"}, {"train": ["layer1.*"]}])
def test_other_ways_to_train_keep_the_zeros(options):
    try:
        made = trainer(**options)
    except onnxtrain.errors.OptionError as error:
        pytest.skip(str(error))  # no instructions for bfloat16
    before = {name: array == 0 for name, array in made.get_weights().items() if name in made.masks}
    found = weights_after(made, 2)
    assert before
    for name, zeros in before.items():
        np.testing.assert_array_equal(found[name] == 0, zeros)


@pytest.mark.parametrize("layer", ["MatMul(x, w)", "Gemm<transB = 1>(x, w)", "Gemm(x, w)"])
def test_layers_without_a_bias_have_all_inputs(layer):
    """Versions of ONNX Runtime end the process at one that is left out between others."""
    weight = np.where(RNG.random((128, 96)) < 0.9, 0, RNG.standard_normal((128, 96))).astype(np.float32)
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> f (float[N, 128] x) => (float[N, 96] y) {{ y = {layer} }}'
    )
    weight = weight.T.copy() if "transB" in layer else weight
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    found = []
    for masks in ("keep", {"w": weight != 0}):
        made = trainer(model, loss="mse", masks=masks)
        found.append([made.train_step(X, np.ones((256, 96), np.float32)) for _ in range(3)])
    assert "Linear" in masked(made)
    nodes = [node for node in made.executor.session._steps[0].step.model.graph if node.op_type == "Linear"]
    assert all(None not in node.inputs for node in nodes)
    assert found[0] == found[1]
    plain = trainer(model, loss="mse", masks=None)
    assert found[0][0] == pytest.approx(plain.train_step(X, np.ones((256, 96), np.float32)), rel=1e-5)
