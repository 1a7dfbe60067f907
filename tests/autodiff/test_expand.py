"""Functions expand into nodes whose types and shapes are known as they are emitted."""

import onnx_ir as ir
import pytest

from onnxtrain.autodiff import expand
from onnxtrain.autodiff.path import Forward, Route
from onnxtrain.editing.working_copy.kv_cache import remove_cache_inputs
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions, is_float
from zoo.language_model import language_model


@pytest.fixture
def model():
    """Two layers with grouped attention and norms of ONNX Runtime, of symbolic sizes."""
    made = ir.from_proto(language_model())
    remove_cache_inputs(made)
    return infer_shapes(made)


def _forward(model):
    """The graph, and the route from its logits to all weights."""
    forward = Forward.of(model)
    xs = tuple(value for value in model.graph.initializers.values() if is_float(value))
    return forward, Route((model.graph.outputs[0],), xs)


def test_bodies_are_inferred_without_another_inference_of_the_graph(model, monkeypatch):
    monkeypatch.delattr(expand, "_infer_bodies")
    forward, route = _forward(model)
    path, missing = expand.expand_functions(forward, route)
    assert not missing
    assert {node.op_type for node in path if node.domain == "com.microsoft"} == {"RotaryEmbedding"}  # has a rule
    for node in path:
        shape = dimensions(node.outputs[0])
        assert shape is not None, node.name
        assert None not in shape, node.name


def test_bodies_of_all_layers_share_their_mask(model):
    forward, route = _forward(model)
    expand.expand_functions(forward, route)
    assert [node.op_type for node in forward.graph].count("Range") == 1
