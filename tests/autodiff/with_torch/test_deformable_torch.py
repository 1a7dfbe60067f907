"""Gradients of deformable convolution for all inputs, against PyTorch's differentiation of its definition."""

import pytest

torch = pytest.importorskip("torch")

from onnx import helper  # noqa: E402

from autodiff.case import normal  # noqa: E402
from autodiff.with_torch.against_torch import check_against_torch  # noqa: E402

pytestmark = pytest.mark.torch

LAYERS = {
    "plain": ((1, 2, 4, 5), (3, 2, 2, 2), {}),
    "strides-pads": ((2, 1, 5, 6), (2, 1, 3, 2), {"strides": [2, 3], "pads": [1, 1, 1, 2], "dilations": [1, 2]}),
    "groups": ((1, 4, 4, 3), (4, 2, 2, 2), {"group": 2}),
    "offset-groups": ((2, 4, 3, 4), (4, 2, 2, 2), {"group": 2, "offset_group": 2}),
}


def _bilinear(image: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Channels of an image [channels, height, width] at points [...], zeros beyond it."""
    height, width = image.shape[1:]
    total = 0
    for down in (0, 1):
        for right in (0, 1):
            row, column = y.detach().floor() + down, x.detach().floor() + right
            weight = (1 - (y - row).abs()) * (1 - (x - column).abs())
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            row, column = row.long().clamp(0, height - 1), column.long().clamp(0, width - 1)
            total = total + image[:, row, column] * weight * inside
    return total


def _deformable(options: dict):
    strides, dilations = options.get("strides", [1, 1]), options.get("dilations", [1, 1])
    top, left, *_ = options.get("pads", [0] * 4)
    group, bent = options.get("group", 1), options.get("offset_group", 1)

    def function(x, weight, offset, bias, mask):
        batch, outputs, (rows, columns) = x.shape[0], weight.shape[0], offset.shape[2:]
        kernel = weight.shape[2:]
        offset = offset.reshape(batch, bent, *kernel, 2, rows, columns)
        mask = mask.reshape(batch, bent, *kernel, rows, columns)
        y = torch.zeros(batch, outputs, rows, columns, dtype=x.dtype)
        y = y + bias[:, None, None]
        parts = [part.chunk(bent) for part in x]
        for i in range(kernel[0]):
            for j in range(kernel[1]):
                base_y = torch.arange(rows)[:, None] * strides[0] - top + i * dilations[0]
                base_x = torch.arange(columns)[None, :] * strides[1] - left + j * dilations[1]
                sampled = torch.stack(
                    [
                        torch.cat(
                            [
                                _bilinear(parts[n][g], base_y + offset[n, g, i, j, 0], base_x + offset[n, g, i, j, 1])
                                * mask[n, g, i, j]
                                for g in range(bent)
                            ]
                        )
                        for n in range(batch)
                    ]
                )
                y = y + torch.nn.functional.conv2d(sampled, weight[:, :, i : i + 1, j : j + 1], groups=group)
        return y

    return function


@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize("name", LAYERS)
def test_deformable_convolution(name: str, shapes: str) -> None:
    x, weight, options = LAYERS[name]
    strides, dilations = options.get("strides", [1, 1]), options.get("dilations", [1, 1])
    pads = options.get("pads", [0] * 4)
    counts = [
        (x[2 + a] + pads[a] + pads[a + 2] - dilations[a] * (weight[2 + a] - 1) - 1) // strides[a] + 1 for a in (0, 1)
    ]
    positions = options.get("offset_group", 1) * weight[2] * weight[3]
    inputs = [
        normal(*x),
        normal(*weight, seed=1),
        normal(x[0], 2 * positions, *counts, seed=2),
        normal(weight[0], seed=3),
        normal(x[0], positions, *counts, seed=4),
    ]
    node = helper.make_node("DeformConv", list("abcde"), ["y"], kernel_shape=list(weight[2:]), **options)
    check_against_torch(node, inputs, _deformable(options), opset=19, shapes=shapes)
