"""Second derivatives of layers: gradient graphs against central differences of themselves."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from autodiff.case import Case, case, normal
from onnxtrain.runtime.testing import check_gradient, projected_gradient

POSITIVE = np.abs(normal(3, seed=9)) + 0.5

LAYERS = [
    case("MatMul", normal(2, 5, 3), normal(3, 4, seed=1)),
    case("Gemm", normal(2, 3), normal(3, 4, seed=1), normal(4, seed=2)),
    case("Einsum", normal(2, 3, 4), normal(2, 4, 5, seed=1), equation="bij,bjk->bik"),
    case("Det", normal(3, 3)),
    case("Conv", normal(1, 2, 5, 5), normal(2, 2, 3, 3, seed=1), label="columns", pads=[1, 1, 1, 1]),
    case("Conv", normal(1, 9, 5, 4), normal(2, 9, 3, 2, seed=1), label="per-position", strides=[2, 2]),
    case("Conv", normal(1, 2, 6, 6), normal(2, 2, 5, 5, seed=1), label="convolution", pads=[2, 2, 2, 2]),
    case("Conv", normal(2, 2, 5, 5), normal(2, 1, 3, 3, seed=1), label="depthwise", group=2),
    case("ConvTranspose", normal(1, 2, 3, 3), normal(2, 2, 2, 2, seed=1), strides=[2, 2]),
    case("LpPool", normal(1, 1, 4, 4), kernel_shape=[2, 2]),
    case("LayerNormalization", normal(2, 3, 4), normal(4, seed=1), normal(4, seed=2)),
    case("BatchNormalization", normal(2, 3, 4), POSITIVE, normal(3), normal(3, seed=1), POSITIVE),
    case("InstanceNormalization", normal(2, 3, 4), normal(3, seed=1), normal(3, seed=2)),
    case("RMSNormalization", normal(2, 3, 4), normal(4, seed=1), opset=23),
    case("LpNormalization", normal(2, 3)),
    case("LRN", normal(3, 3, 2, 2), size=3),
    case(
        "LSTM", normal(2, 2, 2), normal(1, 8, 2, seed=1), normal(1, 8, 2, seed=2), normal(1, 16, seed=3), hidden_size=2
    ),
    case(
        "GRU", normal(2, 2, 2), normal(1, 6, 2, seed=1), normal(1, 6, 2, seed=2), normal(1, 12, seed=3), hidden_size=2
    ),
    case("RNN", normal(2, 2, 2), normal(1, 2, 2, seed=1), normal(1, 2, 2, seed=2), normal(1, 4, seed=3), hidden_size=2),
    case("Attention", normal(1, 2, 3, 4), normal(1, 2, 3, 4, seed=1), normal(1, 2, 3, 4, seed=2), opset=23),
]


def _first_gradient(layer: Case, feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A model whose outputs are the gradients of the layer with respect to all inputs."""
    infos = [helper.make_tensor_value_info(name, 11, array.shape) for name, array in feeds.items()]
    output = helper.make_tensor_value_info("y0", 11, None)
    graph = helper.make_graph([layer.node], "layer", infos, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", layer.opset)], ir_version=10)
    (y,) = ReferenceEvaluator(model).run(None, feeds)
    first = projected_gradient(model, list(feeds), {"y0": normal(*y.shape, seed=5)}, "static")
    gradients = {output.name: output.name.replace("_grad", "_first") for output in first.graph.output[1:]}
    for node in first.graph.node:
        for names in (node.input, node.output):  # an output may be read, too
            names[:] = [gradients.get(name, name) for name in names]
    del first.graph.output[:]
    first.graph.output.extend(helper.make_tensor_value_info(name, 11, None) for name in gradients.values())
    return first


@pytest.mark.parametrize("layer", LAYERS, ids=[layer.name for layer in LAYERS])
def test_second_order(layer: Case) -> None:
    feeds = dict(zip(layer.node.input, layer.inputs, strict=True))
    check_gradient(_first_gradient(layer, feeds), feeds)
