"""Losses as graphs: what training minimises, built from a prediction and a target in standard operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from onnxtrain.lazy import LazyMapping, lazy_names, public_names

if TYPE_CHECKING:
    from onnxtrain.training.losses.base import Loss, TargetForm, TargetKind, examples, node_rank
    from onnxtrain.training.losses.contrastive_losses import InfoNCE, Triplet
    from onnxtrain.training.losses.cross_entropy import SoftmaxCrossEntropy
    from onnxtrain.training.losses.ctc_loss import CTC
    from onnxtrain.training.losses.custom_loss import CustomLoss
    from onnxtrain.training.losses.dice_loss import Dice
    from onnxtrain.training.losses.distillation import Distillation
    from onnxtrain.training.losses.elementwise import BinaryCrossEntropy, Huber, MeanAbsoluteError, MeanSquaredError
    from onnxtrain.training.losses.focal_losses import BinaryFocal, Focal
    from onnxtrain.training.losses.next_token import NextToken

__all__ = [
    "CTC",
    "LOSSES",
    "BinaryCrossEntropy",
    "BinaryFocal",
    "CustomLoss",
    "Dice",
    "Distillation",
    "Focal",
    "Huber",
    "InfoNCE",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "NextToken",
    "SoftmaxCrossEntropy",
    "TargetForm",
    "TargetKind",
    "Triplet",
    "examples",
    "node_rank",
]

__dir__ = public_names(__name__)
__getattr__ = lazy_names(
    __name__,
    {
        "BinaryCrossEntropy": "onnxtrain.training.losses.elementwise",
        "BinaryFocal": "onnxtrain.training.losses.focal_losses",
        "CTC": "onnxtrain.training.losses.ctc_loss",
        "CustomLoss": "onnxtrain.training.losses.custom_loss",
        "Dice": "onnxtrain.training.losses.dice_loss",
        "Distillation": "onnxtrain.training.losses.distillation",
        "examples": "onnxtrain.training.losses.base",
        "Focal": "onnxtrain.training.losses.focal_losses",
        "Huber": "onnxtrain.training.losses.elementwise",
        "InfoNCE": "onnxtrain.training.losses.contrastive_losses",
        "Loss": "onnxtrain.training.losses.base",
        "MeanAbsoluteError": "onnxtrain.training.losses.elementwise",
        "MeanSquaredError": "onnxtrain.training.losses.elementwise",
        "NextToken": "onnxtrain.training.losses.next_token",
        "node_rank": "onnxtrain.training.losses.base",
        "SoftmaxCrossEntropy": "onnxtrain.training.losses.cross_entropy",
        "TargetForm": "onnxtrain.training.losses.base",
        "TargetKind": "onnxtrain.training.losses.base",
        "Triplet": "onnxtrain.training.losses.contrastive_losses",
    },
)

LOSSES: Final[Mapping[str, type[Loss]]] = LazyMapping(
    {
        "softmax_cross_entropy": "onnxtrain.training.losses.cross_entropy:SoftmaxCrossEntropy",
        "next_token": "onnxtrain.training.losses.next_token:NextToken",
        "binary_cross_entropy": "onnxtrain.training.losses.elementwise:BinaryCrossEntropy",
        "mean_squared_error": "onnxtrain.training.losses.elementwise:MeanSquaredError",
        "mean_absolute_error": "onnxtrain.training.losses.elementwise:MeanAbsoluteError",
        "huber": "onnxtrain.training.losses.elementwise:Huber",
        "focal": "onnxtrain.training.losses.focal_losses:Focal",
        "binary_focal": "onnxtrain.training.losses.focal_losses:BinaryFocal",
        "dice": "onnxtrain.training.losses.dice_loss:Dice",
        "ctc": "onnxtrain.training.losses.ctc_loss:CTC",
        "triplet": "onnxtrain.training.losses.contrastive_losses:Triplet",
        "info_nce": "onnxtrain.training.losses.contrastive_losses:InfoNCE",
        "distillation": "onnxtrain.training.losses.distillation:Distillation",
    }
)
"""The losses by the names that the command line takes."""
