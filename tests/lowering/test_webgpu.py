"""Step graphs for WebGPU have no float64 and step like others; what the provider lacks is refused."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

import onnxtrain
from onnxtrain.errors import OptionError


def stepped(graph, first, feeds, steps=10):
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    state, losses = dict(first), []
    for _ in range(steps):
        inputs = {value.name: (state | feeds)[value.name] for value in session.get_inputs()}
        names = [value.name for value in session.get_outputs()]
        results = dict(zip(names, session.run(names, inputs), strict=True))
        state = {name: results.get(f"{name}_new", array) for name, array in state.items()}
        losses.append(float(results["loss"]))
    return losses


@pytest.mark.parametrize("optimizer", [onnxtrain.Momentum(), onnxtrain.Adam(), onnxtrain.Adagrad(), onnxtrain.SSGD()])
def test_no_float64_and_nearly_the_same_losses(optimizer):
    training = onnxtrain.training_model(
        onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", optimizer=optimizer, clip_norm=1.0
    )
    graph = onnxtrain.lower(training, portable="webgpu")
    onnx.checker.check_model(graph, full_check=True)
    assert not any(tensor.data_type == TensorProto.DOUBLE for tensor in graph.graph.initializer)
    assert not any(value.type.tensor_type.elem_type == TensorProto.DOUBLE for value in graph.graph.value_info)
    first = {name: np.array(array) for name, array in onnxtrain.TrainingSession(training).state.items()}
    points = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    feeds = {"input": points, "target": np.arange(16) % 3, "learning_rate": np.array(0.01, np.float32)}
    np.testing.assert_allclose(
        stepped(graph, first, feeds), stepped(onnxtrain.lower(training), first, feeds), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (onnxtrain.examples.lenet5, {}, "is the gradient of a MaxPool, which ONNX Runtime's WebGPU provider has not"),
        (onnxtrain.examples.small_resnet, {"batch_norm": "train"}, "is a BatchNormalization in training mode"),
    ],
)
def test_what_the_provider_lacks_is_refused(model, options, message):
    training = onnxtrain.training_model(
        model(), loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(), **options
    )
    with pytest.raises(OptionError, match=message):
        onnxtrain.lower(training, portable="webgpu")


def test_models_of_float64_are_refused():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (double[N,2] x) => (double[N,2] y) <double[2,2] w = {1.0, 2.0, 3.0, 4.0}> { y = MatMul(x, w) }""")
    training = onnxtrain.training_model(model, loss="mean_squared_error", optimizer=onnxtrain.Momentum())
    with pytest.raises(OptionError, match="is float64, which WebGPU has not; convert the model to float32"):
        onnxtrain.lower(training, portable="webgpu")
