"""Training with the OpenVINO provider on the CPU: a third-party provider that compiles graphs.

Its package replaces onnxruntime: run pip install onnxruntime-openvino in a separate environment.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import StepError
from onnxtrain.lowering.portable import fix_dimensions
from onnxtrain.plugins.provider_check.provider_check import check_provider
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.training.examples import digits_cnn, lenet5, mlp, small_resnet

pytestmark = pytest.mark.skipif(
    "OpenVINOExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="onnxruntime has no OpenVINO provider here: pip install onnxruntime-openvino has one",
)

OPENVINO, CPU = (RuntimeOptions(threads=1, kernels=False, providers=[name]) for name in ("openvino", "cpu"))
MODELS = {
    "mlp": (mlp, (784,)),
    "digits_cnn": (digits_cnn, (1, 8, 8)),
    "lenet5": (lenet5, (1, 28, 28)),
    "small_resnet": (small_resnet, (3, 16, 16)),
}


def _static(model: onnx.ModelProto, shape: tuple[int, ...]) -> onnx.ModelProto:
    sizes = zip(model.graph.input[0].type.tensor_type.shape.dim, shape, strict=True)
    fix_dimensions(model, {dim.dim_param: size for dim, size in sizes if dim.dim_param})
    return model


def _trainer(model: onnx.ModelProto, options: RuntimeOptions, **arguments) -> onnxtrain.Trainer:
    return onnxtrain.Trainer(model, loss="softmax_cross_entropy", runtime=options, **arguments)


@pytest.mark.parametrize("optimizer", ["adam", "sgd(lr=0.01)"])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_are_those_of_the_processor(name, optimizer):
    make, shape = MODELS[name]
    rng = np.random.default_rng(0)
    x, y = rng.random((8, *shape), np.float32), rng.integers(0, 10, 8)
    here, there = (_trainer(_static(make(), x.shape), options, optimizer=optimizer) for options in (CPU, OPENVINO))
    losses = np.array([[trainer.train_step(x, y) for trainer in (here, there)] for _ in range(20)])
    np.testing.assert_allclose(losses[:, 1], losses[:, 0], rtol=1e-3, atol=1e-4)
    assert losses[-1, 1] < losses[0, 1]
    weights, expected = there.get_weights(flat=True), here.get_weights(flat=True)
    np.testing.assert_allclose(weights, expected, atol=2e-3 * np.abs(expected).max())


def test_large_frozen_weights_get_there():
    """Tensors of 64 KiB or more are not in the serialized graph of a session."""
    x, y = np.random.default_rng(0).random((8, 784), np.float32), np.arange(8)
    here, there = (_trainer(mlp((784, 512, 10)), options, train="layer2.*") for options in (CPU, OPENVINO))
    for _ in range(3):
        assert there.train_step(x, y) == pytest.approx(here.train_step(x, y), rel=1e-4)
    assert there.evaluate((x, y)) == pytest.approx(here.evaluate((x, y)), rel=1e-4)


def test_nodes_that_need_static_shapes_are_found():
    """The weight gradient of a convolution is a convolution with a kernel of the batch size."""
    x, y = np.random.default_rng(0).random((4, 1, 28, 28), np.float32), np.arange(4)
    with pytest.raises(StepError, match="dynamic weights shape"):
        _trainer(lenet5(), OPENVINO).train_step(x, y)
    report = check_provider(_trainer(lenet5(), CPU), "openvino")
    assert "dynamic weights shape" in report.failure
    assert report.nodes == []
    assert check_provider(_trainer(lenet5(), CPU), "openvino", sizes={"N": 4}).agrees


def test_openvino_itself_runs_the_step_graph_of_lenet(tmp_path):
    """Without ONNX Runtime: ``export --portable openvino --static N=8``."""
    openvino = pytest.importorskip("openvino")
    training = onnxtrain.training_model(lenet5(), loss="cross_entropy", optimizer="adam")
    session = onnxtrain.TrainingSession(training)
    session.initialize()
    graph = onnxtrain.lower(training, portable="openvino")
    fix_dimensions(graph, {"N": 8})
    onnx.save(graph, tmp_path / "step.onnx")
    rng = np.random.default_rng(0)
    feeds = {name: np.asarray(value) for name, value in session.state.items()}
    image = lenet5().graph.input[0].name
    feeds |= {image: rng.normal(size=(8, 1, 28, 28)).astype(np.float32), "target": np.arange(8)}
    ours = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    feeds = {port.name: feeds.get(port.name, np.array(1e-3, np.float32)) for port in ours.get_inputs()}
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    theirs = openvino.Core().compile_model(tmp_path / "step.onnx", "CPU", options)(feeds)
    for port, expected in zip(ours.get_outputs(), ours.run(None, feeds), strict=True):
        np.testing.assert_allclose(theirs[port.name], expected, rtol=0, atol=1e-4, err_msg=port.name)
