"""Names of losses and metrics in other tools."""

from __future__ import annotations

from typing import Final

ALIASES: Final = {
    "cross_entropy": "softmax_cross_entropy",
    "categorical_crossentropy": "softmax_cross_entropy",
    "sparse_categorical_crossentropy": "softmax_cross_entropy",
    "bce": "binary_cross_entropy",
    "bce_with_logits": "binary_cross_entropy",
    "binary_crossentropy": "binary_cross_entropy",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "smooth_l1": "huber",
    "categorical_focal_crossentropy": "focal",
    "binary_focal_crossentropy": "binary_focal",
    "sigmoid_focal_loss": "binary_focal",
    "dice_loss": "dice",
    "ctc_loss": "ctc",
    "rnnt_loss": "transducer",
    "triplet_margin_loss": "triplet",
    "supervised_contrastive": "info_nce",
    "contrastive": "info_nce",
}
"""Names of losses (which are metrics, too) in other tools, mapped to the names here."""
