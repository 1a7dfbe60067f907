# Written by `python tools/stubs.py`; do not edit.
"""Losses, built as graphs of standard operators from a prediction and a target."""

from collections.abc import Mapping
from typing import Final

from onnxtrain.losses.alignment_losses import CTC as CTC
from onnxtrain.losses.alignment_losses import Transducer as Transducer
from onnxtrain.losses.base import Loss as Loss
from onnxtrain.losses.base import ReducedLoss as ReducedLoss
from onnxtrain.losses.base import TargetForm as TargetForm
from onnxtrain.losses.base import TargetKind as TargetKind
from onnxtrain.losses.base import examples as examples
from onnxtrain.losses.base import mean_over as mean_over
from onnxtrain.losses.base import node_rank as node_rank
from onnxtrain.losses.cross_entropy import NextToken as NextToken
from onnxtrain.losses.cross_entropy import SoftmaxCrossEntropy as SoftmaxCrossEntropy
from onnxtrain.losses.custom_loss import CustomLoss as CustomLoss
from onnxtrain.losses.dice_loss import Dice as Dice
from onnxtrain.losses.distillation import Distillation as Distillation
from onnxtrain.losses.elementwise import BinaryCrossEntropy as BinaryCrossEntropy
from onnxtrain.losses.elementwise import Huber as Huber
from onnxtrain.losses.elementwise import MeanAbsoluteError as MeanAbsoluteError
from onnxtrain.losses.elementwise import MeanSquaredError as MeanSquaredError
from onnxtrain.losses.embedding_losses import ArcFace as ArcFace
from onnxtrain.losses.embedding_losses import CosFace as CosFace
from onnxtrain.losses.embedding_losses import InfoNCE as InfoNCE
from onnxtrain.losses.embedding_losses import Triplet as Triplet
from onnxtrain.losses.focal_losses import BinaryFocal as BinaryFocal
from onnxtrain.losses.focal_losses import Focal as Focal
from onnxtrain.plugins.detection.losses import DETR as DETR
from onnxtrain.plugins.detection.losses import YOLO as YOLO
from onnxtrain.plugins.text.policy_loss import GRPO as GRPO
from onnxtrain.plugins.text.preference_losses import DPO as DPO
from onnxtrain.plugins.text.preference_losses import KTO as KTO
from onnxtrain.plugins.text.preference_losses import ORPO as ORPO
from onnxtrain.plugins.text.preference_losses import Reward as Reward
from onnxtrain.plugins.text.ranking_losses import ListNet as ListNet
from onnxtrain.plugins.text.ranking_losses import MultipleNegatives as MultipleNegatives
from onnxtrain.plugins.text.ranking_losses import RankNet as RankNet

LOSSES: Final[Mapping[str, type[Loss]]]
