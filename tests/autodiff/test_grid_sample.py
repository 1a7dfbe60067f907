"""GridSample in double precision against PyTorch, where the two agree on the convention."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from autodiff.case import normal
from onnxtrain.autodiff.evaluator import evaluator
from onnxtrain.runtime.testing import projected_gradient

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

MODES = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("sizes", [(4, 5), (1, 3), (3, 2, 4)])
def test_gradient_equals_that_of_pytorch(sizes, mode, padding, align):
    if mode == "cubic" and (len(sizes) == 3 or padding != "zeros"):
        pytest.skip("PyTorch has no such kernel, or brings places outside back in another way than ONNX")
    x = normal(2, 3, *sizes)
    grid = np.random.default_rng(1).uniform(-2.3, 2.3, size=(2, 3, *(2,) * (len(sizes) - 1), len(sizes)))
    projection = normal(2, 3, *grid.shape[1:-1], seed=5)
    found = ours(x, grid, projection, mode, padding, align)
    places = torch.tensor(grid, requires_grad=True)
    image = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.grid_sample(image, places, MODES[mode], padding, align_corners=bool(align))
    (y * torch.tensor(projection)).sum().backward()
    np.testing.assert_allclose(found[0], image.grad, atol=1e-12)
    np.testing.assert_allclose(found[1], places.grad, atol=1e-12)


def ours(x, grid, projection, mode, padding, align):
    """The gradients alone: the reference evaluator's own GridSample computes in float32."""
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], **attributes)
    infos = [helper.make_tensor_value_info(n, TensorProto.DOUBLE, a.shape) for n, a in (("x", x), ("grid", grid))]
    output = helper.make_tensor_value_info("y", TensorProto.DOUBLE, projection.shape)
    graph = helper.make_graph([node], "sample", infos, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    built = projected_gradient(model, ["x", "grid"], {"y": projection})
    del built.graph.output[0]
    kept = [node for node in built.graph.node if node.op_type != "GridSample" and "y" not in node.input]
    del built.graph.node[:]
    built.graph.node.extend(kept)
    return evaluator(built).run(None, {"x": x, "grid": grid})
