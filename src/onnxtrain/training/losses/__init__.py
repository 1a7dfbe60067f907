"""Losses as graphs: what training minimises, built from a prediction and a target in standard operators."""

from __future__ import annotations

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

LOSSES: dict[str, type[Loss]] = {
    loss.name: loss
    for loss in (
        *(SoftmaxCrossEntropy, NextToken, BinaryCrossEntropy, MeanSquaredError, MeanAbsoluteError, Huber),
        *(Focal, BinaryFocal, Dice, CTC, Triplet, InfoNCE, Distillation),
    )
}
"""The losses by the names that the command line takes."""
