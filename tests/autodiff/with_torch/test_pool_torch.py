"""Pooling that ONNX's reference evaluator lacks or gets wrong, and ties, against PyTorch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnx import helper  # noqa: E402

from autodiff.case import apart, normal  # noqa: E402
from autodiff.with_torch.against_torch import check_against_torch  # noqa: E402

functional = torch.nn.functional
pytestmark = pytest.mark.torch
each_knowledge_of_shapes = pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])

WINDOWS = {
    "dense": {"kernel_size": (2, 3), "stride": 1},
    "dense-pads": {"kernel_size": 3, "stride": 1, "padding": 1},
    "overlap": {"kernel_size": 3, "stride": 2, "padding": 1},
    "separate": {"kernel_size": 2, "stride": 2},
    "ceil": {"kernel_size": (3, 2), "stride": 2, "ceil_mode": True},
    "ceil-pads": {"kernel_size": 3, "stride": (2, 3), "padding": 1, "ceil_mode": True},
}
DILATED = {"kernel_size": 2, "stride": (1, 2), "padding": 1, "dilation": 2}


def _attributes(options: dict, rank: int = 2) -> dict:
    def each(name: str, default: int) -> list[int]:
        value = options.get(name, default)
        return [value] * rank if isinstance(value, int) else list(value)

    attributes = {"kernel_shape": each("kernel_size", 1), "strides": each("stride", 1)}
    if "dilation" in options:
        attributes["dilations"] = each("dilation", 1)
    return attributes | {"pads": each("padding", 0) * 2, "ceil_mode": int(options.get("ceil_mode", False))}


@each_knowledge_of_shapes
@pytest.mark.parametrize("options", [*WINDOWS.values(), DILATED], ids=[*WINDOWS, "dilated"])
def test_max_pool(options: dict, shapes: str) -> None:
    node = helper.make_node("MaxPool", ["x"], ["y"], **_attributes(options))
    check_against_torch(node, [apart(2, 3, 6, 7)], lambda x: functional.max_pool2d(x, **options), shapes=shapes)


@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
def test_first_of_equal_maxima_takes_the_gradient(options: dict) -> None:
    x = np.random.default_rng(0).integers(0, 2, size=(2, 3, 6, 7)).astype(np.float64)
    node = helper.make_node("MaxPool", ["x"], ["y"], **_attributes(options))
    check_against_torch(node, [x], lambda x: functional.max_pool2d(x, **options))


@pytest.mark.parametrize("order", [0, 1])
def test_max_pool_beside_its_indices(order: int) -> None:
    node = helper.make_node(
        "MaxPool", ["x"], ["y", "indices"], kernel_shape=[3, 3], strides=[2, 2], storage_order=order
    )
    check_against_torch(node, [apart(2, 2, 6, 5)], lambda x: functional.max_pool2d(x, kernel_size=3, stride=2))


@each_knowledge_of_shapes
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_average_pool(name: str, include: bool, shapes: str) -> None:
    options = WINDOWS[name] | {"count_include_pad": include}
    node = helper.make_node("AveragePool", ["x"], ["y"], count_include_pad=int(include), **_attributes(options))
    check_against_torch(
        node, [normal(2, 3, 6, 7)], lambda x: functional.avg_pool2d(x, **options), opset=22, shapes=shapes
    )


@each_knowledge_of_shapes
@pytest.mark.parametrize("name", ["dense", "separate", "ceil"])
def test_lp_pool(name: str, shapes: str) -> None:
    options = WINDOWS[name] | {"ceil_mode": False}
    node = helper.make_node("LpPool", ["x"], ["y"], p=3, **_attributes(WINDOWS[name]))

    def function(x: torch.Tensor) -> torch.Tensor:
        if name == "ceil":  # PyTorch's own scales windows at the border up
            x = functional.pad(x, (0, 1, 0, 1))
        return functional.lp_pool2d(x.abs(), 3, **options)

    check_against_torch(node, [apart(2, 3, 6, 7) / 10], function, shapes=shapes)


@each_knowledge_of_shapes
@pytest.mark.parametrize("size", [(6,), (4, 5), (3, 2, 2)])
def test_global_pools(size: tuple[int, ...], shapes: str) -> None:
    x, axes = apart(2, 3, *size), tuple(range(2, 2 + len(size)))
    highest = {1: functional.adaptive_max_pool1d, 2: functional.adaptive_max_pool2d}
    highest[3] = functional.adaptive_max_pool3d
    check_against_torch(
        helper.make_node("GlobalMaxPool", ["x"], ["y"]), [x], lambda x: highest[len(size)](x, 1), shapes=shapes
    )
    check_against_torch(
        helper.make_node("GlobalAveragePool", ["x"], ["y"]),
        [x],
        lambda x: x.mean(axes, keepdim=True),
        shapes=shapes,
    )
    for p in (1, 2, 3):
        check_against_torch(
            helper.make_node("GlobalLpPool", ["x"], ["y"], p=p),
            [x],
            lambda x, p=p: (x.abs() ** p).sum(axes, keepdim=True) ** (1 / p),
            shapes=shapes,
        )


def test_norm_of_a_zero_window_has_gradient_zero() -> None:
    x = apart(1, 1, 4)
    x[..., :2] = 0
    node = helper.make_node("LpPool", ["x"], ["y"], p=2, kernel_shape=[2], strides=[2])

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x.reshape(1, 1, 2, 2), dim=-1)

    check_against_torch(node, [x], function)


@each_knowledge_of_shapes
def test_max_unpool(shapes: str) -> None:
    x = apart(2, 2, 4, 6)
    y, indices = functional.max_pool2d(torch.tensor(x), 2, return_indices=True)
    flat = indices.numpy() + (np.arange(4) * 24).reshape(2, 2, 1, 1)
    node = helper.make_node("MaxUnpool", ["x", "i"], ["y"], kernel_shape=[2, 2], strides=[2, 2])
    check_against_torch(node, [y.numpy(), flat], lambda x, i: functional.max_unpool2d(x, indices, 2), shapes=shapes)
