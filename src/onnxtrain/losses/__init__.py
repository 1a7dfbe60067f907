"""Losses, built as graphs of standard operators from a prediction and a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxtrain.errors._internal import public_names
from onnxtrain.losses.base import Loss, TargetForm, TargetKind, examples, node_rank
from onnxtrain.losses.contrastive_losses import InfoNCE, Triplet
from onnxtrain.losses.cross_entropy import NextToken, SoftmaxCrossEntropy
from onnxtrain.losses.ctc_loss import CTC
from onnxtrain.losses.custom_loss import CustomLoss
from onnxtrain.losses.detection_losses import DETR, YOLO
from onnxtrain.losses.dice_loss import Dice
from onnxtrain.losses.distillation import Distillation
from onnxtrain.losses.elementwise import BinaryCrossEntropy, Huber, MeanAbsoluteError, MeanSquaredError
from onnxtrain.losses.focal_losses import BinaryFocal, Focal
from onnxtrain.losses.margin_losses import ArcFace, CosFace
from onnxtrain.losses.preference_losses import DPO, KTO, ORPO, Reward
from onnxtrain.losses.ranking_losses import ListNet, MultipleNegatives, RankNet
from onnxtrain.losses.transducer_loss import Transducer

__all__ = [
    "CTC",
    "DETR",
    "DPO",
    "KTO",
    "LOSSES",
    "ORPO",
    "YOLO",
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
    "ListNet",
    "Loss",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "MultipleNegatives",
    "NextToken",
    "RankNet",
    "Reward",
    "SoftmaxCrossEntropy",
    "TargetForm",
    "TargetKind",
    "Transducer",
    "Triplet",
    "examples",
    "node_rank",
]

__dir__ = public_names(__name__)

LOSSES: Final[Mapping[str, type[Loss]]] = {
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
    "yolo": YOLO,
    "detr": DETR,
    "triplet": Triplet,
    "info_nce": InfoNCE,
    "arcface": ArcFace,
    "cosface": CosFace,
    "distillation": Distillation,
    "dpo": DPO,
    "orpo": ORPO,
    "kto": KTO,
    "reward": Reward,
    "multiple_negatives": MultipleNegatives,
    "listnet": ListNet,
    "ranknet": RankNet,
}
"""Losses by their names on the command line."""
