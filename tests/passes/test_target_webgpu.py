"""Step graphs for WebGPU have no float64 and only operators of the provider, and step like others."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

import onnxtrain
from onnxtrain.errors import OptionError
from sentences import raises_sentence
from zoo.arrays import copied


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
    first = copied(onnxtrain.TrainingSession(training).state)
    points = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    feeds = {"input": points, "target": np.arange(16) % 3, "learning_rate": np.array(0.01, np.float32)}
    np.testing.assert_allclose(
        stepped(graph, first, feeds), stepped(onnxtrain.lower(training), first, feeds), rtol=0, atol=1e-4
    )


def pool(image, **attributes):
    """Return a convolution and a pooling of images, whose sum of squares is trained to zero."""
    listed = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,2,{image}] x) => (float[N,2,a,b] y)
        <float[2,2,1,1] w = {{0.5, -0.3, 0.2, 0.8}}> {{ c = Conv(x, w)  y = MaxPool <{listed}> (c) }}""")


POOLINGS = [
    ("6,6", {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("7,8", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("7,5", {"kernel_shape": [2, 2], "strides": [2, 3]}),  # rows and columns behind the last window
    ("7,8", {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("9,9", {"kernel_shape": [2, 2], "dilations": [2, 3]}),
    ("5,6", {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": '"SAME_UPPER"'}),
]


def losses_of_both(model, options, feeds, loss="softmax_cross_entropy"):
    training = onnxtrain.training_model(model, loss=loss, optimizer=onnxtrain.Momentum(0.05), **options)
    first = copied(onnxtrain.TrainingSession(training).state)
    graphs = [onnxtrain.lower(training, portable="webgpu"), onnxtrain.lower(training)]
    onnx.checker.check_model(graphs[0], full_check=True)
    feeds = feeds | {"learning_rate": np.array(0.05, np.float32)}
    return graphs[0], [stepped(graph, first, feeds) for graph in graphs]


def lacking(graph):
    """Return the nodes that the provider lacks."""
    return [
        node.op_type
        for node in graph.graph.node
        if (node.op_type == "MaxPool" and len(node.output) > 1)
        or any(attribute.name == "training_mode" and attribute.i for attribute in node.attribute)
    ]


@pytest.mark.parametrize(("image", "attributes"), POOLINGS, ids=str)
def test_gradients_of_pooling_need_no_indices(image, attributes):
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 3, (2, 2, *map(int, image.split(",")))).astype(np.float32)  # integers: tied maxima
    model = pool(image, **attributes)
    y = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    feeds = {"x": x, "target": rng.standard_normal(y.shape).astype(np.float32)}
    graph, (ours, expected) = losses_of_both(model, {}, feeds, "mean_squared_error")
    assert not lacking(graph)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_a_network_with_pooling_steps_alike():
    feeds = {"image": np.random.default_rng(0).random((4, 1, 28, 28), np.float32), "target": np.arange(4)}
    graph, (ours, expected) = losses_of_both(onnxtrain.examples.lenet5(), {}, feeds)
    assert not lacking(graph)
    np.testing.assert_allclose(ours, expected, rtol=1e-4)


def test_batch_statistics_are_computed_by_hand():
    model = onnxtrain.examples.small_resnet()
    training = onnxtrain.training_model(
        model, loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum(0.05), batch_norm="train"
    )
    shape = [d.dim_value or 4 for d in training.graph.input[0].type.tensor_type.shape.dim]
    feeds = {
        training.graph.input[0].name: np.random.default_rng(0).random(shape, np.float32),
        "target": np.arange(shape[0]) % 3,
    }
    graph, (ours, expected) = losses_of_both(model, {"batch_norm": "train"}, feeds)
    assert not lacking(graph)
    np.testing.assert_allclose(ours, expected, rtol=1e-4)
    assert not lacking(onnxtrain.lower(training, portable="cuda"))


def test_images_of_any_size_are_refused_before_a_pooling():
    training = onnxtrain.training_model(
        pool("height,width", kernel_shape=[2, 2]), loss="mean_squared_error", optimizer=onnxtrain.Momentum()
    )
    with pytest.raises(OptionError, match="its images have no fixed size"):
        onnxtrain.lower(training, portable="webgpu")


def test_models_of_float64_are_refused():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (double[N,2] x) => (double[N,2] y) <double[2,2] w = {1.0, 2.0, 3.0, 4.0}> { y = MatMul(x, w) }""")
    training = onnxtrain.training_model(model, loss="mean_squared_error", optimizer=onnxtrain.Momentum())
    with raises_sentence("webgpu_float64", what="x"):
        onnxtrain.lower(training, portable="webgpu")


@pytest.mark.parametrize(("image", "attributes"), POOLINGS[:2], ids=str)
def test_gradients_of_pooling_on_cuda_need_no_unpooling(image, attributes):
    training = onnxtrain.training_model(
        pool(image, **attributes), loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.05)
    )
    graphs = [onnxtrain.lower(training, portable="cuda"), onnxtrain.lower(training)]
    assert "MaxUnpool" not in [node.op_type for node in graphs[0].graph.node]
    x = np.random.default_rng(0).normal(size=(2, 2, *map(int, image.split(",")))).astype(np.float32)
    y = onnxruntime.InferenceSession(pool(image, **attributes).SerializeToString()).run(None, {"x": x})[0]
    feeds = {"x": x, "target": np.zeros_like(y), "learning_rate": np.array(0.05, np.float32)}
    ours, expected = (stepped(graph, copied(onnxtrain.TrainingSession(training).state), feeds) for graph in graphs)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
