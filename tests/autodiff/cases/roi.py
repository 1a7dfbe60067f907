"""Regions of interest; only the image has a gradient."""

import numpy as np

from autodiff.case import Case, case, normal

IMAGES = normal(2, 3, 7, 6)
REGIONS = np.array([[0.3, 0.2, 5.6, 4.4], [1.7, 2.1, 4.3, 6.9], [-2.4, -0.7, 9.3, 8.8], [3.1, 3.2, 3.4, 3.3]])
OWNERS = np.array([0, 1, 0, 1])


def align(label: str, opset: int = 18, runtime: bool = True, **options: object) -> Case:
    options = {"output_height": 2, "output_width": 3, **options}
    return case("RoiAlign", IMAGES, REGIONS, OWNERS, label=label, opset=opset, wrt=["a"], runtime=runtime, **options)


CASES = [
    align("plain", sampling_ratio=2),
    align("adaptive"),
    align("scaled", sampling_ratio=1, spatial_scale=0.7),
    align("whole-pixels", coordinate_transformation_mode="output_half_pixel"),
    align("whole-pixels-2", coordinate_transformation_mode="output_half_pixel", sampling_ratio=2),
    align("maximum", mode="max", sampling_ratio=2),
    # Small bins: ONNX's reference evaluator gathers from fewer than 64 candidates.
    align("maximum-adaptive", mode="max", output_height=4, coordinate_transformation_mode="output_half_pixel"),
    align("maximum-adaptive-half", mode="max", output_height=4),
    align("22", opset=22, sampling_ratio=2, runtime=False),  # ONNX Runtime has it up to opset 21
    # ONNX's reference evaluator lacks MaxRoiPool: test_roi_torch.py.
    case("MaxRoiPool", IMAGES, REGIONS, label="against-torch", shapes=(), pooled_shape=[2, 3]),
]
