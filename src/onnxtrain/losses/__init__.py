"""Losses, built as graphs of standard operators from a prediction and a target."""

from __future__ import annotations

from typing import Any, Final

from onnxtrain.errors._internal import public_names
from onnxtrain.errors.registries import Registry
from onnxtrain.losses.base import Loss, ReducedLoss, TargetForm, TargetKind, examples, mean_over, node_rank
from onnxtrain.losses.contrastive_losses import InfoNCE, Triplet
from onnxtrain.losses.cross_entropy import NextToken, SoftmaxCrossEntropy
from onnxtrain.losses.ctc_loss import CTC
from onnxtrain.losses.custom_loss import CustomLoss
from onnxtrain.losses.dice_loss import Dice
from onnxtrain.losses.distillation import Distillation
from onnxtrain.losses.elementwise import BinaryCrossEntropy, Huber, MeanAbsoluteError, MeanSquaredError
from onnxtrain.losses.focal_losses import BinaryFocal, Focal
from onnxtrain.losses.margin_losses import ArcFace, CosFace
from onnxtrain.losses.transducer_loss import Transducer

__all__ = [
    "CTC",
    "LOSSES",
    "ArcFace",
    "BinaryCrossEntropy",
    "BinaryFocal",
    "CosFace",
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
    "ReducedLoss",
    "SoftmaxCrossEntropy",
    "TargetForm",
    "TargetKind",
    "Transducer",
    "Triplet",
    "examples",
    "mean_over",
    "node_rank",
]


def _is_loss(given: object) -> bool:
    return isinstance(given, type) and issubclass(given, Loss)


_BUILT_IN: dict[str, type[Loss] | str] = {
    "softmax_cross_entropy": SoftmaxCrossEntropy,
    "next_token": NextToken,
    "binary_cross_entropy": BinaryCrossEntropy,
    "mean_squared_error": MeanSquaredError,
    "mean_absolute_error": MeanAbsoluteError,
    "huber": Huber,
    "focal": Focal,
    "binary_focal": BinaryFocal,
    "dice": Dice,
    "ctc": CTC,
    "transducer": Transducer,
    "triplet": Triplet,
    "info_nce": InfoNCE,
    "arcface": ArcFace,
    "cosface": CosFace,
    "distillation": Distillation,
}

LOSSES: Final[Registry[type[Loss]]] = Registry("loss", _is_loss, "a class derived from Loss", _BUILT_IN)
"""Losses by their names on the command line, with those of plugins."""

__dir__ = public_names(__name__, LOSSES.class_names)


def __getattr__(name: str) -> Any:
    return LOSSES.of_class(name, __name__)
