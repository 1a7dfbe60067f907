"""onnxruntime-genai's builder of language models.

Weights have the path of the checkpoint and the operator that reads them (``model.layers.0.mlp.up_proj.MatMul.weight``),
numbers are under ``/model/constants``.
"""

from __future__ import annotations

import re
from typing import Final

from onnxtrain.model_file.exporters.exporter import Exporter

EXPORTER: Final = Exporter(
    "onnxruntime-genai",
    {"made": r"(?i:(^|/)constants?/)", "literal": r"(^|/)constants/"},
)

_OPERATOR: Final = r"[./](MatMul|MatMulNBits|Gemm|Conv|Gather)\w*"
_WEIGHT: Final = re.compile(rf"({_OPERATOR})?[./](q?weight|kernel|embeddings?|W)(_\w+)?(:0)?$")


def layer_of_weight(name: str) -> str:
    """Return the path of a layer by that of its weight, also as Keras writes it.

    Example:
        >>> layer_of_weight("model.layers.0.attn.q_proj.MatMul.weight"), layer_of_weight("dense/kernel:0")
        ('model.layers.0.attn.q_proj', 'dense')
    """
    return _WEIGHT.sub("", name)


def layer_of_node(name: str) -> str:
    """Return the path of a layer by the name of its node."""
    return re.sub(rf"{_OPERATOR}$", "", name)
