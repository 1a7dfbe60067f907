"""Convolutions that ONNX's reference evaluator gets wrong or is too slow for, against PyTorch."""

import pytest

torch = pytest.importorskip("torch")

from onnx import helper  # noqa: E402

from autodiff.case import normal  # noqa: E402
from autodiff.with_torch.against_torch import check_against_torch  # noqa: E402

functional = torch.nn.functional
pytestmark = pytest.mark.torch

CONVOLUTIONS = {
    "groups": ((2, 4, 4, 3), (6, 2, 2, 2), {"groups": 2, "padding": 1}),
    "groups-strides": ((2, 6, 7, 5), (3, 2, 3, 2), {"groups": 3, "stride": 2, "dilation": (1, 2)}),
    "groups-flipped": ((1, 4, 28, 29), (16, 2, 1, 2), {"groups": 2}),
    "groups-many-channels": ((2, 24, 9, 8), (24, 12, 3, 3), {"groups": 2, "padding": 1, "stride": (1, 2)}),
    "depthwise-multiplier": ((2, 2, 4, 4), (4, 1, 2, 2), {"groups": 2}),
    "depthwise-large": ((2, 32, 30, 30), (32, 1, 3, 3), {"groups": 32, "padding": 1}),
    "depthwise-7x7": ((2, 8, 14, 14), (8, 1, 7, 7), {"groups": 8, "padding": 3}),
    "3d-groups": ((1, 4, 3, 3, 4), (2, 2, 2, 1, 2), {"groups": 2}),
    "1d-groups": ((2, 4, 9), (4, 2, 3), {"groups": 2, "dilation": 2, "padding": 2}),
    "resnet": ((2, 32, 28, 28), (48, 32, 3, 3), {"padding": 1}),
    "resnet-strides": ((2, 32, 15, 14), (48, 32, 3, 3), {"padding": 1, "stride": 2}),
    "stem": ((2, 3, 33, 32), (16, 3, 7, 7), {"padding": 3, "stride": 2}),
    "lenet": ((4, 6, 14, 14), (16, 6, 5, 5), {}),
    "patches": ((2, 3, 32, 32), (24, 3, 8, 8), {"stride": 8}),
    "remainder": ((2, 3, 34, 37), (4, 3, 8, 8), {"stride": 8}),
}

TRANSPOSED = {
    "groups": ((2, 4, 3, 2), (4, 3, 2, 2), {"groups": 2, "stride": (1, 2)}),
    "groups-padding": ((2, 4, 5, 4), (4, 2, 3, 3), {"groups": 2, "stride": 2, "padding": 1, "output_padding": 1}),
    "depthwise-multiplier": ((2, 2, 4, 3), (2, 3, 3, 2), {"groups": 2, "stride": (2, 1)}),
    "unet": ((2, 32, 8, 8), (32, 16, 2, 2), {"stride": 2}),
}


def _attributes(options: dict, weight: tuple[int, ...]) -> dict:
    rank = len(weight) - 2

    def each(name: str, default: int) -> list[int]:
        value = options.get(name, default)
        return [value] * rank if isinstance(value, int) else list(value)

    attributes = {"strides": each("stride", 1), "dilations": each("dilation", 1), "pads": each("padding", 0) * 2}
    attributes |= {"group": options.get("groups", 1), "kernel_shape": list(weight[2:])}
    return attributes | ({"output_padding": each("output_padding", 0)} if "output_padding" in options else {})


@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name: str, shapes: str) -> None:
    x, weight, options = CONVOLUTIONS[name]
    rank = len(weight) - 2
    function = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[rank]
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **_attributes(options, weight))
    inputs = [normal(*x), normal(*weight, seed=1), normal(weight[0], seed=2)]
    check_against_torch(node, inputs, lambda x, w, b: function(x, w, b, **options), shapes=shapes)


@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolution(name: str, shapes: str) -> None:
    x, weight, options = TRANSPOSED[name]
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **_attributes(options, weight))
    channels = weight[1] * options.get("groups", 1)
    inputs = [normal(*x), normal(*weight, seed=1), normal(channels, seed=2)]
    check_against_torch(node, inputs, lambda x, w, b: functional.conv_transpose2d(x, w, b, **options), shapes=shapes)


@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize(("mode", "padding"), [("NOTSET", (1, 0)), ("SAME_UPPER", (0, 1)), ("SAME_LOWER", (1, 0))])
def test_transposed_convolution_of_given_size(mode: str, padding: tuple[int, int], shapes: str) -> None:
    node = helper.make_node(
        "ConvTranspose",
        ["x", "w"],
        ["y"],
        strides=[2, 3],
        output_shape=[6, 11],
        auto_pad=mode,
        kernel_shape=[3, 3],
    )

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = functional.conv_transpose2d(x, w, stride=(2, 3))  # 7 x 12: one row and one column too many
        before, after = padding
        return full[:, :, before : 7 - after, before : 12 - after]

    check_against_torch(node, [normal(1, 2, 3, 4), normal(2, 2, 3, 3, seed=1)], function, shapes=shapes)
