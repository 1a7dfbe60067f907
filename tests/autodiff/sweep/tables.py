"""Exceptions of the sweep: ONNX's node tests that it omits or changes, each with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

OPSETS = (18, 20, 23, 26)
"""Every test is also converted to these opsets, where the operator allows it."""

WITHOUT_EVALUATOR = {
    ("DequantizeLinear", 18): "ONNX's reference evaluator has it from opset 19 on",
    **{("CenterCropPad", opset): "its body fails in ONNX's reference evaluator" for opset in (20, 23, 26)},
}
"""Omitted operators and opsets."""

NEWEST = 26
"""The newest opset that ONNX Runtime runs: a model with a later one is converted to it."""

SKIPPED: dict[str, str] = {
    r"pow": "its powers go up to 59 to the 59th: beyond single precision, and no differences resolve them",
    r"attention_4d_with_past_and_present_qk_matmul_bias_[34]d_mask_causal": "its second output has infinities",
    r"loop16_seq_none": "a state that is an optional value, which the rule refuses",
    r"maxunpool_export_with_output_shape": "ONNX counts the indices in the size that strides imply, ONNX Runtime and "
    "PyTorch in the output, and so does the rule",
    r"roialign_mode_max": "ONNX's reference evaluator cannot choose among more than 64 candidates",
    r"castlike_(FLOAT16|BFLOAT16|FLOAT8\w+|FLOAT4\w+|U?INT[24])_to_\w+": "only the type of the floating input is read",
}
"""Patterns of names of tests that are no gradient checks."""


@dataclass(frozen=True)
class Move:
    """A shift of inputs by random numbers between two bounds, the same in every run.

    Attributes:
        reason: The reason.
        low: Lower bound.
        high: Upper bound.
        inputs: Names of the inputs; all differentiated ones where empty.
    """

    reason: str
    low: float = -0.1
    high: float = 0.1
    inputs: tuple[str, ...] = ()


KINK = Move("a kink at zero", 0.05, 0.1)
TIE = Move("ties")
MOVED: dict[str, Move] = {
    r"acosh_example": Move("the end of the domain", 0.05, 0.1),
    r"(elu|leakyrelu|selu|thresholdedrelu|celu)(_example)?": KINK,
    r"abs|relu|hardsigmoid.*|hardswish|shrink.*|prelu.*|softsign.*": KINK,
    r"clip_.*": KINK,
    r"reduce_(min|max|l1|l2)_.*": TIE,
    r"(max|min)_.*": TIE,
    r"(l1|l2)normalization_.*|lpnormalization_.*": Move("a norm of zero"),
    r"maxpool_.*": TIE,
    r"(global)?maxpool.*": TIE,
    r"basic_deform_conv_.*|deform_conv_.*": Move(
        "places on the grid, where interpolation has a kink",
        0.2,
        0.4,
        ("offset", "offset_with_padding", "offset_without_padding"),
    ),
    r"gridsample.*": Move(
        "places on the grid or beyond its border, where interpolation has a kink", -0.03, 0.03, ("Grid",)
    ),
    r"range_.*": Move("a limit where the number of steps changes", -0.5, -0.25, ("limit",)),
    r"cumprod_.*": Move("zeros", 0.05, 0.1),
    r"unique_.*": TIE,
}
"""Patterns of names of tests whose inputs are moved."""

REPLACED: dict[str, str] = {
    r"cast(like)?_(FLOAT|DOUBLE)_to_(FLOAT|DOUBLE)": "NaN and infinity have no difference quotient",
}
"""Patterns of names of tests in whose inputs 1 replaces NaN and infinity."""

CONFIGURATION: dict[tuple[str, str], str] = {
    ("CastLike", "target_type"): "only its type is read",
    ("Dropout", "ratio"): "PyTorch takes it as a number; the mask jumps with it",
    ("OneHot", "depth"): "a size",
    ("OneHot", "indices"): "positions",
    ("Range", "limit"): "only decides how many numbers there are",
    ("Resize", "roi"): "a region, which PyTorch does not have",
    ("Resize", "scales"): "decides the size of the output; PyTorch takes numbers",
    ("RoiAlign", "rois"): "regions; PyTorch's operator passes no gradient to them either",
    ("Upsample", "scales"): "decides the size of the output; PyTorch takes numbers",
}
"""Floating inputs (operator, name in its schema) that configure it and have no gradient."""

SILENT: dict[tuple[str, str], str] = {
    ("BatchNormalization", "running_mean"): "the moving average is not differentiated, as in PyTorch",
    ("BatchNormalization", "running_var"): "the moving average is not differentiated, as in PyTorch",
}
"""Floating outputs (operator, name in its schema) without gradients."""

_CONSTANTS = "its body, which ONNX defines, has constants in single precision"
SINGLE: dict[str, str] = {
    "AffineGrid": _CONSTANTS,
    "MeanVarianceNormalization": _CONSTANTS,
    "GroupNormalization": "its body computes in single precision",
    "DeformConv": "ONNX's reference evaluator rounds places to single precision",
}
"""Operators whose differences are computed in float32, with a step of 0.01 and a tolerance of 2 %."""

BY_RUNTIME: dict[str, str] = {
    r"maxpool_.*": "the gradient reads the positions of the maxima, which ONNX's reference evaluator gets wrong",
}
"""Patterns of names of tests whose gradient is evaluated by ONNX Runtime alone, in single precision; the differences
are those of the reference evaluator in double."""

NOT_BY_RUNTIME: dict[str, str] = {
    r"resize_downsample_scales_(linear|cubic)_align_corners": "ONNX Runtime's kernel gives another result",
    r"training_dropout.*": "ONNX Runtime draws other random numbers than ONNX's reference evaluator",
}
"""Patterns of names of tests where ONNX Runtime is not compared."""

EXCUSES: dict[str, str] = {
    "rank": r"gradient (of .* )?needs the rank of",
    "constants": r"the gradient needs (a constant|constant sizes)|needs (its|a|the) .* (to be|as) (a )?constant",
}
"""Errors that a rule may raise, for unknown ranks and computed axes, with the words of the message."""

NOT_TWICE = {operator: SINGLE[operator] for operator in ("AffineGrid", "MeanVarianceNormalization")}
"""Operators whose gradient is not differentiated once more."""

Item = TypeVar("Item")


def matching(table: Mapping[str, Item], name: str) -> Item | None:
    """The entry of the first pattern that the name of a test matches as a whole."""
    return next((item for pattern, item in table.items() if re.fullmatch(pattern, name)), None)
