"""The names that other tools have for losses, metrics and options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from onnxtrain.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")

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
    "triplet_margin_loss": "triplet",
    "supervised_contrastive": "info_nce",
    "contrastive": "info_nce",
}
"""Names of losses, which are metrics too, to those that they have here."""

_TYPES = "a model in float16 or bfloat16 trains as it is, in float32; leave it out, and give a model of that type"
_SCALING = "gradients are float32 whatever the type of the model, so that no loss is scaled; leave it out"
_ROUNDING = "give master_weights=False for weights in bfloat16 that updates round at random"

ELSEWHERE: Final = {
    **dict.fromkeys(("fp16", "bf16", "half", "amp", "use_amp", "autocast", "mixed_precision", "precision"), _TYPES),
    **dict.fromkeys(("loss_scale", "loss_scaling", "loss_scaler", "scaler", "grad_scaler"), _SCALING),
    **dict.fromkeys(("stochastic_rounding", "bf16_stochastic_round"), _ROUNDING),
}
"""Options of other tools that a training here has not, and what there is to say of them."""


def refuses_elsewhere(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function say of options of other tools what there is instead.

    Raises:
        OptionError: One is given.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in ELSEWHERE:
                raise OptionError(f"There is no option {name!r}: {ELSEWHERE[name]}.")
        return function(*args, **kwargs)

    return call
