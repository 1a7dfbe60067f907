"""Meaning of the names of initializers, and the module path of a weight whose name lacks it.

PyTorch's exporters name the weight of a ``Linear`` by a number. The node that reads it knows its module
(:func:`~onnxtrain.model_file.exporters.module_of`).
"""

from __future__ import annotations

import re
from typing import Final, Literal

import onnx_ir as ir

from onnxtrain.model_file.exporters import NameOrigin, bare, module_of, origin_of
from onnxtrain.parameters.readers import Functions, arrivals, role_of

Meaning = Literal["table", "transform", "mask", "scalar", "statistic", "preprocessing", "learned"]
"""Kinds of tensors with usual names: position tables, matrices of spectrograms, masks, fixed scalars, running
statistics, means and deviations of the data, and trainable scalars such as temperatures, slopes and gates."""

_WORDS: Final[dict[Meaning, str]] = {
    "table": (
        r"(\w+_)?(anchors?|anchor_(points|grid|boxes|priors)|prior_boxes|mesh_?grid)"
        r"|(\w+_)?(cos|sin|cosine|sine)s?(_?(cache|cached|table|emb|embed|embedding|pos))?"
        r"|(\w+_)?inv_(freqs?|timescales?)|(\w+_)?freqs_(cis|cos|sin|complex)|(\w+_)?(alibi(_slopes|_bias)?|coords_table)"
    ),
    "transform": (
        r"(\w+_)?dft(_(kernel|basis|matrix|pairs))?|(\w+_)?mel_?(basis|filters?|filter_?banks?|matrix)|wcos|wsin"
    ),
    "mask": r"(\w+_)?masks?",
    "scalar": (
        r"(?!(\w+_)?log_(?!zero_guard))(\w+_)?(eps|epsilon|mean|std|var|variance|masked_bias|embed_scale|norm_factor"
        r"|scaling|softmax_scale|inv_scale|scale_factor|guard|guard_value|zero_point|momentum|num|count"
        r"|(min|max|fill|pad|padding)(_val|_value)?)"
    ),
    "statistic": r"(running|moving)_(mean|var|variance|std)",
    "preprocessing": r"(?!(\w+_)?log_)(\w+_)?(means?|std|stds|stddev|var|variance|offset|normalizer|scaler)",
    "learned": (
        r"(\w+_)?(logit_scale|logit_bias|temperature|temp|tau|alpha|beta|gamma|slope|rezero|resweight|gate|gain)\d*"
    ),
}


def means(meaning: Meaning, name: str) -> bool:
    """Return whether the last word of a name says what a tensor is, perhaps with a number behind it.

    Example:
        >>> means("table", "rotary.inv_freq"), means("mask", "decoder.mask_2"), means("mask", "masked_bias")
        (True, True, False)
    """
    return re.match(rf"({_WORDS[meaning]})(_\d+)?$", last_word(name)) is not None


def last_word(name: str) -> str:
    """Return the last part of a path in lower case: the tensor's name within its module."""
    return re.split(r"[./:]", bare(name))[-1].lower()


_BIASES = {("Gemm", 2), ("Conv", 2), ("ConvTranspose", 2), ("Add", 0), ("Add", 1)}


def module_paths(value: ir.Value, functions: Functions | None = None) -> tuple[str, ...]:
    """Return the module paths of an initializer in the exported program; none where its name in the file is its path.

    Example:
        >>> weight, x = ir.Value(name="26"), ir.Value(name="x")
        >>> node = ir.Node("", "MatMul", [x, weight], name="/encoder/layer.1/query/MatMul")
        >>> module_paths(weight)
        ('encoder.layer.1.query.weight',)
    """
    name = value.name or ""
    is_made = origin_of(name) is NameOrigin.EXPORTER
    word = "" if is_made else name.rpartition(".")[2]
    found: dict[str, None] = {}
    modules: set[str] = set()
    for node, index in arrivals(value, functions):
        module = module_of(node.name or "", node.metadata_props)
        if module:
            modules.add(module)
            if is_made:
                role = "bias" if (node.op_type, index) in _BIASES else role_of(node.op_type, index) or "weight"
            else:
                role = role_in_module(node.op_type, index) or word
            found[f"{module}.{role}"] = None
    if not is_made and ("." not in name or len(modules) < 2):
        return ()
    return tuple(path for path in found if path != name)


_IN_MODULES = {"scale": "weight", "bias": "bias", "running mean": "running_mean", "running variance": "running_var"}


def role_in_module(operator: str, index: int) -> str:
    """Return PyTorch's name of the parameter at an input slot of an operator; "" where it has none.

    Example:
        >>> role_in_module("BatchNormalization", 4), role_in_module("Gemm", 2), role_in_module("Mul", 1)
        ('running_var', 'bias', '')
    """
    role = _IN_MODULES.get(role_of(operator, index), "")
    return role or ("bias" if (operator, index) in _BIASES and operator != "Add" else "")


def node_names(value: ir.Value, functions: Functions | None = None) -> tuple[str, ...]:
    """Return the names of the nodes that read an initializer, as they are and as module paths."""
    names = [node.name or "" for node, _ in arrivals(value, functions)]
    return tuple(dict.fromkeys(other for name in names if name for other in (name, name.strip("/").replace("/", "."))))
