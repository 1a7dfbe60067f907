"""Symbolic dimensions are replaced by sizes, in the model and in its training."""

import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.lowering.portable import fix_dimensions


@pytest.fixture
def training():
    return onnxtrain.training_model(
        onnxtrain.examples.lenet5(), loss="softmax_cross_entropy", optimizer=onnxtrain.Momentum()
    )


def test_the_step_graph_is_static_and_shorter(training):
    dynamic = onnxtrain.lower(training)
    fix_dimensions(training, {"N": 4})
    step = onnxtrain.lower(training)
    onnx.checker.check_model(step, full_check=True)
    shapes = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in step.graph.input}
    assert shapes["image"] == [4, 1, 28, 28]
    assert shapes["target"] == [4]
    assert len(step.graph.node) < len(dynamic.graph.node)
    onnxruntime.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"M": 4}, "no dimension 'M' to give the size 4; the model's inputs have N"), ({"N": 0}, "needs 1 or more")],
)
def test_wrong_sizes(training, sizes, message):
    with pytest.raises(OptionError, match=message):
        fix_dimensions(training, sizes)
