"""Maximum pooling of regions, against PyTorch's differentiation of its definition."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from onnx import helper  # noqa: E402

from autodiff.case import apart  # noqa: E402
from autodiff.with_torch.against_torch import check_against_torch  # noqa: E402

pytestmark = pytest.mark.torch

REGIONS = np.array([[0, 0, 0, 5, 4], [1, 1, 2, 4, 6], [0, 2, 1, 2, 9], [1, 8, 8, 9, 9]], dtype=np.float64)


def _pool(scale: float, pooled: tuple[int, int]):
    def function(x: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        rows = []
        for image, left, top, right, bottom in regions.detach().tolist():
            left, top, right, bottom = (math.floor(v * scale + 0.5) for v in (left, top, right, bottom))
            sizes = max(bottom - top + 1, 1) / pooled[0], max(right - left + 1, 1) / pooled[1]
            for i in range(pooled[0]):
                for j in range(pooled[1]):
                    window = x[
                        int(image),
                        :,
                        math.floor(i * sizes[0]) + top : math.ceil((i + 1) * sizes[0]) + top,
                        math.floor(j * sizes[1]) + left : math.ceil((j + 1) * sizes[1]) + left,
                    ]
                    empty = window.numel() == 0
                    rows.append(torch.zeros(x.shape[1]) if empty else window.amax((1, 2)))
        stacked = torch.stack(rows).reshape(len(regions), *pooled, x.shape[1])
        return stacked.permute(0, 3, 1, 2) + 0 * regions.sum()

    return function


@pytest.mark.parametrize("shapes", ["static", "dynamic", "unknown"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_max_roi_pool(scale: float, shapes: str) -> None:
    node = helper.make_node("MaxRoiPool", ["x", "r"], ["y"], pooled_shape=[2, 3], spatial_scale=scale)
    check_against_torch(node, [apart(2, 3, 7, 6), REGIONS], _pool(scale, (2, 3)), shapes=shapes)
